"""One algorithm, four environments: does regret grow like log T or like sqrt T, as the paper says?

The algorithm is Jin and Luo's FTRL. The stochastic, the stochastically constrained and the
corrupted environment satisfy the paper's self-bounding condition. For these the paper promises
log T, plus sqrt(C log T) for a corruption of C. The adversary does not satisfy the condition, and
the promise is sqrt(L S A T). The algorithm runs with the paper's constants and with a small
log-barrier. It is compared with O-REPS, 1/2-Tsallis, UCB-style value iteration, follow-the-leader
and the uniform policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import torch_occ as occ
from experiments import common
from experiments.common import Fits, Game, Growth, Histories, RunsOnMDP

PAPER, SMALL, UNIFORM = "Jin-Luo, β = 64 L", "Jin-Luo, small β", "uniform policy"
UCB = "UCB value iteration"
STOCHASTIC, CONSTRAINED = "stochastic", "stochastically constrained"
CORRUPTED, ADVERSARIAL = "corrupted", "adversarial"

#: The games of which TensorBoard has curves, few enough for colours of their own.
BOARD = {(place, SMALL) for place in (STOCHASTIC, CONSTRAINED, CORRUPTED, ADVERSARIAL)}
BOARD |= {(place, UCB) for place in (STOCHASTIC, ADVERSARIAL)}


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """Which games are played, and how long."""

    episodes: int = 1_000_000
    """T"""
    beta: float = 1.0
    """weight of the log-barrier of the second copy of the algorithm"""
    swing: float = 0.5
    """how far the stochastically constrained means move; gaps there are (1 - swing) times `gap`"""
    budget: float = 1000.0
    """C; it is spent from the first episode on and makes the optimal actions look bad"""
    adversary: Literal["greedy", "switching"] = "greedy"
    """greedy: charges each state's likeliest action; switching: mean losses m and 1 - m in turn"""
    period: int = 100
    """episodes between two switches"""
    window: float = 0.1
    """fits use the episodes from this share of T on"""


def environments(args: Args) -> dict[str, occ.LossProcess]:
    """The four loss processes, all built on one table of means."""
    _, mean = args.problem()
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
    """The algorithm with two values of beta, and the learners that it is compared with."""
    return {
        PAPER: occ.FTRL(mdp, occ.jin_luo(mdp)),
        SMALL: occ.FTRL(mdp, occ.jin_luo(mdp, beta=args.beta)),
        "Tsallis": occ.FTRL.tsallis(mdp),
        "O-REPS (knows T)": occ.FTRL.o_reps(mdp, args.episodes),
        UCB: occ.OptimisticValueIteration(mdp),
        "follow the leader": occ.FollowTheLeader(mdp),
        UNIFORM: occ.FixedPolicy(mdp),
    }


def verdict(
    args: Args, mdp: occ.LayeredMDP, fits: Fits, histories: Histories
) -> tuple[list[str], list[str]]:
    """What the run shows and what it does not show.

    Only the fitted intervals and the certificates of the steps decide.
    """
    shows: list[str] = []
    not_shown: list[str] = []
    for name in (PAPER, SMALL):
        for place in (STOCHASTIC, CONSTRAINED, CORRUPTED):
            seen, text = logarithmic(fits[place, name])
            (shows if seen else not_shown).append(f"{name}, {place}: {text}")
        seen, text = worst_case(args, mdp, fits[ADVERSARIAL, name])
        line = f"{name}, {ADVERSARIAL} ({args.adversary}): {text}"
        (shows if seen else not_shown).append(line)
    for (place, name), fit in fits.items():
        if name not in (PAPER, SMALL, UNIFORM) and fit.exponent.exists and fit.exponent.lower > 0.8:
            shows.append(f"{name}, {place}: grows almost linearly, exponent {fit.exponent.text()}.")
    for place in dict.fromkeys(place for place, _ in fits):
        own, paper, uniform = (fits[place, name].final for name in (SMALL, PAPER, UNIFORM))
        finals = {name: fit.final.value for (where, name), fit in fits.items() if where == place}
        best = min(finals, key=lambda name: finals[name])
        if best != SMALL:
            numbers = f"{best} has {finals[best]:.0f}, {SMALL} {own.value:.0f}"
            not_shown.append(f"That the algorithm is the best one, {place}: {numbers}.")
        if paper.value > 0.8 * uniform.value > 0:
            numbers = f"{paper.value:.0f}, and the uniform policy has {uniform.value:.0f}"
            not_shown.append(f"That {PAPER} learns much, {place}: its regret is {numbers}.")
        if own.value > 0 and paper.lower > own.upper:
            times = f"{paper.value / own.value:.1f} times the regret of β = {args.beta:g}"
            shows.append(f"The paper's β costs {times}, {place}.")
    for (place, name), history in histories.items():
        if count := int(history.uncertified[:, -1].sum()):
            share = f"{count:,} of its {args.episodes * args.seeds:,} steps"
            text = f"{share} could not be certified, so its figures are provisional."
            not_shown.append(f"{name}, {place}: {text}")
    spent = float(histories[CORRUPTED, SMALL].corruption[:, -1].mean())
    other = f"gaps other than {args.gap:g}, C other than {spent:.0f}, or T beyond {args.episodes:,}"
    not_shown.append(f"Anything about other MDPs, {other}.")
    return shows, not_shown


def logarithmic(fit: Growth) -> tuple[bool, str]:
    """Whether log T is seen, and why."""
    line, share = f"exponent {fit.exponent.text()}", f"{fit.log_share:.0%} of the resamples"
    if not fit.exponent.exists:
        return False, f"{line}: it does not exist, because some regret is not positive."
    if fit.exponent.upper >= 0.5:
        return False, f"{line}: sqrt T or faster is possible, so log T is not seen at this T."
    if fit.log_share > 0.95:
        return True, f"{line}, slower than sqrt T; a + b log T beats a + b sqrt T in {share}."
    return False, f"{line}, slower than sqrt T, but a + b log T fits better in only {share}."


def worst_case(args: Args, mdp: occ.LayeredMDP, fit: Growth) -> tuple[bool, str]:
    """Whether the growth agrees with sqrt T, and why."""
    bound = math.sqrt(mdp.horizon * mdp.num_pairs * args.episodes)
    line = f"exponent {fit.exponent.text()}, regret {fit.final.value:.0f}"
    line += f" = {fit.final.value / bound:.2f} sqrt(L S A T)"
    if fit.exponent.exists and fit.exponent.lower > 0.5:
        return False, f"{line}: faster than sqrt T in this window, so sqrt T is not seen at this T."
    if fit.exponent.exists and fit.exponent.upper < 0.5:
        return True, f"{line}: slower than sqrt T, as the bound allows."
    return True, f"{line}: compatible with sqrt T."


def distances(fits: Fits, limit: float) -> str:
    """The slopes of learners in the stochastic environment, as multiples of the limit's."""
    names = (name for place, name in fits if place == STOCHASTIC and name != UNIFORM)
    parts = (f"{name} {fits[STOCHASTIC, name].per_log.value / limit:.1f}" for name in names)
    return (
        f"The limit, {STOCHASTIC}: d R / d log T is at least {limit:.1f} for every consistent "
        f"learner in the long run. As multiples of it: {', '.join(parts)}."
    )


def draw_growth(
    axes: Any,
    curves: Mapping[str, occ.History],
    scale: Literal["log", "sqrt"],
    window: float,
    colour: str,
    markers: Sequence[str],
) -> None:
    """Regret of one learner in several environments; log T, or sqrt T, is straight on the axis.

    The colour is that of the learner. Each environment has its own marker. The best a + b log T
    and a + b sqrt T are fitted to the checkpoints from `window` * T on and drawn from a tenth of
    that on: the right one stays close to the curve there.
    """
    end = max(float(history.episodes[-1]) for history in curves.values())
    if scale == "log":
        axes.set(xscale="log", xlim=(max(end / 1e4, 1), end))
    else:
        axes.set_xscale("function", functions=(lambda t: np.sqrt(np.maximum(t, 0)), np.square))
        ticks = [end * share for share in (0, 0.01, 0.1, 0.25, 0.5, 1)]
        axes.set_xlim(0, end)
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    for i, (marker, (name, history)) in enumerate(zip(markers, curves.items(), strict=True)):
        common.plot_regret(axes, history, label=name, colour=colour)
        line = axes.lines[-1]
        line.set(linewidth=1.8, marker=marker, markersize=8)
        line.set(markerfacecolor="white", markeredgewidth=1.6)
        line.set_markevery((0.03 * (i + 1), 0.09))
        t, y = common.late(history.episodes, history.regret.mean(0, keepdim=True), window)
        x = torch.from_numpy(np.geomspace(max(window * end / 10, 2), end, 200))
        for function, style in ((torch.log, ":"), (torch.sqrt, "-.")):
            fit = y.mean() + common.slope(function(t), y) * (function(x) - function(t).mean())
            grey = "0.25" if style == ":" else "0.5"
            axes.plot(x, fit, color=grey, linestyle=style, linewidth=1.3)
    common.tidy(axes, ylim=(0, None), xlabel="episodes T", ylabel="pseudo-regret")


def draw_limit(axes: Any, history: occ.History, window: float, limit: float) -> None:
    """A line of the limit's slope, from a point of the curve on."""
    t, y = common.late(history.episodes, history.regret.mean(0, keepdim=True), window)
    x, line = t.tolist(), (y[0, 0] + limit * (t / t[0]).log()).tolist()
    label = rf"slope of the limit, {limit:.1f} per $\log T$"
    axes.plot(x, line, color="0.1", linestyle="--", linewidth=1.6, label=label)


def draw(args: Args, histories: Histories, limit: float) -> Figure:
    """Above, the algorithm in both worlds; below, all learners in every environment.

    Everywhere a colour means a learner. Above, a marker means an environment.
    """
    figure = common.new_figure(13, 8.6)
    places = (STOCHASTIC, CONSTRAINED, CORRUPTED, ADVERSARIAL)
    parts: Any = figure.subfigures(2, 1, height_ratios=[1.12, 1], hspace=0.03)
    left, right = parts[0].subplots(1, 2)
    words = {place: place for place in places}
    words[CORRUPTED] = f"corrupted, C = {args.budget:,.0f}"
    words[ADVERSARIAL] = f"{args.adversary} adversary"
    curves = {words[place]: histories[place, SMALL] for place in places}
    easy, hard = dict(list(curves.items())[:3]), dict(list(curves.items())[3:])
    colour = common.colours(histories)[SMALL]
    draw_growth(left, easy, "log", args.window, colour, ("o", "s", "^"))
    draw_growth(right, hard, "sqrt", args.window, colour, ("D",))
    draw_limit(left, histories[STOCHASTIC, SMALL], args.window, limit)
    left.set_title(r"the paper promises $\log T$: it is straight on this axis", fontsize=11)
    right.set_title(r"the paper promises $\sqrt{T}$: it is straight on this axis", fontsize=11)
    fits = [
        Line2D([], [], color="0.25", linestyle=":", label=r"best $a + b\,\log T$"),
        Line2D([], [], color="0.5", linestyle="-.", label=r"best $a + b\,\sqrt{T}$"),
    ]
    for axes in (left, right):
        handles, _ = axes.get_legend_handles_labels()
        axes.legend(handles=[*handles, *fits], frameon=False, loc="upper left", fontsize=9)
    which = rf"Jin and Luo's FTRL with $\beta = {args.beta:g}$"
    title = f"One algorithm, both worlds: {which}, mean of {args.seeds} seeds with its 95 % band"
    parts[0].suptitle(title, fontsize=13)
    panels = parts[1].subplots(1, 4)
    common.fill_panels(parts[1], panels, histories, places, SMALL)
    draw_limit(panels[0], histories[STOCHASTIC, UCB], args.window, limit)
    for axes in panels[1:]:
        axes.set_ylabel("")
    title = "The same algorithm (thick) beside the others, on doubly logarithmic axes"
    parts[1].suptitle(title, fontsize=11)
    return figure


def main(args: Args) -> Path:
    """Play, fit, draw, and report what came out."""
    directory = common.begin("best_of_both_worlds", args, args.seed)
    mdp, mean = args.problem()
    games = [
        Game(place, name, learner, losses, name == SMALL, logged=(place, name) in BOARD)
        for place, losses in environments(args).items()
        for name, learner in learners(args, mdp).items()
    ]
    histories = common.play_all(games, args, directory)
    fits = common.fit_all(histories, directory / "growth.csv", args.window)
    limit = occ.limits.lower_bound(mdp, mean).value
    common.write_figure(directory / "regret.png", draw(args, histories, limit))
    start = f"{args.window * args.episodes:g}"
    print(f"\nGrowth from T = {start} on, with 95 % bootstrap intervals over {args.seeds} seeds")
    print("(an exponent of 0.5 is sqrt T, 1 is linear; that of a + b log T tends to 0)\n")
    print(f"{common.growth_table(fits)}\n")
    shows, not_shown = verdict(args, mdp, fits, histories)
    common.write_findings(directory, [*shows, distances(fits, limit)], not_shown)
    print(f"\nwritten to {directory}: regret.png, growth.csv, report.txt and config.json;")
    print("every game has its own directory with a history, and six have a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
