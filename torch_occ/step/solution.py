"""What a solve returns, for both backends: the minimizer, its certificate, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.kernels import constants


class Status(IntEnum):
    """How a solve ended."""

    CONVERGED = constants.CONVERGED
    MAX_STEPS = constants.MAX_STEPS
    STALLED = constants.STALLED
    UNDERFLOW = constants.UNDERFLOW
    NOT_FINITE = constants.NOT_FINITE
    NOT_CONVEX = constants.NOT_CONVEX

    @property
    def advice(self) -> str:
        """What it means and what to do."""
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "solved and certified",
    Status.MAX_STEPS: "the iteration limit was reached; raise max_steps, or start closer with warm_start",
    Status.STALLED: "rounding stopped the progress short of the tolerance; rescale the loss, or accept a larger tolerance",
    Status.UNDERFLOW: "an occupancy fell below the smallest floating-point number; add a LogBarrier, or a smaller learning rate",
    Status.NOT_FINITE: "a derivative of the regularizer overflowed; check that it is finite and convex inside Omega",
    Status.NOT_CONVEX: "the regularizer curves downwards at the point found, so this may be no minimum; "
    "check that it is convex: the signs of its weights, the curvature of its functions",
}


@dataclass(frozen=True)
class Options:
    """When to stop.

    Args:
        tolerance: the largest dual residual that counts as converged; by default eps^(2/3), 4e-11 in double precision.
        max_steps: Newton steps allowed.
    """

    tolerance: float | None = None
    max_steps: int = 200

    def __post_init__(self) -> None:
        if self.tolerance is not None and not self.tolerance > 0:
            raise ValueError(f"tolerance: expected a positive number, got {self.tolerance}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps: expected at least 1, got {self.max_steps}")

    def tolerance_in(self, dtype: torch.dtype) -> float:
        """The tolerance, or the default one for this precision."""
        return torch.finfo(dtype).eps ** (2 / 3) if self.tolerance is None else self.tolerance


class Solution(NamedTuple):
    """The minimizer and its certificate; every tensor has the batch shape in front."""

    q: Tensor  # (*batch, S, A)
    value: Tensor  # (*batch, S), the multipliers v of the flow constraints
    certificate: Tensor  # (*batch, 5), by name below; one tensor, since a tensor costs a tenth of a small solve
    backend: str = "torch"  # or "engine": who solved it

    @property
    def status(self) -> Tensor:
        """`(*batch,)`, see `Status`."""
        return self.certificate[..., 0].long()

    @property
    def steps(self) -> Tensor:
        """`(*batch,)`, Newton steps."""
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
        """`(*batch,)`, the largest |grad psi + loss - E'v| in units of q times its curvature: the relative error of q that it stands for.

        The residual includes the rounding of the losses' sums along an episode, which no solver can undo. In a state with one action,
        where nothing is decided, it is relative to its terms.
        """
        return self.certificate[..., 4]

    @property
    def converged(self) -> Tensor:
        """`(*batch,)`."""
        return self.certificate[..., 0] == Status.CONVERGED

    def merge(self, other: Solution, where: Tensor) -> Solution:
        """The other solution at some elements `(*batch,)` of the batch, this one elsewhere."""
        q, value, certificate = (
            torch.where(over(where, mine.dim() - where.dim()), theirs, mine)
            for mine, theirs in zip(self[:3], other[:3], strict=True)
        )
        return Solution(q, value, certificate, self.backend)


def over(x: Tensor, event_dims: int) -> Tensor:
    """`(*batch,)` ready to meet `(*batch, *event)`."""
    return x[(..., *(None,) * event_dims)]
