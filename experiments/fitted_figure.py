"""The figure of experiments/fitted.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_occ.game.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[dict[str, Any]], episodes: int) -> Figure:
    """Regret relative to the untuned Tsallis entropy, on every MDP, in both worlds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row["setting"] for row in rows))
    for axes, world in zip(figure.subplots(1, 2), ("stochastic", "greedy adversary"), strict=True):
        for i, name in enumerate(names):
            kept = [row for row in rows if row["setting"] == name]
            x = np.arange(len(shapes)) + 0.13 * (i - (len(names) - 1) / 2)
            axes.errorbar(
                x,
                [row[f"{world}, relative"] for row in kept],
                [1.96 * row[f"{world}, standard error"] for row in kept],
                color=COLOURS[i % len(COLOURS)],
                marker="os^Dvp"[i % 6],
                linestyle="none",
                capsize=2,
                label=name,
            )
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        if world == "stochastic":
            axes.axhline(0.8, color="0.5", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(shapes)), shapes)
        axes.set_ylim(bottom=0)
        axes.set(ylabel="regret relative to Tsallis, untuned", title=f"{world}, T = {episodes:,}")
        axes.grid(visible=True, axis="y", color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize="small", loc="lower left")
    return figure
