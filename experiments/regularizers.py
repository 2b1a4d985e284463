"""Seven regularizers on one MDP: swap the regularizer, keep everything else, compare.

One of the regularizers, `Mine`, is defined in this file, in five lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, table, write_csv, write_figure
from experiments.curves import draw_ratios
from experiments.games import (
    Game,
    Settings,
    growth_row,
    loss_with_gap,
    play_all,
    write_configuration,
)
from experiments.growth import growth

STOCHASTIC, SWITCHING = "stochastic", "switching"


class Mine(occ.SeparableRegularizer):
    """Tsallis on q(s,a), Shannon on q(s) - q(s,a). Autograd computes gradients and Hessians."""

    def pair(self, x: Tensor) -> Tensor:
        return -x.sqrt()

    def rest(self, x: Tensor) -> Tensor:
        return x * x.log()


@dataclass(frozen=True)
class Args:
    """Which games are played, and how long."""

    episodes: int = 5000
    """T"""
    seeds: int = 16
    """independent runs of each game"""
    seed: int = 1
    """of the MDP, the losses and the first run"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gap: float = 0.4
    """of every suboptimal action"""
    beta: float = 1.0
    """weight of the log-barrier beside the hybrid regularizer; the paper has 64 L"""
    gamma: float = 1.0
    """eta_t = gamma / sqrt(t), the same for all; with the best gamma for each, ranks may change"""
    period: int = 50
    """episodes between two switches of the losses in the switching environment"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


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


def main(args: Args) -> Path:
    """Play every regularizer in two environments."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "regularizers", args.seed)
    write_configuration(directory, args)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = loss_with_gap(mdp, args.gap, args.seed)
    other = loss_with_gap(mdp, args.gap, args.seed + 1)
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
    settings = Settings(args.episodes, args.seeds, args.processes, args.tensorboard, args.seed)
    histories = play_all(games, settings, directory)
    names = list(zoo(args, mdp))
    histories = {(place, name): histories[place, name] for place in environments for name in names}
    fits = {key: growth(history.episodes, history.regret) for key, history in histories.items()}
    write_csv(directory / "regularizers.csv", [growth_row(*key, fit) for key, fit in fits.items()])
    title = f"Regret as a multiple of that of {names[0]}, β = {args.beta:g}; "
    title += f"γ = {args.gamma:g} for all, {args.seeds} seeds, 95 % bands"
    figure = draw_ratios(histories, list(environments), names[0], title)
    write_figure(directory / "regularizers.png", figure)
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
    print(f"\n{table(header, cells)}\n")
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
