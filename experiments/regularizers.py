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


def draw(histories: Histories, environments: Sequence[str], reference: str, title: str) -> Figure:
    """Regret as a multiple of the reference learner's, one panel per environment.

    Bands are 95 % bootstrap intervals over seeds. Learner and reference are resampled together,
    since they play with the same random numbers.
    """
    figure = common.new_figure(12, 5)
    panels = figure.subplots(1, len(environments), sharey=True)
    for axes, environment in zip(panels, environments, strict=True):
        against = histories[environment, reference]
        t, end = against.episodes, int(against.episodes[-1])
        for name, colour in common.colours(histories).items():
            found = common.ratio_band(histories[environment, name].regret, against.regret)
            axes.fill_between(t, found.lower, found.upper, color=colour, alpha=0.15, linewidth=0)
            axes.plot(t, found.value, color=colour, linewidth=1.8, label=name)
        scales = {"xscale": "log", "yscale": "log", "xlim": (end / 100, end), "ylim": (0.5, 8)}
        common.tidy(axes, xlabel="episodes T", title=environment, **scales)
        axes.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    common.legend_below(figure, panels[0], 7)
    figure.suptitle(title)
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
    figure = draw(histories, list(environments), names[0], title)
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
