"""The results of experiments/benchmark.py: rows, tables, the goals, and the figure."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments.common import seconds, table


@dataclass
class Row:
    """One contestant in one cell.

    Times are seconds for the whole batch. Ratios are multiples of torch_occ's time.
    """

    horizon: int
    width: int
    actions: int
    pairs: int
    batch: int
    contestant: str
    accurate: bool
    forward: float | None = None
    backward: float | None = None
    warm: float | None = None
    residual_q: float | None = None
    residual_gradient: float | None = None
    ratio_forward: float | None = None
    ratio_backward: float | None = None
    ratio_total: float | None = None
    ratio_warm: float | None = None
    measured: int = 0  # elements of the batch that were run; the times are scaled up from them
    repeats: int = 0
    note: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.horizon, self.width, self.actions

    def cells(self) -> list[str]:
        """As printed."""
        scaled = "" if self.measured == self.batch else "~"
        times = (self.forward, self.backward, self.warm)
        residuals = (self.residual_q, self.residual_gradient)
        ratios = (self.ratio_forward, self.ratio_backward, self.ratio_total, self.ratio_warm)
        cells = [scaled + seconds(x) if x else "-" for x in times]
        cells += [f"{x:.0e}" if x is not None else "-" for x in residuals]
        cells += [multiple(x) for x in ratios]
        return [f"{self.shape}", str(self.batch), self.contestant, *cells, self.note]


def multiple(x: float | None) -> str:
    """A ratio with two digits or as an integer."""
    return "-" if not x else f"{x:.1f}" if x < 10 else f"{x:,.0f}"


HEADER = ["size", "batch", "", "forward", "backward", "warm", "KKT q", "KKT grad"]
HEADER += ["×fwd", "×bwd", "×both", "×warm", "note"]


def verdict(rows: list[Row]) -> list[str]:
    """The two goals of the project, for every batch that was measured."""
    lines = []
    for shape, goal in (((5, 5, 4), 50), ((10, 10, 5), 5000)):
        for batch in sorted({row.batch for row in rows}):
            found = [
                row.ratio_total
                for row in rows
                if row.accurate and row.shape == shape and row.batch == batch and row.ratio_total
            ]
            if found:
                outcome = "reached" if min(found) >= goal else "MISSED"
                speed = f"{min(found):,.0f} times as fast as accurate cvxpylayers"
                lines.append(f"{shape}, batch {batch}: {speed}; goal {goal:,} {outcome}")
    return lines


def summary(rows: list[Row]) -> str:
    """A step with its gradient, one line per size, for the README.

    The time of torch_occ, and how many times as long the others take.
    """
    names = list(dict.fromkeys(row.contestant for row in rows))
    batches = sorted({row.batch for row in rows})
    ends = dict.fromkeys((batches[0], batches[-1]))
    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        line = [f"{shape}", ""]
        for batch in ends:
            cell = {
                row.contestant: row for row in rows if row.shape == shape and row.batch == batch
            }
            ours = cell[names[0]]
            line[1] = str(ours.pairs)
            line.append(seconds(((ours.forward or 0.0) + (ours.backward or 0.0)) / batch))
            line += [
                multiple(cell[name].ratio_total or cell[name].ratio_forward) for name in names[1:]
            ]
        lines.append(line)
    header = ["size", "pairs"]
    for batch in ends:
        header += [f"batch {batch}: {names[0]}, per step", *names[1:]]
    return table(header, lines)


def draw_rivals(rows: list[Row]) -> Figure:
    """Seconds per step, forward and backward together, over the batch; one panel per size."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.contestant for row in rows if row.forward))
    figure = Figure(figsize=(3.4 * len(shapes) + 1.2, 4.4), layout="constrained")
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    for panel, shape in zip(panels, shapes, strict=True):
        for i, name in enumerate(names):
            here = [
                row for row in rows if row.shape == shape and row.contestant == name and row.forward
            ]
            points = [
                (
                    row.batch,
                    ((row.forward or 0) + (row.backward or 0)) / row.batch,
                    row.measured == row.batch,
                )
                for row in here
            ]
            label = (
                name
                if any(row.backward for row in rows if row.contestant == name)
                else f"{name}, no gradient"
            )
            style = {
                "color": f"C{i}",
                "linewidth": 2.4 if i == 0 else 1.4,
                "zorder": 3 if i == 0 else 2,
            }
            panel.plot(
                [point[0] for point in points], [point[1] for point in points], label=label, **style
            )
            for batch, duration, whole in points:
                panel.plot(
                    batch,
                    duration,
                    "o",
                    color=f"C{i}",
                    markerfacecolor=f"C{i}" if whole else "white",
                    zorder=4,
                )
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="batch",
            title="horizon {}, width {}, {} actions".format(*shape),
        )
        panel.set_xticks(
            batches := sorted({row.batch for row in rows}),
            [str(batch) for batch in batches],
            minor=False,
        )
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds per step, forward + backward")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9
    )
    figure.suptitle(
        "One FTRL step and its gradient (hollow: scaled up from part of the batch)", fontsize=11
    )
    return figure
