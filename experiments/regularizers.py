"""Seven regularizers on one MDP: swap the regularizer, keep everything else, compare.

One of the regularizers, `Mine`, is defined in this file, in five lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import Game, Histories, RunsOnMDP

STOCHASTIC, SWITCHING = "stochastic", "switching"


class Mine(occ.SeparableRegularizer):
    """Tsallis on q(s,a), Shannon on q(s) - q(s,a). Autograd computes gradients and Hessians."""

    def pair(self, x: Tensor) -> Tensor:
        return -x.sqrt()

    def rest(self, x: Tensor) -> Tensor:
        return x * x.log()


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """Which games are played, and how long."""

    episodes: int = 5000
    """T"""
    seeds: int = 16
    """independent runs of each game"""
    beta: float = 1.0
    """weight of the log-barrier beside the hybrid regularizer; the paper has 64 L"""
    gamma: float = 1.0
    """eta_t = gamma / sqrt(t), the same for all; with the best gamma for each, ranks may change"""
    period: int = 50
    """episodes between two switches of the losses in the switching environment"""


def zoo(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.Regularizer]:
    """Name -> psi_t. The first one is the reference of the figure."""
    eta, alpha = occ.InverseSqrt(args.gamma), 1 / math.sqrt(args.actions)
    return {
        "hybrid + log-barrier": occ.jin_luo(mdp, beta=args.beta, gamma=args.gamma),
        "hybrid": occ.HybridTsallis(alpha) / eta,
        "Tsallis": occ.Tsallis() / eta,
        "hybrid with 1 - q": occ.HybridComplement() / eta,
        "Shannon": occ.Shannon() / eta,
        "log-barrier": occ.LogBarrier() / eta,
        "mine": Mine() / eta,
    }


def draw_ratios(
    histories: Histories, environments: Sequence[str], reference: str, title: str
) -> Figure:
    """Regret as a multiple of the reference learner's: a row per environment, a panel per learner.

    Bands are 95 % bootstrap intervals over seeds. Learner and reference are resampled together,
    since they play with the same random numbers. Below 1 a learner has less regret than the
    reference. The other learners are drawn in grey.
    """
    names = [name for name in common.colours(histories) if name != reference]
    rows = len(environments)
    figure = common.new_figure(2.15 * len(names) + 0.5, 2.5 * rows + 0.7)
    grid = figure.subplots(rows, len(names), squeeze=False, sharex=True, sharey=True)
    for panels, environment in zip(grid, environments, strict=True):
        against = histories[environment, reference]
        t, end = against.episodes, int(against.episodes[-1])
        bands = {
            name: common.ratio_band(histories[environment, name].regret, against.regret)
            for name in names
        }
        for axes, name in zip(panels, names, strict=True):
            for other in names:
                axes.plot(t, bands[other].value, color="0.85", linewidth=1.0, zorder=1)
            found, colour = bands[name], common.colours(histories)[name]
            axes.fill_between(t, found.lower, found.upper, color=colour, alpha=0.2, linewidth=0)
            axes.plot(t, found.value, color=colour, linewidth=2.0, zorder=3)
            axes.axhline(1.0, color="0.3", linewidth=0.9, zorder=2)
            value, lower, upper = (float(x[-1]) for x in found)
            text = f"at T: {value:.2f} [{lower:.2f}, {upper:.2f}]"
            outside = "" if 0.5 <= value <= 2 else "\n(beyond the axis)"
            axes.text(0.04, 0.97, text + outside, fontsize=8, va="top", transform=axes.transAxes)
            limits = {"xlim": (end / 100, end), "ylim": (0.5, 2.0)}
            common.tidy(axes, xscale="log", yscale="log", **limits)
            axes.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0], ["0.5", "0.7", "1", "1.4", "2"])
            axes.yaxis.set_minor_locator(NullLocator())
        panels[0].set_ylabel(environment)
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name, fontsize=10)
    figure.supxlabel("episodes T", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure


def main(args: Args) -> Path:
    """Play every regularizer in two environments."""
    directory = common.begin("regularizers", args, args.seed)
    mdp, mean = args.problem()
    other = common.loss_with_gap(mdp, args.gap, args.seed + 1)
    environments = {
        STOCHASTIC: occ.BernoulliLosses(mean),
        SWITCHING: occ.SwitchingLosses(torch.stack([mean, other]), args.period, noise="bernoulli"),
    }
    games = [
        Game(place, name, occ.FTRL(mdp, regularizer), losses)
        for place, losses in environments.items()
        for name, regularizer in zoo(args, mdp).items()
    ]
    # The slowest first: a regularizer that is not built in is not compiled.
    games.sort(key=lambda game: game.name != "mine")
    histories = common.play_all(games, args, directory)
    names = list(zoo(args, mdp))
    histories = {(place, name): histories[place, name] for place in environments for name in names}
    fits = common.fit_all(histories, directory / "regularizers.csv")
    title = f"Regret as a multiple of that of {names[0]}, β = {args.beta:g}; "
    title += f"γ = {args.gamma:g} for all, {args.seeds} seeds, 95 % bands"
    figure = draw_ratios(histories, list(environments), names[0], title)
    common.write_figure(directory / "regularizers.png", figure)
    cells = []
    for name in names:
        here = histories[STOCHASTIC, name]
        steps = float(here.newton_steps.mean())
        worst = max(float(histories[x, name].uncertified[:, -1].sum()) for x in environments)
        speed = args.episodes * args.seeds / max(float(here.wall_time[-1]), 1e-9)
        columns = []
        for place in environments:
            columns += [fits[place, name].final.text(1), fits[place, name].exponent.text()]
        columns += [f"{steps:.1f}", f"{worst:.0f}", f"{speed:,.0f} ({here.backend})"]
        cells.append([name, *columns])
    header = ["regularizer", "stochastic: R(T)", "exponent", "switching: R(T)", "exponent"]
    header += ["Newton steps", "uncertified", "episodes / s"]
    print(f"\n{common.table(header, cells)}\n")
    for place in environments:
        order = sorted(names, key=lambda name: fits[place, name].final.value)
        best, second = fits[place, order[0]].final, fits[place, order[1]].final
        clear = "by more than the intervals" if best.upper < second.lower else "not significantly"
        lowest = f"{order[0]} has the lowest regret at T, {clear} below {order[1]}"
        print(f"{place}: {lowest}; {order[-1]} has the highest.")
    print(f"This is for γ = {args.gamma:g} for all of them, on this MDP, at this T.")
    print(f"\nwritten to {directory}; regularizers.png shows ratios to {names[0]}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
