"""The figure of experiments/all_worlds.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_occ.game.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_frontier(rows: Sequence[dict[str, Any]], episodes: int) -> Figure:
    """One world over the other: each candidate's distance to the specialists."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        kept = [row for row in rows if row["family"] == family]
        x, y = ([row[key] for row in kept] for key in ("to Thompson", "to the best"))
        axes.plot(x, y, color=COLOURS[i], marker="os^"[i % 3], label=family)
        for row in kept:
            axes.annotate(
                f"{row['gamma']:g}",
                (row["to Thompson"], row["to the best"]),
                textcoords="offset points",
                xytext=(5, 4),
                fontsize=8,
                color=COLOURS[i],
            )
    axes.axhline(2.0, color="0.5", linewidth=0.8, linestyle="--")
    axes.axvline(2.0, color="0.5", linewidth=0.8, linestyle="--")
    axes.set_xlim(left=1)
    axes.set_ylim(bottom=0.9)
    axes.set(
        xlabel="stochastic: regret over that of Thompson sampling",
        ylabel="greedy adversary: regret over the least",
        title=f"validation MDPs, T = {episodes:,}; numbers are γ, dashed: twice",
    )
    axes.grid(visible=True, color="0.92", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
