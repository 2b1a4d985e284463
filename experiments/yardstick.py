"""Whole simulations beside a C loop of the same game, for experiments/benchmark.py.

A simulation is timed with all that Python does for it, and with the drawing of its random numbers.
The C loop (experiments/yardstick.c) gets its random numbers for free. Both use one thread. Times
are processor times, because the machine may be shared. No single set of options is the best for
every size and processor: the vectorizer of a compiler may gain a factor of two or lose one. So all
builds are measured, and the fastest counts.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import torch_occ as occ
from experiments import common
from torch_occ._support.constants import CHUNK
from torch_occ._support.streams import Purpose, uniforms

Shape = tuple[int, int, int]
Row = dict[str, Any]


#: Options of all builds. Without the others `sqrt` and largest numbers are not vectorized.
COMMON = (
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffinite-math-only",
    "-fno-signed-zeros",
)
SCALAR = ("-fno-tree-vectorize", "-fno-tree-slp-vectorize")
NARROW, WIDE = "-mprefer-vector-width=256", "-mprefer-vector-width=512"
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("-O2", *SCALAR, "-DHALF=1"),
    ("-O3", *SCALAR),
    ("-O3", *SCALAR, "-DHALF=1"),
    ("-O2", NARROW, "-DPAD=4"),
    ("-O3", NARROW),
    ("-O3", WIDE),
    ("-O3", NARROW, "-DPAD=4"),
    ("-O3", WIDE, "-DPAD=8"),
    ("-O3", NARROW, "-fno-tree-slp-vectorize", "-DPAD=4"),
    ("-O3", WIDE, "-fno-tree-slp-vectorize", "-DPAD=8"),
    ("-O3", NARROW, "-fassociative-math"),
    ("-O3", NARROW, "-fassociative-math", "-DPAD=4"),
)

#: Episodes of each of many seeds. One seed alone plays ALONE times as many.
SHAPES: dict[Shape, int] = {
    (3, 3, 3): 4096,
    (5, 5, 4): 1024,
    (10, 10, 5): 256,
    (10, 20, 10): 64,
}
SEEDS, ALONE = 64, 8


class Build(NamedTuple):
    """The yardstick as one compiler made it with some options."""

    name: str
    library: ctypes.CDLL

    @property
    def scalar(self) -> bool:
        """Whether the compiler was told to use no vector instructions."""
        return SCALAR[0] in self.name


class Played(NamedTuple):
    """What the yardstick reports of some seeds: sums over episodes, one entry per seed."""

    newton_steps: NDArray[np.float64]
    factorizations: NDArray[np.float64]
    expected: NDArray[np.float64]


def compilers() -> list[str]:
    """The C compilers of this machine, each once."""
    found: dict[Path, str] = {}
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if path is not None:
            found.setdefault(Path(path).resolve(), name)
    return list(found.values())


def build(shape: Shape, library: Path, command: Sequence[str]) -> ctypes.CDLL | None:
    """yardstick.c as a library for one size; None if the compiler refuses."""
    names = ("LAYERS", "WIDTH", "ACTIONS")
    sizes = [f"-D{name}={value}" for name, value in zip(names, shape, strict=True)]
    source = Path(__file__).with_name("yardstick.c")
    command = [*command, "-shared", "-fPIC", *sizes, "-o", str(library), str(source), "-lm"]
    done = subprocess.run(command, capture_output=True, check=False)
    return None if done.returncode else ctypes.CDLL(str(library.absolute()))


def builds(shape: Shape, directory: Path) -> list[Build]:
    """All builds for one size. Options that a compiler does not know cost their build."""
    found: list[Build] = []
    for compiler in compilers():
        for options in OPTIONS:
            library = directory / f"yardstick_{'_'.join(map(str, shape))}_{len(found)}.so"
            loaded = build(shape, library, [compiler, *COMMON, *options])
            if loaded is not None:
                found.append(Build(" ".join([compiler, *options]), loaded))
    return found


class Match:
    """One game, for the engine and for the C loop, with the same random numbers."""

    def __init__(self, shape: Shape, beta: float, seeds: int, episodes: int) -> None:
        self.mdp = mdp = occ.LayeredMDP.random(*shape, seed=0)
        self.mean = common.random_means(mdp, 1)
        self.learner = occ.FTRL(mdp, occ.jin_luo(mdp, beta=beta))
        self.seeds, self.episodes = seeds, episodes
        self.row: Row = {"size": str(shape), "beta": beta, "seeds": seeds}
        # For C:
        transitions = np.zeros((mdp.num_states, mdp.num_actions, max(mdp.layer_sizes)))
        for here, p in zip(mdp.layer_slices[:-1], mdp.transitions[:-1], strict=True):
            transitions[here] = p.numpy()
        self.inputs = transitions, self.mean.contiguous().numpy()
        self.numbers = self.draw()[:, :episodes].contiguous().numpy()
        self.constants = [ctypes.c_double(x) for x in (mdp.num_actions**-0.5, beta, 1.0)]

    def draw(self) -> torch.Tensor:
        """The random numbers of all seeds, in whole chunks: `(seeds, episodes, L, 3)`, uniform."""
        chunks = range(-(-self.episodes // CHUNK))
        return uniforms(range(self.seeds), Purpose.EPISODES, chunks, (self.mdp.horizon, 3))

    def simulate(self) -> occ.History:
        """The whole simulation by the engine."""
        losses, seeds, T = occ.BernoulliLosses(self.mean), range(self.seeds), self.episodes
        options: dict[str, Any] = {"backend": "engine", "checkpoints": [T]}
        return occ.simulate(self.mdp, self.learner, losses, T, seeds, **options)

    def play(self, library: ctypes.CDLL, seeds: int | None = None) -> Played:
        """The first seeds by the C loop, one after the other."""
        results = np.zeros((len(self.numbers[:seeds]), 3))
        for numbers, result in zip(self.numbers[:seeds], results, strict=True):
            q = occ.interior_point(self.mdp).numpy().copy()
            arrays = [_pointer(x) for x in (*self.inputs, numbers)]
            span = ctypes.c_long(0), ctypes.c_long(self.episodes)
            library.play(*arrays, *span, *self.constants, _pointer(q), _pointer(result))
        return Played(*results.T)

    def fastest(self, candidates: Sequence[Build]) -> Build:
        """The build that plays two seeds in the least time."""
        games = {x.name: partial(self.play, x.library, 2) for x in candidates}
        found = common.in_turns(games, 5)
        return min(candidates, key=lambda x: found[x.name])

    def time(self, candidates: Sequence[Build], repeats: int, budget: float) -> Row:
        """Microseconds per episode and seed of all contestants, and how far their games differ."""
        contestants: dict[str, Any] = {"engine": self.simulate, "drawing": self.draw}
        chosen = {}
        for name, group in (("C", candidates), ("scalar C", [x for x in candidates if x.scalar])):
            if group:
                chosen[name] = best = self.fastest(group)
                contestants[name] = partial(self.play, best.library)
        found = common.in_turns(contestants, repeats, budget)
        drawn, count = self.seeds * CHUNK * -(-self.episodes // CHUNK), self.seeds * self.episodes
        row: Row = {"engine, us": 1e6 * found["engine"] / count}
        for name in ("C", "scalar C"):
            row[f"{name}, us"] = 1e6 * found[name] / count if name in chosen else None
            row[f"engine / {name}"] = found["engine"] / found[name] if name in chosen else None
        row["drawing, us"] = 1e6 * found["drawing"] / drawn
        row |= {f"build of {name}": best.name for name, best in chosen.items()}
        played = self.play(chosen["C"].library) if chosen else None
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


def _pointer(array: NDArray[np.float64]) -> ctypes.c_void_p:
    """The address of a contiguous array, for C."""
    return array.ctypes.data_as(ctypes.c_void_p)


def measure_loop(
    repeats: int, shapes: Sequence[Shape] = tuple(SHAPES), seeds: int = SEEDS, budget: float = 10.0
) -> list[Row]:
    """All sizes, with the paper's beta and a small one, with many seeds and with one.

    The budget is in seconds, for one row. Without a compiler the columns of C are empty.
    """
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for shape in shapes:
            candidates = builds(shape, Path(directory))
            for beta in (64.0 * shape[0], 1.0):
                for count, episodes in ((seeds, SHAPES[shape]), (1, ALONE * SHAPES[shape])):
                    match = Match(shape, beta, count, episodes)
                    rows.append(match.row | match.time(candidates, repeats, budget))
                    print(
                        "  ".join(f"{key} {_short(x)}" for key, x in rows[-1].items()), flush=True
                    )
    return rows


def report_loop(rows: Sequence[Row]) -> str:
    """The rows as a table."""
    keys = ["seeds", "Newton steps", "engine, us", "C, us", "engine / C", "scalar C, us"]
    keys += ["engine / scalar C", "drawing, us", "factorizations of C"]
    keys += ["expected loss, median difference", "build of C"]
    shown = [key for key in keys if any(row.get(key) is not None for row in rows)]
    cells = [
        [row["size"], f"{row['beta']:g}", *(_short(row.get(key)) for key in shown)] for row in rows
    ]
    text = "Per episode and seed, in microseconds; ratios within this run.\n\n"
    return text + common.table(["size", "beta", *shown], cells, left=(0, 1 + len(shown)))


def _short(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
