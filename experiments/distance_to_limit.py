"""How far from the limit: what does one more e-fold of episodes cost, and what must it cost?

No consistent learner has a slope d regret / d log T below C in the long run (`occ.lower_bound`).
Learners that know the transitions play on three MDPs: one whose optimal policy visits every state,
one with deterministic transitions and one with two successors per pair, whose optimal policies
leave out states. The slopes are fitted to the last decade and divided by C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, seconds, table, write_csv, write_figure
from experiments.curves import colours, tidy
from experiments.games import (
    Game,
    Histories,
    Settings,
    loss_with_gap,
    play_all,
    write_configuration,
    write_text,
)
from experiments.growth import Fit, growth
from experiments.limit_worlds import world_with_hidden_states
from torch_occ._support.choices import summary_writer
from torch_occ.game.figures import plot_regret

DENSE, DETERMINISTIC, TWO = "every state visited", "deterministic", "two successors"


@dataclass(frozen=True)
class Args:
    """Which games are played, and how long."""

    episodes: int = 1_000_000
    """T"""
    seeds: int = 16
    """independent runs of each game"""
    fast_seeds: int = 32
    """runs of learners that plan with an index, which take less time"""
    seed: int = 1
    """of the MDPs, the losses and the first run"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gap: float = 0.4
    """of every suboptimal action of the first MDP"""
    smallest_gap: float = 0.05
    """of the others, whose means are random"""
    window: float = 0.1
    """slopes are fitted to the episodes from this share of T on"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


World = tuple[occ.LayeredMDP, Tensor]


def worlds(args: Args) -> dict[str, World]:
    """The MDPs and their mean losses."""
    shape = (args.horizon, args.width, args.actions)
    dense = occ.LayeredMDP.random(*shape, seed=args.seed)
    found = {DENSE: (dense, loss_with_gap(dense, args.gap, args.seed))}
    for name, successors in ((DETERMINISTIC, 1), (TWO, 2)):
        found[name] = world_with_hidden_states(*shape, successors, args.seed, args.smallest_gap)
    return found


def learners(mdp: occ.LayeredMDP) -> dict[str, occ.Learner]:
    """Learners that know the transitions but not the number of episodes."""
    return {
        "Thompson": occ.Thompson(mdp),
        "KL-UCB": occ.KLUCB(mdp),
        "UCB value iteration": occ.OptimisticValueIteration(mdp),
        "Tsallis": occ.FTRL.tsallis(mdp),
        "Jin-Luo, β = 1": occ.FTRL(mdp, occ.jin_luo(mdp, beta=1.0)),
    }


#: Learners that are played with `fast_seeds`.
FAST = (occ.Thompson, occ.KLUCB, occ.OptimisticValueIteration)

Slopes = dict[tuple[str, str], Fit]  # d regret / d log T, by world and learner


def rows(limits: dict[str, occ.LowerBound], slopes: Slopes, histories: Histories) -> list[Any]:
    """One row per game: the slope, the slope over C, and the regret over log T."""
    found = []
    for (place, name), slope in slopes.items():
        limit, history = limits[place].value, histories[place, name]
        final = float(history.regret[:, -1].mean())
        found.append(
            {
                "world": place,
                "learner": name,
                "seeds": len(history.regret),
                "limit": limit,
                "slope": slope.value,
                "slope_over_limit": slope.value / limit,
                "lower": slope.lower / limit,
                "upper": slope.upper / limit,
                "regret": final,
                "regret_over_log_T": final / math.log(float(history.episodes[-1])),
            }
        )
    return found


def draw(limits: dict[str, occ.LowerBound], slopes: Slopes, histories: Histories) -> Any:
    """Above, regret over log T beside lines of slope C; below, slopes over C with intervals."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 7.4), layout="constrained")
    grid = figure.subplots(2, len(limits), height_ratios=[1.5, 1])
    colour = colours(histories)
    for (above, below), (place, limit) in zip(grid.T, limits.items(), strict=True):
        mine = {name: histories[place, name] for where, name in histories if where == place}
        end = max(float(history.episodes[-1]) for history in mine.values())
        above.set(xscale="log", xlim=(max(end / 1e4, 1), end), xlabel="episodes T")
        for i, (name, history) in enumerate(mine.items()):
            plot_regret(above, history, label=name, colour=colour[name])
            slope = slopes[place, name]
            low, middle, high = (x / limit.value for x in (slope.lower, slope.value, slope.upper))
            below.plot([low, high], [-i, -i], color=colour[name], linewidth=2.2)
            below.plot(middle, -i, "o", color=colour[name], markersize=6)
            below.annotate(
                f"{middle:.2f}", (middle, -i), (0, 5), textcoords="offset points", ha="center",
                fontsize=8,
            )  # fmt: skip
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
        above.set_ylim(0, 1.05 * top)
        above.set_title(f"{place}, C = {limit.value:.2f}")
        below.axvline(1.0, color="0.3", linewidth=1.0, linestyle=":")
        below.set_yticks([-i for i in range(len(mine))], list(mine))
        below.set(xlim=(0, None), ylim=(0.6 - len(mine), 0.7), xlabel="slope / C")
        tidy(above)
        tidy(below)
    grid[0, 0].set_ylabel("pseudo-regret")
    for axes in grid[1, 1:]:
        axes.set_yticklabels([])
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, frameon=False)
    counts = sorted({len(history.regret) for history in histories.values()})
    seeds = " to ".join(str(x) for x in dict.fromkeys((counts[0], counts[-1])))
    title = f"What an e-fold of episodes costs, and must cost: means of {seeds} seeds"
    figure.suptitle(f"{title}, 95 % intervals, slopes of the last decade")
    return figure


def report(args: Args, limits: dict[str, occ.LowerBound], found: list[Any]) -> str:
    """What the run shows, and what it does not show."""
    lines = ["What this run shows"]
    for place in limits:
        here = sorted((x for x in found if x["world"] == place), key=lambda x: x["slope"])
        best, worst = here[0], here[-1]
        lines.append(
            f"  + {place}: {best['learner']} has {best['slope_over_limit']:.2f} C, "
            f"{worst['learner']} {worst['slope_over_limit']:.2f} C."
        )
    below = [x for x in found if x["regret_over_log_T"] < x["limit"]]
    names = ", ".join(f"{x['learner']} ({x['world']})" for x in below) or "nobody"
    lines.append(f"  + Regret itself is below C log T for {names}: the limit is about slopes.")
    lines.append("What it does not show")
    early = [x for x in found if x["upper"] < 1]
    names = ", ".join(f"{x['learner']} ({x['world']})" for x in early)
    if early:
        lines.append(
            f"  - That {names} beats the limit: a slope below C at this T must rise later, or the "
            "learner is not consistent."
        )
    lines.append(f"  - Slopes beyond T = {args.episodes:,}, other MDPs, and other gaps.")
    return "\n".join(lines)


def main(args: Args) -> Path:
    """Play, fit, draw, and report what came out."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "distance_to_limit", args.seed)
    write_configuration(directory, args)
    places = worlds(args)
    limits = {name: occ.lower_bound(*world) for name, world in places.items()}
    for name, limit in limits.items():
        print(f"  {name}: {limit}")
    games = [
        Game(place, name, learner, occ.BernoulliLosses(mean))
        for place, (mdp, mean) in places.items()
        for name, learner in learners(mdp).items()
    ]
    settings = Settings(args.episodes, args.seeds, args.processes, args.tensorboard, args.seed)
    groups = ((True, args.fast_seeds), (False, args.seeds))
    played: Histories = {}
    for fast, seeds in groups:
        group = [game for game in games if isinstance(game.learner, FAST) == fast]
        played |= play_all(group, replace(settings, seeds=seeds), directory)
    histories = {
        (game.environment, game.name): played[game.environment, game.name] for game in games
    }
    slopes = {
        key: growth(history.episodes, history.regret, args.window).per_log
        for key, history in histories.items()
    }
    found = rows(limits, slopes, histories)
    write_csv(directory / "slopes.csv", found)
    figure = draw(limits, slopes, histories)
    write_figure(directory / "limit.png", figure)
    header = ("world", "learner", "seeds", "C", "slope / C", "R(T)", "R(T) / log T", "time")
    cells = [
        [
            row["world"],
            row["learner"],
            str(row["seeds"]),
            f"{row['limit']:.2f}",
            f"{row['slope_over_limit']:.2f} [{row['lower']:.2f}, {row['upper']:.2f}]",
            f"{row['regret']:.0f}",
            f"{row['regret_over_log_T']:.1f}",
            seconds(float(histories[row["world"], row["learner"]].wall_time[-1])),
        ]
        for row in found
    ]
    text = table(header, cells, left=(0, 1))
    print(f"\nSlopes d R / d log T from T = {args.window * args.episodes:g} on, over C, with 95 %")
    print(f"bootstrap intervals over seeds\n\n{text}\n")
    if args.tensorboard:
        with summary_writer(directory / "limit") as writer:
            writer.add_figure("limit/slopes", figure, close=False)
            writer.add_text("limit/table", text)
            for row in found:
                tag = f"limit/{row['world']}/{row['learner']}".replace(" ", "_")
                writer.add_scalar(tag, row["slope_over_limit"], args.episodes)
    words = report(args, limits, found)
    write_text(directory / "report.txt", words)
    print(words)
    print(f"\nwritten to {directory}: limit.png, slopes.csv, report.txt and config.json")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
