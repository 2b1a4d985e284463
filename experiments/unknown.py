"""Who pays what for not knowing the transitions?

Every learner that does not know P plays beside a twin that does. Two environments: stochastic
losses, and an adversary that charges each state's likeliest action. The price is the ratio of the
two regrets. Follow the regularized leader and mirror descent: the plug-in, the practical and the
printed form of Jin, Huang and Luo (2021), and UOB-REPS (Jin, Jin, Luo, Sra and Yu, 2020). Optimism
and sampling, which are made for stochastic losses only: UCBVI with three bonuses, EULER,
StrongEuler and posterior sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from matplotlib.figure import Figure

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS, Fit, Game, Growth, Histories, RunsOnMDP

STOCHASTIC, ADVERSARIAL = "stochastic", "greedy adversary"
UNIFORM = "uniform policy"


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """Which games are played, and how long."""

    beta: float = 1.0
    """weight of the log-barrier of the plug-in, the practical form and their twin"""
    delta: float = 0.1
    """probability with which confidence bounds may fail"""
    window: float = 0.1
    """exponents are fitted from this share of T on"""


class Rival(NamedTuple):
    """A learner that does not know the transitions, and the name of its twin that does."""

    learner: occ.Learner
    twin: str
    panel: int  # 0: FTRL and mirror descent; 1: optimism and sampling


PANELS = ("follow the regularized leader, mirror descent", "optimism, posterior sampling")


def twins(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.Learner]:
    """The learners that know the transitions."""
    small = occ.Tsallis() / occ.InverseSqrt(1.0) + occ.LogBarrier(args.beta)
    return {
        "Tsallis FTRL": occ.FTRL(mdp, small),
        "Jin-Luo 2020": occ.FTRL(mdp, occ.jin_luo(mdp)),
        "O-REPS": occ.FTRL.o_reps(mdp, args.episodes),
        "UCB value iteration": occ.OptimisticValueIteration(mdp),
        "Thompson sampling": occ.rivals.Thompson(mdp),
    }


def rivals(args: Args, mdp: occ.LayeredMDP) -> dict[str, Rival]:
    """The learners that do not know the transitions."""
    small = occ.Tsallis() / occ.InverseSqrt(1.0) + occ.LogBarrier(args.beta)
    T, delta, ucb = args.episodes, args.delta, "UCB value iteration"
    printed = occ.rivals.UnknownFTRL.jin_huang_luo(mdp, T)
    return {
        "plug-in FTRL": Rival(occ.rivals.UnknownFTRL(mdp, small), "Tsallis FTRL", 0),
        "practical FTRL": Rival(occ.rivals.UnknownFTRL.practical(mdp, small), "Tsallis FTRL", 0),
        "Jin-Huang-Luo 2021": Rival(printed, "Jin-Luo 2020", 0),
        "UOB-REPS": Rival(occ.rivals.UOBREPS(mdp, T, delta), "O-REPS", 0),
        "UCBVI-CH": Rival(occ.rivals.UCBVI(mdp, T, bonus="hoeffding", delta=delta), ucb, 1),
        "UCBVI-BF": Rival(occ.rivals.UCBVI(mdp, T, bonus="bernstein", delta=delta), ucb, 1),
        "StrongEuler": Rival(occ.rivals.StrongEuler(mdp, delta), ucb, 1),
        "EULER": Rival(occ.rivals.EULER(mdp, delta), ucb, 1),
        "UCBVI, sharp": Rival(occ.rivals.UCBVI(mdp, bonus="sharp", delta=delta), ucb, 1),
        "PSRL": Rival(occ.rivals.PSRL(mdp), "Thompson sampling", 1),
    }


class Price(NamedTuple):
    """A learner in one environment beside its twin."""

    environment: str
    name: str
    twin: str
    growth: Growth
    twin_regret: float
    ratio: Fit  # regret over the twin's, at T

    def cells(self) -> list[str]:
        """One line of the table."""
        regret, exponent = self.growth.final.text(0), self.growth.exponent.text()
        twin = [self.twin, f"{self.twin_regret:,.0f}"]
        return [self.environment, self.name, regret, exponent, *twin, self.ratio.text()]

    def row(self) -> dict[str, Any]:
        """The same for a CSV file."""
        fits = self.growth.final.row("regret") | self.growth.exponent.row("exponent")
        line: dict[str, Any] = {"environment": self.environment, "learner": self.name} | fits
        return line | self.ratio.row("price") | {"twin": self.twin, "twin_regret": self.twin_regret}


HEADER = ("environment", "learner", "regret at T", "exponent", "twin that knows P", "", "price")


def prices(args: Args, players: dict[str, Rival], histories: Histories) -> list[Price]:
    """The regret of every rival, its exponent, and its ratio to the twin's with an interval."""
    found = []
    for place in dict.fromkeys(place for place, _ in histories):
        for name, rival in players.items():
            own, other = histories[place, name], histories[place, rival.twin]
            band = common.ratio_band(own.regret, other.regret)
            ratio = Fit(*(float(x[-1]) for x in band))
            fit = common.growth(own.episodes, own.regret, args.window)
            regret = float(other.regret[:, -1].mean())
            found.append(Price(place, name, rival.twin, fit, regret, ratio))
    return found


def draw(args: Args, players: dict[str, Rival], histories: Histories) -> Figure:
    """A row per environment, a column per kind of learner.

    In a column, a colour means a learner that does not know P. Twins are dashed, with the colour
    of their first rival.
    """
    places = list(dict.fromkeys(place for place, _ in histories))
    figure = common.new_figure(12, 4.2 * len(places) + 1.2)
    grid = figure.subplots(len(places), len(PANELS), squeeze=False, sharex=True)
    for panels, place in zip(grid, places, strict=True):
        for number, axes in enumerate(panels):
            axes.set(xscale="log", yscale="log")
            here = {name: rival for name, rival in players.items() if rival.panel == number}
            drawn: dict[str, str] = {}
            for colour, (name, rival) in zip(COLOURS, here.items(), strict=False):
                common.plot_regret(axes, histories[place, name], label=name, colour=colour)
                drawn.setdefault(rival.twin, colour)
            for twin, colour in drawn.items():
                label = f"{twin} (knows P)"
                common.plot_regret(axes, histories[place, twin], label=label, colour=colour)
                axes.lines[-1].set(linestyle="--", linewidth=1.9)
            common.plot_regret(axes, histories[place, UNIFORM], label=UNIFORM, colour="0.6")
            axes.lines[-1].set(linestyle=":", linewidth=1.4)
            top = max(float(histories[place, name].regret.mean(0).max()) for name in here)
            common.tidy(axes, xlim=(10, args.episodes), ylim=(3, 3 * top))
        panels[0].set_ylabel(f"{place}\npseudo-regret")
    for axes, title in zip(grid[0], PANELS, strict=True):
        axes.set_title(title, fontsize=11)
    for axes in grid[-1]:
        axes.set_xlabel("episodes T")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    size = f"L = {args.horizon}, {args.width} states, {args.actions} actions"
    title = f"The price of not knowing P ({size}): mean of {args.seeds} seeds with its 95 % band"
    figure.suptitle(title, fontsize=13)
    return figure


def main(args: Args) -> Path:
    """Play, compare with the twins, draw, and report what came out."""
    directory = common.begin("unknown", args, args.seed)
    mdp, mean = args.problem()
    worlds = {STOCHASTIC: occ.BernoulliLosses(mean), ADVERSARIAL: occ.GreedyAdversary()}
    players = rivals(args, mdp)
    learners = {name: rival.learner for name, rival in players.items()}
    learners |= twins(args, mdp) | {UNIFORM: occ.FixedPolicy(mdp)}
    games = [
        Game(place, name, learner, losses, mdp=mdp)
        for place, losses in worlds.items()
        for name, learner in learners.items()
    ]
    histories = common.play_all(games, args, directory)
    found = prices(args, players, histories)
    common.write_csv(directory / "unknown.csv", [price.row() for price in found])
    common.write_figure(directory / "unknown.png", draw(args, players, histories))
    print("\nRegret without knowing P, and its ratio to that of a twin that knows P: the price")
    print(f"(95 % bootstrap intervals over {args.seeds} seeds, learner and twin together)\n")
    print(f"{common.table(HEADER, [price.cells() for price in found], left=(0, 1, 4))}\n")
    for (place, name), history in histories.items():
        if count := int(history.uncertified[:, -1].sum()):
            print(f"{name}, {place}: {count:,} steps could not be certified")
    print("The adversary reacts to the policy and does not try to mislead about the transitions.")
    print("There is one MDP, with dense transitions, whose optimal policy visits every state.")
    print(f"\nwritten to {directory}: unknown.png, unknown.csv and config.json;")
    print("every game has its own directory with a history and a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
