"""Hints: a prediction m_t of the loss function of episode t, made before the episode.

`AdaptiveFTRL` adds m_t to the cumulative loss and estimates the loss by m_t + (loss - m_t) / q on
the visited pairs. So its regret depends on the errors of the hints and not on the losses. To write
new hints, derive from `Hints`. Their state is part of the learner's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback


class Hints:
    """Base class. The state is a dictionary of tensors whose first dimension is the seed."""

    def start(self, zero: Tensor) -> dict[str, Tensor]:
        """The first state; `zero` is `(N, S, A)`."""
        return {}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        """m_t, `(N, S, A)`."""
        raise NotImplementedError(f"{type(self).__name__}: write predict(state) -> (N, S, A)")

    def observe(self, state: dict[str, Tensor], feedback: Feedback) -> dict[str, Tensor]:
        """The state after an episode."""
        return state


class MeanHints(Hints):
    """The mean of the observed losses of each pair, with a prior.

        m = (count * prior + sum of losses) / (count + number of visits)

    In a stochastic world the errors are then the noise of the losses, and the regret has their
    variances (Li, Tsuchiya and Yamanishi, 2026).

    Raises:
        ValueError: if `prior` is outside [0, 1] or `count` is not positive.
    """

    def __init__(self, prior: float = 0.5, count: float = 1.0) -> None:
        if not (0 <= prior <= 1 and count > 0):
            raise ValueError(
                "prior, count: expected a number in [0, 1] and a positive number, got "
                f"{prior} and {count}"
            )
        self.prior, self.count = prior, count

    def start(self, zero: Tensor) -> dict[str, Tensor]:
        return {"visits": zero.clone(), "losses": zero.clone()}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        return (self.count * self.prior + state["losses"]) / (self.count + state["visits"])

    def observe(self, state: dict[str, Tensor], feedback: Feedback) -> dict[str, Tensor]:
        visits, ones = state["visits"], torch.ones_like(feedback.losses)
        return {
            "visits": visits + feedback.scatter(ones, visits),
            "losses": state["losses"] + feedback.scatter(feedback.losses, visits),
        }


class GradientHints(Hints):
    """Gradient descent on (m - loss)^2 / 2: m <- (1 - step) m + step loss on the visited pairs.

    The regret then has the path length of the losses (Li, Tsuchiya and Yamanishi, 2026, with
    step = 1/4).

    Raises:
        ValueError: if `prior`, the first m, is outside [0, 1], or `step` outside (0, 1].
    """

    def __init__(self, step: float = 0.25, prior: float = 0.5) -> None:
        if not (0 < step <= 1 and 0 <= prior <= 1):
            raise ValueError(
                f"step, prior: expected numbers in (0, 1] and [0, 1], got {step} and {prior}"
            )
        self.step, self.prior = step, prior

    def start(self, zero: Tensor) -> dict[str, Tensor]:
        return {"hint": zero + self.prior}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        return state["hint"]

    def observe(self, state: dict[str, Tensor], feedback: Feedback) -> dict[str, Tensor]:
        hint = state["hint"]
        moved = self.step * (feedback.losses - feedback.gather(hint))
        return {"hint": hint + feedback.scatter(moved, hint)}
