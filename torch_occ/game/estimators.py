"""Estimators: from the feedback of an episode to an estimate of its loss function, `(N, S, A)`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.checks import check_that, unwritten
from torch_occ.regularizers.schedules import Schedule


class Feedback(NamedTuple):
    """What N learners observed in one episode."""

    states: Tensor  # (N, L), numbered over all layers
    actions: Tensor  # (N, L)
    losses: Tensor  # (N, L)
    table: Tensor | None  # (N, S, A), the whole loss function; only under full information
    reached: Tensor | None = None  # (N, L), in games: the layers that the player got to

    def scatter(self, values: Tensor, like: Tensor) -> Tensor:
        """Put values `(N, L)` on the visited pairs of a table `(N, S, A)`, zero elsewhere."""
        index = self.states * like.shape[-1] + self.actions
        return torch.zeros_like(like).flatten(-2).scatter(-1, index, values).view_as(like)

    def gather(self, table: Tensor) -> Tensor:
        """The entries of a table `(N, S, A)` on the visited pairs, `(N, L)`."""
        return table.flatten(-2).gather(-1, self.states * table.shape[-1] + self.actions)


class Estimator:
    """Base class of estimators."""

    #: Whether the learner is shown the whole loss function.
    full_information = False

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        """Estimate the loss function `(N, S, A)` of episode t, in which q was played."""
        raise unwritten(self, "__call__(feedback, q, t) -> (N, S, A)")


class CentredEstimator(Estimator):
    """(loss - b) / q on the visited pairs, plus a baseline b everywhere.

    It is unbiased if b is chosen before the episode. Subclasses define `baseline`. They can be
    forecast (torch_occ.tuning.forecast), because their covariance depends only on q and b.
    """

    def baseline(self, q: Tensor, t: Tensor) -> Tensor:
        """b `(*batch, S, A)`, given q `(*batch, S, A)` and the episode `(*batch,)`."""
        raise unwritten(self, "baseline(q, t) -> (*batch, S, A)")

    def baseline_like(self, q: Tensor, t: Tensor) -> Tensor:
        """The baseline in the shape of q; a ValueError if it does not broadcast."""
        found = self.baseline(q, t)
        try:
            return found.expand_as(q)
        except (AttributeError, RuntimeError):
            kind = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(
                f"estimator: {type(self).__name__}.baseline at episode {int(t.min())}: expected a "
                f"tensor that broadcasts to {tuple(q.shape)}, got {kind}"
            ) from None

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        baseline = self.baseline_like(q, torch.tensor(float(t), dtype=q.dtype, device=q.device))
        above = (feedback.losses - feedback.gather(baseline)) / feedback.gather(q)
        return feedback.scatter(above, q) + baseline


class ImportanceWeighted(CentredEstimator):
    """loss / q on the visited pairs, zero elsewhere: unbiased, `alg:main_alg`."""

    def baseline(self, q: Tensor, t: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(q)


class ReducedVariance(CentredEstimator):
    """(loss - b) / q 1{visited} + b with b = 1/2 where q >= (4 eta_t)^2, and 0 elsewhere: unbiased.

    This is the estimator of Tsallis-INF (Zimmert and Seldin, 2021, section 3), for the 1/2-Tsallis
    entropy as this package writes it: their learning rate is 4 eta_t. If eta_t is small, b = 1/2
    nearly everywhere.
    """

    def __init__(self, learning_rate: Schedule) -> None:
        expected = "an occ.Schedule, for example occ.InverseSqrt(0.5)"
        fine = isinstance(learning_rate, Schedule)
        check_that(fine, "learning_rate", expected, repr(learning_rate), TypeError)
        found = "one per layer, state or pair"
        check_that(not learning_rate.places(), "learning_rate", "one rate for all pairs", found)
        self.learning_rate = learning_rate

    def threshold(self, t: Tensor) -> Tensor:
        """The smallest q with a baseline, (4 eta_t)^2."""
        return (4 * self.learning_rate(t).detach()) ** 2

    def baseline(self, q: Tensor, t: Tensor) -> Tensor:
        """1/2 where q is at least the threshold, and 0 elsewhere."""
        return torch.where(q >= self.threshold(t)[..., None, None], 0.5, 0.0).to(q.dtype)


class ImplicitExploration(Estimator):
    """loss / (q + bias) on the visited pairs (Neu, 2015): biased downwards, at most 1 / bias.

    Raises:
        ValueError: if `bias` is not positive.
    """

    def __init__(self, bias: float) -> None:
        check_that(bias > 0, "bias", "a positive number", bias)
        self.bias = bias

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        return feedback.scatter(feedback.losses / (feedback.gather(q) + self.bias), q)


class FullInformation(Estimator):
    """The loss function itself, which the learner is shown."""

    full_information = True

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        assert feedback.table is not None, (
            "simulate shows the table to estimators with full_information"
        )
        return feedback.table


def centred(estimator: Estimator | None) -> CentredEstimator:
    """Return the estimator; a TypeError if its covariance is not known in advance."""
    if estimator is None:
        return ImportanceWeighted()
    # An estimator with its own `__call__` has another covariance.
    own = type(estimator).__call__ is not CentredEstimator.__call__
    if not isinstance(estimator, CentredEstimator) or own:
        raise TypeError(
            f"estimator: {type(estimator).__name__} cannot be forecast; simulate it, or give "
            "ImportanceWeighted, ReducedVariance or a CentredEstimator of your own, with a "
            "baseline and no __call__"
        )
    return estimator
