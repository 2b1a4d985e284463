"""Parts of torch_occ, for experiments/benchmark.py.

Dense or layered linear algebra, and how the time of a Newton iteration is spent.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch.utils._python_dispatch import TorchDispatchMode

import torch_occ as occ
from experiments.common import seconds, table
from experiments.contestants import Case, TorchOcc, Trial
from torch_occ.mdp import layered, occupancy

#: horizon, width and actions: growing in width, growing in length, and a few of other proportions.
GRID = (
    (3, 3, 3),
    (5, 5, 4),
    (4, 10, 4),
    (3, 30, 4),
    (10, 5, 4),
    (20, 3, 3),
    (10, 10, 5),
    (5, 30, 5),
    (40, 3, 3),
    (20, 10, 5),
    (10, 30, 5),
)

#: batch * A * S^3 / L beyond which dense matrices are not tried.
FAR_TOO_MUCH = 2e7


@dataclass(frozen=True)
class Anatomy:
    """The measurements."""

    batches: tuple[int, ...]
    repeats: int
    budget: float
    t: float
    seed: int
    clock: Callable[[], float]


# -- dense or layered -----------------------------------------------------------------------------


@contextmanager
def dense_up_to(states: int) -> Iterator[None]:
    """Use another DENSE_STATES in this context."""
    modules: list[Any] = [layered, occupancy]
    before = modules[0].DENSE_STATES
    for module in modules:
        module.DENSE_STATES = states
    try:
        yield
    finally:
        for module in modules:
            module.DENSE_STATES = before


def measure_flows(
    anatomy: Anatomy, grid: tuple[tuple[int, int, int], ...] = GRID
) -> list[dict[str, Any]]:
    """Forward plus backward with one dense matrix and layer by layer, in turns."""
    rows: list[dict[str, Any]] = []
    for shape in grid:
        for batch in anatomy.batches:
            case = Case(shape, batch, anatomy.seed, anatomy.t, anatomy.clock)
            # The dense path works with S x S matrices: A S^3 multiplications per element. The
            # layered one makes L times as many calls.
            work = batch * shape[2] * case.mdp.num_states**3 / shape[0]
            row: dict[str, Any] = dict(zip(("horizon", "width", "actions"), shape, strict=True))
            row |= {"states": case.mdp.num_states, "batch": batch, "work": work}
            times: dict[str, Any] = {"dense": None, "layered": None, "ratio": None}
            if work <= FAR_TOO_MUCH:
                times = _dense_and_layered(anatomy, case)
            rows.append(row | times)
    header = ["size", "states", *(f"batch {batch}: dense, layered" for batch in anatomy.batches)]
    lines = []
    for shape in grid:
        cells = [row for row in rows if (row["horizon"], row["width"], row["actions"]) == shape]
        found = [
            f"{seconds(row['dense'])}, {seconds(row['layered'])} (×{row['ratio']:.2f})"
            if row["ratio"]
            else "not tried"
            for row in cells
        ]
        lines.append([f"{shape}", str(cells[0]["states"]), *found])
    print("Dense or layered: × is time layered / time dense, so dense is faster above 1;", end=" ")
    print(f"not tried where batch A S^3 / L > {FAR_TOO_MUCH:g}\n")
    print(table(header, lines) + "\n", flush=True)
    return rows


def _dense_and_layered(anatomy: Anatomy, case: Case) -> dict[str, Any]:
    trials: dict[str, list[Trial]] = {"dense": [], "layered": []}
    for _ in range(1 + anatomy.repeats):  # the first ones do not count
        for kind, limit in (("dense", sys.maxsize), ("layered", 0)):
            if sum(trial.total for trial in trials[kind]) <= anatomy.budget / 4:
                with dense_up_to(limit):
                    trials[kind].append(TorchOcc().prepare(case)(case.batch))
    times = {
        kind: statistics.median(trial.total for trial in (done[1:] or done))
        for kind, done in trials.items()
    }
    return times | {"ratio": times["layered"] / times["dense"]}


def draw_flows(rows: list[dict[str, Any]]) -> Figure:
    """The time of the layered path over that of the dense one, over the work of the dense one."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for i, batch in enumerate(sorted({row["batch"] for row in rows})):
        here = [row for row in rows if row["batch"] == batch and row["ratio"]]
        axes.plot(
            [row["work"] for row in here],
            [row["ratio"] for row in here],
            "o",
            color=f"C{i}",
            label=f"batch {batch}",
        )
        for row in here:
            place, name = (row["work"], row["ratio"]), f"{row['horizon']}×{row['width']}"
            axes.annotate(name, place, (4, 4), textcoords="offset points", fontsize=6, color="0.4")
    axes.axhline(1, color="0.5", linewidth=1)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="batch × actions × states³ / horizon",
        ylabel="time layered / time dense",
    )
    axes.set_title("Above the line, one dense matrix is faster", fontsize=11)
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# -- the profile ----------------------------------------------------------------------------------

#: The parts of a solve and their functions: (file, function). A nested function belongs to the
#: first part that lists it.
PARTS = {
    "derivatives (autograd)": [("derivatives.py", "derivatives")],
    "factorization": [("kkt.py", "factorize")],
    "triangular solves": [("kkt.py", "solve")],
    "retraction": [("newton.py", "retract")],
    "step length": [("newton.py", "_relative_change")],
    "shaping": [("occupancy.py", "optimal_policy")],
    "certificate": [("newton.py", "_dual_residual"), ("occupancy.py", "flow_residual")],
}


class CountOperations(TorchDispatchMode):
    """Count the torch operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def profile_solve(case: Case, repeats: int) -> dict[str, float]:
    """Seconds of one forward pass by part, under cProfile."""
    step = occ.FTRLStep(case.mdp, case.regularizer)
    loss = case.loss if case.batch > 1 else case.loss[0]
    iterations = int(step.solve(loss, case.t).steps.max())
    profiler = cProfile.Profile(case.clock)
    profiler.enable()
    for _ in range(repeats):
        step.solve(loss, case.t)
    profiler.disable()
    with CountOperations() as counter:
        step.solve(loss, case.t)
    # (file, line, function) -> (calls, without recursion, own time, time with callees, callers)
    entries: dict[tuple[str, int, str], tuple[Any, ...]] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    cumulative: Counter[tuple[str, str]] = Counter()
    for (file, _, name), entry in entries.items():
        if "torch_occ" in file:
            cumulative[(Path(file).name, name)] += entry[3] / repeats
    parts = {
        part: sum(cumulative[function] for function in functions)
        for part, functions in PARTS.items()
    }
    whole = cumulative[("ftrl.py", "solve")]
    parts["bookkeeping of the loop"] = cumulative[("newton.py", "newton")] - sum(parts.values())
    parts["checks and autograd.Function"] = whole - cumulative[("newton.py", "newton")]
    return parts | {"total": whole, "iterations": iterations, "operations": counter.count}


def measure_profile(
    anatomy: Anatomy, shapes: tuple[tuple[int, int, int], ...]
) -> list[dict[str, Any]]:
    """The shares of a forward pass, for every size and batch."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for batch in anatomy.batches:
            case = Case(shape, batch, anatomy.seed, anatomy.t, anatomy.clock)
            large = case.mdp.num_pairs * batch * shape[1] > 10_000_000
            parts = profile_solve(case, 1 if large else anatomy.repeats)
            rows.append(
                {
                    "horizon": shape[0],
                    "width": shape[1],
                    "actions": shape[2],
                    "batch": batch,
                    **parts,
                }
            )
    names = [*PARTS, "bookkeeping of the loop", "checks and autograd.Function"]
    columns = [
        f"({row['horizon']}, {row['width']}, {row['actions']}), {row['batch']}" for row in rows
    ]
    lines = [[name, *(f"{row[name] / row['total']:.0%}" for row in rows)] for name in names]
    lines.append(["one forward pass", *(seconds(row["total"]) for row in rows)])
    lines.append(["Newton iterations", *(str(row["iterations"]) for row in rows)])
    lines.append(["torch operations", *(str(row["operations"]) for row in rows)])
    print("The time of a forward pass by part, under cProfile (size, batch)\n")
    print(f"{table(['', *columns], lines)}\n", flush=True)
    return rows
