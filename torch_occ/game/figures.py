"""Figures of a run: regret curves with bands over seeds, heat maps of q.

Figures are drawn on `matplotlib.figure.Figure` and never through pyplot. So no window opens, no
global state changes and any thread may draw. Save a figure with `figure.savefig(path)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ.game.history import History, band
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The colours of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

#: The layers and states per layer that a heat map shows at most, and the number of cells in one
#: direction up to which numbers are written into them.
PANELS, STATES, WRITTEN = 8, 16, 8


# -- regret ------------------------------------------------------------------------------------


def plot_regret(
    axes: Axes,
    history: History,
    *,
    label: str | None = None,
    colour: str = COLOURS[0],
    realised: bool = False,
) -> None:
    """Draw the mean pseudo-regret (or realised regret) over seeds with its 95 % band."""
    t = history.episodes.numpy()
    curves = (history.realised_regret if realised else history.regret).cpu()
    mean, lower, upper = (x.numpy() for x in band(curves))
    axes.plot(t, mean, "--" if realised else "-", color=colour, label=label, linewidth=1.6)
    if len(curves) > 1:
        # On a logarithmic axis, a band that reaches below zero would not be drawn at all.
        floor = np.where(mean > 0, mean * 1e-3, lower) if axes.get_yscale() == "log" else lower
        axes.fill_between(t, np.maximum(lower, floor), upper, color=colour, alpha=0.2, linewidth=0)


def plot_references(axes: Axes, start: float, regret: float, end: float) -> None:
    """Draw grey lines proportional to log T (dotted) and sqrt T (dash-dotted).

    Both pass through `regret` at `start` > 1 and end at `end`.
    """
    t = np.geomspace(start, end, 50)
    logarithm, root = regret * np.log(t) / np.log(start), regret * np.sqrt(t / start)
    axes.plot(t, logarithm, ":", color="0.35", linewidth=1.3, label=r"$\propto \log T$")
    axes.plot(t, root, "-.", color="0.55", linewidth=1.0, label=r"$\propto \sqrt{T}$")


def regret_figure(
    histories: History | Mapping[str, History], *, title: str = "", realised: bool = True
) -> Figure:
    """Regret over the number of episodes, of one run or of several by name, in two panels.

    The left panel has two logarithmic axes; there sqrt T is a straight line of slope 1/2. The right
    panel has a logarithmic T; there log T is a straight line. Both reference lines start on the
    first curve, at a hundredth of its last episode.

    Args:
        realised: also show the realised regret, dashed, in the right panel; for one run only.

    Returns:
        A matplotlib figure.
    """
    runs = {"pseudo-regret": histories} if isinstance(histories, History) else dict(histories)
    first = next(iter(runs.values()))
    figure = _figure((8.0, 3.4))
    left, right = figure.subplots(1, 2)
    positive = any(bool((history.regret.mean(0) > 0).any()) for history in runs.values())
    left.set(xscale="log", yscale="log" if positive else "linear")
    left.set_title(r"log-log: $\sqrt{T}$ is straight")
    right.set(xscale="log", title=r"log-linear: $\log T$ is straight")
    for i, (label, history) in enumerate(runs.items()):
        for axes in (left, right):
            plot_regret(axes, history, label=label, colour=COLOURS[i % len(COLOURS)])
    if realised and len(runs) == 1:
        plot_regret(right, first, label="realised regret", colour=COLOURS[1], realised=True)
    # Episodes at whose mean regret reference lines may start.
    t, mean = first.episodes, first.regret.mean(0)
    usable = ((t >= 2) & (mean > 0) & (t < t.amax())).nonzero().flatten() if len(t) else t
    for axes in (left, right):
        axes.set(xlabel="episodes T", ylabel="regret")
        axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        limits = axes.get_ylim()
        if len(usable):
            start = usable[(t[usable].double().log() - (t[-1] / 100).log()).abs().argmin()]
            plot_references(axes, float(t[start]), float(mean[start]), float(t[-1]))
            axes.set_ylim(limits)
    right.legend(frameon=False, fontsize="small", loc="upper left")
    figure.suptitle(title)
    return figure


# -- occupancy ---------------------------------------------------------------------------------


def occupancy_figure(
    mdp: LayeredMDP, q: Tensor, *, optimal: Tensor | None = None, title: str = ""
) -> Figure:
    """A heat map of q `(S, A)`: one panel per layer, one row per state, one column per action.

    The colour is proportional to the square root of q, so that rarely visited pairs differ from
    pairs that are never visited. Masked pairs are white. Of a large MDP it shows eight layers,
    evenly spaced, and the 16 most visited states of each.

    Args:
        optimal: a deterministic policy `(S, A)` whose actions get a ring.

    Returns:
        A matplotlib figure.
    """
    from matplotlib.colors import PowerNorm

    found = f"{tuple(q.shape)}; of several seeds, draw one or their mean, q.mean(0)"
    check_that(q.shape == mdp.actions.shape, "q", f"shape {tuple(mdp.actions.shape)}", found)
    layers = np.linspace(0, mdp.horizon - 1, min(mdp.horizon, PANELS)).round().astype(int).tolist()
    cells, most = max(*mdp.layer_sizes, mdp.num_actions), min(max(mdp.layer_sizes), STATES)
    written = cells <= WRITTEN and mdp.horizon <= PANELS
    height = max(1.2, (0.5 if written else 0.3) * most)
    width = min(max(0.9, 0.5 * mdp.num_actions), 4.0)
    figure = _figure((1.6 + len(layers) * (width + 0.25), 1.1 + height))
    panels = figure.subplots(1, len(layers), squeeze=False).ravel()
    shown = torch.where(mdp.actions, q, torch.nan).detach().cpu()
    # In a small MDP colours compare with those of other episodes, in a large one with each other.
    largest = 1.0 if written else float(shown.nan_to_num().max())
    norm = PowerNorm(0.5, vmin=0.0, vmax=largest)
    for k, axes in zip(layers, panels, strict=True):
        where = mdp.layer_slices[k]
        busiest = shown[where].nansum(-1).sort(descending=True, stable=True).indices[:STATES]
        states, of = busiest.sort().values, mdp.layer_sizes[k]
        layer = shown[where][states].numpy()
        image = axes.imshow(layer, "viridis", norm, aspect="auto", interpolation="nearest")
        part = f": {STATES} of {of:,}" if of > STATES else ""
        axes.set_title(f"layer {k}{part}", fontsize="small")
        axes.set_yticks(range(len(states)), states.tolist())
        axes.set_xticks(range(0, mdp.num_actions, -(-mdp.num_actions // 10)))
        axes.tick_params(labelsize=7, length=2)
        if written:
            style = {"ha": "center", "va": "center", "fontsize": 9}
            for (s, a), x in np.ndenumerate(layer):
                if np.isfinite(x):
                    axes.text(a, s, _short(x), color="black" if x > 0.4 else "white", **style)
        if optimal is not None:
            s, a = (optimal[where][states.to(optimal.device)] > 0).nonzero().cpu().numpy().T
            ring = {"facecolors": "none", "edgecolors": "#FF9D3B", "linewidths": 1.4}
            axes.scatter(a, s, s=420 if written else 60, **ring)
    figure.supxlabel("action", fontsize="small")
    figure.supylabel("state", fontsize="small")
    ticks = [x for x in (0.001, 0.01, 0.05, 0.2, 0.5, 1) if 0.01 <= x / largest <= 1]
    figure.colorbar(image, ax=panels, label="q(s, a)", ticks=[0, *ticks], fraction=0.05)
    figure.suptitle(title, fontsize="medium")
    return figure


def _short(x: float) -> str:
    """A probability in two or three characters: .25, 1, and ~0 for 3e-4."""
    return "1" if x > 0.995 else f"{x:.2f}".lstrip("0") if x >= 0.005 else "~0"


# -- matplotlib --------------------------------------------------------------------------------


def _figure(size: tuple[float, float]) -> Figure:
    with extra("experiments", "figures need matplotlib"):
        from matplotlib.figure import Figure
    return Figure(figsize=size, dpi=110, layout="constrained", facecolor="white")


def pixels(figure: Figure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The figure as an image `(height, width, 3)`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
