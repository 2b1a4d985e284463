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
from numpy.typing import NDArray

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


# -- Draws from a stream of random numbers, compiled: uniform, normal and binomial ones ------------
#
# A generator is one number of 64 bits, the state of SplitMix64 (Steele, Lea and Flood, 2014).
# Kernels keep one generator per lane in an array, and every draw advances the generator of its
# lane.


Generators = NDArray[np.uint64]

#: `_stirling` of small numbers, where its series is not accurate.
_SMALL = np.array(
    [
        math.lgamma(x) - (x - 0.5) * math.log(x) + x - 0.5 * math.log(2 * math.pi)
        for x in range(1, 11)
    ]
)

#: A binomial number is drawn by inversion if fewer events are expected, else by rejection.
FEW = 10.0


@routine(inline=True)
def uniform_drawn(generators: Generators, n: int) -> float:
    """Draw a uniform number in (0, 1) from generator n."""
    found = uniform(generators[n], 0)
    generators[n] += _GOLDEN
    return found


@routine
def normal_drawn(generators: Generators, n: int) -> float:
    """Draw a standard normal number (Box and Muller, 1958)."""
    radius = np.sqrt(-2.0 * np.log(uniform_drawn(generators, n)))
    return radius * np.cos(2.0 * np.pi * uniform_drawn(generators, n))


@routine
def binomial_drawn(count: float, p: float, generators: Generators, n: int) -> float:
    """Draw how many of `count` independent events happen, each with probability p."""
    if p >= 1.0 or p <= 0.0:
        return count if p >= 1.0 else 0.0
    rarer = min(p, 1.0 - p)
    if count * rarer < FEW:
        found = _inverted(count, rarer, generators, n)
    else:
        found = _accepted(count, rarer, generators, n)
    return count - found if p > 0.5 else found


@routine
def _inverted(count: float, p: float, generators: Generators, n: int) -> float:
    """`binomial_drawn` for 0 < p <= 1/2 and a small mean, by inversion."""
    target, k = uniform_drawn(generators, n), 0.0
    probability, odds = np.exp(count * np.log1p(-p)), p / (1.0 - p)
    while target > probability and k < count:
        target -= probability
        k += 1.0
        probability *= (count - k + 1.0) / k * odds
        if probability < 1e-300:
            break
    return k


@routine
def _accepted(count: float, p: float, generators: Generators, n: int) -> float:
    """`binomial_drawn` for p <= 1/2 and a mean of at least FEW (BTRS of Hörmann, 1993).

    Numbers from a distribution that lies above the binomial one are accepted with the ratio of the
    two probabilities.
    """
    spread = np.sqrt(count * p * (1.0 - p))
    b = 1.15 + 2.53 * spread
    a, safe = -0.0873 + 0.0248 * b + 0.01 * p, 0.92 - 4.2 / b
    while True:
        u, v = uniform_drawn(generators, n) - 0.5, uniform_drawn(generators, n)
        slack = 0.5 - abs(u)
        k = np.floor((2.0 * a / slack + b) * u + count * p + 0.5)
        if slack >= 0.07 and v <= safe:
            return k  # below the ratio for certain
        if 0.0 <= k <= count:
            height = v * (2.83 + 5.1 / b) * spread / (a / (slack * slack) + b)
            if np.log(height) <= _log_ratio(count, p, k):
                return k


@routine
def _log_ratio(count: float, p: float, k: float) -> float:
    """The logarithm of the probability of k, divided by that of the likeliest number."""
    odds, mode = p / (1.0 - p), np.floor((count + 1.0) * p)
    left, others = count - k, count - mode
    return (
        (mode + 0.5) * np.log((mode + 1.0) / (odds * (others + 1.0)))
        + (count + 1.0) * np.log1p((k - mode) / (left + 1.0))
        + (k + 0.5) * np.log(odds * (left + 1.0) / (k + 1.0))
        + (_stirling(mode) + _stirling(others) - _stirling(k) - _stirling(left))
    )


@routine(inline=True)
def _stirling(k: float) -> float:
    """log k! - [(k + 1/2) log(k + 1) - (k + 1) + log sqrt(2 pi)], up to 1e-10."""
    if k < len(_SMALL):
        return _SMALL[int(k)]
    square = (k + 1.0) * (k + 1.0)
    return (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / 1260.0 / square) / square) / (k + 1.0)
