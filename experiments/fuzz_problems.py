"""The problems of experiments/fuzz.py: random MDPs, losses and regularizers; problems in files.

A batch is one MDP with many losses, episodes and parameters, or a batch of MDPs. Everything follows
from a NumPy generator. Each family of regularizers is written twice: with the package, and as the
table of terms that the judge reads.
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
from experiments.fuzz_judge import ARGUMENTS, FLOOR, FUNCTIONS, Case, Floats, judge
from torch_occ.regularizers.base import TabularRegularizer
from torch_occ.regularizers.terms import Term as Row
from torch_occ.regularizers.terms import XLogX

Backend = Literal["auto", "engine", "torch"]
Generator = np.random.Generator
Parameters = dict[str, Floats]  # by name, (B,) or (B, S, A) each

#: What is special about a batch, and how much smaller it is than an ordinary one.
KINDS: dict[str, int] = {
    "reasonable": 1,  # losses like t * mean
    "extreme": 2,  # losses up to 1e12 in size, tiny parameters
    "endless": 32,  # losses up to 1e300
    "spread": 1,  # reasonable, with parameters per layer, state or pair
    "mdps": 4,  # reasonable, with as many MDPs as losses
    "wide": 16,  # reasonable, sparse layers of up to 16 states
    "budgets": 256,  # reasonable, with one to three budgets, some nearly tight
    "float32": 32,  # reasonable, in single precision
}
#: How many times fewer steps there are of cells that take much longer than others of their kind.
SLOW: dict[tuple[str, str], int] = {
    ("visits", ""): 8,  # always in torch
    ("visits", "budgets"): 64,
    ("log_barrier_sqrt", "spread"): 32,
    ("log_barrier", "spread"): 4,
    ("log_barrier", "budgets"): 64,
    ("complement", "extreme"): 8,
    ("complement", "endless"): 8,
    ("complement_barrier", "extreme"): 4,
    ("complement_barrier", "endless"): 4,
}


# -- regularizers ---------------------------------------------------------------------------------


class Part(NamedTuple):
    """A term of psi: sign * parameter / eta_t * sum f(argument), with eta_t = gamma / sqrt(t)."""

    argument: Literal["pair", "rest", "complement", "state"]
    function: Literal["root", "power", "x log x", "log"]
    parameter: str | None = None
    sign: int = -1
    scheduled: bool = True  # otherwise without eta_t


class Family(NamedTuple):
    """A family of regularizers, for the package and for the judge."""

    label: str
    parameters: tuple[str, ...]
    build: Callable[[occ.LayeredMDP, dict[str, Any]], occ.Regularizer]
    parts: tuple[Part, ...]


class Visits(TabularRegularizer):
    """sum q(s) log q(s); beside Shannon's entropy, kappa > w in torch_occ.step.entropic."""

    def table(self) -> tuple[Row, ...]:
        return (Row("state", XLogX(), 1.0),)


#: Powers of ten between which a parameter lies, in ordinary and in hard problems.
SPANS = {
    "alpha": ((-2.0, 0.5), (-4.0, 1.0)),
    "beta": ((-2.0, 2.5), (-9.0, 3.0)),
    "gamma": ((-1.0, 1.0), (-3.0, 3.0)),
    "power": ((-1.0, -0.05), (-1.0, -0.05)),
    "price": ((-1.0, 1.5), (-3.0, 7.0)),
    "tiny": ((-12.0, 2.0), (-12.0, 2.0)),
}
ROOT, BARRIER = Part("pair", "root"), Part("pair", "log", "beta", scheduled=False)
REST, COMPLEMENT = Part("rest", "root", "alpha"), Part("complement", "root", "alpha")
ENTROPY, LESS_STATES = Part("pair", "x log x", sign=1), Part("state", "x log x")


def _rate(parameters: dict[str, Any]) -> occ.Schedule:
    return occ.InverseSqrt(parameters["gamma"])


FAMILIES: dict[str, Family] = {
    "tsallis": Family("Tsallis 1/2", ("gamma",), lambda _, p: occ.Tsallis() / _rate(p), (ROOT,)),
    "powers": Family(
        "Tsallis, powers 0.1 to 0.9",
        ("gamma", "power"),
        lambda _, p: occ.Tsallis(p["power"]) / _rate(p),
        (Part("pair", "power"),),
    ),
    "jin_luo": Family(
        "jin_luo",
        ("alpha", "beta", "gamma"),
        lambda mdp, p: occ.jin_luo(mdp, **p),
        (ROOT, REST, BARRIER),
    ),
    "log_barrier_sqrt": Family(
        "LogBarrier / sqrt t",
        ("beta", "gamma"),
        lambda _, p: occ.LogBarrier(p["beta"]) / _rate(p),
        (Part("pair", "log", "beta"),),
    ),
    "entropy_barrier": Family(
        "ConditionalEntropy + LogBarrier",
        ("beta", "gamma"),
        lambda _, p: occ.ConditionalEntropy() / _rate(p) + occ.LogBarrier(p["beta"]),
        (ENTROPY, LESS_STATES, BARRIER),
    ),
    "hybrid": Family(
        "HybridTsallis",
        ("alpha", "gamma"),
        lambda _, p: occ.HybridTsallis(p["alpha"]) / _rate(p),
        (ROOT, REST),
    ),
    "complement": Family(
        "HybridComplement",
        ("alpha", "gamma"),
        lambda _, p: occ.HybridComplement(p["alpha"]) / _rate(p),
        (ROOT, COMPLEMENT),
    ),
    "complement_barrier": Family(
        "HybridComplement + LogBarrier",
        ("alpha", "beta", "gamma"),
        lambda _, p: occ.HybridComplement(p["alpha"]) / _rate(p) + occ.LogBarrier(p["beta"]),
        (ROOT, COMPLEMENT, BARRIER),
    ),
    "shannon": Family("Shannon", ("gamma",), lambda _, p: occ.Shannon() / _rate(p), (ENTROPY,)),
    "conditional_entropy": Family(
        "ConditionalEntropy",
        ("gamma",),
        lambda _, p: occ.ConditionalEntropy() / _rate(p),
        (ENTROPY, LESS_STATES),
    ),
    "visits": Family(
        "Shannon + entropy of states",
        ("price", "gamma"),
        lambda _, p: (occ.Shannon() + Visits() * occ.Constant(p["price"])) / _rate(p),
        (ENTROPY, Part("state", "x log x", "price", sign=1)),
    ),
    "log_barrier": Family(
        "LogBarrier, beta to 1e-12",
        ("tiny",),
        lambda _, p: occ.LogBarrier(p["tiny"]),
        (Part("pair", "log", "tiny", scheduled=False),),
    ),
}


# -- problems -------------------------------------------------------------------------------------


#: The sets of values of a parameter per layer, state or pair. They are multiplied by one that is
#: drawn as for an ordinary problem, unless it is an exponent.
SPREADS = ((1e-12, 1.0), (1e-6, 1.0), (1e-3, 1.0, 192.0), (0.5, 1.0, 2.0))


@dataclass(frozen=True, eq=False)
class Batch:
    """Steps of one family."""

    family: str
    mdp: occ.LayeredMDP
    loss: Floats  # (B, S, A)
    t: Floats  # (B,)
    parameters: Parameters
    start: Floats | None = None  # (B, S, A), None from the interior point
    costs: Floats | None = None  # (B, m, S, A), of budgets
    limits: Floats | None = None  # (B, m)

    @property
    def single(self) -> bool:
        """Whether numbers are in single precision."""
        return self.mdp.dtype == torch.float32

    @property
    def floor(self) -> float:
        return 1e-30 if self.single else FLOOR  # q has no relative accuracy below

    def rounded(self) -> Batch:
        """The same with numbers of single precision."""
        parameters = {
            name: x.astype(np.float32).astype(float) for name, x in self.parameters.items()
        }
        loss, t = (x.astype(np.float32).astype(float) for x in (self.loss, self.t))
        return replace(self, loss=loss, t=t, parameters=parameters)

    def _tensor(self, x: Floats) -> Tensor:
        return torch.from_numpy(x).to(self.mdp.dtype)

    def solve(self, backend: Backend) -> occ.Solution:
        """The package's answer, with what it says about it."""
        family, parameters = FAMILIES[self.family], {}
        for name, x in self.parameters.items():
            own = self._tensor(x)
            parameters[name] = own if x.ndim == 1 else occ.PerPair(self.mdp, own)
        psi = family.build(self.mdp, parameters).to(self.mdp.dtype)
        step = occ.FTRLStep(self.mdp, psi, backend=backend)
        start = None if self.start is None else self._tensor(self.start)
        budgets = None
        if self.costs is not None and self.limits is not None:
            budgets = occ.Budgets(self._tensor(self.costs), self._tensor(self.limits))
        loss, t = self._tensor(self.loss), self._tensor(self.t)
        with torch.no_grad():
            return step.solve(loss, t, warm_start=start, check=False, constraints=budgets)

    def case(self) -> Case:
        """For the judge."""
        dense, parts, size = self.mdp.to_dense(), FAMILIES[self.family].parts, len(self.t)
        exists, widths = dense.actions.numpy(), [p.shape[-3] for p in dense.transitions]
        tables = []
        for p in dense.transitions:  # the last one leads out of the MDP
            rows = p.double().flatten(-3, -2).reshape(-1, p.shape[-3] * p.shape[-2], p.shape[-1])
            more = max(widths) - rows.shape[-1]
            tables.append(np.pad(rows.numpy(), ((0, 0), (0, 0), (0, more))))
        P = np.concatenate(
            [np.broadcast_to(x, (max(map(len, tables)), *x.shape[1:])) for x in tables], 1
        )

        def values(name: str | None) -> Floats:  # (B, N)
            x = np.ones(size) if name is None else self.parameters[name]
            return np.broadcast_to(x.reshape(size, *(x.shape[1:] or (1, 1))), self.loss.shape)[
                :, exists
            ]

        kinds = [
            (
                ARGUMENTS.index(x.argument),
                FUNCTIONS.index("power" if x.function == "root" else x.function),
            )
            for x in parts
        ]
        exponents = [
            values("power") if x.function == "power" else 0.5 * values(None) for x in parts
        ]
        ones = np.ones(size)
        rates = [
            [self.t if x.scheduled else ones for x in parts],
            [self.parameters["gamma"] if x.scheduled else ones for x in parts],
        ]
        budgets = np.zeros((size, 0, exists.sum() + 1))
        if self.costs is not None and self.limits is not None:
            budgets = np.concatenate([self.costs[:, :, exists], self.limits[..., None]], -1)
        return Case(
            layers=np.array([0, *np.cumsum(widths)]),
            states=np.array([0, *np.cumsum(exists.sum(1))]),
            kinds=np.array(kinds),
            initial=dense.initial.double().numpy().reshape(1, -1),
            P=P[:, exists.ravel()],
            weights=np.stack([x.sign * values(x.parameter) for x in parts], 1),
            exponents=np.stack(exponents, 1),
            rates=np.moveaxis(np.array(rates), -1, 0),
            loss=self.loss[:, exists],
            budgets=budgets,
        )

    def errors(self, q: Floats, multipliers: Floats | None = None, exact: bool = False) -> Floats:
        """What the judge says about answers `(B, S, A)`."""
        prices = np.zeros((len(q), 0)) if multipliers is None else multipliers
        return judge(self.case(), q[:, self.mdp.actions.numpy()], prices, self.floor, exact)

    def take(self, index: NDArray[np.intp]) -> Batch:
        """Some of the steps."""
        mdp = self.mdp
        if mdp.batch_shape:
            mdp = mdp.with_probabilities(mdp.initial, *(p[index] for p in mdp.probabilities[1:]))
        parameters = {name: x[index] for name, x in self.parameters.items()}
        arrays = {name: getattr(self, name) for name in ARRAYS}
        some: Any = {name: None if x is None else x[index] for name, x in arrays.items()}
        return replace(self, mdp=mdp, parameters=parameters, **some)

    def save(self, path: Path, what: str) -> None:
        """As NumPy arrays, the transitions as tables, with a remark."""
        dense = self.mdp.to_dense()
        arrays = {f"transitions_{k}": p.numpy() for k, p in enumerate(dense.transitions)}
        arrays |= {f"parameter_{name}": x for name, x in self.parameters.items()}
        given = {name: getattr(self, name) for name in ARRAYS}
        arrays |= {name: x for name, x in given.items() if x is not None}
        arrays |= {"actions": dense.actions.numpy(), "initial": dense.initial.numpy()}
        arrays |= {"sparse": np.array(self.mdp.is_sparse), "family": np.array(self.family)}
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, what=np.array(what), **arrays)

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
            mdp = mdp.to_sparse() if arrays["sparse"] else mdp
            given = {name: arrays.get(name) for name in ARRAYS}
            return cls(str(arrays["family"]), mdp, parameters=parameters, **given)


#: The arrays of a batch that have one entry per step.
ARRAYS = ("loss", "t", "start", "costs", "limits")


def draw(random: Generator, family: str, kind: str, size: int) -> Batch:
    """A batch of cold starts."""
    hard = kind in ("extreme", "endless")
    mdp = wide_mdp(random) if kind == "wide" else random_mdp(random, hard)
    t = 10.0 ** random.uniform(0, 10, size)
    t[random.random(size) < 0.05] = 1.0
    shape = (size, mdp.num_states, mdp.num_actions)
    parameters = {}
    for name in FAMILIES[family].parameters:
        parameters[name] = 10.0 ** random.uniform(*SPANS[name][hard], size)
        if kind == "spread" and name in ("alpha", "beta", "tiny"):
            parameters[name] = spread(random, mdp, size) * parameters[name][:, None, None]
        elif kind == "spread" and name == "power":
            parameters[name] = random.uniform(0.1, 0.9, shape)
    loss = extreme_losses(random, shape) if hard else reasonable_losses(random, t, shape)
    if kind == "endless":
        loss *= 10.0 ** random.uniform(0, 288, (size, 1, 1))
    batch = Batch(family, mdp, loss, t, parameters)
    if kind == "mdps":
        mdp, tables = mdp.to_dense(), []
        for p in mdp.transitions:
            noisy = p * torch.from_numpy(random.gamma(1.0, size=(size, *p.shape)) + 1e-3)
            tables.append(noisy / noisy.sum(-1, keepdim=True).clamp(min=FLOOR))
        return replace(batch, mdp=mdp.with_probabilities(mdp.initial, *tables))
    if kind == "budgets":
        return with_budgets(random, batch)
    return replace(batch, mdp=mdp.to(torch.float32)).rounded() if kind == "float32" else batch


def spread(random: Generator, mdp: occ.LayeredMDP, size: int) -> Floats:
    """Values of one set per layer, state or pair, `(B, S, A)`."""
    choices = SPREADS[random.integers(len(SPREADS))]
    layers, (states, actions) = mdp.layer.numpy(), (mdp.num_states, mdp.num_actions)
    sort = random.integers(3)
    shape = [(mdp.horizon, 1), (states, 1), (states, actions)][sort]
    values = random.choice(choices, (size, *shape))
    values = values[:, layers] if sort == 0 else values
    return np.broadcast_to(values, (size, states, actions)).copy()


def with_budgets(random: Generator, batch: Batch) -> Batch:
    """One to three budgets, which an occupancy measure meets; it has little room in some cases."""
    mdp, size = batch.mdp, len(batch.t)
    m = int(random.integers(1, 4))
    costs = torch.from_numpy(random.random((size, m, mdp.num_states, mdp.num_actions)))
    costs = torch.where(mdp.actions, costs, 0.0)
    weights = torch.from_numpy(random.dirichlet(np.ones(m), size))
    cheapest = occ.optimal_policy(mdp, (costs * weights[..., None, None]).sum(1)).policy
    low, high = occ.occupancy(mdp, cheapest), occ.interior_point(mdp)
    least = np.where(random.random(size) < 0.3, -9.0, -2.0)
    room = torch.from_numpy(10.0 ** random.uniform(least, 0.0))[:, None, None]
    met = (1 - room) * low + room * high
    limits = (costs * met[:, None]).sum((-2, -1))
    return replace(batch, costs=costs.numpy(), limits=limits.numpy())


def neighbours(random: Generator, batch: Batch, q: Floats, good: NDArray[np.bool_]) -> Batch:
    """The next episode of solved steps: one more loss where the policy went, from the last q."""
    index = np.flatnonzero(good)
    here = batch.take(index)
    visited = random.random(here.loss.shape) < q[index]
    more = np.where(visited, random.random(here.loss.shape) / np.where(visited, q[index], 1.0), 0.0)
    there = replace(here, loss=here.loss + more, t=here.t + 1.0, start=q[index])
    return there.rounded() if there.single else there


def random_mdp(random: Generator, hard: bool) -> occ.LayeredMDP:
    """Layers of all sizes, now and then with masks, single actions, zeros; some are sparse."""
    horizon, widest = int(random.integers(1, 7)), int(random.integers(1, 6))
    num_actions = int(random.choice([1, 2, 3, 4, 5], p=[0.04, 0.28, 0.28, 0.2, 0.2]))
    sizes = [
        int(random.choice([1, 1, 2, 3])),
        *(int(n) for n in random.integers(1, widest + 1, horizon - 1)),
    ]
    concentration = random.choice([0.02, 0.05, 0.3, 1.0, 10.0] if hard else [0.3, 1.0, 3.0])
    smallest = 1e-30 if hard else 1e-12
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


def wide_mdp(random: Generator) -> occ.LayeredMDP:
    """Sparse layers of up to 16 states, each pair with one to three successors."""
    horizon, num_actions = int(random.integers(2, 6)), int(random.integers(2, 4))
    sizes = [1, *(int(n) for n in random.integers(6, 17, horizon - 1))]
    tables = []
    for here, there in zip(sizes, [*sizes[1:], 1], strict=True):
        rows = np.zeros((here, num_actions, there))
        for _ in range(3):
            next_state = random.integers(there, size=(here, num_actions, 1))
            np.put_along_axis(rows, next_state, random.random(next_state.shape) + 0.05, -1)
        tables.append(torch.from_numpy(rows / rows.sum(-1, keepdims=True)))
    mdp = occ.LayeredMDP(tables).prune()
    return mdp.to_sparse() if random.random() < 0.5 else mdp


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
