"""The arithmetic floor of an episode: no program can do the yardstick's arithmetic in less time.

The arithmetic is counted, by playing experiments/yardstick.c with numbers that count. The
throughput of this processor is measured, by experiments/throughput.c, with vectors of 32 and of
64 bytes. All lanes of a vector are taken to be in use, by as many seeds.

Counted are additions, products, divisions and roots. A product and an addition are taken to be one
fused instruction wherever there are enough of both. Not counted are loads and stores, comparisons
and selections, random numbers, and lanes that wait for others.
Fused instructions and divisions use different parts of a processor, so the floor is the larger of
their two times. Most processors share something between them, and then the sum is more realistic.

It is the floor of this algorithm: a program that replaces roots and divisions by iterations of
products can fall below the second of the two times.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.timing import Shape, in_turns
from experiments.yardstick import NARROW, WIDE, Yardstick, build, compilers, pointer


@dataclass(frozen=True)
class Throughput:
    """Nanoseconds per element, with the better of the two vector lengths."""

    fused: float
    division: float
    root: float


@dataclass(frozen=True)
class Floor:
    """The arithmetic of one episode of one seed, and microseconds for its two parts."""

    additions: float
    products: float
    divisions: float
    roots: float
    fused_us: float
    divided_us: float

    @property
    def us(self) -> float:
        """The floor: both parts at the same time."""
        return max(self.fused_us, self.divided_us)

    def row(self) -> dict[str, float]:
        """All of it, by the names of the benchmark's columns."""
        return {
            "floor, us": self.us,
            "additions": self.additions,
            "products": self.products,
            "divisions": self.divisions,
            "roots": self.roots,
            "sums and products, us": self.fused_us,
            "divisions and roots, us": self.divided_us,
        }


def measure_throughput(
    directory: Path, repeats: int = 9, rounds: int = 20_000
) -> Throughput | None:
    """Measure this processor; None without a C compiler."""
    contestants: dict[str, Callable[[], object]] = {}
    elements: dict[str, int] = {}
    for compiler in compilers()[:1]:
        for width, size in ((NARROW, 32), (WIDE, 64)):
            options = [compiler, "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast"]
            path = directory / f"throughput_{size}.so"
            library = build((0, 0, 0), path, [*options, width, f"-DBYTES={size}"], "throughput.c")
            if library is not None:
                for name in ("fused", "division", "root"):
                    function = getattr(library, name)
                    function.restype = ctypes.c_double
                    contestants[f"{name} {size}"] = partial(function, ctypes.c_long(rounds))
                    elements[f"{name} {size}"] = library.elements()
    if not contestants:
        return None
    found = in_turns(contestants, repeats)
    each = {name: 1e9 * time / rounds / elements[name] for name, time in found.items()}

    def best(kind: str) -> float:
        return min(time for name, time in each.items() if name.startswith(kind))

    return Throughput(best("fused"), best("division"), best("root"))


def counting_library(shape: Shape, directory: Path) -> ctypes.CDLL | None:
    """The yardstick with numbers that count; None without a C++ compiler."""
    compiler, library = shutil.which("c++"), directory / f"counting_{'_'.join(map(str, shape))}.so"
    if compiler is None:
        return None
    return build(shape, library, [compiler, "-O1", "-DHALF=1"], "counting.cpp")


def measure_floor(
    library: ctypes.CDLL, yardstick: Yardstick, throughput: Throughput, seeds: int = 4
) -> Floor:
    """The floor of one game, with the arithmetic of its first seeds."""

    def counts(episodes: int | None) -> NDArray[np.float64]:
        found = np.zeros((2, 4))
        library.counted(pointer(found[0]))
        yardstick.play(library, seeds, episodes)
        library.counted(pointer(found[1]))
        return found[1] - found[0]

    played = yardstick.numbers[:seeds].shape[0] * yardstick.numbers.shape[1]
    additions, products, divisions, roots = (counts(None) - counts(0)) / played
    return Floor(
        additions,
        products,
        divisions,
        roots,
        1e-3 * throughput.fused * max(additions, products),
        1e-3 * (throughput.division * divisions + throughput.root * roots),
    )
