"""Gamma and Beta variates from numbers that are a function of a key, compiled.

A learner that samples needs random numbers of its own: a number of them that is not known before,
and a function of its seed alone. So nothing is consumed from a stream. `key_of` hashes the run's
seed, the episode and the item, and `uniform` hashes this key and a counter.
Hashes are the output function of SplitMix64 (Steele, Lea and Flood, 2014). A run that continues
from a file needs no saved state.
"""

from __future__ import annotations

import math

import numpy as np

from torch_occ._support.constants import GOLDEN, MIX_ONE, MIX_TWO
from torch_occ.engine.layout import routine

_GOLDEN, _ONE, _TWO = np.uint64(GOLDEN), np.uint64(MIX_ONE), np.uint64(MIX_TWO)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


#: The coefficients of sin(x) / x in powers of x^2, as many as count for x <= pi / 2.
_SINE = np.array([(-1.0) ** k / math.factorial(2 * k + 1) for k in range(11)])


@routine(inline=True)
def mixed(z: np.uint64) -> np.uint64:
    """The output function of SplitMix64: a bijection of 64 bits."""
    z = (z ^ (z >> _30)) * _ONE
    z = (z ^ (z >> _27)) * _TWO
    return z ^ (z >> _31)


@routine(inline=True)
def episode_key(seed: int, t: int) -> np.uint64:
    """The key of one episode of one seed."""
    key = mixed(np.uint64(seed) + _GOLDEN)
    return mixed(key + (np.uint64(t) + np.uint64(1)) * _GOLDEN)


@routine(inline=True)
def key_of(episode: np.uint64, item: int) -> np.uint64:
    """The key of one item, for example of a pair, in an episode with this key."""
    return mixed(episode + (np.uint64(item) + np.uint64(1)) * _GOLDEN)


@routine(inline=True)
def uniform(key: np.uint64, counter: int) -> float:
    """A uniform number in (0, 1), never 0 or 1."""
    bits = mixed(key + (np.uint64(counter) + np.uint64(1)) * _GOLDEN)
    return (np.float64(bits >> _11) + 0.5) * 2.0**-53


@routine(inline=True)
def cosine(u: float) -> float:
    """cos(2 pi u) for 0 <= u <= 1, to the last bits, in a fraction of the time of `np.cos`.

    It is -sin(x) with x = 2 pi (1/4 - |u - 1/2|), which is at most pi / 2; this is its series.
    """
    x = 2.0 * np.pi * (0.25 - abs(u - 0.5))
    square, total = x * x, 0.0
    for k in range(len(_SINE) - 1, -1, -1):
        total = total * square + _SINE[k]
    return -x * total


@routine
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
        normal = radius * cosine(uniform(key, counter + 1))
        root, square = 1.0 + c * normal, normal * normal
        if root > 0.0:
            v, number = root * root * root, uniform(key, counter + 2)
            # The first test implies the second, which needs two logarithms.
            if number < 1.0 - 0.0331 * square * square:
                break
            if np.log(number) < 0.5 * square + d - d * v + d * np.log(v):
                break
        counter += 3
    if shape < 1.0:
        return d * v * uniform(key, 0) ** (1.0 / shape)
    return d * v


@routine(inline=True)
def beta(episode: np.uint64, item: int, a: float, b: float) -> float:
    """A Beta(a, b) variate: X / (X + Y) of two Gamma variates, the items 2 item and 2 item + 1."""
    x = gamma(key_of(episode, 2 * item), a)
    y = gamma(key_of(episode, 2 * item + 1), b)
    return x / (x + y)
