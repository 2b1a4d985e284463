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
from experiments.common import machine, run_directory, table, write_csv, write_figure
from experiments.games import write_configuration
from torch_occ.game.history import student


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
    shapes: tuple[tuple[int, int, int], ...] = (
        (5, 3, 2),
        (4, 4, 3),
        (3, 3, 3),
        (2, 8, 3),
        (5, 5, 4),
    )
    """horizon, width and actions"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def regrets(args: Args, shape: tuple[int, int, int], name: str) -> torch.Tensor:
    """Regret at T in both worlds, mean over seeds, `(draws, 2)`."""
    found = []
    for seed in range(args.seed, args.seed + args.draws):
        mdp = occ.LayeredMDP.random(*shape, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=mdp.dtype, generator=generator)
        learner = occ.recommended(mdp) if name == "recommended" else occ.FTRL.tsallis(mdp)
        worlds: tuple[occ.LossProcess, ...] = (occ.BernoulliLosses(mean), occ.GreedyAdversary())
        found.append(
            [
                float(
                    occ.simulate(
                        mdp,
                        learner,
                        losses,
                        args.episodes,
                        range(args.seeds),
                        checkpoints=[args.episodes],
                    )
                    .regret[:, -1]
                    .mean()
                )
                for losses in worlds
            ]
        )
    return torch.tensor(found, dtype=torch.float64)


def main(args: Args) -> Path:
    """Play both learners, and compare them draw by draw."""
    from matplotlib.figure import Figure

    directory = run_directory(args.root, "untuned", args.seed)
    write_configuration(directory, args)
    torch.set_num_threads(1)
    print(f"T = {args.episodes:,}, {args.draws} draws of each shape; {machine()}", flush=True)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines, rows = [], []
    for i, shape in enumerate(args.shapes):
        tsallis, ours = (regrets(args, shape, name) for name in ("tsallis", "recommended"))
        ratio = ours / tsallis
        half = torch.zeros(2, dtype=torch.float64)
        if args.draws > 1:
            half = student(args.draws - 1) * ratio.std(0) / args.draws**0.5
        label = ", ".join(map(str, shape))
        cells = [label]
        for world, name in enumerate(("stochastic", "adversary")):
            mean, width = float(ratio[:, world].mean()), float(half[world])
            cells += [f"{tsallis[:, world].mean():,.0f}", f"{ours[:, world].mean():,.0f}"]
            cells += [f"{mean:.2f} ± {width:.2f}"]
            rows.append({"shape": label, "world": name, "ratio": mean, "half_width": width})
            axes.errorbar(
                [mean], [i + 0.15 * (1 - 2 * world)], xerr=[width], fmt="os"[world],
                color=f"C{3 * world}", capsize=3, label=name if i == 0 else None,
            )  # fmt: skip
        lines.append(cells)
        print(f"  {label}: stochastic {cells[3]}, adversary {cells[6]}", flush=True)
    axes.axvline(1.0, color="0.6", linewidth=0.8)
    axes.set_yticks(range(len(args.shapes)), [x[0] for x in lines])
    axes.set(xlabel="regret of recommended(mdp) over that of FTRL.tsallis(mdp), at T",
             ylabel="horizon, width, actions")  # fmt: skip
    axes.legend()
    write_csv(directory / "untuned.csv", rows)
    write_figure(directory / "untuned.png", figure)
    header = ["shape", "Tsallis", "recommended", "ratio", "Tsallis, adversary"]
    header += ["recommended, adversary", "ratio, adversary"]
    print(f"\n{table(header, lines)}\n\nRatios: mean over draws ± half of the 95 % interval.")
    print(f"written to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
