"""The figures of the experiment about both worlds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tuning_worlds import GREEDY, STOCHASTIC
from torch_occ.game.figures import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ratios = Sequence[tuple[float, float]]  # values and standard errors
MARKERS = ("s", "*", "o", "^", "D")


def draw_held_out(
    ratios: Mapping[tuple[str, str], Ratios], mdps: Sequence[int], episodes: int, seeds: int
) -> Figure:
    """Regret on each MDP and on average, relative to the paper's.

    The stochastic world is on the left, the adversary on the right.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for _, name in ratios))
    for place, axes in zip((STOCHASTIC, GREEDY), panels, strict=True):
        for i, name in enumerate(names):
            values, errors = np.array(ratios[place, name]).T
            x = np.arange(len(values)) + 0.16 * (i - (len(names) - 1) / 2)
            size = 11 if MARKERS[i] == "*" else 5.5
            axes.errorbar(
                x,
                values,
                1.96 * errors,
                color=COLOURS[i],
                marker=MARKERS[i],
                markersize=size,
                linestyle="none",
                capsize=2,
                label=name,
            )
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.axvline(len(mdps) - 0.5, color="0.85", linewidth=0.8)
        axes.set_xticks(range(len(mdps) + 1), [*(f"MDP {number}" for number in mdps), "mean"])
        axes.grid(visible=True, axis="y", color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    left, right = panels
    left.axhline(8.0, color=COLOURS[1], linewidth=0.9, linestyle="--")
    left.set(
        yscale="log",
        ylabel="times less regret than the paper's",
        title=f"stochastic, T = {episodes:,} (dashed: eight times)",
    )
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_locator(LogLocator(subs=(2.0, 3.0, 5.0)))
    left.yaxis.set_minor_formatter("{x:g}")
    right.set(
        ylabel="regret relative to the paper's",
        title=f"greedy adversary (dotted: as good), {seeds} seeds, 95 %",
    )
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize="small", loc="lower left")
    return figure


def draw_environments(
    rows: Sequence[dict[str, Any]], episodes: int, seeds: int, mdps: int
) -> Figure:
    """Bars: regret of every setting in every environment."""
    from matplotlib.figure import Figure

    places = list(dict.fromkeys(row["environment"] for row in rows))
    names = list(dict.fromkeys(row["setting"] for row in rows))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        kept = [row for row in rows if row["setting"] == name]
        x = np.arange(len(places)) + (i - (len(names) - 1) / 2) * width
        heights = [row["regret"] for row in kept]
        axes.bar(
            x,
            heights,
            width * 0.92,
            color=COLOURS[i],
            label=name,
            yerr=[1.96 * row["standard_error"] for row in kept],
            error_kw={"linewidth": 0.8},
        )
        for at, row in zip(x, kept, strict=True):
            top = max(row["regret"] + 1.96 * row["standard_error"], 0.0)
            axes.text(at, 1.06 * top, f"{row['regret']:,.0f}", ha="center", va="bottom", fontsize=7)
    axes.set_yscale("symlog", linthresh=math.sqrt(episodes))  # a regret may be negative
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set(
        ylabel=f"regret at T = {episodes:,}",
        title=f"{mdps} held-out MDPs, {seeds} seeds, 95 % intervals",
    )
    axes.set_xticks(range(len(places)), places)
    axes.legend(frameon=False, fontsize="small", ncols=2)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_frontier(rows: Sequence[dict[str, Any]], episodes: int, mdps: int, seeds: int) -> Figure:
    """The gain in the stochastic world over the cost against the adversary, one line per family."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(7.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(dict.fromkeys(row["family"] for row in rows)):
        kept = [row for row in rows if row["family"] == name]
        alone = kept[0]["gamma"] is None
        axes.errorbar(
            [row["stochastic"] for row in kept],
            [row["adversary"] for row in kept],
            [1.96 * row["adversary, standard error"] for row in kept],
            color="black" if alone else COLOURS[i],
            marker="*" if alone else "o",
            markersize=13 if alone else 4.5,
            linestyle="none" if alone else "-" if "baseline" in name else "--",
            linewidth=1.3,
            elinewidth=0.7,
            capsize=2,
            label=name,
            zorder=3 if alone else 2,
        )
        for row in kept:
            if row["gamma"] is not None and i in (0, 1):
                offset = (5, -11) if i == 0 else (-34, 3)
                at = (row["stochastic"], row["adversary"])
                axes.annotate(
                    f"γ = {row['gamma']:g}",
                    at,
                    offset,
                    textcoords="offset points",
                    fontsize=7,
                    color=COLOURS[i],
                )
    low, high = axes.get_ylim()
    axes.fill_between(
        [8.0, 1000.0], min(low, 0.6), 1.0, color=COLOURS[2], alpha=0.1, linewidth=0, zorder=0
    )
    axes.plot([1.0], [1.0], color="0.3", marker="X", markersize=8, linestyle="none", label="paper")
    axes.axhline(1.0, color="0.4", linewidth=0.8, linestyle=":")
    axes.axvline(8.0, color="0.4", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        xlim=(0.9, 1.3 * max(row["stochastic"] for row in rows)),
        ylim=(min(low, 0.6), high),
        xlabel="stochastic: times less regret than the paper's",
        ylabel="greedy adversary: regret relative to the paper's",
        title=f"T = {episodes:,}, {mdps} training MDPs, {seeds} seeds, 95 % (shaded: the aim)",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(LogLocator(subs=(2.0, 3.0, 5.0, 8.0)))
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    axes.grid(visible=True, which="major", color="0.93", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
