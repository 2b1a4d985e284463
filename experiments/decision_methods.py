"""Shortest paths with predicted costs: the data of PyEPO, its methods, and those of torch_occ.

A predictor is linear: features (N, 5) -> costs of edges (N, E). Every method is a loss of a batch;
the network, its initial weights, the order of the batches and the optimizer are the same for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_occ as occ
from torch_occ._support.extras import extra

FEATURES = 5
TEST_POINTS = 1000
BATCH = 32
RATE = 0.01  # of Adam


class Points(NamedTuple):
    """Features, costs, and what PyEPO's solver finds for these costs: paths and their costs."""

    x: Tensor  # (N, F)
    c: Tensor  # (N, E)
    w: Tensor  # (N, E), zeros and ones
    z: Tensor  # (N, 1)

    def __getitem__(self, index: Any) -> Points:  # type: ignore[override]
        return Points(self.x[index], self.c[index], self.w[index], self.z[index])


@dataclass(frozen=True)
class Problem:
    """PyEPO's shortest paths on a grid: training, validation and test data of one seed."""

    grid: int
    degree: int
    noise: float
    points: int
    seed: int

    @property
    def validation(self) -> int:
        """The number of points for validation: a quarter of those for training, besides them."""
        return self.points // 4

    @cached_property
    def model(self) -> Any:
        """PyEPO's model of the problem, with Gurobi."""
        with extra("decisions", "this experiment needs pyepo and gurobipy"):
            from pyepo.model.grb import shortestPathModel
        return shortestPathModel((self.grid, self.grid))

    @cached_property
    def mdp(self) -> occ.GraphMDP:
        return occ.LayeredMDP.from_graph(self.model.arcs, 0, self.grid**2 - 1)

    @cached_property
    def points_of_all(self) -> Points:
        from pyepo.data.shortestpath import genData

        count = self.points + self.validation + TEST_POINTS
        shape = (self.grid, self.grid)
        x, c = genData(count, FEATURES, shape, self.degree, self.noise, self.seed)
        costs = torch.from_numpy(c)
        w = self.mdp.shortest_path(costs).float()
        return Points(torch.from_numpy(x).float(), costs, w, (w * costs).sum(-1, keepdim=True))

    @property
    def train(self) -> Points:
        return self.points_of_all[: self.points]

    @property
    def valid(self) -> Points:
        return self.points_of_all[self.points : self.points + self.validation]

    @property
    def test(self) -> Points:
        return self.points_of_all[self.points + self.validation :]

    def regret(self, predicted: Tensor, data: Points) -> float:
        """The normalized regret of PyEPO: sum (c·w(predicted) - z) / sum |z|."""
        chosen = (self.mdp.shortest_path(predicted) * data.c).sum(-1, keepdim=True)
        return float((chosen - data.z).sum() / data.z.abs().sum())


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

    loss = PFY(problem.model, n_samples=1, sigma=1.0, processes=1, seed=problem.seed)
    return lambda predicted, data: loss(predicted, data.w)


def black_box(problem: Problem) -> Loss:
    """Differentiation of a black box by Vlastelica et al.: the cost of the path that is chosen."""
    from pyepo.func import DBB

    solve = DBB(problem.model, lambd=10, processes=1)
    return lambda predicted, data: (solve(predicted) * data.c).sum(-1).mean()


RIVALS: dict[str, Callable[[Problem], Loss]] = {
    "two-stage": two_stage,
    "SPO+": spo_plus,
    "PFY": perturbed_fenchel_young,
    "DBB": black_box,
}


# -- training --------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Normalized regrets after every epoch, and the seconds of processor time per epoch."""

    valid: list[float]
    test: list[float]
    seconds: float  # the median over epochs, without the evaluation


def epochs_of(points: int) -> int:
    """640 updates for 1,000 points, and 320 for 100."""
    return 20 if points >= 1000 else 80


def train(problem: Problem, method: Callable[[Problem], Loss], epochs: int) -> Trained:
    """Train a linear predictor with the loss of a method."""
    data, loss = problem.train, method(problem)
    network = torch.nn.Linear(FEATURES, data.c.shape[1])
    generator = torch.Generator().manual_seed(problem.seed)
    for weight in network.parameters():  # torch's default, from our generator
        torch.nn.init.uniform_(weight, -(FEATURES**-0.5), FEATURES**-0.5, generator=generator)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    valid, test, seconds = [], [], []
    for _ in range(epochs):
        order = torch.randperm(len(data.x), generator=generator).split(BATCH)
        begin = time.process_time()
        for index in order:
            value = loss(network(data.x[index]), data[index])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        seconds.append(time.process_time() - begin)
        with torch.no_grad():
            valid.append(problem.regret(network(problem.valid.x), problem.valid))
            test.append(problem.regret(network(problem.test.x), problem.test))
    return Trained(valid, test, sorted(seconds)[len(seconds) // 2])
