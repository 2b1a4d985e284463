"""The problems of experiments/fuzz.py: random MDPs, losses and regularizers, and how a problem is kept in a file.

A batch is one MDP with many losses, episodes and parameters. Everything follows from a NumPy generator. Each family of regularizers
is written twice: with the package, and as the table of terms that the judge reads.
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
from torch_occ.files import write_atomically

Kind = Literal["reasonable", "extreme"]
Backend = Literal["engine", "torch"]
Generator = np.random.Generator
Parameters = dict[str, Floats]  # by name, (B,) each


# -- regularizers ---------------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """A family of regularizers."""

    label: str
    parameters: dict[str, tuple[float, float, float, float]]  # powers of ten: from, to; the same in extreme problems
    build: Callable[[occ.LayeredMDP, dict[str, Tensor]], occ.Regularizer]
    terms: Callable[[dict[str, Array], Array], list[Term]]  # of the parameters and sqrt(t), in the judge's numbers


ALPHA, BETA, GAMMA = (-2.0, 0.5, -4.0, 1.0), (-2.0, 2.5, -9.0, 3.0), (-1.0, 1.0, -3.0, 3.0)


def _root(argument: Any, weight: Array) -> Term:
    return Term(argument, "power", -weight, 0 * weight + 1 / (0 * weight + 2))


def _entropy(argument: Any, weight: Array) -> Term:
    return Term(argument, "x log x", weight)


FAMILIES = {
    "tsallis": Family(
        "Tsallis 1/2",
        {"gamma": GAMMA},
        lambda _, p: occ.Tsallis() / occ.InverseSqrt(p["gamma"]),
        lambda p, root: [_root("pair", root / p["gamma"])],
    ),
    "powers": Family(
        "Tsallis, powers 0.1 to 0.9",
        {"gamma": GAMMA, "power": (-1.0, -0.05, -1.0, -0.05)},
        lambda _, p: occ.Tsallis(p["power"]) / occ.InverseSqrt(p["gamma"]),
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
        lambda _, p: occ.LogBarrier(p["beta"]) / occ.InverseSqrt(p["gamma"]),
        lambda p, root: [Term("pair", "log", -root * p["beta"] / p["gamma"])],
    ),
    "entropy_barrier": Family(
        "ConditionalEntropy + LogBarrier",
        {"beta": BETA, "gamma": GAMMA},
        lambda _, p: occ.ConditionalEntropy() / occ.InverseSqrt(p["gamma"]) + occ.LogBarrier(p["beta"]),
        lambda p, root: [_entropy("pair", root / p["gamma"]), _entropy("state", -root / p["gamma"]), Term("pair", "log", -p["beta"])],
    ),
    "hybrid": Family(
        "HybridTsallis",
        {"alpha": ALPHA, "gamma": GAMMA},
        lambda _, p: occ.HybridTsallis(p["alpha"]) / occ.InverseSqrt(p["gamma"]),
        lambda p, root: [_root("pair", root / p["gamma"]), _root("rest", root * p["alpha"] / p["gamma"])],
    ),
    "complement": Family(
        "HybridComplement",
        {"alpha": ALPHA, "gamma": GAMMA},
        lambda _, p: occ.HybridComplement(p["alpha"]) / occ.InverseSqrt(p["gamma"]),
        lambda p, root: [_root("pair", root / p["gamma"]), _root("complement", root * p["alpha"] / p["gamma"])],
    ),
    "complement_barrier": Family(
        "HybridComplement + LogBarrier",
        {"alpha": ALPHA, "beta": BETA, "gamma": GAMMA},
        lambda _, p: occ.HybridComplement(p["alpha"]) / occ.InverseSqrt(p["gamma"]) + occ.LogBarrier(p["beta"]),
        lambda p, root: [
            _root("pair", root / p["gamma"]),
            _root("complement", root * p["alpha"] / p["gamma"]),
            Term("pair", "log", -p["beta"]),
        ],
    ),
    "shannon": Family(
        "Shannon",
        {"gamma": GAMMA},
        lambda _, p: occ.Shannon() / occ.InverseSqrt(p["gamma"]),
        lambda p, root: [_entropy("pair", root / p["gamma"])],
    ),
    "conditional_entropy": Family(
        "ConditionalEntropy",
        {"gamma": GAMMA},
        lambda _, p: occ.ConditionalEntropy() / occ.InverseSqrt(p["gamma"]),
        lambda p, root: [_entropy("pair", root / p["gamma"]), _entropy("state", -root / p["gamma"])],
    ),
    "log_barrier": Family(
        "LogBarrier, beta to 1e-12",
        {"beta": (-12.0, 2.0, -12.0, 2.0)},
        lambda _, p: occ.LogBarrier(p["beta"]),
        lambda p, root: [Term("pair", "log", -p["beta"])],
    ),
}


# -- problems -------------------------------------------------------------------------------------------------------------


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
        with torch.no_grad():
            return step.solve(torch.from_numpy(self.loss), torch.from_numpy(self.t), warm_start=start, check=False)

    def model(self, arithmetic: Arithmetic) -> Model:
        """The MDP for the judge."""
        dense = self.mdp.to_dense()
        tables = [p.numpy() for p in dense.transitions]
        return Model.of(arithmetic, tables, dense.actions.numpy(), dense.initial.numpy())

    def terms(self, arithmetic: Arithmetic) -> list[Term]:
        """psi for the judge."""
        t = arithmetic.of(self.t)
        root = arithmetic.exp(arithmetic.log(t) / 2)
        return FAMILIES[self.family].terms({name: arithmetic.of(x) for name, x in self.parameters.items()}, root)

    def take(self, index: NDArray[np.intp]) -> Batch:
        """Some of the steps."""
        parameters = {name: x[index] for name, x in self.parameters.items()}
        start = None if self.start is None else self.start[index]
        return replace(self, loss=self.loss[index], t=self.t[index], parameters=parameters, start=start)

    def save(self, path: Path, **more: Any) -> None:
        """As NumPy arrays, the transitions as tables."""
        dense = self.mdp.to_dense()
        arrays = {f"transitions_{k}": p.numpy() for k, p in enumerate(dense.transitions)}
        arrays |= {f"parameter_{name}": x for name, x in self.parameters.items()}
        arrays |= {} if self.start is None else {"start": self.start}
        arrays |= {"actions": dense.actions.numpy(), "initial": dense.initial.numpy(), "sparse": np.array(self.mdp.is_sparse)}
        arrays |= {"family": np.array(self.family), "loss": self.loss, "t": self.t} | {name: np.array(x) for name, x in more.items()}
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))

    @classmethod
    def load(cls, path: Path) -> Batch:
        """What `save` wrote."""
        with np.load(path) as arrays:
            tables = [torch.from_numpy(arrays[f"transitions_{k}"]) for k in range(sum("transitions_" in name for name in arrays))]
            actions, initial = (torch.from_numpy(arrays[name]) for name in ("actions", "initial"))
            mdp = occ.LayeredMDP(tables, actions=actions, initial=initial)
            parameters = {name.removeprefix("parameter_"): arrays[name] for name in arrays if name.startswith("parameter_")}
            start = arrays["start"] if "start" in arrays else None
            mdp = mdp.to_sparse() if arrays["sparse"] else mdp
            return cls(str(arrays["family"]), mdp, arrays["loss"], arrays["t"], parameters, start)


def draw(random: Generator, family: str, kind: Kind, size: int) -> Batch:
    """A batch of cold starts."""
    mdp = random_mdp(random, kind)
    t = 10.0 ** random.uniform(0, 10, size)
    t[random.random(size) < 0.05] = 1.0
    shape = (size, mdp.num_states, mdp.num_actions)
    loss = reasonable_losses(random, t, shape) if kind == "reasonable" else extreme_losses(random, shape)
    spans = FAMILIES[family].parameters
    parameters = {name: 10.0 ** random.uniform(*(s[:2] if kind == "reasonable" else s[2:]), size) for name, s in spans.items()}
    return Batch(family, mdp, loss, t, parameters)


def neighbours(random: Generator, batch: Batch, q: Floats, good: NDArray[np.bool_]) -> Batch:
    """The next episode of the steps that were solved: one more loss where the policy went, and the last q to start from."""
    index = np.flatnonzero(good & (q > 0).reshape(len(q), -1).any(1))
    here = batch.take(index)
    exists = batch.mdp.actions.numpy()
    index = index[(q[index] > 0)[:, exists].all(1)]
    here = batch.take(index)
    visited = random.random(here.loss.shape) < q[index]
    more = np.where(visited, random.random(here.loss.shape) / np.where(visited, q[index], 1.0), 0.0)
    return replace(here, loss=here.loss + more, t=here.t + 1.0, start=q[index])


def random_mdp(random: Generator, kind: Kind) -> occ.LayeredMDP:
    """Layers of different sizes; some have actions that do not exist, single actions, zero or tiny probabilities, or are sparse."""
    horizon, widest, num_actions = (int(random.integers(low, high)) for low, high in ((1, 7), (1, 6), (1, 6)))
    sizes = [int(random.choice([1, 1, 2, 3])), *(int(n) for n in random.integers(1, widest + 1, horizon - 1))]
    concentration = float(random.choice([0.3, 1.0, 3.0] if kind == "reasonable" else [0.02, 0.05, 0.3, 1.0, 10.0]))
    smallest = 1e-12 if kind == "reasonable" else 1e-30
    zeros, masked = float(random.choice([0.0, 0.0, 0.3, 0.7, 1.0])), float(random.choice([0.0, 0.0, 0.3, 0.7]))
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
    mdp = occ.LayeredMDP(tables, actions=torch.from_numpy(actions), initial=torch.from_numpy(initial / initial.sum())).prune()
    return mdp.to_sparse() if random.random() < 0.15 else mdp


def reasonable_losses(random: Generator, t: Floats, shape: tuple[int, ...]) -> Floats:
    """t * mean, with the noise of t episodes and sometimes the heavy tails of importance weights; some means are 0 or 1, some tied."""
    size = shape[0]
    mean = random.random(shape)
    mean = np.where((random.random(size) < 0.2)[:, None, None], np.round(mean), mean)
    gap = 10.0 ** random.uniform(-6, 0, size)
    mean = np.where((random.random(size) < 0.3)[:, None, None], 0.5 + gap[:, None, None] * (mean - 0.5), mean)
    root = np.sqrt(t)[:, None, None]
    noise = root * random.standard_normal(shape) * (random.random(size) < 0.7)[:, None, None]
    tails = root * random.pareto(1.5, shape) * (random.random(size) < 0.4)[:, None, None]
    return np.minimum(np.maximum(t[:, None, None] * mean + noise, 0.0) + tails, 1e11)


def extreme_losses(random: Generator, shape: tuple[int, ...]) -> Floats:
    """Up to 1e12, of four sorts: all sizes in one table, one size, gaps of 0 or 1e8, and 1e12 plus something small."""
    size = shape[0]
    scale = 10.0 ** random.uniform(0, 12, size)[:, None, None]
    every = scale ** random.random(shape) * np.where(random.random(shape) < 0.1, -1.0, 1.0) * (random.random(shape) < 0.8)
    one = scale * random.random(shape)
    gaps = np.minimum(scale, 1e8) * (random.random(shape) < 0.5)
    offset = np.where(random.random(size) < 0.5, 1e12, scale[:, 0, 0])[:, None, None] + random.random(shape)
    sort = random.integers(4, size=size)[:, None, None]
    return np.select([sort == 0, sort == 1, sort == 2], [every, one, gaps], offset)
