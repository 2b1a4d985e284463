"""The figures of experiments/theory.py: terms and bounds along a run, tightness of statements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

import torch_occ as occ
from torch_occ.game.figures import COLOURS
from torch_occ.game.history import band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS

#: Curve, colour, style, words: the bounds on the regret, and the terms with theirs.
REGRET = (
    ("bound_stochastic", PINK, "--", "col:stochastic_bound, explicit"),
    ("bound_adversarial", BLACK, "--", "col:adversarial_bound, explicit"),
    ("bound_lemmas", RED, "--", "both lemmas + lower order"),
    ("bound_terms", RED, "-", "penalty + stability + lower order (lem:key_lemma_ftrl)"),
    ("lower_order", "0.6", "-", "lower order"),
    ("regret", BLUE, "-", "regret, 95 % band"),
)
TERMS = (
    ("stability_first_step", GREEN, ":", "stability, after lem:stability_first_step"),
    ("stability_bound", GREEN, "--", "stability, lem:key_lemma_bound_stability"),
    ("stability", GREEN, "-", "stability"),
    ("penalty_bound", ORANGE, "--", "penalty, lem:key_lemma_bound_penalty"),
    ("penalty", ORANGE, "-", "penalty"),
    ("regret", BLUE, "-", "regret"),
)


def draw_runs(games: Mapping[str, Mapping[str, Tensor]], mdp: occ.LayeredMDP) -> Figure:
    """One column per game: regret and its bounds, terms and theirs, smoothness of the update."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.7 * len(games) + 3.6, 10.4), layout="constrained")
    panels = figure.subplots(
        3, len(games), squeeze=False, sharex="col", gridspec_kw={"height_ratios": [5, 5, 2.6]}
    )
    for column, (place, curves) in enumerate(games.items()):
        t = curves["episodes"].numpy()
        for axes, lines in ((panels[0, column], REGRET), (panels[1, column], TERMS)):
            for name, colour, style, words in lines:
                if name in curves:
                    _curve(axes, t, curves[name], colour, style, words, banded=name == "regret")
            axes.set(xscale="log", yscale="log")
        _trivial(panels[0, column], t, mdp.horizon)
        panels[0, column].set_title(place, fontsize=13)
        _smoothness(panels[2, column], t, curves)
    for row, words in enumerate(
        (
            "regret and bounds on it",
            "terms of the bound, and bounds on them",
            r"$\tilde{q}_t\,/\,q_t$, extremes",
        )
    ):
        panels[row, 0].set_ylabel(words)
        if row < 2:
            low = min(axes.get_ylim()[0] for axes in panels[row])
            high = max(axes.get_ylim()[1] for axes in panels[row])
            for axes in panels[row]:
                axes.set_ylim(max(low, 0.3), high)
    for axes in panels.ravel():
        axes.grid(visible=True, which="major", color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("episodes T")
    for row in range(2):
        handles, labels = panels[row, 0].get_legend_handles_labels()
        panels[row, -1].legend(
            handles,
            labels,
            frameon=False,
            fontsize=9,
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            handlelength=2.6,
        )
    size = f"{mdp.horizon} layers, {mdp.num_states} states, {mdp.num_actions} actions"
    figure.suptitle(f"The regret bound of Jin and Luo, taken apart: {size}")
    return figure


def _curve(
    axes: Axes, t: np.ndarray, values: Tensor, colour: str, style: str, words: str, banded: bool
) -> None:
    mean, lower, upper = (x.numpy() for x in band(values))
    mean = np.where(mean > 0, mean, np.nan)  # a logarithmic axis has no place for the rest
    axes.plot(t, mean, color=colour, linestyle=style, linewidth=1.9 if banded else 1.5, label=words)
    if banded:
        axes.fill_between(
            t, np.where(lower > 0, lower, mean), upper, color=colour, alpha=0.2, linewidth=0
        )


def _trivial(axes: Axes, t: np.ndarray, horizon: int) -> None:
    """L T, the regret that no learner can exceed."""
    axes.plot(
        t,
        horizon * t,
        color="0.75",
        linewidth=1.0,
        linestyle="-.",
        label="L T, the largest regret possible",
    )


def _smoothness(axes: Axes, t: np.ndarray, curves: Mapping[str, Tensor]) -> None:
    low, high = curves["smoothness_min"].amin(0).numpy(), curves["smoothness_max"].amax(0).numpy()
    axes.fill_between(t, low, high, color=SKY, alpha=0.45, linewidth=0)
    axes.plot(t, low, color=BLUE, linewidth=1.0)
    axes.plot(t, high, color=BLUE, linewidth=1.0)
    axes.set(xscale="log")
    margin = max(1 - low.min(), high.max() - 1)
    axes.set_ylim(1 - 1.3 * margin, 1 + 1.3 * margin)
    axes.text(
        0.98,
        0.96,
        "lem:smooth_update allows [1/2, 2]",
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=8,
        color="0.4",
    )


def draw_tightness(ratios: Mapping[str, list[float]], mdps: int) -> Figure:
    """left / right of every inequality, one dot per instance; 1 is tight."""
    from matplotlib.figure import Figure

    order = sorted(ratios, key=lambda label: max(ratios[label]))
    figure = Figure(figsize=(9.4, 0.27 * len(order) + 1.5), layout="constrained")
    axes = figure.subplots()
    jitter = np.random.default_rng(0)
    for row, label in enumerate(order):
        values = np.array(ratios[label])
        shown = np.clip(values, 1e-4, None)
        if len(shown) > 800:
            shown = np.sort(shown)[np.linspace(0, len(shown) - 1, 800).astype(int)]
        axes.scatter(
            shown,
            row + jitter.uniform(-0.28, 0.28, len(shown)),
            s=5,
            color=BLUE,
            alpha=0.16,
            linewidths=0,
        )
        axes.scatter(
            [np.clip(np.median(values), 1e-4, None)], [row], s=26, marker="|", color=BLACK, zorder=3
        )
        axes.scatter([max(values.max(), 1e-4)], [row], s=20, color=RED, zorder=4, linewidths=0)
    axes.axvline(1, color=RED, linewidth=0.9)
    axes.set(xscale="log", xlim=(0.9e-4, 1.25), ylim=(-0.7, len(order) - 0.3))
    axes.set_xlabel("left side / right side (smaller or negative ones at the edge)")
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x", which="major", color="0.92", linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(
        f"How tight the statements are on {mdps} random MDPs: "
        "every instance, median (bar) and tightest (large dot)",
        fontsize=11,
    )
    return figure
