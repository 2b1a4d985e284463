"""Families of loss distributions: how much information an observation carries about its mean.

kl(m, x) is the relative entropy between losses of mean m and of mean x. The limit of regret needs
two functions for means x = m - d that are lower than m by d >= 0:

    information(m, d) = kl(m, m - d),        tilt(m, r) = argmin over d of kl(m, m - d) - r d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Family(Protocol):
    """What a family of loss distributions must have."""

    def information(self, mean: Floats, reduction: Floats) -> Floats:
        """kl(mean, mean - reduction), infinite where the reduction is impossible."""
        ...

    def tilt(self, mean: Floats, r: Floats) -> Floats:
        """The reduction d >= 0 that minimizes kl(mean, mean - d) - r d, for r >= 0."""
        ...

    def most(self, mean: Floats) -> Floats:
        """The supremum of possible reductions."""
        ...


@dataclass(frozen=True)
class Bernoulli:
    """Losses 0 and 1. For learners that know only that losses are in [0, 1], kl is the same."""

    def information(self, mean: Floats, reduction: Floats) -> Floats:
        other = mean - reduction
        with np.errstate(divide="ignore", invalid="ignore"):
            # log1p keeps the digits of small reductions.
            ones = np.where(mean > 0, -mean * np.log1p(-reduction / mean), 0.0)
            zeros = np.where(mean < 1, -(1 - mean) * np.log1p(reduction / (1 - mean)), 0.0)
        found = np.where(other > 0, ones + zeros, np.inf)
        return np.where(reduction > 0, found, 0.0)

    def tilt(self, mean: Floats, r: Floats) -> Floats:
        # The other mean x solves m - x = r x (1 - x), and m / x = 1 + excess.
        root = np.sqrt((1 - r) ** 2 + 4 * r * (1 - mean))
        excess = 0.5 * r * (1 + (r + 2 - 4 * mean) / (root + 1))
        # No more than the largest number below 1: a loss of mean zero would have infinite kl.
        return mean * np.minimum(excess / (1 + excess), 1 - 2.0**-53)

    def most(self, mean: Floats) -> Floats:
        return mean


@dataclass(frozen=True)
class Gaussian:
    """Normal losses with a known variance and any mean: kl(m, x) = (m - x)^2 / (2 variance)."""

    variance: float

    def information(self, mean: Floats, reduction: Floats) -> Floats:
        return reduction**2 / (2 * self.variance)

    def tilt(self, mean: Floats, r: Floats) -> Floats:
        return self.variance * r

    def most(self, mean: Floats) -> Floats:
        return np.full_like(mean, np.inf)
