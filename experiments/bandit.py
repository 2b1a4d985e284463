"""The multi-armed bandit, L = 1, against published values.

The learners are Tsallis-INF, the hybrid regularizer, Shannon's (Exp3), UCB1 and, for corrupted
losses, a multi-layer race. Published values: the benchmark DataWraith/banditbench prints regrets of
Tsallis-INF, UCB1 and random play. We read its settings in its source and play these games again
(`PUBLISHED`). Of Zimmert and Seldin (2021) we could read the abstract, but not the experiments, so
none of their numbers is reproduced. K, gap and the phases of the second environment follow our
unchecked memory of their set-up: phases of length 1.6^n, in which the best arm and the others have
the means (0, gap) and (1 - gap, 1) in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import Game, Runs

IW, RV, HYBRID, SHANNON = "Tsallis-INF (IW)", "Tsallis-INF (RV)", "hybrid", "Shannon (Exp3)"
UCB, RACE, RANDOM = "UCB1", "multi-layer race", "uniformly random"
STOCHASTIC, CONSTRAINED, CORRUPTED = "stochastic", "stochastically constrained", "corrupted"


@dataclass(frozen=True)
class Args(Runs):
    """Which games are played, and how long."""

    arms: int = 8
    """K"""
    gap: float = 0.125
    """of every arm but one"""
    budget: float = 1000.0
    """C; it is spent from the first episode on and makes the best arm look bad"""
    seeds: int = 16
    """independent runs of each game"""
    runs: int = 2000
    """games of 500 rounds that are played for each published value"""


def learners(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.Learner]:
    """The learners.

    This package's eta_t is a quarter of Zimmert and Seldin's: their 2 / sqrt(t) and 4 / sqrt(t) are
    gamma = 1/2 and gamma = 1 here. The race is that of Lykouris, Mirrokni and Paes Leme (2018) with
    the changes that `occ.rivals.MultiLayerUCBVI` describes.
    """
    return {
        IW: occ.FTRL.tsallis(mdp, gamma=0.5),
        RV: occ.FTRL(
            mdp, occ.Tsallis() / occ.InverseSqrt(1.0), occ.ReducedVariance(occ.InverseSqrt(1.0))
        ),
        HYBRID: occ.FTRL(mdp, occ.HybridTsallis(alpha=1.0) / occ.InverseSqrt(1.0)),
        SHANNON: occ.FTRL(
            mdp, occ.Shannon() / occ.InverseSqrt(math.sqrt(math.log(args.arms) / args.arms))
        ),
        UCB: occ.OptimisticValueIteration(mdp, scale=math.sqrt(2), floor=-math.inf),
        RACE: occ.rivals.MultiLayerUCBVI(mdp, args.episodes),
    }


class RandomArms(occ.LossProcess):
    """Each seed has its own Bernoulli arms, with means drawn uniformly from an interval."""

    noise = "bernoulli"

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def start(self, mdp: occ.LayeredMDP, seeds: Sequence[int]) -> dict[str, Tensor]:
        shape = (mdp.num_states, mdp.num_actions)
        drawn = [np.random.default_rng(seed).uniform(self.low, self.high, shape) for seed in seeds]
        return {"mean": torch.from_numpy(np.stack(drawn))}

    def means(
        self, mdp: occ.LayeredMDP, state: dict[str, Tensor], t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return state["mean"][None], state


class Published(NamedTuple):
    """A published mean regret, and its game."""

    learner: str
    interval: tuple[float, float]  # of the arms' means
    regret: float


#: github.com/DataWraith/banditbench, README.md at commit 01a05a49: T = 500, K = 10 Bernoulli arms
#: with uniformly drawn means, 10,001 runs. "Tsallis-INF" is the reduced-variance one with
#: 4 / sqrt(t) (src/bandits/tsallis_inf.rs). "UCB1" has the index of Auer et al.
#: (src/bandits/ucb/ucb1.rs). Regret is that of the means of the arms pulled (src/lib.rs).
PUBLISHED = (
    Published(RV, (0.0, 1.0), 46.4787),
    Published(UCB, (0.0, 1.0), 86.8474),
    Published(RANDOM, (0.0, 1.0), 204.0160),
    Published(RV, (0.25, 0.75), 45.6862),
    Published(UCB, (0.25, 0.75), 68.0927),
    Published(RANDOM, (0.25, 0.75), 102.0080),
)
PUBLISHED_ARMS, PUBLISHED_EPISODES = 10, 500


def play_published(args: Args) -> list[dict[str, Any]]:
    """Our mean with Student's 95 % interval beside every published value."""
    mdp = occ.LayeredMDP([torch.ones(1, PUBLISHED_ARMS, 1, dtype=torch.float64)])
    players = learners(args, mdp) | {RANDOM: occ.FixedPolicy(mdp)}
    rows, seeds = [], range(args.seed, args.seed + args.runs)
    for value in PUBLISHED:
        losses = RandomArms(*value.interval)
        found = common.final_regret(players[value.learner], losses, PUBLISHED_EPISODES, seeds)
        mean, lower, upper = (float(x) for x in common.band(found))
        means = "{:g} to {:g}".format(*value.interval)
        row = {"learner": value.learner, "means": means, "published": value.regret}
        rows.append(row | {"ours": mean, "lower": lower, "upper": upper})
    return rows


def compare_with_values(args: Args, directory: Path) -> None:
    """Print and write our regrets beside the published values."""
    rows, cells = play_published(args), []
    common.write_csv(directory / "published.csv", rows)
    for row in rows:
        ours = f"{row['ours']:.1f} [{row['lower']:.1f}, {row['upper']:.1f}]"
        cells.append([row["learner"], row["means"], f"{row['published']:.1f}", ours])
    size = f"K = {PUBLISHED_ARMS}, T = {PUBLISHED_EPISODES}"
    print(f"Published values: DataWraith/banditbench, {size}; ours over {args.runs:,} runs\n")
    print(common.table(["learner", "arms' means", "published", "ours"], cells, left=(0, 1)) + "\n")


def main(args: Args) -> Path:
    """Play, fit, and compare with published results."""
    directory = common.begin("bandit", args, args.seed)
    mdp = occ.LayeredMDP([torch.ones(1, args.arms, 1, dtype=torch.float64)])
    worse = torch.ones(1, args.arms, dtype=torch.float64)
    worse[0, -1] = 0.0  # the last arm is the best: breaking ties by order gains nothing
    mean = (1 - args.gap) / 2 + args.gap * worse
    environments: dict[str, occ.LossProcess] = {
        STOCHASTIC: occ.BernoulliLosses(mean),
        CONSTRAINED: occ.StochasticallyConstrained(worse, swing=1 - args.gap, growth=1.6),
        CORRUPTED: occ.Corrupted(occ.BernoulliLosses(mean), args.budget, "targeted", target=mean),
    }
    games = [
        Game(place, name, player, losses, mdp=mdp)
        for place, losses in environments.items()
        for name, player in learners(args, mdp).items()
    ]
    histories = common.play_all(games, args, directory)
    fits = common.fit_all(histories, directory / "bandit.csv")
    figure = common.new_figure(14.7, 4.4)
    common.fill_panels(figure, figure.subplots(1, 3), histories, list(environments), RV)
    figure.suptitle(f"K = {args.arms} arms, gap {args.gap:g}; {args.seeds} seeds, 95 % bands")
    common.write_figure(directory / "bandit.png", figure)
    print(f"\n{common.growth_table(fits)}\n")
    compare_with_values(args, directory)
    files = "bandit.png, bandit.csv, published.csv and config.json"
    print(f"\nwritten to {directory}: {files};")
    print("every game has its own directory with a history and a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
