"""Leaping: the regret of particles that play many episodes per step, compiled.

A particle is one run of the learner that plays `length` episodes with one q. It draws at once how
often these visit every pair (by multinomials along the layers, so that trajectories stay intact)
and the losses there, adds the estimates, and solves again:

    n ~ visits of `length` episodes with q,
    Lhat += (losses(n) - n b) / q + length b,
    t += length,

where b is the baseline of the estimator, zero for importance weights.

Leaps of one episode are the algorithm itself. The only error is that q is constant during a leap,
and leaps are as long as that allows (`longest_leap` of torch_occ.engine.leaps). Everything changes
on the scale of t, so the number of leaps grows with log T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.losses import LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.forecast import check_episodes, phases_of

#: The relative change of q that is allowed in a leap; docs/tuning.md has measurements.
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
) -> Leaps:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` for up to 1e12 episodes.

    Args:
        regularizer: a built-in one, or a table of elementary terms, whose weights are powers of t.
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed in
            advance.
        estimator: importance-weighted by default, or `ReducedVariance`.
        particles: the number of independent runs.
        seed: the same seed gives the same numbers.
        accuracy: the relative change of q that is allowed in a leap. Smaller is slower and closer
            to the algorithm.

    Returns:
        The regret of every particle.

    Raises:
        ValueError: if an argument is wrong, or the engine cannot play it.
        TypeError: if the losses or the estimator cannot be forecast.
    """
    check_episodes(episodes)
    if particles < 1:
        raise ValueError(f"particles: expected at least 1, got {particles}")
    if not accuracy > 0:
        raise ValueError(f"accuracy: expected a positive number, got {accuracy}")
    for batch in regularizer.batched():
        raise ValueError(
            f"regularizer: a parameter has the batch shape {tuple(batch)}, and leap takes one "
            "regularizer at a time; forecast takes a batch"
        )
    estimate, phases = centred(estimator), phases_of(mdp, losses, int(episodes))
    if mdp.batch_shape or phases.means.dim() != 3:
        raise ValueError(
            "leaping takes one MDP and one table of means (S, A) at a time; forecast takes batches"
        )
    compiled = later("tuning.compiled_leaps")
    reason = compiled.why_no_leap(mdp, regularizer, estimate)
    if reason is not None:
        raise ValueError(f"leap: {reason}; use occ.forecast, or occ.simulate for fewer episodes")
    options = (particles, seed, accuracy)
    return Leaps(*compiled.run_leaps(mdp, regularizer, estimate, phases, int(episodes), *options))
