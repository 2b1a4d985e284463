"""One algorithm, four environments: does the regret of Jin and Luo's FTRL grow like log T where it should, and like sqrt T at worst?

The stochastic, the stochastically constrained and the corrupted environment satisfy the paper's self-bounding condition, so the paper
promises log T (plus sqrt(C log T)); the adversary does not, and the promise is sqrt(L S A T). The algorithm runs with the paper's constants
and with a small log-barrier, against O-REPS, 1/2-Tsallis, UCB-style value iteration, follow-the-leader and the uniform policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import torch_occ as occ
from experiments.common import run_directory, table, write_csv, write_figure
from experiments.games import (
    GROWTH_HEADER,
    Game,
    Histories,
    Settings,
    draw_growth,
    fill_panels,
    growth_cells,
    growth_row,
    loss_with_gap,
    play_all,
    write_configuration,
    write_text,
)
from experiments.growth import Growth, growth
from torch_occ.game.figures import COLOURS

PAPER, SMALL, UNIFORM = "Jin-Luo, β = 64 L", "Jin-Luo, small β", "uniform policy"
STOCHASTIC, CONSTRAINED, CORRUPTED, ADVERSARIAL = "stochastic", "stochastically constrained", "corrupted", "adversarial"


@dataclass(frozen=True)
class Args:
    """Which games are played, and how long."""

    episodes: int = 100_000
    """T"""
    seeds: int = 12
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
    """weight of the log-barrier of the second copy of the algorithm"""
    swing: float = 0.5
    """how far the stochastically constrained means move; its gaps are (1 - swing) times `gap`"""
    budget: float = 1000.0
    """C, spent from the first episode on, on making the optimal actions look bad"""
    adversary: Literal["greedy", "switching"] = "greedy"
    """greedy: charges each state's likeliest action; switching: the losses and their mirror image take turns"""
    period: int = 100
    """episodes between two switches"""
    window: float = 0.1
    """fits use the episodes from this part of T on"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def environments(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.LossProcess]:
    """The four loss processes, all built on one table of means."""
    mean = loss_with_gap(mdp, args.gap, args.seed)
    adversary = (
        occ.GreedyAdversary()
        if args.adversary == "greedy"
        else occ.SwitchingLosses(torch.stack([mean, 1 - mean]), args.period, noise="bernoulli")
    )
    return {
        STOCHASTIC: occ.BernoulliLosses(mean),
        CONSTRAINED: occ.StochasticallyConstrained(mean, swing=args.swing),
        CORRUPTED: occ.Corrupted(occ.BernoulliLosses(mean), args.budget, "targeted", target=mean),
        ADVERSARIAL: adversary,
    }


def learners(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.Learner]:
    """The algorithm twice, and whom it is compared with."""
    return {
        PAPER: occ.FTRL(mdp, occ.jin_luo(mdp)),
        SMALL: occ.FTRL(mdp, occ.jin_luo(mdp, beta=args.beta)),
        "Tsallis": occ.FTRL.tsallis(mdp),
        "O-REPS (knows T)": occ.FTRL.o_reps(mdp, args.episodes),
        "UCB value iteration": occ.OptimisticValueIteration(mdp),
        "follow the leader": occ.FollowTheLeader(mdp),
        UNIFORM: occ.FixedPolicy(mdp),
    }


Fits = dict[tuple[str, str], Growth]


def verdict(args: Args, mdp: occ.LayeredMDP, fits: Fits, histories: Histories) -> tuple[list[str], list[str]]:
    """What the run shows and what it does not, decided by the fitted intervals and the certificates of the steps, and nothing else."""
    shows, not_shown = [], []
    spent = float(histories[CORRUPTED, SMALL].corruption[:, -1].mean())
    for name in (PAPER, SMALL):
        for place in (STOCHASTIC, CONSTRAINED, CORRUPTED):
            line, fit = f"{name}, {place}: exponent {fits[place, name].exponent.text()}", fits[place, name]
            if not fit.exponent.exists:
                not_shown.append(f"{line}: the regret is not positive throughout, so it has none.")
            elif fit.exponent.upper >= 0.5:
                not_shown.append(f"{line}: sqrt T or faster cannot be excluded, the logarithm is not seen at this T.")
            elif fit.log_share > 0.95:
                shows.append(f"{line}, slower than sqrt T; a + b log T beats a + b sqrt T in {fit.log_share:.0%} of the resamples.")
            else:
                not_shown.append(
                    f"{line}, slower than sqrt T, but a + b log T is the better fit in only {fit.log_share:.0%} of the resamples."
                )
        worst, bound = fits[ADVERSARIAL, name], math.sqrt(mdp.horizon * mdp.num_pairs * args.episodes)
        line = f"{name}, {ADVERSARIAL} ({args.adversary}): exponent {worst.exponent.text()}, regret {worst.final.value:.0f}"
        line += f" = {worst.final.value / bound:.2f} sqrt(L S A T)"
        if worst.exponent.exists and worst.exponent.lower > 0.5:
            not_shown.append(f"{line}: faster than sqrt T on this window, so the worst-case rate is not seen at this T.")
        elif worst.exponent.exists and worst.exponent.upper < 0.5:
            shows.append(f"{line}: slower than sqrt T, as the bound allows.")
        else:
            shows.append(f"{line}: compatible with sqrt T.")
    for (place, name), fit in fits.items():
        if name not in (PAPER, SMALL, UNIFORM) and fit.exponent.exists and fit.exponent.lower > 0.8:
            shows.append(f"{name}, {place}: grows almost linearly, exponent {fit.exponent.text()}.")
    for place in dict.fromkeys(place for place, _ in fits):
        own, paper, uniform = (fits[place, name].final for name in (SMALL, PAPER, UNIFORM))
        best, lowest = min(((name, fit.final.value) for (where, name), fit in fits.items() if where == place), key=lambda pair: pair[1])
        if best != SMALL:
            not_shown.append(f"That the algorithm is the best one, {place}: {best} has {lowest:.0f}, {SMALL} {own.value:.0f}.")
        if paper.value > 0.8 * uniform.value > 0:
            not_shown.append(f"{PAPER} learning anything much, {place}: {paper.value:.0f}, never learning costs {uniform.value:.0f}.")
        if own.value > 0 and paper.lower > own.upper:
            shows.append(f"The paper's β costs {paper.value / own.value:.1f} times the regret of β = {args.beta:g}, {place}.")
    for (place, name), history in histories.items():
        if count := int(history.uncertified[:, -1].sum()):
            steps = args.episodes * args.seeds
            not_shown.append(f"{name}, {place}: {count:,} of its {steps:,} steps could not be certified, so its figures are provisional.")
    not_shown.append(f"Anything about other MDPs, gaps other than {args.gap:g}, C other than {spent:.0f}, or T beyond {args.episodes:,}.")
    return shows, not_shown


def draw(args: Args, histories: Histories) -> Any:
    """Above, the one algorithm in both worlds, on axes that make log T and sqrt T straight; below, everybody everywhere."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(13, 8.6), layout="constrained")
    places = (STOCHASTIC, CONSTRAINED, CORRUPTED, ADVERSARIAL)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.12, 1], hspace=0.03)
    left, right = parts[0].subplots(1, 2)
    words = {STOCHASTIC: "stochastic", CONSTRAINED: "stochastically constrained", CORRUPTED: f"corrupted, C = {args.budget:,.0f}"}
    easy = {words[place]: histories[place, SMALL] for place in places[:3]}
    draw_growth(left, easy, "log", args.window, (COLOURS[0], COLOURS[2], COLOURS[4]))
    draw_growth(right, {f"{args.adversary} adversary": histories[ADVERSARIAL, SMALL]}, "sqrt", args.window, (COLOURS[1],))
    left.set_title(r"where the paper promises $\log T$: an axis on which $\log T$ is straight", fontsize=11)
    right.set_title(r"against an adversary, $\sqrt{T}$: an axis on which $\sqrt{T}$ is straight", fontsize=11)
    fits = [
        Line2D([], [], color="0.25", linestyle=":", label=r"best $a + b\,\log T$"),
        Line2D([], [], color="0.5", linestyle="-.", label=r"best $a + b\,\sqrt{T}$"),
    ]
    for axes in (left, right):
        handles, _ = axes.get_legend_handles_labels()
        axes.legend(handles=[*handles, *fits], frameon=False, loc="upper left", fontsize=9)
    parts[0].suptitle(
        rf"One algorithm, both worlds: Jin and Luo's FTRL with $\beta = {args.beta:g}$, mean of {args.seeds} seeds with its 95 % band",
        fontsize=13,
    )
    panels = parts[1].subplots(1, 4)
    fill_panels(parts[1], panels, histories, places, SMALL)
    for axes in panels[1:]:
        axes.set_ylabel("")
    parts[1].suptitle("The same beside the others, doubly logarithmic", fontsize=11)
    return figure


def main(args: Args) -> Path:
    """Play, fit, draw, and say what came out."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "best_of_both_worlds", args.seed)
    write_configuration(directory, args)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    games = [
        Game(place, name, learner, losses, pictures=name == SMALL)
        for place, losses in environments(args, mdp).items()
        for name, learner in learners(args, mdp).items()
    ]
    settings = Settings(args.episodes, args.seeds, args.processes, args.tensorboard, args.seed)
    histories: Histories = play_all(games, settings, directory)
    fits = {key: growth(history.episodes, history.regret, args.window) for key, history in histories.items()}
    write_csv(directory / "growth.csv", [growth_row(*key, fit) for key, fit in fits.items()])
    write_figure(directory / "regret.png", draw(args, histories))
    cells = table(GROWTH_HEADER, [growth_cells(*key, fit) for key, fit in fits.items()], left=(0, 1))
    print(f"\nGrowth from T = {args.window * args.episodes:g} on, with 95 % bootstrap intervals over {args.seeds} seeds")
    print(f"(exponent 0.5 is sqrt T, 1 is linear; that of a + b log T tends to 0)\n\n{cells}\n")
    shows, not_shown = verdict(args, mdp, fits, histories)
    lines = ["What this run shows", *(f"  + {line}" for line in shows)]
    lines += ["What it does not show", *(f"  - {line}" for line in not_shown)]
    write_text(directory / "report.txt", "\n".join(lines))
    print("\n".join(lines))
    print(f"\nwritten to {directory}: regret.png, growth.csv, report.txt, config.json; a history and a TensorBoard log for every game")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
