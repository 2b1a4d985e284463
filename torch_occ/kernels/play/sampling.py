"""Gamma and Beta variates from numbers that are a function of a key, compiled.

A learner that samples needs random numbers of its own: a number of them that is not known before,
and the same in both backends. So nothing is consumed from a stream. `key_of` hashes the run's seed,
the episode and the item (for example a pair), and `uniform` hashes this key and a counter. Hashes
are the output function of SplitMix64 (Steele, Lea and Flood, 2014). A run that continues from a
file needs no saved state.

torch_occ.game.learners.sampling has the same functions for arrays, without Numba.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import GOLDEN, MIX_ONE, MIX_TWO
from torch_occ.kernels.layout import kernel

_GOLDEN, _ONE, _TWO = np.uint64(GOLDEN), np.uint64(MIX_ONE), np.uint64(MIX_TWO)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@kernel
def mixed(z: np.uint64) -> np.uint64:
    """The output function of SplitMix64: a bijection of 64 bits."""
    z = (z ^ (z >> _30)) * _ONE
    z = (z ^ (z >> _27)) * _TWO
    return z ^ (z >> _31)


@kernel
def key_of(seed: int, t: int, item: int) -> np.uint64:
    """The key of one item in one episode of one seed."""
    key = mixed(np.uint64(seed) + _GOLDEN)
    key = mixed(key + (np.uint64(t) + np.uint64(1)) * _GOLDEN)
    return mixed(key + (np.uint64(item) + np.uint64(1)) * _GOLDEN)


@kernel
def uniform(key: np.uint64, counter: int) -> float:
    """A uniform number in (0, 1), never 0 or 1."""
    bits = mixed(key + (np.uint64(counter) + np.uint64(1)) * _GOLDEN)
    return (np.float64(bits >> _11) + 0.5) * 2.0**-53


@kernel
def gamma(key: np.uint64, shape: float) -> float:
    """A Gamma(shape, 1) variate for a shape > 0 (Marsaglia and Tsang, 2000).

    A shape below 1 is raised by 1, and the variate multiplied by U^(1/shape).
    """
    raised = shape if shape >= 1.0 else shape + 1.0
    d = raised - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    counter = 1
    while True:
        radius = np.sqrt(-2.0 * np.log(uniform(key, counter)))
        normal = radius * np.cos(2.0 * np.pi * uniform(key, counter + 1))
        root = 1.0 + c * normal
        if root > 0.0:
            v = root * root * root
            exponent = 0.5 * normal * normal + d - d * v + d * np.log(v)
            if np.log(uniform(key, counter + 2)) < exponent:
                break
        counter += 3
    if shape < 1.0:
        return d * v * uniform(key, 0) ** (1.0 / shape)
    return d * v


@kernel
def beta(seed: int, t: int, item: int, a: float, b: float) -> float:
    """A Beta(a, b) variate: X / (X + Y) of two Gamma variates, the items 2 item and 2 item + 1."""
    x = gamma(key_of(seed, t, 2 * item), a)
    y = gamma(key_of(seed, t, 2 * item + 1), b)
    return x / (x + y)
