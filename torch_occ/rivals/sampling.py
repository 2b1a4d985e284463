"""Gamma and Beta variates of learners that sample, for arrays of items.

The random numbers are a function of the run's seed, the episode and the item; see
torch_occ.engine.draws, the compiled twin. Both backends get the same variates up to the
rounding of logarithms and cosines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.constants import GOLDEN, MIX_ONE, MIX_TWO

Keys = NDArray[np.uint64]
Floats = NDArray[np.float64]

_GOLDEN, _ONE, _TWO = np.uint64(GOLDEN), np.uint64(MIX_ONE), np.uint64(MIX_TWO)


def mixed(z: Keys) -> Keys:
    """The output function of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * _ONE
    z = (z ^ (z >> np.uint64(27))) * _TWO
    return z ^ (z >> np.uint64(31))


def keys_of(seeds: Sequence[int], t: int, items: int) -> Keys:
    """The keys of the items 0, ..., items - 1 in one episode: `(N, items)`."""
    one = np.ones(1, np.uint64)
    key = mixed(np.array(seeds, np.uint64) + _GOLDEN)
    key = mixed(key + (np.uint64(t) + one) * _GOLDEN)
    return mixed(key[:, None] + np.arange(1, items + 1, dtype=np.uint64) * _GOLDEN)


def uniform(key: Keys, counter: int) -> Floats:
    """A uniform number in (0, 1) for every key."""
    bits = mixed(key + np.full(1, counter + 1, np.uint64) * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gammas(key: Keys, shape: Floats) -> Floats:
    """A Gamma(shape, 1) variate for every key; the shapes are positive."""
    raised = np.where(shape >= 1.0, shape, shape + 1.0)
    d = raised - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    found, open_, counter = np.empty_like(d), np.ones(d.shape, bool), 1
    while open_.any():
        mine, each, slope = key[open_], d[open_], c[open_]
        normal = np.sqrt(-2.0 * np.log(uniform(mine, counter)))
        normal *= np.cos(2.0 * np.pi * uniform(mine, counter + 1))
        root = 1.0 + slope * normal
        v = np.where(root > 0.0, root * root * root, 1.0)
        exponent = 0.5 * normal * normal + each - each * v + each * np.log(v)
        accepted = (root > 0.0) & (np.log(uniform(mine, counter + 2)) < exponent)
        places = np.flatnonzero(open_)[accepted]
        found.flat[places] = (each * v)[accepted]
        open_.flat[places] = False
        counter += 3
    boost = uniform(key, 0) ** (1.0 / np.minimum(shape, 1.0))
    return np.where(shape >= 1.0, found, found * boost)


def betas(seeds: Sequence[int], t: int, a: Tensor, b: Tensor) -> Tensor:
    """A Beta(a, b) variate for every entry of `(N, ...)`, one row per seed, at episode t."""
    first, second = (x.detach().cpu().double().flatten(1).numpy() for x in (a, b))
    keys = keys_of(seeds, t, 2 * first.shape[1])
    x, y = gammas(keys[:, 0::2], first), gammas(keys[:, 1::2], second)
    return torch.from_numpy(x / (x + y)).to(a).view_as(a)
