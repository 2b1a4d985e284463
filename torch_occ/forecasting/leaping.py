"""The regret of FTRL by leaping: many episodes at once, while the policy would hardly change.

A particle is one run of the learner. Instead of solving for q in every episode, it plays `length`
episodes with one q. It draws at once how often these visit every pair (by multinomials along the
layers, so that trajectories stay intact) and the losses there, adds the estimates, and solves
again:

    n ~ visits of `length` episodes with q,
    Lhat += (losses(n) - n b) / q + length b,
    t += length,

where b is the baseline of the estimator, zero for importance weights.

Leaps of one episode are the algorithm itself. The only error is that q is constant during a leap,
and leaps are as long as that allows (`longest_leap`). Everything changes on the scale of t, so the
number of leaps grows with log T. This also holds where the learner is hardly regularized: there a
single visit changes much, but visits are rare.

`leap` draws exact counts. Use it where the expansion of torch_occ.forecasting.mean_path fails;
`predict` chooses between the two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.backends import Backend, engine_takes, later
from torch_occ.forecasting.course import Course
from torch_occ.forecasting.mean_path import forecast
from torch_occ.forecasting.torch_leaps import leap_in_torch
from torch_occ.game.estimators import Estimator, ImportanceWeighted, centred
from torch_occ.game.losses import LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer

#: The relative change of q that is allowed in a leap; docs/meta_tuning.md has measurements.
ACCURACY = 0.5

#: The default number of particles.
PARTICLES = 128


class Leaps(NamedTuple):
    """The pseudo-regret of N particles at C episodes."""

    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C)
    leaps: Tensor  # (N,), the number of leaps
    uncertified: Tensor  # (N,), the number of steps without certificate

    @property
    def mean(self) -> Tensor:
        """The mean over the particles, `(C,)`; NaN if a step was not certified."""
        return torch.where(self.uncertified.any(), torch.nan, self.regret.mean(0))

    @property
    def standard_error(self) -> Tensor:
        """The standard error of the mean, `(C,)`."""
        return self.regret.std(0) / len(self.regret) ** 0.5

    @property
    def final(self) -> Tensor:
        """The mean after the last episode."""
        return self.mean[-1]


class Prediction(NamedTuple):
    """A forecast of the regret at T, by the method that was chosen."""

    regret: Tensor  # ()
    standard_error: Tensor  # (), zero for the mean path
    method: Literal["mean path", "leaping"]


def predict(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    particles: int = PARTICLES,
    seed: int = 0,
) -> Prediction:
    """Forecast the regret at T by `forecast` where it is reliable, and by `leap` elsewhere.

    The noise of the forecast decides; nothing is simulated. With a baseline the method is always
    `leap`: a rare visit without loss may change the estimates completely, and covariances do not
    show this.

    Returns:
        The regret, its standard error, and the method.
    """
    if type(centred(estimator)) is ImportanceWeighted:
        with torch.no_grad():
            path = forecast(mdp, regularizer, losses, episodes)
        if bool(path.reliable):
            return Prediction(path.final, torch.zeros_like(path.final), "mean path")
    found = leap(
        mdp, regularizer, losses, episodes, estimator=estimator, particles=particles, seed=seed
    )
    return Prediction(found.final, found.standard_error[-1], "leaping")


def leap(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    particles: int = PARTICLES,
    seed: int = 0,
    accuracy: float = ACCURACY,
    backend: Backend = "auto",
) -> Leaps:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` for up to 1e12 episodes.

    Args:
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed in
            advance.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other
            `CentredEstimator`.
        particles: the number of independent runs.
        seed: the same seed gives the same numbers on the same backend.
        accuracy: the relative change of q that is allowed in a leap. Smaller is slower and closer
            to the algorithm.
        backend: "engine" is compiled and takes built-in regularizers and estimators; "torch" takes
            all; "auto" uses the engine where it can.

    Returns:
        The regret of every particle.

    Raises:
        ValueError: if an argument is wrong, or the engine is required but cannot be used.
        TypeError: if the losses or the estimator cannot be forecast.
    """
    if not 1 <= episodes <= 10**12:
        raise ValueError(f"episodes: expected a number from 1 to 1e12, got {episodes}")
    if particles < 1:
        raise ValueError(f"particles: expected at least 1, got {particles}")
    if not accuracy > 0:
        raise ValueError(f"accuracy: expected a positive number, got {accuracy}")
    for _, batch in regularizer.batched():
        raise ValueError(
            f"regularizer: a parameter has the batch shape {tuple(batch)}, and leap takes one "
            "regularizer at a time; forecast takes a batch"
        )
    estimate, course = centred(estimator), Course.of(mdp, losses, int(episodes))
    if engine_takes(
        backend, lambda: later("forecasting.compiled_leaps").why_not(mdp, regularizer, estimate)
    ):
        play = later("forecasting.compiled_leaps").leap_compiled
    else:
        play = leap_in_torch
    expected, leaps, uncertified = play(
        mdp, regularizer, estimate, course, particles, seed, accuracy
    )
    return Leaps(course.stops.long(), expected - course.best, leaps, uncertified)
