"""Means over seeds, and Student's 95 % confidence intervals of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """A mean over seeds and its 95 % confidence interval."""

    mean: Tensor  # (C,)
    lower: Tensor  # (C,)
    upper: Tensor  # (C,)


def band(curves: Tensor) -> Band:
    """Mean over the first dimension and Student's 95 % interval: `(N, C)` -> `(C,)` each.

    For one seed the interval has width zero.
    """
    mean, n = curves.mean(0), len(curves)
    if n < 2:
        return Band(mean, mean, mean)
    half = student(n - 1) * curves.std(0) / math.sqrt(n)
    return Band(mean, mean - half, mean + half)


class Mean(NamedTuple):
    """A mean over seeds with its standard error, which is NaN for one seed."""

    mean: float
    standard_error: float
    seeds: int

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """The mean of one value per seed, `(N,)`."""
        n = len(values)
        error = float(values.std()) / math.sqrt(n) if n > 1 else math.nan
        return cls(float(values.mean()), error, n)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % confidence interval; NaN for one seed."""
        half = student(self.seeds - 1) * self.standard_error if self.seeds > 1 else math.nan
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        return (
            number(self.mean)
            if self.seeds < 2
            else f"{number(self.mean)} ± {number(self.standard_error, 2)}"
        )


def number(x: float, digits: int = 4) -> str:
    """A number with about `digits` significant digits, and separated thousands from 1,000 on."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{digits}g}"


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution.

    From five degrees of freedom on it comes from an expansion that is correct to 0.2 %.
    """
    exact = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445}
    z, n = 1.959964, degrees
    correction = (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return (
        exact[n]
        if n in exact
        else z + correction + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
