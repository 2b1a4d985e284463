"""The figure of experiments/meta_gradients.py: bias and standard error of each estimator over T."""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ.game.figures import COLOURS

REFERENCE, PATHWISE = "finite differences", "pathwise"
UNBIASED, FORECAST = "pathwise + score", "forecast"
STYLES = {
    REFERENCE: (COLOURS[6], "-", "o"),
    PATHWISE: (COLOURS[1], "--", "s"),
    UNBIASED: (COLOURS[0], "-", "D"),
    FORECAST: (COLOURS[2], ":", "^"),
}


def draw(rows: list[dict[str, Any]], shown: str) -> Any:
    """One column per setting: the gradient over its reference, and the error with 1,000 seeds."""
    from matplotlib.figure import Figure

    rows, low, high = [row for row in rows if row["parameter"] == shown], -1.0, 4.0
    betas = list(dict.fromkeys(row["beta"] for row in rows))
    figure = Figure(figsize=(3.4 * len(betas) + 0.8, 6.2), layout="constrained")
    grid = figure.subplots(2, len(betas), squeeze=False, sharex=True, sharey="row")
    for beta, (above, below) in zip(betas, grid.T, strict=True):
        for i, (estimator, (colour, style, marker)) in enumerate(STYLES.items()):
            kept = [row for row in rows if row["beta"] == beta and row["estimator"] == estimator]
            t, unit = (np.array([row[key] for row in kept]) for key in ("episodes", "reference"))
            values = np.array([row["gradient"] for row in kept]) / unit
            errors = np.array([row["standard_error"] for row in kept]) / abs(unit)
            look = {"color": colour, "linestyle": style, "linewidth": 1.3, "label": estimator}
            look |= {"marker": marker, "markersize": 4}
            beside = t * 1.08 ** (i - 1.5)
            usable = errors < 1
            above.errorbar(
                beside[usable],
                values[usable],
                yerr=1.96 * errors[usable],
                capsize=2.5,
                elinewidth=1,
                **look,
            )
            if not usable.all():  # noise: pale and not connected
                pale = {**look, "linestyle": "none", "alpha": 0.3, "label": None}
                above.errorbar(
                    beside[~usable],
                    values[~usable],
                    yerr=1.96 * errors[~usable],
                    elinewidth=1,
                    **pale,
                )
            # Arrows stand for values outside the axes.
            for edge, outside in ((low, values < low), (high, values > high)):
                for x, solid in zip(beside[outside], usable[outside], strict=True):
                    arrow = above.plot(
                        x,
                        edge,
                        "v" if edge < 0 else "^",
                        color=colour,
                        alpha=1 if solid else 0.3,
                        clip_on=False,
                    )
                    arrow[0].set_in_layout(False)
            if estimator != FORECAST:
                below.plot(
                    t, errors * np.sqrt(np.array([row["seeds"] for row in kept]) / 1000), **look
                )
        above.axhline(1, color="0.75", linewidth=0.8, zorder=0)
        above.set(title=f"β = {beta:g}", ylim=(low, high))
        below.axhspan(1, 1e30, color="0.94", zorder=0, linewidth=0)
        below.set(xscale="log", yscale="log", xlabel="episodes T", ylim=(1e-3, 1e8))
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
    grid[0, 0].set_ylabel("estimate / reference (95 %)")
    grid[1, 0].set_ylabel("standard error of 1,000 seeds\n/ |gradient|")
    grid[1, 0].text(
        0.04,
        0.95,
        "error larger than the gradient",
        transform=grid[1, 0].transAxes,
        fontsize="small",
        color="0.35",
        va="top",
    )
    figure.legend(
        *grid[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(STYLES),
        frameon=False,
    )
    figure.suptitle(
        f"The gradient of the regret in log {shown}, through the run", fontsize="medium"
    )
    return figure
