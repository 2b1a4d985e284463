"""The regularizer zoo on one MDP: swap the regularizer, keep everything else, compare. One of them is defined here, in five lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, table, write_csv, write_figure
from experiments.games import (
    Game,
    Settings,
    draw_panels,
    growth_row,
    loss_with_gap,
    play_all,
    write_configuration,
)
from experiments.growth import growth

STOCHASTIC, SWITCHING = "stochastic", "switching"


class Mine(occ.SeparableRegularizer):
    """A regularizer of one's own: Tsallis on q(s,a), Shannon on q(s) - q(s,a). Gradients and Hessians come by themselves."""

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
    """eta_t = gamma / sqrt(t), the same for all: with each at its own best gamma the order may be another"""
    period: int = 50
    """episodes after which the losses and their mirror image take turns in the switching environment"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def zoo(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.Regularizer]:
    """Name -> psi_t."""
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
    games.sort(key=lambda game: game.name != "mine")  # the slowest first: what is not built in is not compiled
    histories = play_all(games, Settings(args.episodes, args.seeds, args.processes, args.tensorboard, args.seed), directory)
    names = list(zoo(args, mdp))
    histories = {(place, name): histories[place, name] for place in environments for name in names}
    fits = {key: growth(history.episodes, history.regret) for key, history in histories.items()}
    write_csv(directory / "regularizers.csv", [growth_row(*key, fit) for key, fit in fits.items()])
    title = f"One MDP, one γ = {args.gamma:g}, {len(names)} regularizers; {args.seeds} seeds, 95 % bands"
    write_figure(directory / "regularizers.png", draw_panels(histories, list(environments), names[0], title))
    cells = []
    for name in names:
        here = histories[STOCHASTIC, name]
        steps, worst = (
            float(here.newton_steps.mean()),
            max(float(histories[place, name].uncertified[:, -1].sum()) for place in environments),
        )
        speed = args.episodes * args.seeds / max(float(here.wall_time[-1]), 1e-9)
        columns = [text for place in environments for text in (fits[place, name].final.text(1), fits[place, name].exponent.text())]
        cells.append([name, *columns, f"{steps:.1f}", f"{worst:.0f}", f"{speed:,.0f} ({here.backend})"])
    header = ["regularizer", "stochastic: R(T)", "exponent", "switching: R(T)", "exponent", "Newton steps", "uncertified", "episodes / s"]
    print(f"\n{table(header, cells)}\n")
    for place in environments:
        order = sorted(names, key=lambda name: fits[place, name].final.value)
        best, second = fits[place, order[0]].final, fits[place, order[1]].final
        clear = "clearly" if best.upper < second.lower else "but not beyond the intervals"
        print(f"{place}: {order[0]} has the lowest regret at T, {clear} below {order[1]}; {order[-1]} the highest.")
    print(f"With γ = {args.gamma:g} for all of them, on this MDP, at this T.\n\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
