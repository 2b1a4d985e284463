"""What to take without tuning: `occ.recommended(mdp)` against the untuned Tsallis entropy.

Both are played on MDPs of several shapes, each with losses of its own, in the stochastic world and
against the greedy adversary. Nothing was chosen by these MDPs (their seeds begin at 9100).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

import torch_occ as occ
from experiments import common

WORLDS = ("stochastic", "adversary")
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Args:
    """Which games are played."""

    episodes: int = 100_000
    """T"""
    draws: int = 8
    """MDPs and losses of each shape"""
    seeds: int = 2
    """runs of each game"""
    seed: int = 9100
    """of the first MDP of each shape and its losses"""
    shapes: tuple[Shape, ...] = ((5, 3, 2), (4, 4, 3), (3, 3, 3), (2, 8, 3), (5, 5, 4))
    """horizon, width and actions"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def regrets(args: Args, shape: Shape) -> torch.Tensor:
    """Regret at T of both learners in both worlds, mean over seeds, `(draws, 2, 2)`."""
    found = []
    for seed in range(args.seed, args.seed + args.draws):
        mdp = occ.LayeredMDP.random(*shape, seed=seed)
        losses = (occ.BernoulliLosses(common.random_means(mdp, seed)), occ.GreedyAdversary())
        finals = [
            common.final_regret(learner, process, args.episodes, range(args.seeds)).mean()
            for learner in (occ.FTRL.tsallis(mdp), occ.recommended(mdp))
            for process in losses
        ]
        found.append(torch.stack(finals).reshape(2, 2))
    return torch.stack(found)


def main(args: Args) -> Path:
    """Play both learners, and compare them draw by draw."""
    directory = common.begin("untuned", args, args.seed)
    size = f"T = {args.episodes:,}, {args.draws} draws of each shape"
    print(f"{size}; {common.machine()}", flush=True)
    figure = common.new_figure(7, 4)
    axes = figure.subplots()
    lines, rows = [], []
    for i, shape in enumerate(args.shapes):
        found, cells = regrets(args, shape), [", ".join(map(str, shape))]
        for world, name in enumerate(WORLDS):
            tsallis, ours = found[:, 0, world], found[:, 1, world]
            each = occ.game.Mean.of(ours / tsallis)
            half = each.interval[1] - each.mean if args.draws > 1 else 0.0
            cells += [
                f"{tsallis.mean():,.0f}",
                f"{ours.mean():,.0f}",
                f"{each.mean:.2f} ± {half:.2f}",
            ]
            row = {"shape": cells[0], "world": name, "ratio": each.mean, "half_width": half}
            rows.append(row)
            look = {"fmt": "os"[world], "color": f"C{3 * world}", "capsize": 3}
            label, y = name if i == 0 else None, i + 0.15 * (1 - 2 * world)
            axes.errorbar([each.mean], [y], xerr=[half], label=label, **look)
        lines.append(cells)
        print(f"  {cells[0]}: stochastic {cells[3]}, adversary {cells[6]}", flush=True)
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(args.shapes)), [x[0] for x in lines])
    label = "regret of recommended(mdp) over that of FTRL.tsallis(mdp), at T"
    common.tidy(axes, xlabel=label, ylabel="horizon, width, actions")
    axes.legend()
    common.write_csv(directory / "untuned.csv", rows)
    common.write_figure(directory / "untuned.png", figure)
    header = ["shape", "Tsallis", "recommended", "ratio", "Tsallis, adversary"]
    header += ["recommended, adversary", "ratio, adversary"]
    print(f"\n{common.table(header, lines)}\n")
    print("Ratios: mean over draws ± half of the 95 % interval.")
    print(f"written to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
