"""Shortest paths with predicted costs: the data of PyEPO, its methods, and those of torch_occ.

A predictor is linear: features (N, 5) -> costs of edges (N, E). Every method is a loss of a batch;
the network, its initial weights, the order of the batches and the optimizer are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import torch_occ as occ
from torch_occ._support.choices import extra

FEATURES = 5
TEST_POINTS = 1000
BATCH = 32
RATE = 0.01  # of Adam

#: PyEPO's own solver, and a compiled dynamic program in its place: the same paths, found faster.
Solver = Literal["gurobi", "dynamic"]


@dataclass(frozen=True)
class Points:
    """Features, costs, the paths of least cost, and the costs of these paths."""

    x: Tensor  # (*batch, N, F)
    c: Tensor  # (*batch, N, E)
    w: Tensor  # (*batch, N, E), zeros and ones
    z: Tensor  # (*batch, N, 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> Points:
        """The same with every tensor converted."""
        return Points(*(function(x) for x in (self.x, self.c, self.w, self.z)))


@dataclass(frozen=True)
class Problem:
    """PyEPO's shortest paths on a grid: training, validation and test data, for several seeds."""

    grid: int
    degree: int
    noise: float
    points: int
    seeds: tuple[int, ...]
    solver: Solver = "gurobi"

    @property
    def validation(self) -> int:
        """The number of points for validation: a quarter of those for training, besides them."""
        return self.points // 4

    @cached_property
    def model(self) -> Any:
        """PyEPO's model of the problem."""
        with extra("decisions", "this experiment needs pyepo and gurobipy"):
            if self.solver == "dynamic":
                return dynamic_program(self.grid)
            from pyepo.model.grb import shortestPathModel
        return shortestPathModel((self.grid, self.grid))

    @cached_property
    def mdp(self) -> occ.GraphMDP:
        return occ.LayeredMDP.from_graph(self.model.arcs, 0, self.grid**2 - 1)

    @cached_property
    def data(self) -> tuple[Points, Points, Points]:
        """The points for training, validation and test, `(seeds, N, ...)`."""
        from pyepo.data.shortestpath import genData

        sizes = (self.points, self.validation, TEST_POINTS)
        shape = (self.grid, self.grid)
        drawn = [
            genData(sum(sizes), FEATURES, shape, self.degree, self.noise, seed)
            for seed in self.seeds
        ]
        x = torch.stack([torch.from_numpy(x).float() for x, _ in drawn])
        c = torch.stack([torch.from_numpy(c) for _, c in drawn])
        w = self.mdp.shortest_path(c).float()
        parts = zip(*(y.split(sizes, 1) for y in (x, c, w, (w * c).sum(-1, True))), strict=True)
        train, valid, test = (Points(*part) for part in parts)
        return train, valid, test

    def regrets(self, predicted: Tensor, data: Points) -> list[float]:
        """The normalized regret of PyEPO, sum (c·w(predicted) - z) / sum |z|, of each seed."""
        chosen = (self.mdp.shortest_path(predicted) * data.c).sum(-1, True)
        found: list[float] = ((chosen - data.z).sum((1, 2)) / data.z.abs().sum((1, 2))).tolist()
        return found


Loss = Callable[[Tensor, Points], Tensor]  # predicted costs (N, E), data -> a number


# -- PyEPO -----------------------------------------------------------------------------------------


def two_stage(problem: Problem) -> Loss:
    """Least squares: the prediction knows nothing of the decision."""
    return lambda predicted, data: torch.nn.functional.mse_loss(predicted, data.c)


def spo_plus(problem: Problem) -> Loss:
    """SPO+ of Elmachtoub and Grigas."""
    from pyepo.func import SPOPlus

    loss = SPOPlus(problem.model, processes=1)
    return lambda predicted, data: loss(predicted, data.c, data.w, data.z)


def perturbed_fenchel_young(problem: Problem) -> Loss:
    """The perturbed Fenchel-Young loss of Berthet et al., with one sample as in PyEPO's tests."""
    from pyepo.func import PFY

    loss = PFY(problem.model, n_samples=1, sigma=1.0, processes=1, seed=problem.seeds[0])
    return lambda predicted, data: loss(predicted, data.w)


def black_box(problem: Problem) -> Loss:
    """Differentiation of a black box by Vlastelica et al.: the cost of the path that is chosen."""
    from pyepo.func import DBB

    solve = DBB(problem.model, lambd=10, processes=1)
    return lambda predicted, data: (solve(predicted) * data.c).sum(-1).mean()


def dynamic_program(grid: int) -> Any:
    """PyEPO's shortest paths with a compiled dynamic program in the place of Gurobi.

    It finds the same paths, so the regrets of PyEPO's methods are the same, and it is faster.
    """
    import numba
    import numpy as np
    from pyepo.model.bases import shortestPathBase

    @numba.njit(cache=True)
    def shortest(tails: Any, heads: Any, costs: Any) -> Any:
        size = heads[-1] + 1
        length, last = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
        length[0] = 0.0
        for e in range(len(costs)):  # PyEPO's arcs are in topological order
            new = length[tails[e]] + costs[e]
            if new < length[heads[e]]:
                length[heads[e]], last[heads[e]] = new, e
        path, node = np.zeros(len(costs)), size - 1
        while node:
            path[last[node]] = 1.0
            node = tails[last[node]]
        return path, length[-1]

    class Model(shortestPathBase):
        def _getModel(self) -> tuple[Any, Any]:  # noqa: N802
            self.tails, self.heads = np.array(self.arcs).T.copy()
            return None, np.arange(len(self.arcs))

        def setObj(self, c: Any) -> None:  # noqa: N802
            self.costs = np.asarray(c, dtype=np.float64)

        def solve(self) -> Any:
            return shortest(self.tails, self.heads, self.costs)

    return Model((grid, grid))


RIVALS: dict[str, Callable[[Problem], Loss]] = {
    "two-stage": two_stage,
    "SPO+": spo_plus,
    "PFY": perturbed_fenchel_young,
    "DBB": black_box,
}


# -- torch_occ -------------------------------------------------------------------------------------


def soft_margin(temperature: float, target_temperature: float = 0.0) -> Callable[[Problem], Loss]:
    """The Fenchel-Young loss at 2 predicted - c, with the entropy of paths; SPO+ if cold.

        FY(2 predicted - c, target) / 2,    psi = temperature * ConditionalEntropy

    The target is the best path for c or, with a temperature of its own, the step's answer to c.
    Training needs the gradient only, which is target - q by the envelope theorem. So the step is
    solved without derivatives; `fenchel_young_loss` has the same gradient, and the value as well.
    """

    def make(problem: Problem) -> Loss:
        mdp = problem.mdp
        step = occ.FTRLStep(mdp, occ.ConditionalEntropy() / occ.Constant(1 / temperature))
        scale = temperature / target_temperature if target_temperature else 0.0

        def loss(predicted: Tensor, data: Points) -> Tensor:
            with torch.no_grad():
                flow = mdp.flows(step(mdp.losses(2 * predicted - data.c)))
                path = mdp.flows(step(mdp.losses(scale * data.c))) if scale else data.w
            return ((path - flow) * predicted).sum(-1).mean()

        return loss

    return make


def expected_cost(temperature: float) -> Callable[[Problem], Loss]:
    """The expected true cost of the plan, with the entropy of paths."""

    def make(problem: Problem) -> Loss:
        mdp = problem.mdp
        step = occ.FTRLStep(mdp, occ.ConditionalEntropy() / occ.Constant(1 / temperature))
        return lambda predicted, data: occ.expected_cost(
            step, mdp.losses(predicted), mdp.losses(data.c)
        ).mean()

    return make


#: What is chosen from on the validation data.
CANDIDATES: dict[str, Callable[[Problem], Loss]] = {
    "margin 0.3": soft_margin(0.3),
    "margin 1": soft_margin(1.0),
    "margin 3": soft_margin(3.0),
    "soft 0.3": soft_margin(0.3, 0.3),
    "soft 3": soft_margin(3.0, 3.0),
    "cost 1": expected_cost(1.0),
}

METHODS = {**RIVALS, **CANDIDATES}


# -- training --------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Normalized regrets of each seed: on validation data after every epoch, and in the end."""

    valid: list[list[float]]  # (epochs, seeds)
    test: list[float]  # (seeds,), after the last epoch


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of each seed: `(seeds, N, n)` at `(seeds, M)` -> `(seeds, M, n)`."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def epochs_of(points: int) -> int:
    """640 updates for 1,000 points, and 320 for 100."""
    return 20 if points >= 1000 else 80


def train(problem: Problem, method: Callable[[Problem], Loss], epochs: int) -> Trained:
    """Train a linear predictor for each seed, with the loss of a method.

    All seeds are trained at once: a batch holds the batches of all seeds. Every seed has its own
    generator for weights and batches.
    """
    (data, valid, test), loss = problem.data, method(problem)
    count, size, edges = data.c.shape
    generators = [torch.Generator().manual_seed(seed) for seed in problem.seeds]
    bound = FEATURES**-0.5  # as in torch.nn.Linear
    weight, bias = torch.empty(count, FEATURES, edges), torch.empty(count, 1, edges)
    for i, generator in enumerate(generators):
        for parameter in (weight, bias):
            torch.nn.init.uniform_(parameter[i], -bound, bound, generator=generator)
    optimizer = torch.optim.Adam([weight.requires_grad_(), bias.requires_grad_()], lr=RATE)
    history = []
    for _ in range(epochs):
        order = torch.stack([torch.randperm(size, generator=g) for g in generators])
        for index in order.split(BATCH, 1):  # (seeds, 32)
            batch = data.map(partial(_take, index=index))
            predicted = torch.baddbmm(bias, batch.x, weight)
            # A mean over all seeds; each gets the gradient of its own mean.
            value = count * loss(predicted.flatten(0, 1), batch.map(lambda x: x.flatten(0, 1)))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        with torch.no_grad():
            history.append(problem.regrets(torch.baddbmm(bias, valid.x, weight), valid))
    with torch.no_grad():
        final = problem.regrets(torch.baddbmm(bias, test.x, weight), test)
    return Trained(history, final)
