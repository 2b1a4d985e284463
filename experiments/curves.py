"""Regret curves of many games: side by side, with fits of log T and sqrt T, and as ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

import torch_occ as occ
from experiments.games import Histories
from experiments.growth import late, ratio_band, slope
from torch_occ.game.figures import COLOURS, plot_references, plot_regret

#: Ratios beyond these limits leave their panels.
LOWEST, HIGHEST = 0.5, 2.0


def colours(histories: Histories) -> dict[str, str]:
    """The colour of every learner. A colour never means anything else."""
    names = dict.fromkeys(name for _, name in histories)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def draw_panels(
    histories: Histories, environments: Sequence[str], anchor: str, title: str, columns: int = 2
) -> Any:
    """Regret over episodes on doubly logarithmic axes, one panel per environment.

    The references log T and sqrt T start on the curve of the learner `anchor`, at a tenth of T.
    """
    from matplotlib.figure import Figure

    rows = -(-len(environments) // columns)
    figure = Figure(figsize=(4.9 * columns, 3.5 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    fill_panels(figure, panels, histories, environments, anchor)
    figure.suptitle(title)
    return figure


def fill_panels(
    figure: Any, panels: Any, histories: Histories, environments: Sequence[str], anchor: str
) -> None:
    """Draw these panels on existing axes, and their legend below the figure."""
    for axes, environment in zip(panels, environments, strict=True):
        axes.set(xscale="log", yscale="log", xlabel="episodes T", ylabel="pseudo-regret")
        axes.set_title(environment)
        top = 0.0
        for name, colour in colours(histories).items():
            history = histories[environment, name]
            plot_regret(axes, history, label=name, colour=colour)
            axes.lines[-1].set_linewidth(2.4 if name == anchor else 1.3)
            top = max(top, float(history.regret.mean(0).max()))
        history = histories[environment, anchor]
        t, mean = history.episodes, history.regret.mean(0)
        start, end = int((t < t[-1] / 10).sum()), float(t[-1])
        bottom = float(mean.where((t >= 3) & (mean > 0), torch.inf).min())
        if float(mean[start]) > 0:
            plot_references(axes, float(t[start]), float(mean[start]), end)
        axes.set(xlim=(3, end), ylim=(min(bottom, top / 30) / 2, 2 * top))
        tidy(axes)
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(5, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def draw_growth(
    axes: Any,
    curves: Mapping[str, occ.History],
    scale: Literal["log", "sqrt"],
    window: float,
    colour: str,
    markers: Sequence[str],
) -> None:
    """Regret of one learner in several environments; log T, or sqrt T, is straight on the axis.

    The colour is that of the learner. Each environment has its own marker. The best a + b log T
    and a + b sqrt T are fitted to the checkpoints from `window` * T on and drawn from a tenth of
    that on: the right one stays close to the curve there.
    """
    if scale == "log":
        axes.set_xscale("log")
    else:
        axes.set_xscale("function", functions=(lambda t: np.sqrt(np.maximum(t, 0)), np.square))
    end = max(float(history.episodes[-1]) for history in curves.values())
    if scale == "log":
        axes.set_xlim(max(end / 1e4, 1), end)
    else:
        ticks = [end * share for share in (0, 0.01, 0.1, 0.25, 0.5, 1)]
        axes.set_xlim(0, end)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    for i, (marker, (name, history)) in enumerate(zip(markers, curves.items(), strict=True)):
        plot_regret(axes, history, label=name, colour=colour)
        line = axes.lines[-1]
        line.set(linewidth=1.8, marker=marker, markersize=8)
        line.set(markerfacecolor="white", markeredgewidth=1.6)
        line.set_markevery((0.03 * (i + 1), 0.09))
        t, y = late(history.episodes, history.regret.mean(0, keepdim=True), window)
        x = torch.from_numpy(np.geomspace(max(window * end / 10, 2), end, 200))
        for function, style in ((torch.log, ":"), (torch.sqrt, "-.")):
            fit = y.mean() + slope(function(t), y) * (function(x) - function(t).mean())
            grey = "0.25" if style == ":" else "0.5"
            axes.plot(x, fit, color=grey, linestyle=style, linewidth=1.3)
    axes.set(ylim=(0, None), xlabel="episodes T", ylabel="pseudo-regret")
    tidy(axes)


def draw_ratios(
    histories: Histories, environments: Sequence[str], reference: str, title: str
) -> Any:
    """Regret as a multiple of the reference learner's: a row per environment, a panel per learner.

    Bands are 95 % bootstrap intervals over seeds. Learner and reference are resampled together,
    since they play with the same random numbers. Below 1 a learner has less regret than the
    reference. The other learners are drawn in grey.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    names = [name for name in colours(histories) if name != reference]
    rows = len(environments)
    figure = Figure(figsize=(2.15 * len(names) + 0.5, 2.5 * rows + 0.7), layout="constrained")
    grid = figure.subplots(rows, len(names), squeeze=False, sharex=True, sharey=True)
    for panels, environment in zip(grid, environments, strict=True):
        against = histories[environment, reference]
        t, end = against.episodes, int(against.episodes[-1])
        bands = {
            name: ratio_band(histories[environment, name].regret, against.regret) for name in names
        }
        for axes, name in zip(panels, names, strict=True):
            for other in names:
                axes.plot(t, bands[other].value, color="0.85", linewidth=1.0, zorder=1)
            found, colour = bands[name], colours(histories)[name]
            axes.fill_between(t, found.lower, found.upper, color=colour, alpha=0.2, linewidth=0)
            axes.plot(t, found.value, color=colour, linewidth=2.0, zorder=3)
            axes.axhline(1.0, color="0.3", linewidth=0.9, zorder=2)
            value, lower, upper = (float(x[-1]) for x in found)
            text = f"at T: {value:.2f} [{lower:.2f}, {upper:.2f}]"
            outside = "" if LOWEST <= value <= HIGHEST else "\n(beyond the axis)"
            place = {"ha": "left", "va": "top", "transform": axes.transAxes}
            axes.text(0.04, 0.97, text + outside, fontsize=8, **place)
            axes.set(xscale="log", yscale="log", xlim=(end / 100, end), ylim=(LOWEST, HIGHEST))
            axes.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0], ["0.5", "0.7", "1", "1.4", "2"])
            axes.yaxis.set_minor_locator(NullLocator())
            tidy(axes)
        panels[0].set_ylabel(environment)
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name, fontsize=10)
    figure.supxlabel("episodes T", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure


def tidy(axes: Any) -> None:
    """A faint grid, and only the spines that carry numbers."""
    axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
