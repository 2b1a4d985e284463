"""Decision-focused learning on PyEPO's shortest paths: regret and time, against PyEPO's methods.

A linear predictor sees 5 features and predicts the costs of the edges of a grid; the path that is
shortest for the prediction is taken. PyEPO generates the data: the costs are a polynomial of the
features, of some degree, with noise. From degree 2 on, a linear predictor is misspecified. Every
method trains the same predictor with the same optimizer on the same batches.

Of torch_occ, several losses are trained (`decision_methods.CANDIDATES`), and one is chosen by its
regret on validation data, a quarter of the training points, besides them. Rivals do not use these.

Every cell is saved, so a run that was stopped continues. The table and the figure show all cells
that are there. Seconds are of processor time, with one thread: they hardly depend on the load.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import tyro

from experiments.common import machine, write_figure
from experiments.decision_methods import (
    BATCH,
    CANDIDATES,
    METHODS,
    RATE,
    Loss,
    Problem,
    Solver,
    Trained,
    epochs_of,
    train,
)
from experiments.decision_report import (
    Cell,
    disagreement,
    figure,
    regret_table,
    rows,
    time_table,
    verdict,
)
from torch_occ._support.files import write_atomically


@dataclass
class Args:
    """What is run."""

    degrees: tuple[int, ...] = (4, 8, 6, 1, 2)
    noises: tuple[float, ...] = (0.5, 0.0)
    points: tuple[int, ...] = (1000, 100)
    """Training points."""
    seeds: tuple[int, ...] = tuple(range(10))
    methods: tuple[str, ...] = ()
    """Names of methods; all by default."""
    grid: int = 5
    """The side of the grid on which regrets are measured."""
    solver: str = "gurobi"
    """The solver of PyEPO's methods: "gurobi" or "dynamic" (the same paths, found faster)."""
    epochs: int = 0
    """By default 20 for 1,000 points, and 80 for fewer."""
    timing_grids: tuple[int, ...] = ()
    """Sides of grids on which to measure times, for example 5 10 20 30."""
    output: Path = Path("runs/decisions")


def cells(args: Args) -> Iterator[Cell]:
    """All cells; each trains all seeds."""
    names = args.methods or tuple(METHODS)
    for points, degree, noise, name in product(args.points, args.degrees, args.noises, names):
        solver = "" if name in CANDIDATES or name == "two-stage" else args.solver
        epochs = args.epochs or epochs_of(points)
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


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically."""
    write_atomically(path, lambda file: file.write(json.dumps(content).encode()))


# -- time ------------------------------------------------------------------------------------------


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


def main(args: Args) -> Path:
    """Run the cells that are missing, and write the table and the figure."""
    torch.set_num_threads(1)
    folder = args.output / "cells"
    for cell in cells(args):
        path = folder / cell.name
        if not path.exists():
            trained = run(cell)
            write_json(path, {"cell": cell._asdict(), "trained": trained._asdict()})
    for grid in args.timing_grids:
        write_json(args.output / f"times_{grid}.json", measure(grid))
    report(args)
    return args.output


def report(args: Args) -> None:
    """Write `decisions.md` and `decisions.png` from all cells and times that were saved."""
    found = load(args.output / "cells")
    result = rows(found, args.grid)
    times = {
        int(path.stem.removeprefix("times_")): json.loads(path.read_text())
        for path in args.output.glob("times_*.json")
    }
    text = [regret_table(result), "", *verdict(result), "", time_table(times)]
    count, worst = disagreement(found)
    if count:
        text += ["", f"SPO+ with both solvers, {count} times: {100 * worst:.2g} % apart at most."]
    text += ["", machine()]
    content = "\n".join(text) + "\n"
    print(content)
    write_atomically(args.output / "decisions.md", lambda file: file.write(content.encode()))
    write_figure(args.output / "decisions.png", figure(result, times))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
