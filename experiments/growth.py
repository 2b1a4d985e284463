"""How fast does regret grow? Fits with bootstrap intervals over seeds.

All functions are pure functions of (episodes, regret). A curve is averaged over seeds first and
fitted afterwards. The intervals resample the seeds. They say how far another set of seeds could
have moved the fit. They do not say whether the model is right, nor what happens after the last
episode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Statistic = Callable[[Tensor, Tensor], Tensor]  # x (C,), mean curves (B, C) -> (B,)


class Fit(NamedTuple):
    """A number fitted to the mean over seeds, with its 95 % percentile interval.

    All three are NaN where the fit does not exist.
    """

    value: float
    lower: float
    upper: float

    @property
    def exists(self) -> bool:
        return self.value == self.value

    def text(self, digits: int = 2) -> str:
        """`0.51 [0.48, 0.55]`, or a dash."""
        return (
            f"{self.value:.{digits}f} [{self.lower:.{digits}f}, {self.upper:.{digits}f}]"
            if self.exists
            else "-"
        )


# -- what is fitted -------------------------------------------------------------------------------


def slope(x: Tensor, y: Tensor) -> Tensor:
    """The least-squares slope of y `(*batch, C)` over x `(C,)`, with an intercept."""
    centred = x - x.mean()
    return (y * centred).sum(-1) / (centred**2).sum()


def residual(x: Tensor, y: Tensor) -> Tensor:
    """The sum of squares that the best line through y `(*batch, C)` over x `(C,)` leaves."""
    return ((y - y.mean(-1, keepdim=True) - slope(x, y).unsqueeze(-1) * (x - x.mean())) ** 2).sum(
        -1
    )


def power_slope(x: Tensor, y: Tensor) -> Tensor:
    """The slope of log y over log x; NaN for curves that are not positive."""
    return slope(x.log(), y.where((y > 0).all(-1, keepdim=True), torch.nan).log())


def log_slope(x: Tensor, y: Tensor) -> Tensor:
    """The slope of y over log x: what one more e-fold of episodes costs."""
    return slope(x.log(), y)


def last(x: Tensor, y: Tensor) -> Tensor:
    """The last point."""
    return y[..., -1]


def fits_log_better(x: Tensor, y: Tensor) -> Tensor:
    """1 where a + b log x leaves a smaller residual than a + b sqrt x, else 0."""
    return (residual(x.log(), y) < residual(x.sqrt(), y)).to(y.dtype)


# -- on which part, and how surely ----------------------------------------------------------------


def late(episodes: Tensor, regret: Tensor, fraction: float = 0.1) -> tuple[Tensor, Tensor]:
    """The checkpoints from `fraction` times the last episode on, in float64.

    `(C,)`, `(N, C)` -> `(c,)`, `(N, c)`.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction: expected a number in [0, 1), got {fraction}")
    chosen = episodes >= fraction * episodes[-1]
    if int(chosen.sum()) < 3:
        raise ValueError(
            f"a fit needs three checkpoints, but only {int(chosen.sum())} "
            f"are later than {fraction:g} of the run"
        )
    return episodes[chosen].double(), regret[:, chosen].double()


def resampled_means(regret: Tensor, resamples: int = 1000, seed: int = 0) -> Tensor:
    """Mean curves of bootstrap samples of the seeds: `(N, C)` -> `(resamples, C)`.

    The same seed gives the same samples.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(regret), (resamples, len(regret)), generator=generator)
    weights = torch.zeros(resamples, len(regret), dtype=regret.dtype).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=regret.dtype)
    )
    return weights @ regret / len(regret)


def bootstrap(
    statistic: Statistic, x: Tensor, curves: Tensor, resamples: int = 1000, seed: int = 0
) -> Fit:
    """A statistic of the mean curve, `(C,)` and `(N, C)`, with its 95 % interval.

    NaN if any resample has none.
    """
    found = statistic(x, resampled_means(curves, resamples, seed))
    value = float(statistic(x, curves.mean(0, keepdim=True)))
    if bool(found.isnan().any()):
        return Fit(torch.nan, torch.nan, torch.nan)
    lower, upper = found.quantile(torch.tensor([0.025, 0.975], dtype=found.dtype)).tolist()
    return Fit(value, lower, upper)


class Band(NamedTuple):
    """A curve with its 95 % percentile band, `(C,)` each."""

    value: Tensor
    lower: Tensor
    upper: Tensor


def ratio_band(regret: Tensor, reference: Tensor, resamples: int = 1000, seed: int = 0) -> Band:
    """The ratio of two mean regret curves, `(N, C)` each, with its bootstrap band.

    Both are resampled together, seed by seed: runs with the same seed share their random numbers.
    NaN where the reference is not positive in every resample.
    """
    above, below = (resampled_means(x, resamples, seed) for x in (regret, reference))
    value = regret.mean(0) / reference.mean(0)
    levels = torch.tensor([0.025, 0.975], dtype=value.dtype)
    lower, upper = (above / below).quantile(levels, dim=0)
    exists = (below > 0).all(0) & (reference.mean(0) > 0)
    return Band(*(x.where(exists, torch.nan) for x in (value, lower, upper)))


class Growth(NamedTuple):
    """How a regret curve grows late in the run."""

    final: Fit  # regret after the last episode
    exponent: Fit  # slope of log regret over log T: 0 is bounded, 1/2 is sqrt T, 1 is linear
    per_log: Fit  # slope of regret over log T
    log_share: float  # share of resamples that a + b log T fits better than a + b sqrt T


def growth(
    episodes: Tensor, regret: Tensor, fraction: float = 0.1, resamples: int = 1000, seed: int = 0
) -> Growth:
    """All fits of one run, on the checkpoints from `fraction` of the last episode on."""
    t, curves = late(episodes, regret, fraction)
    final, exponent, per_log = (
        bootstrap(statistic, t, curves, resamples, seed)
        for statistic in (last, power_slope, log_slope)
    )
    share = float(fits_log_better(t, resampled_means(curves, resamples, seed)).mean())
    return Growth(final, exponent, per_log, share)
