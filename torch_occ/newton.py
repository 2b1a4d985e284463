"""Damped Newton iterations on the manifold of occupancy measures.

Minimize <q, loss> + psi_t(q) over Omega. Three things make it exact over the whole range that a long run produces:

- **Shaping.** Adding E'v to the loss does not move the solution, so the loss is first replaced by the gaps of its optimal policy:
  non-negative, zero at every best action. What remains has no large numbers that must cancel.
- **Steps by relative change.** All elementary terms satisfy |x f'''(x)| <= 2 f''(x) with f'' decreasing. If no argument of psi
  falls by more than the fraction rho along the Newton step, then the step of length 1/(1 + rho) decreases the objective, from
  everywhere, and the full step does for rho <= 1/2. No function values are compared, so nothing drowns in rounding.
  Regularizers of other kinds are guarded by the slope at the end of the step: where the objective has begun to rise steeply, the
  step is shortened.
- **Retraction.** Each iterate is the occupancy of its own policy, q -> pi -> q, computed with additions of positive numbers only:
  the flow constraints hold to the last digit in every state, however rarely it is visited.

The iteration stops when no pair changes by more than sqrt(eps) relative to itself; since Newton squares the error, the last step
leaves only rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.derivatives import Derivatives
from torch_occ.kkt import factorize
from torch_occ.marginals import change, keep
from torch_occ.occupancy import Flow, flow_adjoint, flow_residual, flow_source, optimal_policy


class Status(IntEnum):
    """How a solve ended."""

    CONVERGED = 0
    MAX_STEPS = 1
    STALLED = 2
    UNDERFLOW = 3
    NOT_FINITE = 4

    @property
    def advice(self) -> str:
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "solved and certified",
    Status.MAX_STEPS: "the iteration limit was reached; raise max_steps, or start closer with warm_start",
    Status.STALLED: "rounding stopped the progress short of the tolerance; rescale the loss, or accept a larger tolerance",
    Status.UNDERFLOW: "an occupancy fell below the smallest floating-point number; add a LogBarrier, or a smaller learning rate",
    Status.NOT_FINITE: "a derivative of the regularizer overflowed; check that it is finite and convex inside Omega",
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

        In a state with one action, where nothing is decided, relative to its terms.
        """
        return self.certificate[..., 4]

    @property
    def converged(self) -> Tensor:
        """`(*batch,)`."""
        return self.certificate[..., 0] == Status.CONVERGED

    def merge(self, other: Solution, where: Tensor) -> Solution:
        """The other solution at some elements `(*batch,)` of the batch, this one elsewhere."""
        q, value, certificate = (
            torch.where(_over(where, mine.dim() - where.dim()), theirs, mine) for mine, theirs in zip(self[:3], other[:3], strict=True)
        )
        return Solution(q, value, certificate, self.backend)


def newton(flow: Flow, derive: Callable[[Tensor], Derivatives], loss: Tensor, start: Tensor, options: Options) -> Solution:
    """Minimize from `start`, the occupancy of some interior policy. All elements of the batch advance together, each at its own pace.

    Args:
        derive: q -> gradient and Hessian of psi_t there.
        loss: `(*batch, S, A)`; its batch shape is the whole one.
        start: broadcasts against the loss.
    """
    mdp, eps = flow.mdp, torch.finfo(loss.dtype).eps
    smallest = torch.finfo(loss.dtype).tiny / eps
    plan = optimal_policy(mdp, loss)
    source, nothing = flow_source(mdp), torch.zeros_like(plan.value)

    def retract(q: Tensor) -> Tensor:
        policy = q / q.sum(-1, keepdim=True)
        return flow.forward(policy, source).unsqueeze(-1) * policy

    def stop(running: Tensor, where: Tensor, reason: Status) -> Tensor:
        """Freeze elements with a status; returns those still running."""
        where = running & where
        if bool(where.any()):
            status[where] = reason
        return running & ~where

    q = retract(start.expand_as(plan.gaps))
    psi = derive(q)
    status = torch.full(q.shape[:-2], Status.MAX_STEPS, device=q.device)
    running = torch.ones_like(status, dtype=torch.bool)
    steps, patience = torch.zeros_like(status), torch.full_like(status, PATIENCE)
    decrement = torch.full_like(status, torch.inf, dtype=q.dtype)
    value, best = nothing, decrement

    for _ in range(options.max_steps):
        downhill = -(psi.gradient + plan.gaps)
        dq, v = factorize(psi.hessian, flow, q).solve(downhill, nothing, value)
        squared = _dot(downhill, dq)
        fall, moved = _relative_change(flow, psi, q, dq)
        running = stop(running, ~moved.isfinite(), Status.NOT_FINITE)

        length = torch.where(fall <= 0.5, 1.0, 1 / (1 + fall))
        for _ in range(_BACKTRACKS):
            trial = retract(q + _over(length, 2) * dq)
            alive = keep("pair", mdp, trial, 1.0).amin((-2, -1)) > smallest
            trial = torch.where(_over(running & alive, 2), trial, q)
            psi = derive(trial)
            # Close to the solution the slope is all rounding, and the step is safe anyway.
            overshot = running & (moved > 1e-3) & (_dot(psi.gradient + plan.gaps, dq) > 0.9 * squared)
            if not bool(overshot.any()):
                break
            length = torch.where(overshot, length / 4, length)

        running = stop(running, ~alive, Status.UNDERFLOW)
        q, value = trial, torch.where(_over(running, 1), v, value)
        decrement = torch.where(running, squared, decrement)
        steps += running
        patience = torch.where((moved < 0.5 * best) | (moved > 0.1), PATIENCE, patience - 1)
        best = torch.minimum(best, moved)
        running = stop(running, (moved <= eps**0.5) | (patience == 0), Status.STALLED)  # until certified below
        if not bool(running.any()):
            break

    dual_residual = _dual_residual(flow, psi, plan.gaps, q, value)
    flow_error = (flow_residual(mdp, q) / q.sum(-1)).abs().amax(-1)
    tolerance = options.tolerance_in(loss.dtype)
    certified = (dual_residual <= tolerance) & (flow_error <= tolerance)
    status = torch.where((status == Status.STALLED) & certified, Status.CONVERGED, status)
    certificate = torch.stack([status.to(q), steps.to(q), decrement.clamp(min=0).sqrt(), flow_error, dual_residual], -1)
    return Solution(q, value + plan.value, certificate)


#: How often a step is shortened to a quarter; after that, the next Newton step starts from where it led.
_BACKTRACKS = 30

#: Newton steps without halving the relative change before the iteration is called stalled.
PATIENCE = 6


def _relative_change(flow: Flow, psi: Derivatives, q: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
    """The largest relative fall of any argument of psi along dq, and the largest relative change of any pair; `(*batch,)` each."""
    relative = dq / keep("pair", flow.mdp, q, 1.0)
    fall = -relative.amin((-2, -1))
    for name, x in psi.scalars.items():
        if name != "pair":
            falls = -change(name, flow.mdp, dq) / x
            fall = torch.maximum(fall, falls.amax(-1) if name == "state" else falls.amax((-2, -1)))
    return fall, relative.abs().amax((-2, -1))


def _dual_residual(flow: Flow, psi: Derivatives, loss: Tensor, q: Tensor, value: Tensor) -> Tensor:
    shaping = flow_adjoint(flow.mdp, value)
    residual = psi.gradient + loss - shaping
    unit = keep("pair", flow.mdp, q * psi.hessian.curvature, torch.inf)
    alone = flow.mdp.missing["rest"]
    if alone is not None:
        # A state with one action decides nothing, and its equation only says what v is: measured by its terms.
        terms = psi.gradient.abs() + loss.abs() + shaping.abs() + torch.finfo(q.dtype).tiny
        unit = torch.where(alone, torch.maximum(terms, unit), unit)
    return (residual / unit).abs().amax((-2, -1))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-2, -1))


def _over(x: Tensor, event_dims: int) -> Tensor:
    """`(*batch,)` ready to meet `(*batch, *event)`."""
    return x[(..., *(None,) * event_dims)]
