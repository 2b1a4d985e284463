"""The result of a solve, for both backends: the minimizer, its certificate, its status."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_occ._support import constants


class Status(IntEnum):
    """The outcome of a solve; everything but CONVERGED is a failure."""

    CONVERGED = constants.CONVERGED
    MAX_STEPS = constants.MAX_STEPS
    STALLED = constants.STALLED
    UNDERFLOW = constants.UNDERFLOW
    NOT_FINITE = constants.NOT_FINITE
    NOT_CONVEX = constants.NOT_CONVEX
    INFEASIBLE = constants.INFEASIBLE

    @property
    def advice(self) -> str:
        """The meaning of the status, and what to do."""
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "solved and certified",
    Status.MAX_STEPS: "the iteration limit was reached; "
    "raise max_steps, or start closer with warm_start",
    Status.STALLED: "rounding errors stopped the progress before the tolerance was reached; "
    "rescale the loss, or accept a larger tolerance",
    Status.UNDERFLOW: "an occupancy fell below the smallest floating-point number; "
    "add a LogBarrier, or use a smaller learning rate",
    Status.NOT_FINITE: "a derivative of the regularizer overflowed; "
    "check that the regularizer is finite and convex inside Omega",
    Status.NOT_CONVEX: "the regularizer is not convex at the point found, which may be no minimum; "
    "check the signs of its weights and the curvature of its functions",
    Status.INFEASIBLE: "no policy meets the budgets; raise their limits",
}


@dataclass(frozen=True)
class Options:
    """When to stop.

    Args:
        tolerance: the largest dual residual that counts as converged; by default eps^(2/3), which
            is 4e-11 in double precision.
        max_steps: the largest number of Newton steps.

    Raises:
        ValueError: if the tolerance is not positive, or max_steps is below 1.
    """

    tolerance: float | None = None
    max_steps: int = 200

    def __post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance: expected a positive number, got {self.tolerance}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps: expected at least 1, got {self.max_steps}")

    def tolerance_in(self, dtype: torch.dtype) -> float:
        """Return the tolerance, or its default for this number type."""
        return torch.finfo(dtype).eps ** (2 / 3) if self.tolerance is None else self.tolerance


class Solution(NamedTuple):
    """The minimizer and its certificate, for a batch of problems."""

    q: Tensor  # (*batch, S, A)
    value: Tensor  # (*batch, S), the multipliers v of the flow constraints
    # (*batch, 5), read by the properties below. One tensor, because making five costs time.
    certificate: Tensor
    backend: str = "torch"  # "torch" or "engine", the backend that solved it
    multipliers: Tensor | None = None  # (*batch, m), of the budgets; None without budgets
    slack: Tensor | None = None  # (*batch, m), limits minus expected costs; None without budgets

    @property
    def status(self) -> Tensor:
        """`(*batch,)`, the outcome of each element as a number of `Status`."""
        return self.certificate[..., 0].long()

    @property
    def steps(self) -> Tensor:
        """`(*batch,)`, the number of Newton steps."""
        return self.certificate[..., 1].long()

    @property
    def decrement(self) -> Tensor:
        """`(*batch,)`, the Newton decrement at the last step."""
        return self.certificate[..., 2]

    @property
    def flow_residual(self) -> Tensor:
        """`(*batch,)`, the largest |E q - b| relative to q(s)."""
        return self.certificate[..., 3]

    @property
    def dual_residual(self) -> Tensor:
        """`(*batch,)`, the largest |grad psi + loss - E'v|, in units of q times its curvature.

        In these units it is the relative error of q. It includes the rounding errors of the sums
        of losses along an episode, which no solver can undo. A state with one action has no
        decision to make; its residual is relative to the terms of its equation.
        """
        return self.certificate[..., 4]

    @property
    def converged(self) -> Tensor:
        """`(*batch,)`, whether each element was solved and certified."""
        return self.certificate[..., 0] == Status.CONVERGED

    @property
    def all_converged(self) -> bool:
        """Whether every element was solved and certified."""
        return bool(self.converged.all())

    @property
    def duality_gap(self) -> Tensor:
        """`(*batch,)`, how far the objective is above the optimum with budgets, at most.

        It is the sum of multipliers times slack: zero up to rounding, also without budgets. It is
        NaN for elements that were not solved: then it bounds nothing.
        """
        gap = torch.zeros_like(self.certificate[..., 0])
        if self.multipliers is not None and self.slack is not None:
            gap = (self.multipliers * self.slack).abs().sum(-1)
        return torch.where(self.converged, gap, torch.nan)

    def merge(self, other: Solution, where: Tensor) -> Solution:
        """Return `other` at the elements given by `where` `(*batch,)`, this solution elsewhere."""
        q, value, certificate = (
            torch.where(over(where, mine.dim() - where.dim()), theirs, mine)
            for mine, theirs in zip(self[:3], other[:3], strict=True)
        )
        return Solution(q, value, certificate, self.backend)


class Certified(Protocol):
    """A result with a status per batch element, `(*batch,)`."""

    @property
    def status(self) -> Tensor: ...

    @property
    def steps(self) -> Tensor: ...

    @property
    def dual_residual(self) -> Tensor: ...


def over(x: Tensor, event_dims: int) -> Tensor:
    """Append event dimensions to x `(*batch,)`, to broadcast against `(*batch, *event)`."""
    return x[(..., *(None,) * event_dims)]
