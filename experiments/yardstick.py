"""experiments/yardstick.c: built in all ways that may be the fastest, and played.

No single set of options is the best for every size and processor. The vectorizer of a compiler may
gain a factor of two or lose one, so the benchmark measures all builds and takes the fastest.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import torch_occ as occ
from experiments.timing import Shape, in_turns

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


@dataclass(frozen=True)
class Build:
    """The yardstick as one compiler made it with some options."""

    name: str
    library: ctypes.CDLL

    @property
    def scalar(self) -> bool:
        """Whether the compiler was told to use no vector instructions."""
        return SCALAR[0] in self.name


@dataclass(frozen=True)
class Played:
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


def build(
    shape: Shape, library: Path, command: Sequence[str], source: str = "yardstick.c"
) -> ctypes.CDLL | None:
    """A source of this directory as a library for one size; None if the compiler refuses."""
    names = ("LAYERS", "WIDTH", "ACTIONS")
    sizes = [f"-D{name}={value}" for name, value in zip(names, shape, strict=True)]
    path = Path(__file__).with_name(source)
    done = subprocess.run(
        [*command, "-shared", "-fPIC", *sizes, "-o", library, path, "-lm"],
        capture_output=True,
        check=False,
    )
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


class Yardstick:
    """A game of Jin and Luo's regularizer for the C loop, with its random numbers ready."""

    def __init__(
        self, mdp: occ.LayeredMDP, mean: torch.Tensor, beta: float, numbers: torch.Tensor
    ) -> None:
        """`numbers` is `(seeds, episodes, L, 3)`, uniform as in the engine."""
        transitions = np.zeros((mdp.num_states, mdp.num_actions, max(mdp.layer_sizes)))
        for here, p in zip(mdp.layer_slices[:-1], mdp.transitions[:-1], strict=True):
            transitions[here] = p.numpy()
        self.inputs = transitions, mean.contiguous().numpy()
        self.numbers, self.start = numbers.contiguous().numpy(), occ.interior_point(mdp).numpy()
        self.constants = [ctypes.c_double(x) for x in (mdp.num_actions**-0.5, beta, 1.0)]

    def play(
        self, library: ctypes.CDLL, seeds: int | None = None, episodes: int | None = None
    ) -> Played:
        """Play the first seeds, one after the other, for the first episodes."""
        results = np.zeros((len(self.numbers[:seeds]), 3))
        count = self.numbers.shape[1] if episodes is None else episodes
        for numbers, result in zip(self.numbers[:seeds], results, strict=True):
            q = self.start.copy()
            arrays = [pointer(x) for x in (*self.inputs, numbers)]
            span = ctypes.c_long(0), ctypes.c_long(count)
            library.play(*arrays, *span, *self.constants, pointer(q), pointer(result))
        return Played(*results.T)

    def fastest(self, candidates: Sequence[Build], seeds: int = 2, repeats: int = 5) -> Build:
        """The build that plays the first seeds in the least time."""
        contestants = {
            build.name: lambda build=build: self.play(build.library, seeds) for build in candidates
        }
        found = in_turns(contestants, repeats)
        return min(candidates, key=lambda build: found[build.name])


def pointer(array: NDArray[np.float64]) -> ctypes.c_void_p:
    """The address of a contiguous array, for C."""
    return array.ctypes.data_as(ctypes.c_void_p)
