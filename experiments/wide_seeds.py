"""What do lanes gain with sparse MDPs?

    python -m experiments.wide_seeds                             everything; about five minutes
    python -m experiments.wide_seeds --worlds lake-4 cliff       some MDPs

FTRL plays many seeds of sparse MDPs in the engine: eight at a time in the lanes of a vector, or one
after the other in plain arrays. The script prints microseconds per episode and seed, in processor
time of one thread, with all that Python does. All take turns, and the smallest time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import tyro

import torch_occ as occ
from experiments.common import machine, table
from experiments.timing import in_turns
from experiments.wide_models import grid, losses, taxi

#: How to make an MDP; seeds and episodes of a measurement.
World = tuple[Callable[[], occ.LayeredMDP], int, int]

WORLDS: dict[str, World] = {
    "lake-4": (lambda: occ.LayeredMDP.from_gymnasium("FrozenLake-v1", horizon=20), 64, 256),
    "cliff": (lambda: occ.LayeredMDP.from_gymnasium("CliffWalking-v1", horizon=15), 64, 128),
    "lake-8": (lambda: occ.LayeredMDP.from_gymnasium("FrozenLake8x8-v1", horizon=20), 64, 32),
    "grid-3": (lambda: grid(3, 20), 64, 256),
    "grid-10": (lambda: grid(10, 20), 64, 16),
    "taxi": (lambda: taxi(20), 16, 8),
    "grid-22": (lambda: grid(22, 20), 16, 8),
    "grid-31": (lambda: grid(31, 20), 16, 4),
}


@dataclass
class Args:
    """The measurements."""

    worlds: tuple[str, ...] = ()
    """names of the MDPs; all of them if none is given"""
    betas: tuple[float, ...] = (1280.0, 0.01)
    """weights of the log-barrier; the paper's is 64 L"""
    repeats: int = 3
    """turns, of which the quickest counts"""
    shorten: int = 1
    """the numbers of episodes are divided by this"""


def contestant(
    mdp: occ.LayeredMDP, beta: float, seeds: int, episodes: int, lanes: bool
) -> Callable[[], Any]:
    """A function that plays, in lanes or in plain arrays."""
    noise = occ.BernoulliLosses(losses(mdp, 1))

    def play() -> None:
        with patch("torch_occ.game.players.suits_lanes", lambda _: lanes):
            learner = occ.FTRL(mdp, occ.jin_luo(mdp, beta=beta))
            history = occ.simulate(mdp, learner, noise, episodes, range(seeds), backend="engine")
        if float(history.uncertified.max()):
            raise RuntimeError(f"a step of {mdp} was not certified")

    return play


def measure(name: str, beta: float, repeats: int, shorten: int) -> list[str]:
    """One row of the table."""
    make, seeds, episodes = WORLDS[name]
    mdp, episodes = make(), max(1, episodes // shorten)
    entries = sum(len(p) for p in mdp.to_sparse().probabilities[1:-1])
    found = in_turns(
        {
            f"{kind}, {count}": contestant(mdp, beta, count, episodes, kind == "lanes")
            for count in (seeds, 1)
            for kind in ("plain", "lanes")
        },
        repeats,
    )
    times = [
        1e6 * took / episodes / count
        for took, count in zip(found.values(), (seeds, seeds, 1, 1), strict=True)
    ]
    return [
        *(name, f"{mdp.num_pairs:,}", f"{entries:,}", f"{beta:g}", f"{seeds}"),
        *(f"{x:,.0f}" for x in times[:2]),
        f"{times[0] / times[1]:.1f}",
        *(f"{x:,.0f}" for x in times[2:]),
    ]


def main(args: Args) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    print(f"{machine()}; microseconds per episode and seed, processor time of one thread\n")
    rows = []
    for name in args.worlds or WORLDS:
        for beta in args.betas:
            rows.append(measure(name, beta, args.repeats, args.shorten))
            print("  ".join(rows[-1]), flush=True)
    header = ["MDP", "pairs", "nnz(P)", "beta", "seeds", "plain", "lanes", "ratio"]
    print(f"\n{table([*header, 'one seed, plain', 'one seed'], rows)}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
