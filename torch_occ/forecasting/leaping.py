"""The regret of FTRL by leaping: many episodes at once, as long as the policy would hardly have
changed in between.

A particle is one run of the learner. Instead of solving for q in every episode it plays `length`
episodes with one q, draws at once how often they visit every pair (multinomial down the layers, so
that a trajectory stays one) and what they are charged there, adds the estimates, and solves again:

    n ~ visits of `length` episodes with q,        Lhat += (losses(n) - n b) / q + length b,
    t += length,

with b the baseline of the estimator, nothing for importance weights.

Leaps of one episode are the algorithm itself. The only error is that q stands still during a leap,
and leaps are as long as that allows (`longest_leap`). Everything changes on the scale of t, and so
the number of leaps grows with log T, however little the learner is
regularized: where a single visit changes everything, visits are rare.

`leap` draws exact counts, and is the forecast for where torch_occ.forecasting.mean_path is out of
its depth; `predict` chooses between the two.
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

#: The relative change of q that is tolerated in a leap. Measured in docs/meta_tuning.md.
ACCURACY = 0.5

#: Particles of a forecast.
PARTICLES = 128


class Leaps(NamedTuple):
    """The pseudo-regret of N particles at C episodes."""

    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C)
    leaps: Tensor  # (N,), how many it took
    uncertified: Tensor  # (N,), steps among them without certificate

    @property
    def mean(self) -> Tensor:
        """Over the particles, `(C,)`; NaN if a step was not certified."""
        return torch.where(self.uncertified.any(), torch.nan, self.regret.mean(0))

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, `(C,)`."""
        return self.regret.std(0) / len(self.regret) ** 0.5

    @property
    def final(self) -> Tensor:
        """The mean after the last episode."""
        return self.mean[-1]


class Prediction(NamedTuple):
    """A forecast of the regret at T by the method that suits it."""

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
    """The regret at T: by `forecast` where its own noise says that it may be believed, by `leap`
    elsewhere; no simulation decides.

    With a baseline it is always `leap`: a rare visit without loss may overturn all that was learnt,
    of which covariances say nothing.
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
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` over any number of episodes up to
    1e12.

    Args:
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed
            beforehand.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other
            `CentredEstimator`.
        particles: independent runs.
        seed: the same seed gives the same numbers on the same backend.
        accuracy: how much q may change in a leap, relatively; smaller is slower and closer to the
            algorithm.
        backend: "engine" is compiled and knows what is built in, "torch" knows all; "auto" takes
            the engine where it can.
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
            "regularizer at a time; forecast and leap_smoothly take a batch"
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
