"""Random numbers by name: (seed, purpose, chunk) -> the same numbers, whenever and wherever they
are asked for.

A counter-based generator (Philox) is keyed afresh for every chunk of episodes, so a run can stop at
a chunk's edge and continue without a generator state to restore, and the torch path and the
compiled path are fed the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.spacing import CHUNK
from torch_occ._support.threads import for_each


class Purpose(IntEnum):
    """What a stream is for; no two purposes share numbers."""

    EPISODES = 0  # per layer: action, loss, next state
    TABLES = 1  # whole loss tables, for full information
    WALKS = 2  # the environment's own moves


def stream(seed: int, purpose: Purpose, chunk: int) -> np.random.Generator:
    """The generator of one chunk."""
    return np.random.Generator(np.random.Philox(key=_key(seed, purpose, chunk)))


def uniforms(
    seeds: Sequence[int], purpose: Purpose, chunks: Sequence[int], shape: tuple[int, ...]
) -> Tensor:
    """Uniform numbers in [0, 1) for the episodes of some chunks, `(N, len(chunks) * CHUNK,
    *shape)`.
    """
    numbers = np.empty((len(seeds), len(chunks), CHUNK, *shape))

    def fill(n: int) -> None:
        philox = np.random.Philox(0)
        # keyed anew, it does not gather entropy that nobody asked for
        generator, fresh = np.random.Generator(philox), philox.state
        for block, chunk in zip(numbers[n], chunks, strict=True):
            fresh["state"]["key"] = _key(seeds[n], purpose, chunk)
            philox.state = fresh
            generator.random(out=block)

    for_each(fill, len(seeds))
    return torch.from_numpy(numbers).flatten(1, 2)


def _key(seed: int, purpose: Purpose, chunk: int) -> NDArray[np.uint64]:
    if seed < 0:
        raise ValueError(f"seeds: expected non-negative integers, got {seed}")
    return np.array([seed, chunk * len(Purpose) + purpose], dtype=np.uint64)


def invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """The index drawn by a uniform number from cumulative (unnormalized) probabilities: `(N, K)`,
    `(N,)` -> `(N,)`.
    """
    # Just below one, so that the product stays below the total and an entry of probability zero is
    # never drawn.
    target = uniform.clamp(max=1 - 4 * torch.finfo(uniform.dtype).eps) * cumulative[..., -1]
    return (cumulative <= target.unsqueeze(-1)).sum(-1)
