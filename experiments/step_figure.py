"""The figure of experiments/step.py: q over time, gradients, and the answers of cvxpylayers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import torch_occ as occ
from torch_occ.game.figures import COLOURS
from torch_occ.reference import Comparison

#: Episodes at which the occupancy is drawn.
SHOWN = (1, 1_000, 10_000, 1_000_000)


@dataclass
class Result:
    """The numbers that are drawn."""

    q: Tensor  # (len(SHOWN), S, A)
    gaps: Tensor  # (S, A): what each action costs beyond the best one
    t: int  # the episode of the gradient
    loss_gradient: Tensor  # (S, A), of the expected regret of q_t
    episodes: Tensor  # (E,)
    regret: Tensor  # (E,): expected regret of q_t in one episode
    elasticities: dict[str, Tensor]  # d regret / d log parameter, (E,)
    comparison: Comparison | None


def draw(mdp: occ.LayeredMDP, result: Result) -> Figure:
    """Above, q over time; below, the gradients and the cross-check."""
    figure = Figure(figsize=(12.5, 8.2), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[1, 1.02], hspace=0.04)
    upper, lower = parts
    title = "The FTRL step $q_t$ over time: colours and numbers are $q_t(s,a)$"
    upper.suptitle(f"{title}, frames mark the best actions", fontsize=12)
    panels = upper.subplots(1, len(SHOWN))
    for panel, t, q in zip(panels, SHOWN, result.q, strict=True):
        image = heat(panel, mdp, q, result.gaps, cmap="viridis", norm=PowerNorm(0.5, 0.0, 1.0))
        panel.set_title(f"t = {t:,}", fontsize=11)
    panels[0].set_ylabel("layer")
    upper.colorbar(image, ax=list(panels), fraction=0.02, pad=0.01, ticks=[0, 0.05, 0.2, 0.5, 1])

    left, middle, right = lower.subplots(1, 3, width_ratios=[1, 1.5, 1.5])
    limit = max(float(result.loss_gradient.abs().max()), 1e-300)
    image = heat(
        left,
        mdp,
        result.loss_gradient,
        result.gaps,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        frame="0.25",
        numbers=False,
    )
    left.set_title(f"d regret / d loss at t = {result.t:,}", fontsize=11)
    left.set_ylabel("layer")
    lower.colorbar(image, ax=left, fraction=0.08, pad=0.03, format="%.0e", ticks=[-limit, 0, limit])

    for i, (name, slope) in enumerate(result.elasticities.items()):
        middle.plot(
            result.episodes,
            slope,
            color=COLOURS[i],
            linewidth=2,
            label=rf"$\partial\,$regret$\,/\,\partial\log\,\{name}$",
        )
    middle.plot(
        result.episodes,
        result.regret,
        color="0.6",
        linestyle="--",
        linewidth=1.4,
        label="regret of $q_t$ in one episode",
    )
    middle.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    middle.set(xscale="log", xlabel="episode t")
    middle.set_title("Derivatives in the constants, by forward mode", fontsize=11)
    middle.legend(frameon=False, fontsize=9)
    plain(middle)
    draw_comparison(right, result.comparison)
    return figure


def heat(
    panel: Axes,
    mdp: occ.LayeredMDP,
    x: Tensor,
    gaps: Tensor,
    *,
    frame: str = "#ff8c42",
    numbers: bool = True,
    **colours: Any,
) -> Any:
    """A heat map of pairs, with gaps between layers and a frame around each best action."""
    image = panel.imshow(x, aspect="auto", **colours)
    for s in range(mdp.num_states):
        for a in range(mdp.num_actions):
            entry = float(x[s, a])
            if numbers and mdp.num_pairs <= 60:
                text = (
                    "1" if entry > 0.995 else f"{entry:.2f}".lstrip("0") if entry >= 0.005 else "0"
                )
                panel.text(
                    a,
                    s,
                    text,
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if entry < 0.4 else "black",
                )
            if gaps[s, a] == 0:
                panel.add_patch(
                    Rectangle(
                        (a - 0.44, s - 0.36), 0.88, 0.72, fill=False, edgecolor=frame, linewidth=1.6
                    )
                )
    for here in mdp.layer_slices[1:]:
        panel.axhline(here.start - 0.5, color="white", linewidth=4)
    panel.set_yticks(
        [(here.start + here.stop - 1) / 2 for here in mdp.layer_slices],
        [str(k) for k in range(mdp.horizon)],
    )
    panel.set_xticks(range(mdp.num_actions))
    panel.set_xlabel("action")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    return image


def draw_comparison(panel: Axes, comparison: Comparison | None) -> None:
    """The residual of d loss for each solver; right answers are far to the left."""
    panel.set_title("Residual of the equations of the gradient", fontsize=11)
    if comparison is None:
        panel.axis("off")
        panel.text(
            0.5,
            0.5,
            "no cross-check in this run",
            ha="center",
            color="0.5",
            transform=panel.transAxes,
        )
        return
    answers = comparison.answers[::-1]
    for y, answer in enumerate(answers):
        error = max(answer.errors["loss"], 1e-17)
        right = error <= comparison.tolerance
        colour, marker, word = (COLOURS[0], "o", "right") if right else (COLOURS[1], "X", "wrong")
        panel.plot([1e-17, error], [y, y], color=colour, linewidth=2.2, solid_capstyle="round")
        panel.plot(error, y, marker, color=colour, markersize=8)
        panel.annotate(
            f"{error:.0e}, {word}",
            (error, y),
            (0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
        )
    panel.axvline(comparison.tolerance, color="0.6", linestyle=":", linewidth=1.2)
    panel.set(
        xscale="log",
        xlim=(1e-17, 1e3),
        ylim=(-0.6, len(answers) - 0.3),
        xlabel="relative residual of d loss (dotted: the tolerance)",
    )
    panel.set_yticks(
        range(len(answers)),
        [answer.name.replace("cvxpylayers, ", "cvxpylayers,\n") for answer in answers],
        fontsize=9,
    )
    plain(panel)


def plain(panel: Axes) -> None:
    """Only the axes that carry numbers."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.2)
