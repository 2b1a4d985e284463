"""From what an episode shows to an estimate of its loss function, `(N, S, A)`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.regularizers.schedules import Schedule


class Feedback(NamedTuple):
    """What N learners saw in one episode."""

    states: Tensor  # (N, L), numbered over all layers
    actions: Tensor  # (N, L)
    losses: Tensor  # (N, L)
    table: Tensor | None  # (N, S, A), the whole loss function; only under full information

    def scatter(self, values: Tensor, like: Tensor) -> Tensor:
        """`(N, L)` values on the visited pairs, zero elsewhere, `(N, S, A)`."""
        index = self.states * like.shape[-1] + self.actions
        return torch.zeros_like(like).flatten(-2).scatter(-1, index, values).view_as(like)

    def gather(self, table: Tensor) -> Tensor:
        """The entries of a table `(N, S, A)` on the visited pairs, `(N, L)`."""
        return table.flatten(-2).gather(-1, self.states * table.shape[-1] + self.actions)


class Estimator:
    """Base class."""

    #: Whether the learner is shown the whole loss function.
    full_information = False

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        """The estimate from episode t, in which q `(N, S, A)` was played."""
        raise NotImplementedError


class CentredEstimator(Estimator):
    """(loss - b) / q on the visited pairs, plus b everywhere: unbiased for every baseline b that is
    chosen before the episode.

    Subclasses write `baseline`. They can be forecast (torch_occ.forecasting.mean_path), because b
    is all that their covariance needs besides q.
    """

    def baseline(self, q: Tensor, t: Tensor) -> Tensor:
        """b `(*batch, S, A)`, given q `(*batch, S, A)` and the episode `(*batch,)`."""
        raise NotImplementedError

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        baseline = self.baseline(
            q, torch.tensor(float(t), dtype=q.dtype, device=q.device)
        ).expand_as(q)
        return (
            feedback.scatter((feedback.losses - feedback.gather(baseline)) / feedback.gather(q), q)
            + baseline
        )


class ImportanceWeighted(CentredEstimator):
    """loss / q on the visited pairs, zero elsewhere: unbiased, `alg:main_alg`."""

    def baseline(self, q: Tensor, t: Tensor) -> Tensor:
        """None."""
        return torch.zeros_like(q)

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        return feedback.scatter(feedback.losses / feedback.gather(q), q)


class ReducedVariance(CentredEstimator):
    """(loss - b) / q 1{visited} + b with b = 1/2 where q >= (4 eta_t)^2, and 0 elsewhere: unbiased.

    The estimator of Tsallis-INF (Zimmert and Seldin, 2021, section 3), for the 1/2-Tsallis entropy
    as this package writes it: their learning rate is 4 eta_t. A small eta_t is a baseline nearly
    everywhere.
    """

    def __init__(self, learning_rate: Schedule) -> None:
        self.learning_rate = learning_rate

    def threshold(self, t: Tensor) -> Tensor:
        """(4 eta_t)^2."""
        return (4 * self.learning_rate(t).detach()) ** 2

    def baseline(self, q: Tensor, t: Tensor) -> Tensor:
        """1/2 where q has reached the threshold."""
        return torch.where(q >= self.threshold(t)[..., None, None], 0.5, 0.0).to(q.dtype)


class ImplicitExploration(Estimator):
    """loss / (q + bias) on the visited pairs (Neu, 2015): a little optimistic, and bounded by 1 /
    bias.
    """

    def __init__(self, bias: float) -> None:
        if not bias > 0:
            raise ValueError(f"bias: expected a positive number, got {bias}")
        self.bias = bias

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        return feedback.scatter(feedback.losses / (feedback.gather(q) + self.bias), q)


class FullInformation(Estimator):
    """The loss function itself."""

    full_information = True

    def __call__(self, feedback: Feedback, q: Tensor, t: int) -> Tensor:
        assert feedback.table is not None, (
            "simulate shows the table to estimators with full_information"
        )
        return feedback.table


def centred(estimator: Estimator | None) -> CentredEstimator:
    """The estimator, importance-weighted by default, if its covariance is known beforehand; an
    error otherwise.
    """
    if estimator is None:
        return ImportanceWeighted()
    # whoever estimates in a way of its own has another covariance
    ways = (
        CentredEstimator.__call__,
        ImportanceWeighted.__call__,
    )
    if not isinstance(estimator, CentredEstimator) or type(estimator).__call__ not in ways:
        raise TypeError(
            f"estimator: {type(estimator).__name__} cannot be forecast; simulate it, or give "
            "ImportanceWeighted, ReducedVariance or a "
            "CentredEstimator of your own, with a baseline and no __call__"
        )
    return estimator
