"""How far from the limit: what does one more e-fold of episodes cost, and what must it cost?

No consistent learner has a slope d regret / d log T below C in the long run
(`occ.limits.lower_bound`). Learners that know the transitions play on three MDPs: one whose optimal
policy visits every state, one with deterministic transitions and one with two successors per pair,
whose optimal policies leave out states. The slopes are fitted to the last decade and divided by C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import Fit, Game, Histories, RunsOnMDP

DENSE, DETERMINISTIC, TWO = "every state visited", "deterministic", "two successors"


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """Which games are played, and how long."""

    episodes: int = 1_000_000
    """T"""
    seeds: int = 16
    """independent runs of each game"""
    fast_seeds: int = 32
    """runs of learners that plan with an index, which take less time"""
    smallest_gap: float = 0.05
    """of the MDPs with few successors, whose means are random"""
    window: float = 0.1
    """slopes are fitted to the episodes from this share of T on"""


def few_successors(
    horizon: int, width: int, num_actions: int, successors: int, seed: int
) -> tuple[occ.LayeredMDP, Tensor]:
    """A random MDP with this many successors of a pair, and means `(S, A)` uniform on [0.2, 0.8].

    The probabilities of the successors are uniform on the simplex.
    """
    generator = np.random.default_rng(seed)
    layers = []
    for here, there in pairwise([1, *[width] * (horizon - 1), 1]):
        layer, kept = np.zeros((here, num_actions, there)), min(successors, there)
        for row in layer.reshape(-1, there):
            row[generator.choice(there, kept, replace=False)] = generator.dirichlet(np.ones(kept))
        layers.append(torch.from_numpy(layer))
    mdp = occ.LayeredMDP(layers)
    mean = generator.uniform(0.2, 0.8, (mdp.num_states, num_actions))
    return mdp, torch.from_numpy(mean)


def world_with_hidden_states(
    horizon: int, width: int, num_actions: int, successors: int, seed: int, gap: float
) -> tuple[occ.LayeredMDP, Tensor]:
    """The first of these MDPs, from `seed` on, that suits a measurement of the limit.

    The optimal policy leaves out at least two reachable states, and no suboptimal action of a
    reachable state has less than this gap: smaller gaps would need more than a million episodes.
    States that no policy reaches are removed.
    """
    for candidate in count(seed):
        mdp, mean = few_successors(horizon, width, num_actions, successors, candidate)
        plan = occ.optimal_policy(mdp, mean)
        hidden = mdp.reachable & (occ.occupancy(mdp, plan.policy).sum(-1) == 0)
        other = (plan.policy == 0) & mdp.reachable.unsqueeze(-1)
        if int(hidden.sum()) >= 2 and float(plan.gaps[other].min()) >= gap:
            return mdp.prune(), mean[mdp.reachable]
    raise AssertionError("count has no end")


def worlds(args: Args) -> dict[str, tuple[occ.LayeredMDP, Tensor]]:
    """The MDPs and their mean losses."""
    found, shape = {DENSE: args.problem()}, (args.horizon, args.width, args.actions)
    for name, successors in ((DETERMINISTIC, 1), (TWO, 2)):
        found[name] = world_with_hidden_states(*shape, successors, args.seed, args.smallest_gap)
    return found


def learners(mdp: occ.LayeredMDP) -> dict[str, occ.Learner]:
    """Learners that know the transitions but not the number of episodes."""
    return {
        "Thompson": occ.rivals.Thompson(mdp),
        "KL-UCB": occ.rivals.KLUCB(mdp),
        "UCB value iteration": occ.OptimisticValueIteration(mdp),
        "Tsallis": occ.FTRL.tsallis(mdp),
        "Jin-Luo, β = 1": occ.FTRL(mdp, occ.jin_luo(mdp, beta=1.0)),
    }


#: Learners that are played with `fast_seeds`.
FAST = (occ.rivals.Thompson, occ.rivals.KLUCB, occ.OptimisticValueIteration)

Slopes = dict[tuple[str, str], Fit]  # d regret / d log T, by world and learner


def rows(
    limits: dict[str, occ.limits.LowerBound], slopes: Slopes, histories: Histories
) -> list[Any]:
    """One row per game: the slope, the slope over C, and the regret over log T."""
    found = []
    for (place, name), slope in slopes.items():
        limit, history = limits[place].value, histories[place, name]
        final = float(history.regret[:, -1].mean())
        row: dict[str, Any] = {"world": place, "learner": name, "seeds": len(history.regret)}
        row |= {"limit": limit, "slope": slope.value, "slope_over_limit": slope.value / limit}
        row |= {"lower": slope.lower / limit, "upper": slope.upper / limit, "regret": final}
        found.append(row | {"regret_over_log_T": final / math.log(float(history.episodes[-1]))})
    return found


def draw(limits: dict[str, occ.limits.LowerBound], slopes: Slopes, histories: Histories) -> Figure:
    """Above, regret over log T beside lines of slope C; below, slopes over C with intervals."""
    figure = common.new_figure(12.5, 7.4)
    grid = figure.subplots(2, len(limits), height_ratios=[1.5, 1])
    colour = common.colours(histories)
    for (above, below), (place, limit) in zip(grid.T, limits.items(), strict=True):
        mine = {name: histories[place, name] for where, name in histories if where == place}
        end = max(float(history.episodes[-1]) for history in mine.values())
        above.set(xscale="log", xlim=(max(end / 1e4, 1), end), xlabel="episodes T")
        for i, (name, history) in enumerate(mine.items()):
            common.plot_regret(above, history, label=name, colour=colour[name])
            slope = slopes[place, name]
            low, middle, high = (x / limit.value for x in (slope.lower, slope.value, slope.upper))
            below.plot([low, high], [-i, -i], color=colour[name], linewidth=2.2)
            below.plot(middle, -i, "o", color=colour[name], markersize=6)
            place_of_text = {"xytext": (0, 5), "textcoords": "offset points", "ha": "center"}
            below.annotate(f"{middle:.2f}", (middle, -i), fontsize=8, **place_of_text)
        # Lines of slope C, one of them through the end of the lowest curve.
        lowest = min(float(history.regret[:, -1].mean()) for history in mine.values())
        top = max(float(history.regret[:, -1].mean()) for history in mine.values())
        t = np.geomspace(max(end / 1e4, 1), end, 50)
        first = lowest - limit.value * math.log(end)
        step = max((top - lowest) / 3, 1e-9)
        for j in range(5):
            line = first + j * step + limit.value * np.log(t)
            label = "slope C" if j == 0 else None
            above.plot(t, line, color="0.45", linestyle=":", linewidth=1.1, label=label, zorder=1)
        below.axvline(1.0, color="0.3", linewidth=1.0, linestyle=":")
        below.set_yticks([-i for i in range(len(mine))], list(mine))
        common.tidy(above, ylim=(0, 1.05 * top), title=f"{place}, C = {limit.value:.2f}")
        common.tidy(below, xlim=(0, None), ylim=(0.6 - len(mine), 0.7), xlabel="slope / C")
    grid[0, 0].set_ylabel("pseudo-regret")
    for axes in grid[1, 1:]:
        axes.set_yticklabels([])
    common.legend_below(figure, grid[0, 0], 7)
    counts = sorted({len(history.regret) for history in histories.values()})
    seeds = " to ".join(str(x) for x in dict.fromkeys((counts[0], counts[-1])))
    title = f"What an e-fold of episodes costs, and must cost: means of {seeds} seeds"
    figure.suptitle(f"{title}, 95 % intervals, slopes of the last decade")
    return figure


def main(args: Args) -> Path:
    """Play, fit, draw, and report what came out."""
    directory = common.begin("distance_to_limit", args, args.seed)
    places = worlds(args)
    limits = {name: occ.limits.lower_bound(*world) for name, world in places.items()}
    for name, limit in limits.items():
        print(f"  {name}: {limit}")
    games = [
        Game(place, name, learner, occ.BernoulliLosses(mean))
        for place, (mdp, mean) in places.items()
        for name, learner in learners(mdp).items()
    ]
    played: Histories = {}
    for fast, seeds in ((True, args.fast_seeds), (False, args.seeds)):
        group = [game for game in games if isinstance(game.learner, FAST) == fast]
        played |= common.play_all(group, replace(args, seeds=seeds), directory)
    histories = {(x.environment, x.name): played[x.environment, x.name] for x in games}
    slopes = {
        key: common.growth(x.episodes, x.regret, args.window).per_log
        for key, x in histories.items()
    }
    found = rows(limits, slopes, histories)
    common.write_csv(directory / "slopes.csv", found)
    common.write_figure(directory / "limit.png", draw(limits, slopes, histories))
    header = ("world", "learner", "seeds", "C", "slope / C", "R(T)", "R(T) / log T", "time")
    cells = []
    for row in found:
        ratio = Fit(row["slope_over_limit"], row["lower"], row["upper"]).text()
        line = [row["world"], row["learner"], str(row["seeds"]), f"{row['limit']:.2f}", ratio]
        line += [f"{row['regret']:.0f}", f"{row['regret_over_log_T']:.1f}"]
        time = histories[row["world"], row["learner"]].wall_time[-1]
        cells.append([*line, common.seconds(float(time))])
    print(f"\nSlopes d R / d log T from T = {args.window * args.episodes:g} on, over C, with 95 %")
    print(f"bootstrap intervals over seeds\n\n{common.table(header, cells, left=(0, 1))}\n")
    print("The limit is about slopes: regret itself may be below C log T. A slope below C at this")
    print("T must rise later, or the learner is not consistent.")
    print(f"\nwritten to {directory}: limit.png, slopes.csv and config.json")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
