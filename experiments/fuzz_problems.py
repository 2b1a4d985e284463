"""The problems of experiments/fuzz.py: random MDPs, losses and regularizers; problems in files.

A batch is one MDP with many losses, episodes and parameters. Everything follows from a NumPy
generator. Each family of regularizers is written twice: with the package, and as the table of terms
that the judge reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import torch_occ as occ
from experiments.fuzz_judge import Arithmetic, Array, Floats, Model, Term

Kind = Literal["reasonable", "extreme"]
Backend = Literal["engine", "torch"]
FamilyName = Literal[
    "tsallis",
    "powers",
    "jin_luo",
    "log_barrier_sqrt",
    "entropy_barrier",
    "hybrid",
    "complement",
    "complement_barrier",
    "shannon",
    "conditional_entropy",
    "log_barrier",
]
Generator = np.random.Generator
Parameters = dict[str, Floats]  # by name, (B,) each


# -- regularizers ---------------------------------------------------------------------------------


class Span(NamedTuple):
    """Powers of ten between which a parameter lies, in reasonable and in extreme problems."""

    reasonable: tuple[float, float]
    extreme: tuple[float, float]


class Family(NamedTuple):
    """A family of regularizers."""

    label: str
    parameters: dict[str, Span]
    build: Callable[[occ.LayeredMDP, dict[str, Tensor]], occ.Regularizer]
    terms: Callable[[dict[str, Array], Array], list[Term]]  # of the parameters and sqrt(t)


ALPHA, BETA = Span((-2.0, 0.5), (-4.0, 1.0)), Span((-2.0, 2.5), (-9.0, 3.0))
GAMMA = Span((-1.0, 1.0), (-3.0, 3.0))
TINY_BETA, POWER = Span((-12.0, 2.0), (-12.0, 2.0)), Span((-1.0, -0.05), (-1.0, -0.05))


def _rate(parameters: dict[str, Tensor]) -> occ.Schedule:
    return occ.InverseSqrt(parameters["gamma"])


def _root(argument: Any, weight: Array) -> Term:
    return Term(argument, "power", -weight, 0 * weight + 1 / (0 * weight + 2))


def _entropy(argument: Any, weight: Array) -> Term:
    return Term(argument, "x log x", weight)


FAMILIES: dict[str, Family] = {
    "tsallis": Family(
        "Tsallis 1/2",
        {"gamma": GAMMA},
        lambda _, p: occ.Tsallis() / _rate(p),
        lambda p, root: [_root("pair", root / p["gamma"])],
    ),
    "powers": Family(
        "Tsallis, powers 0.1 to 0.9",
        {"gamma": GAMMA, "power": POWER},
        lambda _, p: occ.Tsallis(p["power"]) / _rate(p),
        lambda p, root: [Term("pair", "power", -root / p["gamma"], p["power"])],
    ),
    "jin_luo": Family(
        "jin_luo",
        {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA},
        lambda mdp, p: occ.jin_luo(mdp, **p),
        lambda p, root: [
            _root("pair", root / p["gamma"]),
            _root("rest", root * p["alpha"] / p["gamma"]),
            Term("pair", "log", -p["beta"]),
        ],
    ),
    "log_barrier_sqrt": Family(
        "LogBarrier / sqrt t",
        {"beta": BETA, "gamma": GAMMA},
        lambda _, p: occ.LogBarrier(p["beta"]) / _rate(p),
        lambda p, root: [Term("pair", "log", -root * p["beta"] / p["gamma"])],
    ),
    "entropy_barrier": Family(
        "ConditionalEntropy + LogBarrier",
        {"beta": BETA, "gamma": GAMMA},
        lambda _, p: occ.ConditionalEntropy() / _rate(p) + occ.LogBarrier(p["beta"]),
        lambda p, root: [
            _entropy("pair", root / p["gamma"]),
            _entropy("state", -root / p["gamma"]),
            Term("pair", "log", -p["beta"]),
        ],
    ),
    "hybrid": Family(
        "HybridTsallis",
        {"alpha": ALPHA, "gamma": GAMMA},
        lambda _, p: occ.HybridTsallis(p["alpha"]) / _rate(p),
        lambda p, root: [
            _root("pair", root / p["gamma"]),
            _root("rest", root * p["alpha"] / p["gamma"]),
        ],
    ),
    "complement": Family(
        "HybridComplement",
        {"alpha": ALPHA, "gamma": GAMMA},
        lambda _, p: occ.HybridComplement(p["alpha"]) / _rate(p),
        lambda p, root: [
            _root("pair", root / p["gamma"]),
            _root("complement", root * p["alpha"] / p["gamma"]),
        ],
    ),
    "complement_barrier": Family(
        "HybridComplement + LogBarrier",
        {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA},
        lambda _, p: occ.HybridComplement(p["alpha"]) / _rate(p) + occ.LogBarrier(p["beta"]),
        lambda p, root: [
            _root("pair", root / p["gamma"]),
            _root("complement", root * p["alpha"] / p["gamma"]),
            Term("pair", "log", -p["beta"]),
        ],
    ),
    "shannon": Family(
        "Shannon",
        {"gamma": GAMMA},
        lambda _, p: occ.Shannon() / _rate(p),
        lambda p, root: [_entropy("pair", root / p["gamma"])],
    ),
    "conditional_entropy": Family(
        "ConditionalEntropy",
        {"gamma": GAMMA},
        lambda _, p: occ.ConditionalEntropy() / _rate(p),
        lambda p, root: [
            _entropy("pair", root / p["gamma"]),
            _entropy("state", -root / p["gamma"]),
        ],
    ),
    "log_barrier": Family(
        "LogBarrier, beta to 1e-12",
        {"beta": TINY_BETA},
        lambda _, p: occ.LogBarrier(p["beta"]),
        lambda p, root: [Term("pair", "log", -p["beta"])],
    ),
}


# -- problems -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """Steps of one family over one MDP."""

    family: str
    mdp: occ.LayeredMDP
    loss: Floats  # (B, S, A)
    t: Floats  # (B,)
    parameters: Parameters
    start: Floats | None = None  # (B, S, A), None from the interior point

    def solve(self, backend: Backend) -> occ.Solution:
        """The package's answer, with what it says about it."""
        family = FAMILIES[self.family]
        parameters = {name: torch.from_numpy(x) for name, x in self.parameters.items()}
        step = occ.FTRLStep(self.mdp, family.build(self.mdp, parameters), backend=backend)
        start = None if self.start is None else torch.from_numpy(self.start)
        loss, t = torch.from_numpy(self.loss), torch.from_numpy(self.t)
        with torch.no_grad():
            return step.solve(loss, t, warm_start=start, check=False)

    def model(self, arithmetic: Arithmetic) -> Model:
        """The MDP for the judge."""
        dense = self.mdp.to_dense()
        tables = [p.numpy() for p in dense.transitions]
        return Model.of(arithmetic, tables, dense.actions.numpy(), dense.initial.numpy())

    def terms(self, arithmetic: Arithmetic) -> list[Term]:
        """psi for the judge."""
        t = arithmetic.of(self.t)
        root = arithmetic.exp(arithmetic.log(t) / 2)
        parameters = {name: arithmetic.of(x) for name, x in self.parameters.items()}
        return FAMILIES[self.family].terms(parameters, root)

    def take(self, index: NDArray[np.intp]) -> Batch:
        """Some of the steps."""
        parameters = {name: x[index] for name, x in self.parameters.items()}
        start = None if self.start is None else self.start[index]
        loss, t = self.loss[index], self.t[index]
        return replace(self, loss=loss, t=t, parameters=parameters, start=start)

    def save(self, path: Path, what: str) -> None:
        """As NumPy arrays, the transitions as tables, with a remark."""
        dense = self.mdp.to_dense()
        arrays = {f"transitions_{k}": p.numpy() for k, p in enumerate(dense.transitions)}
        arrays |= {f"parameter_{name}": x for name, x in self.parameters.items()}
        arrays |= {} if self.start is None else {"start": self.start}
        arrays |= {
            "actions": dense.actions.numpy(),
            "initial": dense.initial.numpy(),
            "sparse": np.array(self.mdp.is_sparse),
        }
        arrays |= {"family": np.array(self.family), "loss": self.loss, "t": self.t}
        arrays |= {"what": np.array(what)}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: Path) -> Batch:
        """A batch that `save` wrote."""
        with np.load(path) as arrays:
            horizon = sum(name.startswith("transitions_") for name in arrays)
            tables = [torch.from_numpy(arrays[f"transitions_{k}"]) for k in range(horizon)]
            actions, initial = (torch.from_numpy(arrays[name]) for name in ("actions", "initial"))
            mdp = occ.LayeredMDP(tables, actions=actions, initial=initial)
            names = [name for name in arrays if name.startswith("parameter_")]
            parameters = {name.removeprefix("parameter_"): arrays[name] for name in names}
            start = arrays.get("start")
            mdp = mdp.to_sparse() if arrays["sparse"] else mdp
            return cls(str(arrays["family"]), mdp, arrays["loss"], arrays["t"], parameters, start)


def draw(random: Generator, family: str, kind: Kind, size: int) -> Batch:
    """A batch of cold starts."""
    mdp = random_mdp(random, kind)
    t = 10.0 ** random.uniform(0, 10, size)
    t[random.random(size) < 0.05] = 1.0
    shape = (size, mdp.num_states, mdp.num_actions)
    parameters, extreme = {}, kind == "extreme"
    for name, span in FAMILIES[family].parameters.items():
        low, high = span.extreme if extreme else span.reasonable
        parameters[name] = 10.0 ** random.uniform(low, high, size)
    loss = extreme_losses(random, shape) if extreme else reasonable_losses(random, t, shape)
    return Batch(family, mdp, loss, t, parameters)


def neighbours(random: Generator, batch: Batch, q: Floats, good: NDArray[np.bool_]) -> Batch:
    """The next episode of solved steps: one more loss where the policy went, from the last q."""
    index = np.flatnonzero(good)
    here = batch.take(index)
    visited = random.random(here.loss.shape) < q[index]
    more = np.where(visited, random.random(here.loss.shape) / np.where(visited, q[index], 1.0), 0.0)
    return replace(here, loss=here.loss + more, t=here.t + 1.0, start=q[index])


def random_mdp(random: Generator, kind: Kind) -> occ.LayeredMDP:
    """Layers of all sizes, now and then with masks, single actions, zeros; some are sparse."""
    horizon, widest = int(random.integers(1, 7)), int(random.integers(1, 6))
    num_actions = int(random.choice([1, 2, 3, 4, 5], p=[0.04, 0.28, 0.28, 0.2, 0.2]))
    sizes = [
        int(random.choice([1, 1, 2, 3])),
        *(int(n) for n in random.integers(1, widest + 1, horizon - 1)),
    ]
    choices = {"reasonable": [0.3, 1.0, 3.0], "extreme": [0.02, 0.05, 0.3, 1.0, 10.0]}
    concentration = float(random.choice(choices[kind]))
    smallest = 1e-12 if kind == "reasonable" else 1e-30
    zeros, masked = (
        float(random.choice([0.0, 0.0, 0.3, 0.7, 1.0])),
        float(random.choice([0.0, 0.0, 0.3, 0.7])),
    )
    tables = []
    for here, there in zip(sizes, [*sizes[1:], 1], strict=True):
        rows = random.gamma(concentration, size=(here, num_actions, there))
        rows *= random.random(rows.shape) >= zeros
        certain = np.arange(there) == random.integers(there, size=(here, num_actions, 1))
        rows = np.where(rows.sum(-1, keepdims=True) > 0, rows, certain)
        rows /= rows.sum(-1, keepdims=True)
        rows = np.where(rows >= smallest, rows, 0.0)
        tables.append(torch.from_numpy(rows / rows.sum(-1, keepdims=True)))
    actions = random.random((sum(sizes), num_actions)) >= masked
    actions[np.arange(len(actions)), random.integers(num_actions, size=len(actions))] = True
    initial = random.random(sizes[0]) + 0.01
    start, mask = torch.from_numpy(initial / initial.sum()), torch.from_numpy(actions)
    mdp = occ.LayeredMDP(tables, actions=mask, initial=start).prune()
    return mdp.to_sparse() if random.random() < 0.15 else mdp


def reasonable_losses(random: Generator, t: Floats, shape: tuple[int, ...]) -> Floats:
    """t * mean, with the noise of t episodes, sometimes with the heavy tails of importance weights.

    Some means are 0 or 1, and some nearly tied.
    """
    each = (shape[0], 1, 1)
    t = t.reshape(each)
    mean = random.random(shape)
    mean = np.where(random.random(each) < 0.2, np.round(mean), mean)
    gap = 10.0 ** random.uniform(-6, 0, each)
    mean = np.where(random.random(each) < 0.3, 0.5 + gap * (mean - 0.5), mean)
    noise = np.sqrt(t) * random.standard_normal(shape) * (random.random(each) < 0.7)
    tails = np.sqrt(t) * random.pareto(1.5, shape) * (random.random(each) < 0.4)
    return np.minimum(np.maximum(t * mean + noise, 0.0) + tails, 1e11)


def extreme_losses(random: Generator, shape: tuple[int, ...]) -> Floats:
    """Up to 1e12: all sizes in one table, one size, gaps of 0 or 1e8, and 1e12 plus less than 1."""
    each = (shape[0], 1, 1)
    scale = 10.0 ** random.uniform(0, 12, each)
    sign = np.where(random.random(shape) < 0.1, -1.0, 1.0) * (random.random(shape) < 0.8)
    every, one = sign * scale ** random.random(shape), scale * random.random(shape)
    gaps = np.minimum(scale, 1e8) * (random.random(shape) < 0.5)
    offset = np.where(random.random(each) < 0.5, 1e12, scale) + random.random(shape)
    sort = random.integers(4, size=each)
    return np.select([sort == 0, sort == 1, sort == 2], [every, one, gaps], offset)
