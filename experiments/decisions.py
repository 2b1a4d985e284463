"""Decision-focused learning on graphs: regret and time, against the losses of PyEPO.

A linear predictor sees 5 features and predicts costs; the plan of least predicted cost is taken.
The data are PyEPO's: costs are a polynomial of the features, of some degree, with noise. From
degree 2 on, a linear predictor is wrong. The plans are paths through grids, walks on maps with
eight neighbours whose fields have costs, and knapsacks, all of them graphs of `from_graph`.

Every loss gets the same chances: it starts at the least squares of the training points, has four
settings (two of its own, each with and without a squared error beside it) and three numbers of
updates. What is best in cross-validation is taken, but only if it beats least squares there by more
than two standard errors of the difference; it is then trained with all points.

Every cell is saved, so a run that was stopped continues. The table and the figure show all cells
that are there. Seconds are of processor time, with one thread: they hardly depend on the load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import util
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numba
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS

FEATURES, TEST_POINTS, BATCH = 5, 1000, 32
WEIGHTS = (0.0, 0.5)  # of the squared error beside a loss
MEMORY = 0.9  # of the running mean of the parameters, which is what is taken
CHECKS = (20, 40, 80)  # updates after which a predictor may be taken
FOLDS = 5  # of the cross-validation

#: PyEPO's own solver, and a compiled dynamic program in its place: the same paths, found faster.
Solver = Literal["gurobi", "dynamic"]


@dataclass(frozen=True)
class Args:
    """What is run. The default seeds are those of the page; trials used 20 to 35, 3000 to 3031."""

    kinds: tuple[str, ...] = ("12 x 12", "5 x 5", "map", "knapsack")
    """of plans"""
    degrees: tuple[int, ...] = (2, 4, 8)
    """of the polynomials"""
    noise: float = 0.5
    """of the costs"""
    points: tuple[int, ...] = (100, 1000)
    """for training"""
    seeds: tuple[int, ...] = tuple(range(4000, 4032))
    """of data and training"""
    methods: tuple[str, ...] = ()
    """names of methods; all by default"""
    timing_grids: tuple[int, ...] = ()
    """sides of grids on which to measure times, for example 5 10 20 30"""
    root: Path = Path("runs")
    """the cells are kept in its folder decisions"""


# -- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """A graph whose edges cost one of the predicted numbers, or nothing."""

    mdp: occ.GraphMDP
    item: Tensor  # (E,): which number; `size` for nothing
    size: int  # how many numbers are predicted
    sign: float = 1.0  # -1 if they are values, which count as negative costs

    def losses(self, costs: Tensor) -> Tensor:
        """Losses of pairs: `(*batch, size)` -> `(*batch, S, A)`."""
        padded = torch.nn.functional.pad(costs, (0, 1))
        return self.mdp.losses(padded.index_select(-1, self.item))

    def use(self, q: Tensor) -> Tensor:
        """How often a plan pays each number: `(*batch, S, A)` -> `(*batch, size)`."""
        flows = self.mdp.flows(q)
        found = flows.new_zeros(*flows.shape[:-1], self.size + 1)
        return found.scatter_add(-1, self.item.expand_as(flows), flows).narrow(-1, 0, self.size)

    @cached_property
    def table(self) -> tuple[Any, Any]:
        """For the dynamic program: the next state of each pair, -1 if absent, and its number."""
        mdp = self.mdp
        number = mdp.losses(self.item + 1.0).long()  # 0 for a pair without an edge
        number = torch.where(number > 0, number - 1, self.size)
        after = [
            here.stop + layer.to_dense().view(-1, mdp.num_actions, layer.shape[-1]).argmax(-1)
            for here, layer in zip(mdp.layer_slices, mdp.transitions, strict=True)
        ]
        return torch.cat(after).where(mdp.actions, -1).numpy(), number.numpy()

    def best(self, costs: Tensor) -> Tensor:
        """The plan of least cost, as its use of each number, `(*batch, size)`."""
        found = cheapest_of_each(*self.table, costs.detach().double().view(-1, self.size).numpy())
        return torch.from_numpy(found).view(costs.shape)


@numba.njit(cache=True)
def cheapest(after: Any, number: Any, costs: Any) -> Any:
    """The plan of least cost as its use of each number, and its cost, by dynamic programming."""
    states = len(after)
    value, best = np.full(states + 1, np.inf), np.zeros(states, dtype=np.int64)
    value[states] = 0.0
    for s in range(states - 1, -1, -1):
        for a in range(after.shape[1]):
            if after[s, a] >= 0:
                i = number[s, a]
                total = value[after[s, a]] + (costs[i] if i < len(costs) else 0.0)
                if total < value[s]:
                    value[s], best[s] = total, a
    used, s = np.zeros(len(costs) + 1), 0
    while s < states:
        used[number[s, best[s]]] += 1.0
        s = after[s, best[s]]
    return used[:-1], value[0]


@numba.njit(cache=True)
def cheapest_of_each(after: Any, number: Any, costs: Any) -> Any:
    """The plans of least cost of a batch, `(N, size)`."""
    found = np.zeros_like(costs)
    for i in range(len(costs)):
        found[i] = cheapest(after, number, costs[i])[0]
    return found


def grid(n: int) -> Graph:
    """Paths through n x n nodes, right and down; PyEPO's order of edges, which have costs."""
    edges = []
    for i in range(n):
        edges += [((i, j), (i, j + 1)) for j in range(n - 1)]
        edges += [((i, j), (i + 1, j)) for j in range(n) if i + 1 < n]
    mdp = occ.LayeredMDP.from_graph(edges, (0, 0), (n - 1, n - 1))
    return Graph(mdp, torch.arange(len(edges)), len(edges))


def fields(n: int) -> Graph:
    """Walks of at most n + 2 moves over n x n fields, each to one of eight neighbours."""
    moves = [move for move in product((-1, 0, 1), repeat=2) if any(move)]
    edges = [
        ((i, j), (i + x, j + y))
        for i, j, (x, y) in product(range(n), range(n), moves)
        if 0 <= i + x < n and 0 <= j + y < n
    ]
    mdp = occ.LayeredMDP.from_graph(edges, (0, 0), (n - 1, n - 1), horizon=n + 2)
    return Graph(mdp, torch.tensor([n * i + j for _, (i, j) in edges]), n * n)


def knapsack(n: int) -> Graph:
    """Subsets of n items with weights of 3 to 8; four tenths of all weight fit in."""
    weights = np.random.RandomState(0).randint(3, 9, n).tolist()
    capacity = 4 * sum(weights) // 10
    edges, item = [], []
    for i, room in product(range(n), range(capacity + 1)):
        for taken in (0, 1) if room >= weights[i] else (0,):
            left = (i + 1, room - taken * weights[i]) if i + 1 < n else "end"
            edges.append(((i, room), left))
            item.append(i if taken else n)
    mdp = occ.LayeredMDP.from_graph(edges, (0, capacity), "end")
    return Graph(mdp, torch.tensor(item), n, sign=-1.0)


KINDS: dict[str, Callable[[], Graph]] = {
    "5 x 5": partial(grid, 5),
    "12 x 12": partial(grid, 12),
    "map": partial(fields, 8),
    "knapsack": partial(knapsack, 16),
}


@cache
def graph_of(kind: str) -> Graph:
    """The graph of a kind of plans; `n x n` is a grid."""
    return KINDS[kind]() if kind in KINDS else grid(int(kind.partition(" ")[0]))


# -- data -----------------------------------------------------------------------------------------


class Points(NamedTuple):
    """Features, costs, the plans of least cost, and the costs of these plans."""

    x: Tensor  # (*batch, N, F)
    c: Tensor  # (*batch, N, size)
    w: Tensor  # (*batch, N, size), how often each cost is paid
    z: Tensor  # (*batch, N, 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> Points:
        """The same with every tensor converted."""
        return Points(*map(function, self))


@dataclass(frozen=True)
class Problem:
    """Plans of one kind: training, validation and test data, for several seeds."""

    kind: str
    degree: int
    noise: float
    points: int
    seeds: tuple[int, ...]
    solver: Solver = "dynamic"

    @property
    def graph(self) -> Graph:
        return graph_of(self.kind)

    @cached_property
    def model(self) -> Any:
        """PyEPO's model of the problem, of grids only with Gurobi."""
        if self.solver == "dynamic":
            return dynamic_program(self.graph)
        from pyepo.model.grb import shortestPathModel

        n = int(self.kind.partition(" ")[0])
        return shortestPathModel((n, n))

    @cached_property
    def data(self) -> tuple[Points, Points]:
        """The points for training and test, `(seeds, N, ...)`.

        The costs of a seed are divided by their mean over the training points.
        """
        sizes, drawn = (self.points, TEST_POINTS), []
        for seed in self.seeds:  # as PyEPO draws them
            random = np.random.RandomState(seed)
            mixing = random.binomial(1, 0.5, (self.graph.size, FEATURES))
            x = random.normal(0, 1, (sum(sizes), FEATURES))
            c = ((x @ mixing.T / FEATURES**0.5 + 3) ** self.degree + 1) / 3.5**self.degree
            c *= random.uniform(1 - self.noise, 1 + self.noise, c.shape)
            c *= self.graph.sign / c[: self.points].mean()
            drawn.append((torch.from_numpy(x).float(), torch.from_numpy(c).float()))
        features, costs = (torch.stack(part) for part in zip(*drawn, strict=True))
        w = self.graph.best(costs).float()
        whole = features, costs, w, (w * costs).sum(-1, True)
        parts = zip(*(y.split(sizes, 1) for y in whole), strict=True)
        train, test = (Points(*part) for part in parts)
        return train, test

    def regrets(self, weight: Tensor, bias: Tensor, data: Points) -> Tensor:
        """Regrets `(seeds, N)`; their mean is PyEPO's, sum (c·w(predicted) - z) / sum |z|."""
        chosen = (self.graph.best(torch.baddbmm(bias, data.x, weight)) * data.c).sum(-1, True)
        return ((chosen - data.z) / data.z.abs().mean(1, True)).squeeze(-1)


# -- losses ---------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Points], Tensor]  # predicted costs (N, size), data -> a number


def dynamic_program(graph: Graph) -> Any:
    """A model of PyEPO with the compiled dynamic program as its solver."""
    from pyepo.model.opt import optModel

    class Model(optModel):
        def _getModel(self) -> tuple[Any, Any]:  # noqa: N802
            return None, range(graph.size)

        def setObj(self, c: Any) -> None:  # noqa: N802
            self.costs = np.asarray(c, dtype=np.float64)

        def solve(self) -> Any:
            return cheapest(*graph.table, self.costs)

    return Model()


def pyepo(name: str, problem: Problem, **options: Any) -> Any:
    """One of PyEPO's losses or layers."""
    import pyepo.func

    return getattr(pyepo.func, name)(problem.model, processes=1, **options)


def spo_plus(problem: Problem, _: float = 0.0) -> Loss:
    """SPO+ of Elmachtoub and Grigas."""
    loss = pyepo("SPOPlus", problem)
    return lambda predicted, data: loss(predicted, data.c, data.w, data.z)


def perturbed_fenchel_young(problem: Problem, sigma: float) -> Loss:
    """The perturbed Fenchel-Young loss of Berthet et al., with one sample as in PyEPO's tests."""
    loss = pyepo("PFY", problem, n_samples=1, sigma=sigma, seed=problem.seeds[0])
    return lambda predicted, data: loss(predicted, data.w)


def frank_wolfe_fenchel_young(problem: Problem, weight: float) -> Loss:
    """The Fenchel-Young loss of weight ||w||^2 / 2, by Frank-Wolfe (Dalle et al.)."""
    loss = pyepo("RFY", problem, lambd=weight, max_iter=FRANK_WOLFE)
    return lambda predicted, data: loss(predicted, data.w)


def perturbation_gradient(problem: Problem, sigma: float) -> Loss:
    """The perturbation gradient of Gupta and Huang."""
    loss = pyepo("PG", problem, sigma=sigma)
    return lambda predicted, data: loss(predicted, data.c)


def implicit_likelihood(problem: Problem, sigma: float) -> Loss:
    """I-MLE of Niepert et al.: how far its plan is from the best one."""
    plan = pyepo("IMLE", problem, n_samples=1, sigma=sigma)
    return lambda predicted, data: (plan(predicted) - data.w).abs().sum(-1).mean()


def soft_margin(problem: Problem, temperature: float) -> Loss:
    """The Fenchel-Young loss at 2 predicted - c, with the entropy of plans; SPO+ if cold.

        FY(2 predicted - c, w),    psi = temperature * ConditionalEntropy

    Training needs the gradient only, which is 2 (w - q) by the envelope theorem. So the step is
    solved without derivatives; `fenchel_young_loss` has the same gradient, and the value as well.
    """
    graph = problem.graph
    step = occ.FTRLStep(graph.mdp, temperature * occ.ConditionalEntropy())

    def loss(predicted: Tensor, data: Points) -> Tensor:
        with torch.no_grad():
            plan = graph.use(step(graph.losses(2 * predicted - data.c)))
        return 2 * ((data.w - plan) * predicted).sum(-1).mean()

    return loss


#: Steps of Frank-Wolfe. With PyEPO's 10,000 an update would take minutes.
FRANK_WOLFE = 10


class Method(NamedTuple):
    """A loss with its two settings: of its parameter, or of the rate of Adam."""

    make: Callable[[Problem, float], Loss]
    values: tuple[float, ...]
    rates: tuple[float, ...] = (0.03,)


METHODS = {
    "SPO+": Method(spo_plus, (0.0,), (0.01, 0.03)),
    "torch_occ": Method(soft_margin, (0.3, 1.0)),
    "PFY": Method(perturbed_fenchel_young, (0.3, 1.0)),
    "PG": Method(perturbation_gradient, (0.1, 1.0)),
    "I-MLE": Method(implicit_likelihood, (0.3, 1.0)),
    "RFY": Method(frank_wolfe_fenchel_young, (0.3, 1.0)),
}


# -- training -------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """Scores in cross-validation and regrets on the test points, `(choices, seeds)`.

    A score is the mean difference of regret to least squares, plus twice its standard error.
    """

    score: list[list[float]]
    test: list[list[float]]


def least_squares(x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `(seeds, F, size)` and biases `(seeds, 1, size)`."""
    features = torch.cat([x, torch.ones_like(x[..., :1])], -1).double()
    found = torch.linalg.lstsq(features, c.double()).solution.float()
    return found[:, :-1].contiguous(), found[:, -1:].contiguous()


def fallback(problem: Problem) -> Trained:
    """Least squares, with the score zero."""
    data, test = problem.data
    found = problem.regrets(*least_squares(*data[:2]), test).mean(-1)
    return Trained([[0.0] * len(found)], [found.tolist()])


def train(problem: Problem, loss: Loss, rate: float, weight: float) -> Trained:
    """Score every number of updates on the points held out in turn, and train with all points."""
    data, test = problem.data
    fold, given = torch.arange(data.c.shape[1]) % FOLDS, (problem, loss, rate, weight)
    parts = []
    for f in range(FOLDS):
        places = ((fold != f).nonzero()[:, 0], (fold == f).nonzero()[:, 0])
        rest, held = (data.map(partial(torch.index_select, dim=1, index=x)) for x in places)
        before, *after = follow(*given, rest, held)
        parts.append(torch.stack(after) - before)
    gain = torch.cat(parts, -1)  # (checks, seeds, N)
    score = gain.mean(-1) + 2 * gain.std(-1) / gain.shape[-1] ** 0.5
    _, *after = follow(*given, data, test)
    return Trained(score.tolist(), torch.stack(after).mean(-1).tolist())


def follow(
    problem: Problem, loss: Loss, rate: float, weight: float, data: Points, seen: Points
) -> Iterator[Tensor]:
    """Regrets `(seeds, N)` at some points: of least squares, then during training from there.

    A squared error stands beside the loss. All seeds are trained at once: a batch holds the batches
    of all seeds. Every seed has its own generator for batches.
    """
    count, size, _ = data.c.shape
    generators = [torch.Generator().manual_seed(seed) for seed in problem.seeds]
    means = least_squares(data.x, data.c)
    yield problem.regrets(*means, seen)
    slope, bias = (x.clone().requires_grad_() for x in means)
    optimizer = torch.optim.Adam([slope, bias], lr=rate)
    order = torch.empty(count, 0, dtype=torch.long)
    for update in range(1, CHECKS[-1] + 1):
        if not order.shape[1]:
            order = torch.stack([torch.randperm(size, generator=g) for g in generators])
        index, order = order[:, :BATCH], order[:, BATCH:]
        batch = data.map(partial(_take, index=index))
        predicted = torch.baddbmm(bias, batch.x, slope)
        # A mean over all seeds; each gets the gradient of its own mean.
        value = loss(predicted.flatten(0, 1), batch.map(lambda x: x.flatten(0, 1)))
        if weight:
            value = value + weight * (predicted - batch.c).square().sum(-1).mean()
        optimizer.zero_grad()
        (count * value).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, latest in zip(means, (slope, bias), strict=True):
                mean.lerp_(latest, 1 - MEMORY)
        if update in CHECKS:
            yield problem.regrets(*means, seen)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of each seed: `(seeds, N, n)` at `(seeds, M)` -> `(seeds, M, n)`."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class Cell(NamedTuple):
    """One method on one kind of data, for several seeds."""

    method: str
    kind: str
    degree: int
    noise: float
    points: int
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of its file."""
        seeds = f"{self.seeds[0]}-{self.seeds[-1]}"
        return common.slug("__".join(map(str, (*self[:-1], seeds)))) + ".json"


def cells(args: Args) -> Iterator[Cell]:
    """All cells; each trains all seeds."""
    names = args.methods or ("least squares", *METHODS)
    for points, kind, degree in product(args.points, args.kinds, args.degrees):
        for name in names:
            if (name, kind) == ("RFY", "12 x 12"):
                continue  # an update takes 0.6 s
            yield Cell(name, kind, degree, args.noise, points, args.seeds)


def run(cell: Cell) -> Trained:
    """Train one predictor per seed with every setting."""
    problem = Problem(*cell[1:])
    if cell.method == "least squares":
        return fallback(problem)
    method, found = METHODS[cell.method], Trained([], [])
    for value, rate, weight in product(method.values, method.rates, WEIGHTS):
        more = train(problem, method.make(problem, value), rate, weight)
        found.score.extend(more.score)
        found.test.extend(more.test)
    return found


def load(folder: Path) -> dict[Cell, Trained]:
    """All cells that were saved."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        cell = Cell(**content["cell"])
        found[cell._replace(seeds=tuple(cell.seeds))] = Trained(**content["trained"])
    return found


# -- times ----------------------------------------------------------------------------------------


def measure(n: int) -> dict[str, float]:
    """Seconds of processor time per update of a batch on a grid, the least of several in turns."""
    problem = Problem(f"{n} x {n}", 4, 0.5, BATCH, (0,))
    updates = {"least squares": _updater(problem, lambda x, data: (x - data.c).square().mean())}
    for name, method in METHODS.items():
        if name == "RFY" and n > 10:
            continue  # it would keep gigabytes of plans
        updates[name] = _updater(problem, method.make(problem, method.values[-1]))
    if util.find_spec("gurobipy"):
        slow = Problem(f"{n} x {n}", 4, 0.5, BATCH, (0,), "gurobi")
        updates["SPO+, Gurobi"] = _updater(slow, spo_plus(slow))
    return common.in_turns(updates, max(4, 150 // n))


def _updater(problem: Problem, loss: Loss) -> Callable[[], None]:
    data = problem.data[0].map(lambda x: x[0])
    network = torch.nn.Linear(data.x.shape[1], data.c.shape[1])
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

    def update() -> None:
        optimizer.zero_grad()
        loss(network(data.x), data).backward()
        optimizer.step()

    return update


def time_table(times: dict[int, dict[str, float]]) -> str:
    """Processor time per epoch of 1,000 points, and how many times that of `torch_occ`."""
    names = list(dict.fromkeys(name for found in times.values() for name in found))
    body = []
    for name in names:
        cells = [name]
        for _, found in sorted(times.items()):
            took = found.get(name, math.nan)
            ratio = f"{took / found['torch_occ']:.2g}"
            cells.append(f"{common.seconds(took * 1000 / BATCH)} ({ratio})" if took > 0 else "-")
        body.append(cells)
    return common.table(["time per epoch", *(f"{n} x {n}" for n in sorted(times))], body)


# -- reports --------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Regrets of the choices in one kind of data, by method: one per seed, in percent."""

    kind: str
    points: int
    degree: int
    noise: float
    regrets: dict[str, Tensor]
    kept: float  # the share of seeds where torch_occ kept least squares

    def minus(self, other: str) -> tuple[float, float]:
        """The mean of the differences of torch_occ, seed by seed, and half of its interval."""
        return spread(self.regrets["torch_occ"] - self.regrets[other])


def rows(saved: dict[Cell, Trained]) -> list[Row]:
    """Every kind of data for which least squares, SPO+ and torch_occ have the same seeds."""
    groups: dict[Cell, dict[str, Trained]] = {}
    for cell, trained in saved.items():
        groups.setdefault(cell._replace(method=""), {})[cell.method] = trained
    result = []
    for cell, runs in groups.items():
        if runs.keys() < {"least squares", "SPO+", "torch_occ"}:
            continue
        own, regrets = runs["least squares"], {}
        kept = 0.0
        for name, found in runs.items():
            score, test = (torch.tensor(a + b) for a, b in zip(own, found, strict=True))
            pick = score.argmin(0, keepdim=True)  # the first of equals: least squares
            regrets[name] = 100 * test.gather(0, pick)[0].double()
            if name == "torch_occ":
                kept = float((pick == 0).double().mean())
        result.append(Row(cell.kind, cell.points, cell.degree, cell.noise, regrets, kept))
    order = list(KINDS)
    return sorted(result, key=lambda row: (order.index(row.kind), *row[1:4]))


def spread(values: Tensor) -> tuple[float, float]:
    """The mean, and half of Student's 95 % interval."""
    found = occ.game.Mean.of(values)
    return found.mean, found.interval[1] - found.mean if len(values) > 1 else math.nan


def regret_table(result: list[Row]) -> str:
    """Mean normalized regrets in percent, and differences ± half of Student's 95 % interval."""
    names, body = ["least squares", *METHODS], []
    for row in result:
        means = (f"{row.regrets[x].mean():.2f}" if x in row.regrets else "-" for x in names)
        line = [row.kind, f"{row.points:,}", str(row.degree), *means]
        for other in ("least squares", "SPO+"):
            mean, half = row.minus(other)
            word = " worse" if mean > half else " better" if mean < -half else ""
            line.append(f"{mean:+.2f} ± {half:.2f}{word}")
        body.append([*line, f"{100 * row.kept:.0f} %"])
    header = ["plan", "points", "degree", *names, "minus least squares", "minus SPO+", "kept"]
    return common.table(header, body)


def draw(result: list[Row]) -> Figure:
    """The regret of every method minus that of least squares, one panel per kind of plans."""
    panels = list(dict.fromkeys((row.kind, row.points) for row in result))
    kinds, points = (list(dict.fromkeys(x)) for x in zip(*panels, strict=True))
    figure = common.new_figure(2.6 * len(kinds) + 0.8, 2.6 * len(points) + 0.6)
    grid = figure.subplots(len(points), len(kinds), squeeze=False)
    for i, j in product(range(len(points)), range(len(kinds))):
        axes = grid[i][j]
        mine = [row for row in result if (row.kind, row.points) == (kinds[j], points[i])]
        for n, name in enumerate(METHODS):
            having = [(x, row) for x, row in enumerate(mine) if name in row.regrets]
            gains = [spread(row.regrets[name] - row.regrets["least squares"]) for _, row in having]
            means, halves = zip(*gains, strict=True) if gains else ((), ())
            look = {"color": COLOURS[n], "marker": "o", "markersize": 3.5, "capsize": 2}
            look |= {"label": name, "linestyle": "none"}
            axes.errorbar([x + 0.11 * (n - 2.5) for x, _ in having], means, halves, **look)
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
        title = f"{kinds[j]}, {points[i]:,} points"
        common.tidy(axes, title=title, xlabel="degree", yscale="symlog")
        axes.set_xticks(range(len(mine)), [str(row.degree) for row in mine])
    grid[0][0].set_ylabel("regret minus that of\nleast squares, % points")
    common.legend_below(figure, grid[0][0], columns=6)
    return figure


def main(args: Args) -> Path:
    """Run the cells that are missing, and report all cells and times that were saved."""
    torch.set_num_threads(1)
    if not util.find_spec("pyepo"):
        print("pyepo is missing, so its losses are left out: pip install 'torch-occ[decisions]'")
        for name in METHODS.keys() - {"torch_occ"}:
            del METHODS[name]
    directory = args.root / "decisions"
    for cell in cells(args):
        path = directory / "cells" / cell.name
        if not path.exists():
            content = {"cell": cell._asdict(), "trained": run(cell)._asdict()}
            common.write_text(path, json.dumps(content))
    for n in args.timing_grids:
        common.write_text(directory / f"times_{n}.json", json.dumps(measure(n)))
    result = rows(load(directory / "cells"))
    times = {
        int(path.stem.removeprefix("times_")): json.loads(path.read_text())
        for path in directory.glob("times_*.json")
    }
    text = "\n\n".join([regret_table(result), time_table(times), common.machine()])
    print(text)
    common.write_text(directory / "decisions.md", text)
    if result:
        common.write_figure(directory / "decisions.png", draw(result))
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
