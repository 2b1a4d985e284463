"""The tables and the figure of the experiment about decisions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments.common import seconds, table
from experiments.decision_methods import BATCH, CANDIDATES, RIVALS, Trained
from torch_occ.game.figures import COLOURS
from torch_occ.game.history import Mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = ("two-stage", "SPO+", "PFY", "DBB", "torch_occ")

#: A row of the table has at least these; other methods may be missing.
NEEDED = {"two-stage", "SPO+", "PFY", "margin 0.3", "margin 1", "margin 3"}


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


def disagreement(found: dict[Cell, Trained]) -> tuple[int, float]:
    """The number of regrets of SPO+ that both solvers have, and their largest difference."""
    differences = [
        abs(trained.test[i] - other.test[cell.seeds.index(seed)])
        for reference, other_trained in found.items()
        if reference.solver == "gurobi" and reference.method == "SPO+"
        for cell, other in found.items()
        if cell == reference._replace(solver="dynamic", seeds=cell.seeds)
        for trained in [other_trained]
        for i, seed in enumerate(reference.seeds)
        if seed in cell.seeds
    ]
    return len(differences), max(differences, default=0.0)


def regret_table(result: list[Row]) -> str:
    """Normalized regrets in percent, mean ± half of Student's 95 % interval."""
    body = []
    for row in result:
        picks = ", ".join(f"{name} ({n})" for name, n in row.chosen.items())
        shown = [spread(row.regrets[name]) if name in row.regrets else None for name in SHOWN]
        count = len(row.regrets["SPO+"])
        body.append([f"{row.points:,}", f"{row.noise:g}", str(row.degree), str(count)])
        body[-1] += [f"{x[0]:.2f} ± {x[1]:.2f}" if x else "-" for x in shown] + [picks]
    return table(["points", "noise", "degree", "seeds", *SHOWN, "chosen"], body)


def spread(values: torch.Tensor) -> tuple[float, float]:
    """The mean, and half of Student's 95 % interval."""
    found = Mean.of(values)
    return found.mean, found.interval[1] - found.mean if len(values) > 1 else math.nan


def verdict(result: list[Row]) -> list[str]:
    """Compare with the best rival of each column: the mean of the differences seed by seed."""
    lines = []
    for row in result:
        best = min(RIVALS.keys() & row.regrets, key=lambda name: float(row.regrets[name].mean()))
        mean, half = spread(row.regrets["torch_occ"] - row.regrets[best])
        word = "worse" if mean - half > 0 else "better" if mean + half < 0 else "level"
        lines.append(
            f"- {row.points} points, noise {row.noise:g}, degree {row.degree}: "
            f"{mean:+.2f} ± {half:.2f} against {best} ({word})"
        )
    return lines


def time_table(times: dict[int, dict[str, float]]) -> str:
    """Processor time per epoch of 1,000 points, and how many times that of `margin 1`."""
    names = list(dict.fromkeys(name for found in times.values() for name in found))
    body = []
    for name in names:
        cells = [name]
        for _, found in sorted(times.items()):
            ratio = found[name] / found["margin 1"]
            cells.append(f"{seconds(found[name] * 1000 / BATCH)} ({ratio:.2g})")
        body.append(cells)
    return table(["time per epoch", *(f"{n} x {n}" for n in sorted(times))], body)


def figure(result: list[Row], times: dict[int, dict[str, float]]) -> Figure:
    """Regret by degree, one panel per number of points and noise; time by size of the grid."""
    from matplotlib.figure import Figure

    panels = sorted({(row.points, row.noise) for row in result}, reverse=True)
    height = max(1, math.ceil(len(panels) / 2))
    drawing = Figure(figsize=(13, 0.6 + 3.2 * height), layout="constrained")
    grid = drawing.add_gridspec(height, 3)
    for i, (points, noise) in enumerate(panels):
        axes = drawing.add_subplot(grid[i // 2, i % 2])
        mine = sorted(row for row in result if (row.points, row.noise) == (points, noise))
        for n, name in enumerate(SHOWN):
            having = [row for row in mine if name in row.regrets]
            spreads = [spread(row.regrets[name]) for row in having]
            axes.errorbar(
                [row.degree + 0.1 * (n - 2) for row in having],
                [mean for mean, _ in spreads],
                [half for _, half in spreads],
                color=COLOURS[n],
                marker="o",
                markersize=3.5,
                linewidth=2.2 if name == "torch_occ" else 1.2,
                capsize=2,
                label=name,
            )
        axes.set(
            yscale="log",
            xlabel="degree of the true costs",
            ylabel="normalized regret, %",
            title=f"{points:,} training points, noise {noise:g}",
        )
        axes.set_xticks([row.degree for row in mine])
        axes.set_xlim(0.5, 8.7)  # PyEPO's degrees
        # Regrets of nearly zero would take most of the axis.
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-2))
        axes.grid(visible=True, color="0.92", linewidth=0.6)
    if panels:
        axes.legend(frameon=False)
    if times:
        axes = drawing.add_subplot(grid[:, 2])
        _draw_times(axes, times)
    return drawing


def _draw_times(axes: Any, times: dict[int, dict[str, float]]) -> None:
    sizes = sorted(times)
    shown = {name: (COLOURS[n], "-") for n, name in enumerate(SHOWN)}
    shown["margin 1"] = shown.pop("torch_occ")
    shown["SPO+, dynamic program"] = (COLOURS[1], ":")
    for name, (colour, line) in shown.items():
        label = "torch_occ, soft margin" if name == "margin 1" else name
        values = [times[size][name] * 1000 / BATCH for size in sizes]
        width = 2.2 if name == "margin 1" else 1.2
        axes.plot(
            sizes, values, color=colour, linestyle=line, marker="o", markersize=3.5,
            linewidth=width, label=label,
        )  # fmt: skip
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="side of the grid",
        ylabel="processor seconds per epoch of 1,000 points",
        title="time",
    )
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.grid(visible=True, color="0.92", linewidth=0.6)
    axes.legend(frameon=False)
