"""Whole simulations beside the C loop of the same game, and beside the floor of its arithmetic.

Part of experiments/benchmark.py. A simulation is timed with all that Python does for it, and with
the drawing of its random numbers. The C loop (experiments/yardstick.c) gets its random numbers for
free. Both use one thread. Times are processor times, because the machine may be shared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_occ as occ
from experiments.common import table
from experiments.floor import Throughput, counting_library, measure_floor, measure_throughput
from experiments.timing import Shape, game, in_turns
from experiments.yardstick import Build, Played, Yardstick, builds
from torch_occ._support.constants import CHUNK
from torch_occ._support.streams import Purpose, uniforms

#: Episodes of each of many seeds. One seed alone plays ALONE times as many.
SHAPES: dict[Shape, int] = {
    (3, 3, 3): 4096,
    (5, 5, 4): 1024,
    (10, 10, 5): 256,
    (10, 20, 10): 64,
}
SEEDS, ALONE = 64, 8

Row = dict[str, Any]


def measure_loop(
    repeats: int,
    shapes: Sequence[Shape] = tuple(SHAPES),
    seeds: int = SEEDS,
    budget: float = 10.0,
) -> tuple[list[Row], Throughput | None]:
    """All sizes, with the paper's beta and a small one, with many seeds and with one.

    The budget is in seconds, for one row. Without a compiler the columns of C are empty.
    """
    rows = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        throughput = measure_throughput(directory)
        for shape in shapes:
            candidates, counting = builds(shape, directory), counting_library(shape, directory)
            for beta in (64.0 * shape[0], 1.0):
                for count, episodes in ((seeds, SHAPES[shape]), (1, ALONE * SHAPES[shape])):
                    match = Match(shape, beta, count, episodes)
                    row = match.row | match.time(candidates, repeats, budget)
                    if counting is not None and throughput is not None:
                        floor = measure_floor(counting, match.yardstick, throughput)
                        row |= floor.row() | {"engine / floor": row["engine, us"] / floor.us}
                    rows.append(row)
                    print("  ".join(f"{key} {_short(x)}" for key, x in row.items()), flush=True)
    return rows, throughput


class Match:
    """One game, for the engine and for the C loop, with the same random numbers."""

    def __init__(self, shape: Shape, beta: float, seeds: int, episodes: int) -> None:
        self.mdp, self.mean = game(shape)
        self.learner = occ.FTRL(self.mdp, occ.jin_luo(self.mdp, beta=beta))
        self.seeds, self.episodes = seeds, episodes
        self.yardstick = Yardstick(self.mdp, self.mean, beta, self.draw()[:, :episodes])
        self.row: Row = {"size": str(shape), "beta": beta, "seeds": seeds}

    def draw(self) -> torch.Tensor:
        """The random numbers of all seeds, in whole chunks."""
        chunks = range(-(-self.episodes // CHUNK))
        return uniforms(range(self.seeds), Purpose.EPISODES, chunks, (self.mdp.horizon, 3))

    def simulate(self) -> occ.History:
        """The whole simulation by the engine."""
        return occ.simulate(
            self.mdp,
            self.learner,
            occ.BernoulliLosses(self.mean),
            self.episodes,
            range(self.seeds),
            backend="engine",
            checkpoints=[self.episodes],
        )

    def time(self, candidates: Sequence[Build], repeats: int, budget: float) -> Row:
        """Microseconds per episode and seed of all contestants, and how far their games differ."""
        contestants: dict[str, Any] = {"engine": self.simulate, "drawing": self.draw}
        chosen = {}
        for name, group in (("C", candidates), ("scalar C", [x for x in candidates if x.scalar])):
            if group:
                chosen[name] = best = self.yardstick.fastest(group)
                contestants[name] = lambda best=best: self.yardstick.play(best.library)
        found = in_turns(contestants, repeats, budget)
        drawn = self.seeds * CHUNK * -(-self.episodes // CHUNK)
        row: Row = {"engine, us": 1e6 * found["engine"] / (self.seeds * self.episodes)}
        for name in ("C", "scalar C"):
            known = name in chosen
            row[f"{name}, us"] = 1e6 * found[name] / (self.seeds * self.episodes) if known else None
            row[f"engine / {name}"] = found["engine"] / found[name] if known else None
        row["drawing, us"] = 1e6 * found["drawing"] / drawn
        row |= {f"build of {name}": best.name for name, best in chosen.items()}
        played = self.yardstick.play(chosen["C"].library) if chosen else None
        return row | self.compare(self.simulate(), played)

    def compare(self, history: occ.History, played: Played | None) -> Row:
        """Newton steps per episode, and the difference of the expected losses of each seed.

        Two correct programs differ by rounding. A run amplifies that by its importance weights, and
        once a draw falls between the two, the seed plays another game. So the median counts.
        """
        row: Row = {"Newton steps": float(history.newton_steps[:, -1].mean())}
        if played is not None:
            incurred = (history.regret[:, -1] + history.comparator[:, -1]).numpy()
            apart = np.abs(incurred / played.expected - 1)
            row["Newton steps of C"] = float(played.newton_steps.mean() / self.episodes)
            row["factorizations of C"] = float(played.factorizations.mean() / self.episodes)
            row["expected loss, median difference"] = float(np.median(apart))
            row["expected loss, largest difference"] = float(apart.max())
        return row


def report_loop(rows: Sequence[Row], throughput: Throughput | None) -> str:
    """The rows as tables: times and ratios, then what was counted for the floor."""
    times = (
        "seeds",
        "Newton steps",
        "engine, us",
        "C, us",
        "engine / C",
        "scalar C, us",
        "engine / scalar C",
        "floor, us",
        "engine / floor",
        "drawing, us",
        "build of C",
    )
    counts = (
        "seeds",
        "Newton steps of C",
        "factorizations of C",
        "additions",
        "products",
        "divisions",
        "roots",
        "sums and products, us",
        "divisions and roots, us",
        "expected loss, median difference",
    )
    text = "Per episode and seed, in microseconds; ratios within this run.\n\n"
    text += f"{_columns(rows, times)}\n\n{_columns(rows, counts)}"
    if throughput is not None:
        text += (
            f"\n\nThis processor, in nanoseconds per element: {throughput.fused:.3g} for a fused "
            f"product and addition, {throughput.division:.3g} for a division, "
            f"{throughput.root:.3g} for a root."
        )
    return text


def _columns(rows: Sequence[Row], keys: Sequence[str]) -> str:
    shown = [key for key in keys if any(row.get(key) is not None for row in rows)]
    return table(
        ["size", "beta", *shown],
        [
            [row["size"], f"{row['beta']:g}", *(_short(row.get(key)) for key in shown)]
            for row in rows
        ],
        left=(0, *(2 + i for i, key in enumerate(shown) if key.startswith("build"))),
    )


def _short(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
