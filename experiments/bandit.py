"""The multi-armed bandit, L = 1, against published values, bounds and statements.

The learners are Tsallis-INF, the hybrid regularizer, Shannon's (Exp3), UCB1, EXP3++ and, for
corrupted losses, a multi-layer race. Published values: the benchmark DataWraith/banditbench prints
regrets of Tsallis-INF, UCB1 and random play. We read its settings in its source and play these
games again (`PUBLISHED`). Of Zimmert and Seldin (2021) we could read the abstract, but not the
experiments, so none of their numbers is reproduced. Regrets are compared with their bounds, each
with its source (`bounds`), and with that abstract. K, gap and the phases of the second environment
follow our unchecked memory of their set-up: phases of length 1.6^n, in which the best arm and the
others have the means (0, gap) and (1 - gap, 1) in turn.
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
from experiments.common import Fits, Game, Runs

IW, RV, HYBRID, SHANNON = "Tsallis-INF (IW)", "Tsallis-INF (RV)", "hybrid", "Shannon (Exp3)"
UCB, PLUS, RACE, RANDOM = "UCB1", "EXP3++", "multi-layer race", "uniformly random"
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


class Exp3PlusPlus(occ.Learner):
    """EXP3++ (Seldin and Slivkins, 2014) with the parameters of Seldin and Lugosi (2017).

    With eta_t = sqrt(ln K / (t K)) / 2, weights w proportional to exp(-eta_t L) for the importance
    weighted losses L, and eps_t = min{1 / (2 K), eta_t, beta ln t / (t gap_t^2)} for every arm,

        q_t = (1 - sum of eps_t) w + eps_t.

    The gap of an arm is estimated from below: its lower confidence bound minus the smallest upper
    one, or 0. The bounds are average -+ sqrt(alpha ln(t K^(1/alpha)) / (2 N)), clipped to [0, 1],
    and 0 and 1 for N = 0; alpha = 3 and beta = 256. We could not read the papers: the formulas are
    those that the library SMPyBandits quotes from them, and agree with our memory.
    """

    def __init__(self, mdp: occ.LayeredMDP, alpha: float = 3.0, beta: float = 256.0) -> None:
        super().__init__(mdp)
        if mdp.num_states != 1:
            raise ValueError(f"mdp: EXP3++ is for bandits, with one state, got {mdp.num_states}")
        self.alpha, self.beta = alpha, beta

    def start(self, num_seeds: int) -> None:
        names = ("estimates", "visits", "losses")
        self.state = {name: self._zeros(num_seeds) for name in names}

    def propose(self, t: int) -> Tensor:
        K, visits = self.mdp.num_actions, self.state["visits"]
        eta = 0.5 * math.sqrt(math.log(K) / (t * K))
        average = self.state["losses"] / visits.clamp(min=1)
        width = (self.alpha * math.log(t * K ** (1 / self.alpha)) / (2 * visits)).sqrt()
        upper, lower = (average + width).clamp(max=1), (average - width).clamp(min=0)
        gap = (lower - upper.amin(-1, keepdim=True)).clamp(min=0)
        explore = (self.beta * math.log(t) / (t * gap**2)).nan_to_num(math.inf, math.inf)
        explore = explore.clamp(max=min(1 / (2 * K), eta))
        weights = torch.softmax(-eta * self.state["estimates"], -1)
        return (1 - explore.sum(-1, keepdim=True)) * weights + explore

    def observe(self, t: int, q: Tensor, feedback: occ.Feedback) -> None:
        seen, state = feedback.losses, self.state
        state["estimates"] = state["estimates"] + feedback.scatter(seen / feedback.gather(q), q)
        state["losses"] = state["losses"] + feedback.scatter(seen, q)
        state["visits"] = state["visits"] + feedback.scatter(torch.ones_like(seen), q)


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
        PLUS: Exp3PlusPlus(mdp),
        RACE: occ.rivals.MultiLayerUCBVI(mdp, args.episodes),
    }


# -- published values -----------------------------------------------------------------------------


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


# -- published statements -------------------------------------------------------------------------


class Bound(NamedTuple):
    """An upper bound on a learner's pseudo-regret, in both environments without corruption."""

    learner: str
    value: float
    formula: str
    source: str


def bounds(K: int, gap: float, T: int) -> list[Bound]:
    """The bounds of the theorems at T, for K - 1 arms with one gap and C = 0."""
    log = math.log(T)
    zimmert = "Zimmert and Seldin, arXiv:1807.07623v6"
    second_hand = "read in the formalization at prove2.me, not in the paper"
    recalled = "for 2 / sqrt(t) itself we recall the same bound"
    iw = f"{zimmert}, Theorem 3 at alpha = 1/2, {second_hand}; {recalled}"
    rv = f"{zimmert}, Theorem 1 (RV), {second_hand}"
    bubeck = "Bubeck and Cesa-Bianchi (2012), Theorem 3.1, from memory"
    self_bounding = (K - 1) * (log + 3) / gap + 2 / gap + 28 * K * log + 1.5 * math.sqrt(K) + 32
    with_gaps = "sum (log T + 3)/gap + 2/gap + 28 K log T + 1.5 sqrt K + 32"
    general, formula = 2 * math.sqrt(K * T) + 14 * K * log + 16, "2 sqrt(KT) + 14 K log T + 16"
    fourteen = f"{rv}, which says that the paper prints 10 K log T and proves 14"
    return [
        Bound(IW, 4 * math.sqrt(K * T) + 1, "4 sqrt(KT) + 1", iw),
        Bound(RV, general, formula, fourteen),
        Bound(RV, self_bounding, with_gaps, f"{rv}, C = 0"),
        Bound(SHANNON, 2 * math.sqrt(K * T * math.log(K)), "2 sqrt(KT log K)", bubeck),
    ]


def lai_robbins(K: int, gap: float, T: int) -> float:
    """sum gap / kl(mean, best mean) * log T, in the stochastic environment.

    No consistent algorithm has less regret than this as T grows.
    """
    mean, best = (1 + gap) / 2, (1 - gap) / 2
    kl = mean * math.log(mean / best) + (1 - mean) * math.log((1 - mean) / (1 - best))
    return (K - 1) * gap * math.log(T) / kl


def claims(fits: Fits) -> list[str]:
    """The statements of the abstract of Zimmert and Seldin (JMLR 22(28), 2021), and this run.

    The abstract does not give the settings of its experiments.
    """
    lines = []
    ours = fits[STOCHASTIC, RV].final
    for rival in (UCB, SHANNON):
        other = fits[STOCHASTIC, rival].final
        outcome = "seen" if ours.upper < other.lower else "not seen at this T"
        statement = f"«significantly outperforms» {rival} in stochastic environments"
        lines.append(f"{statement}: {outcome} ({ours.text(0)} against {other.text(0)})")
    slow, fast = fits[CONSTRAINED, RV], fits[CONSTRAINED, UCB]
    linear = "seen" if fast.exponent.exists and fast.exponent.lower > 0.8 else "not seen at this T"
    statement = f"{UCB}, «almost linear» in an adversarial environment"
    lines.append(f"{statement}: {linear} (exponent {fast.exponent.text()})")
    logarithmic = slow.exponent.exists and slow.exponent.upper < 0.5 and slow.log_share > 0.95
    outcome = "seen" if logarithmic else "not seen at this T"
    detail = f"log T fits better in {slow.log_share:.0%} of the resamples"
    detail = f"exponent {slow.exponent.text()}, {detail}"
    lines.append(f"where Tsallis-INF is «only logarithmic»: {outcome} ({detail})")
    return lines


def compare_with_bounds(args: Args, fits: Fits, directory: Path) -> None:
    """Print and write the regrets beside the published bounds."""
    rows: list[dict[str, Any]] = []
    for bound in bounds(args.arms, args.gap, args.episodes):
        for place in (STOCHASTIC, CONSTRAINED):
            regret = fits[place, bound.learner].final.value
            row: dict[str, Any] = {"learner": bound.learner, "environment": place}
            row |= {"regret": regret, "bound": bound.value, "share": regret / bound.value}
            rows.append(row | {"formula": bound.formula, "source": bound.source})
    common.write_csv(directory / "bounds.csv", rows)
    cells = []
    for row in rows:
        numbers = [f"{row['regret']:.0f}", f"{row['bound']:.0f}", f"{row['share']:.0%}"]
        cells.append([row["learner"], row["environment"], *numbers, row["formula"]])
    header = ["learner", "environment", "regret", "bound", "share", "formula"]
    print("Published bounds (bounds.csv has their sources; some second-hand, some from memory):\n")
    print(common.table(header, cells, left=(0, 1, 5)))
    broken = [row for row in rows if row["share"] > 1]
    names = "".join(f" Broken: {row['learner']}, {row['formula']}." for row in broken)
    print(f"\n{len(rows) - len(broken)} of {len(rows)} bounds hold.{names}")
    floor, found = lai_robbins(args.arms, args.gap, args.episodes), fits[STOCHASTIC, RV].final
    print("Lai and Robbins' asymptotic lower bound in the stochastic environment:", end=" ")
    print(f"{floor:.0f} at T; {RV} has {found.text(0)}.\n")


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
    compare_with_bounds(args, fits, directory)
    compare_with_values(args, directory)
    print("Zimmert and Seldin's abstract, in our setting:")
    print("\n".join(f"  {line}" for line in claims(fits)))
    files = "bandit.png, bandit.csv, bounds.csv, published.csv and config.json"
    print(f"\nwritten to {directory}: {files};")
    print("every game has its own directory with a history and a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
