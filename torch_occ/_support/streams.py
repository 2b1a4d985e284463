"""Random numbers that are a function of seed, purpose and chunk.

A counter-based generator (Philox) gets a new key for every chunk of episodes. So a run can stop at
the end of a chunk and continue without saving the state of a generator, and the torch path and the
compiled path get the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.constants import CHUNK
from torch_occ._support.processes import for_each


class Purpose(IntEnum):
    """The use of a stream; different purposes have independent numbers."""

    EPISODES = 0  # per layer: action, loss, next state
    TABLES = 1  # whole loss tables, for full information
    WALKS = 2  # moves of the loss process itself


def stream(seed: int, purpose: Purpose, chunk: int) -> np.random.Generator:
    """The generator of one chunk."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, chunk)))


def uniforms(
    seeds: Sequence[int], purpose: Purpose, chunks: Sequence[int], shape: tuple[int, ...]
) -> Tensor:
    """Uniform numbers in [0, 1) for all episodes of some chunks.

    Returns:
        A tensor `(len(seeds), len(chunks) * CHUNK, *shape)`.
    """
    numbers = np.empty((len(seeds), len(chunks), CHUNK, *shape))

    def fill(n: int) -> None:
        philox = np.random.Philox(0)
        # One generator per seed gets new keys; a new Philox would gather entropy for nothing.
        generator, fresh = np.random.Generator(philox), philox.state
        for block, chunk in zip(numbers[n], chunks, strict=True):
            fresh["state"]["key"] = _key(seeds[n], purpose, chunk)
            philox.state = fresh
            generator.random(out=block)

    for_each(fill, len(seeds))
    return torch.from_numpy(numbers).flatten(1, 2)


def check_memory(seeds: int, per_episode: int) -> None:
    """Raise MemoryError if the random numbers of one chunk do not fit into the machine's memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return
    needed = 8 * CHUNK * per_episode * seeds
    if needed > memory:
        raise MemoryError(
            f"seeds: {CHUNK} episodes of {seeds:,} seeds need {needed / 1e9:,.1f} GB of random "
            f"numbers, and this machine has {memory / 1e9:,.1f} GB; play fewer seeds in one call, "
            "since a seed plays the same game in any batch"
        )


def _key(seed: int, purpose: Purpose, chunk: int) -> NDArray[np.uint64]:
    if seed < 0:
        raise ValueError(f"seeds: expected non-negative integers, got {seed}")
    return np.array([seed, chunk * len(Purpose) + purpose], dtype=np.uint64)
