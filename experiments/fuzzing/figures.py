"""The picture of experiments/fuzz.py: errors, and what the certificates claim."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from experiments.fuzzing.judge import Floats

#: Errors and claims below this are drawn at it.
LEAST = 1e-18
#: Points of a family in a scatter plot; the largest errors are always among them.
POINTS = 1500

#: Errors and dual residuals of certified answers, by family and kind.
Points = dict[tuple[str, str], tuple[Floats, Floats]]


def draw_errors(found: Points, harmless: float, slack: float) -> Figure:
    """Above, the share of answers with a larger error; below, error over claim; kinds in columns.

    Answers in the shaded region are wrong: their error exceeds both `harmless` and `slack` times
    the claim.
    """
    kinds = list(dict.fromkeys(kind for _, kind in found))
    families = list(dict.fromkeys(family for family, _ in found))
    figure = Figure(figsize=(6.2 * len(kinds) + 2.6, 8.5), layout="constrained")
    axes = figure.subplots(2, len(kinds), squeeze=False, sharey="row")
    colours = {family: colormaps["tab20"](i % 20) for i, family in enumerate(families)}
    random = np.random.default_rng(0)
    largest = max([1e-9, *(float(3 * claims.max(initial=0)) for _, claims in found.values())])
    for column, kind in enumerate(kinds):
        above, below = axes[:, column]
        for family in families:
            errors, claims = found.get((family, kind), (np.zeros(0), np.zeros(0)))
            judged = np.isfinite(errors)
            errors, claims = np.maximum(errors[judged], LEAST), np.maximum(claims[judged], LEAST)
            if not len(errors):
                continue
            order = np.argsort(errors)
            share = 1 - np.arange(len(errors)) / len(errors)
            above.step(errors[order], share, where="pre", color=colours[family], label=family)
            some = random.permutation(len(errors))[: 2 * POINTS // 3]
            chosen = np.union1d(order[-POINTS // 3 :], some)
            below.plot(
                claims[chosen],
                errors[chosen],
                ".",
                markersize=2.5,
                color=colours[family],
                alpha=0.6,
            )
        above.axvline(harmless, color="0.4", linewidth=1, linestyle="--")
        above.set(xscale="log", yscale="log", title=kind, xlabel="relative error of q")
        claim = np.geomspace(LEAST, largest, 200)
        limit = np.maximum(harmless, slack * claim)
        below.fill_between(claim, limit, 1e3, color="C3", alpha=0.08, linewidth=0)
        below.plot(claim, limit, "--", color="0.4", linewidth=1)
        below.plot(claim, claim, ":", color="0.4", linewidth=1)
        below.set(
            xscale="log",
            yscale="log",
            xlabel="claimed: dual residual",
            xlim=(LEAST, largest),
            ylim=(LEAST, 1e3),
        )
        for ax in (above, below):
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("share of certified answers with a larger error")
    axes[1, 0].set_ylabel("relative error of q\n(shaded: wrong; dotted: as claimed)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure
