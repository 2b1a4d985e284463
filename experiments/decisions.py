"""Decision-focused learning on PyEPO's shortest paths: regret and time, against PyEPO's methods.

A linear predictor sees 5 features and predicts the costs of the edges of a grid; the path that is
shortest for the prediction is taken. PyEPO generates the data: the costs are a polynomial of the
features, of some degree, with noise. From degree 2 on, a linear predictor is misspecified. Every
method is a loss of a batch; the network, its initial weights, the order of the batches and the
optimizer are the same for all.

Of torch_occ, several losses are trained (`CANDIDATES`), and one is chosen by its regret on
validation data, a quarter of the training points, besides them. Rivals do not use these.

Every cell is saved, so a run that was stopped continues. The table and the figure show all cells
that are there. Seconds are of processor time, with one thread: they hardly depend on the load.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS

FEATURES, TEST_POINTS, BATCH = 5, 1000, 32
RATE = 0.01  # of Adam

#: PyEPO's own solver, and a compiled dynamic program in its place: the same paths, found faster.
Solver = Literal["gurobi", "dynamic"]


@dataclass(frozen=True)
class Args:
    """What is run."""

    degrees: tuple[int, ...] = (4, 8, 6, 1, 2)
    """of the polynomials"""
    noises: tuple[float, ...] = (0.5, 0.0)
    """of the costs"""
    points: tuple[int, ...] = (1000, 100)
    """for training"""
    seeds: tuple[int, ...] = tuple(range(10))
    """of data and training"""
    methods: tuple[str, ...] = ()
    """names of methods; all by default"""
    grid: int = 5
    """the side of the grid on which regrets are measured"""
    solver: Solver = "gurobi"
    """of PyEPO's methods; dynamic: the same paths, found faster"""
    epochs: int = 0
    """by default 20 for 1,000 points, and 80 for fewer"""
    timing_grids: tuple[int, ...] = ()
    """sides of grids on which to measure times, for example 5 10 20 30"""
    root: Path = Path("runs")
    """the cells are kept in its folder decisions"""


class Points(NamedTuple):
    """Features, costs, the paths of least cost, and the costs of these paths."""

    x: Tensor  # (*batch, N, F)
    c: Tensor  # (*batch, N, E)
    w: Tensor  # (*batch, N, E), zeros and ones
    z: Tensor  # (*batch, N, 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> Points:
        """The same with every tensor converted."""
        return Points(*map(function, self))


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
        try:
            if self.solver == "dynamic":
                return dynamic_program(self.grid)
            from pyepo.model.grb import shortestPathModel
        except ImportError as error:
            need = "this experiment needs pyepo and gurobipy"
            raise ImportError(f"{need}: pip install 'torch-occ[decisions]'") from error
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


class Trained(NamedTuple):
    """Normalized regrets of each seed: on validation data after every epoch, and in the end."""

    valid: list[list[float]]  # (epochs, seeds)
    test: list[float]  # (seeds,), after the last epoch


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of each seed: `(seeds, N, n)` at `(seeds, M)` -> `(seeds, M, n)`."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


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


class Cell(NamedTuple):
    """One method on one kind of data, for several seeds."""

    method: str
    solver: str
    grid: int
    degree: int
    noise: float
    points: int
    seeds: tuple[int, ...]
    epochs: int

    @property
    def name(self) -> str:
        """The name of its file."""
        seeds = "-".join(map(str, self.seeds))
        parts = self._replace(noise=f"{self.noise:g}", seeds=seeds)  # type: ignore[arg-type]
        return "__".join(map(str, parts)) + ".json"


def cells(args: Args) -> Iterator[Cell]:
    """All cells; each trains all seeds."""
    names = args.methods or tuple(METHODS)
    for points, degree, noise, name in product(args.points, args.degrees, args.noises, names):
        solver = "" if name in CANDIDATES or name == "two-stage" else args.solver
        epochs = args.epochs or (20 if points >= 1000 else 80)  # 640 updates, or 320 for 100 points
        yield Cell(name, solver, args.grid, degree, noise, points, args.seeds, epochs)


def run(cell: Cell) -> Trained:
    """Train one predictor per seed."""
    solver: Solver = "gurobi" if cell.solver == "gurobi" else "dynamic"
    problem = Problem(cell.grid, cell.degree, cell.noise, cell.points, cell.seeds, solver)
    return train(problem, METHODS[cell.method], cell.epochs)


def load(folder: Path) -> dict[Cell, Trained]:
    """All cells that were saved."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        cell = Cell(**content["cell"])
        found[cell._replace(seeds=tuple(cell.seeds))] = Trained(**content["trained"])
    return found


def measure(grid: int, rounds: int = 5) -> dict[str, float]:
    """Seconds of processor time per update of a batch; the least of several rounds, by method.

    The rounds take turns, so that all methods see the same load.
    """
    problem = Problem(grid, 4, 0.5, 100, (0,))
    other = Problem(grid, 4, 0.5, 100, (0,), "dynamic")
    updates = {name: _updater(problem, method) for name, method in METHODS.items()}
    for name in ("SPO+", "PFY", "DBB"):
        updates[f"{name}, dynamic program"] = _updater(other, METHODS[name])
    count = max(2, round(20 * (5 / grid) ** 2))
    found: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(rounds + 1):
        for name, update in updates.items():
            begin = time.process_time()
            for _ in range(count if turn else 1):  # the first turn compiles
                update()
            if turn:
                found[name].append((time.process_time() - begin) / count)
    return {name: min(times) for name, times in found.items()}


def _updater(problem: Problem, method: Callable[[Problem], Loss]) -> Callable[[], None]:
    data, loss = problem.data[0].map(lambda x: x[0, :BATCH]), method(problem)
    network = torch.nn.Linear(data.x.shape[1], data.c.shape[1])
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)

    def update() -> None:
        value = loss(network(data.x), data)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return update


SHOWN = ("two-stage", "SPO+", "PFY", "DBB", "torch_occ")

#: A row of the table has at least these; other methods may be missing.
NEEDED = {"two-stage", "SPO+", "PFY", "margin 0.3", "margin 1", "margin 3"}


def choose(candidates: dict[str, Trained]) -> list[str]:
    """The candidate of least mean validation regret in the second half of training, by seed."""
    names = list(candidates)
    late = [
        torch.tensor(found.valid)[len(found.valid) // 2 :].mean(0) for found in candidates.values()
    ]
    return [names[i] for i in torch.stack(late).argmin(0).tolist()]


class Row(NamedTuple):
    """Regrets of the last epoch in one column of the table, by method: one per seed."""

    degree: int
    noise: float
    points: int
    regrets: dict[str, torch.Tensor]  # in percent
    chosen: dict[str, int]  # how often each candidate was chosen


def rows(saved: dict[Cell, Trained], grid: int) -> list[Row]:
    """Every (points, noise, degree) for which the methods were run with the same seeds."""
    groups: dict[tuple[int, float, int], dict[tuple[int, ...], dict[str, Trained]]] = {}
    for cell, trained in saved.items():
        if cell.grid == grid:
            group = groups.setdefault((cell.points, cell.noise, cell.degree), {})
            group.setdefault(cell.seeds, {})[cell.method] = trained
    result = []
    for (points, noise, degree), group in sorted(groups.items()):
        whole = [seeds for seeds, runs in group.items() if set(runs) >= NEEDED]
        if not whole:
            continue
        runs = group[max(whole, key=len)]
        picks = choose({name: runs[name] for name in CANDIDATES if name in runs})
        regrets = {name: 100 * torch.tensor(found.test) for name, found in runs.items()}
        mine = [regrets[pick][i] for i, pick in enumerate(picks)]
        regrets["torch_occ"] = torch.stack(mine)
        chosen = {name: picks.count(name) for name in CANDIDATES if name in picks}
        result.append(Row(degree, noise, points, regrets, chosen))
    return result


def regret_table(result: list[Row]) -> str:
    """Normalized regrets in percent, mean ± half of Student's 95 % interval."""
    body = []
    for row in result:
        picks = ", ".join(f"{name} ({n})" for name, n in row.chosen.items())
        shown = [spread(row.regrets[name]) if name in row.regrets else None for name in SHOWN]
        count = len(row.regrets["SPO+"])
        body.append([f"{row.points:,}", f"{row.noise:g}", str(row.degree), str(count)])
        body[-1] += [f"{x[0]:.2f} ± {x[1]:.2f}" if x else "-" for x in shown] + [picks]
    return common.table(["points", "noise", "degree", "seeds", *SHOWN, "chosen"], body)


def spread(values: torch.Tensor) -> tuple[float, float]:
    """The mean, and half of Student's 95 % interval."""
    found = occ.game.Mean.of(values)
    return found.mean, found.interval[1] - found.mean if len(values) > 1 else math.nan


def verdict(result: list[Row]) -> list[str]:
    """Compare with the best rival of each column: the mean of the differences seed by seed."""
    lines = []
    for row in result:
        best = min(RIVALS.keys() & row.regrets, key=lambda name: float(row.regrets[name].mean()))
        mean, half = spread(row.regrets["torch_occ"] - row.regrets[best])
        word = "worse" if mean - half > 0 else "better" if mean + half < 0 else "level"
        case = f"{row.points} points, noise {row.noise:g}, degree {row.degree}"
        lines.append(f"- {case}: {mean:+.2f} ± {half:.2f} against {best} ({word})")
    return lines


def time_table(times: dict[int, dict[str, float]]) -> str:
    """Processor time per epoch of 1,000 points, and how many times that of `margin 1`."""
    names = list(dict.fromkeys(name for found in times.values() for name in found))
    body = []
    for name in names:
        cells = [name]
        for _, found in sorted(times.items()):
            ratio = found[name] / found["margin 1"]
            cells.append(f"{common.seconds(found[name] * 1000 / BATCH)} ({ratio:.2g})")
        body.append(cells)
    return common.table(["time per epoch", *(f"{n} x {n}" for n in sorted(times))], body)


def draw(result: list[Row]) -> Figure:
    """Regret by degree, one panel per number of points and noise."""
    panels = sorted({(row.points, row.noise) for row in result}, reverse=True)
    height = max(1, math.ceil(len(panels) / 2))
    figure = common.new_figure(9, 0.6 + 3.2 * height)
    grid = figure.add_gridspec(height, 2)
    for i, (points, noise) in enumerate(panels):
        axes = figure.add_subplot(grid[i // 2, i % 2])
        mine = sorted(row for row in result if (row.points, row.noise) == (points, noise))
        for n, name in enumerate(SHOWN):
            having = [row for row in mine if name in row.regrets]
            means, halves = zip(*(spread(row.regrets[name]) for row in having), strict=True)
            look = {"color": COLOURS[n], "marker": "o", "markersize": 3.5, "capsize": 2}
            look |= {"label": name, "linewidth": 2.2 if name == "torch_occ" else 1.2}
            axes.errorbar([row.degree + 0.1 * (n - 2) for row in having], means, halves, **look)
        title = f"{points:,} training points, noise {noise:g}"
        labels = {"xlabel": "degree of the true costs", "ylabel": "normalized regret, %"}
        common.tidy(axes, yscale="log", title=title, xlim=(0.5, 8.7), **labels)  # PyEPO's degrees
        axes.set_xticks([row.degree for row in mine])
        # Regrets of nearly zero would take most of the axis.
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-2))
        axes.legend(frameon=False)
    return figure


def main(args: Args) -> Path:
    """Run the cells that are missing, and report all cells and times that were saved."""
    torch.set_num_threads(1)
    directory = args.root / "decisions"
    for cell in cells(args):
        path = directory / "cells" / cell.name
        if not path.exists():
            content = {"cell": cell._asdict(), "trained": run(cell)._asdict()}
            common.write_text(path, json.dumps(content))
    for grid in args.timing_grids:
        common.write_text(directory / f"times_{grid}.json", json.dumps(measure(grid)))
    result = rows(load(directory / "cells"), args.grid)
    times = {
        int(path.stem.removeprefix("times_")): json.loads(path.read_text())
        for path in directory.glob("times_*.json")
    }
    parts = [regret_table(result), "\n".join(verdict(result)), time_table(times), common.machine()]
    text = "\n\n".join(parts)
    print(text)
    common.write_text(directory / "decisions.md", text)
    common.write_figure(directory / "decisions.png", draw(result))
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
