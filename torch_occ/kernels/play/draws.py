"""Draws from a stream of random numbers, compiled: uniform, normal and binomial ones.

A generator is one number of 64 bits, the state of SplitMix64 (Steele, Lea and Flood, 2014). Kernels
keep one generator per lane in an array, and every draw advances the generator of its lane.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from torch_occ.kernels.constants import GOLDEN
from torch_occ.kernels.layout import kernel, part
from torch_occ.kernels.play.sampling import uniform

Generators = NDArray[np.uint64]

_GOLDEN = np.uint64(GOLDEN)

#: `_stirling` of small numbers, where its series is not accurate.
_SMALL = np.array(
    [
        math.lgamma(x) - (x - 0.5) * math.log(x) + x - 0.5 * math.log(2 * math.pi)
        for x in range(1, 11)
    ]
)

#: A binomial number is drawn by inversion if fewer events are expected, else by rejection.
FEW = 10.0


@part
def uniform_drawn(generators: Generators, n: int) -> float:
    """Draw a uniform number in (0, 1) from generator n."""
    found = uniform(generators[n], 0)
    generators[n] += _GOLDEN
    return found


@kernel
def normal_drawn(generators: Generators, n: int) -> float:
    """Draw a standard normal number (Box and Muller, 1958)."""
    radius = np.sqrt(-2.0 * np.log(uniform_drawn(generators, n)))
    return radius * np.cos(2.0 * np.pi * uniform_drawn(generators, n))


@kernel
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


@kernel
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


@kernel
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


@kernel
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


@part
def _stirling(k: float) -> float:
    """log k! - [(k + 1/2) log(k + 1) - (k + 1) + log sqrt(2 pi)], up to 1e-10."""
    if k < len(_SMALL):
        return _SMALL[int(k)]
    square = (k + 1.0) * (k + 1.0)
    return (1.0 / 12.0 - (1.0 / 360.0 - 1.0 / 1260.0 / square) / square) / (k + 1.0)
