"""Damped Newton iterations on the manifold of occupancy measures.

Minimize <q, loss> + psi_t(q) over Omega. Three things make it exact over the whole range that a long run produces:

- **Shaping.** Adding E'v to the loss does not move the solution, so the loss is first replaced by the gaps of its optimal policy:
  non-negative, zero at every best action. What remains has no large numbers that must cancel.
- **Steps by relative change.** All elementary terms satisfy |x f'''(x)| <= 2 f''(x) with f'' decreasing. If no argument of psi falls by more than the
  fraction rho along the Newton step, then the step of length 1/(1 + rho) decreases the objective, from everywhere, and the full step does for
  rho <= 1/2. No function value is compared, so nothing drowns in rounding. Regularizers of other kinds are guarded by the slope at the end of the
  step: where the objective has begun to rise steeply, the step is shortened.
- **Retraction.** Each iterate is the occupancy of its own policy, q -> pi -> q, computed with additions of positive numbers only: the
  flow constraints hold to the last digit in every state, however rarely it is visited.

The iteration stops when no pair changes by more than sqrt(eps) relative to itself; since Newton squares the error, the last step leaves rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from torch_occ.derivatives import Derivatives
from torch_occ.kkt import factorize
from torch_occ.marginals import change
from torch_occ.occupancy import Flow, flow_adjoint, flow_residual, flow_source, optimal_policy, policy_of


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


@dataclass(frozen=True)
class Solution:
    """The minimizer and its certificate; every field has the batch shape in front.

    `dual_residual` is the largest |grad psi + loss - E'v| in units of q times its curvature, which is the relative error of q that it stands for;
    `flow_residual` is the largest |E q - b| relative to q(s).
    """

    q: Tensor  # (*batch, S, A)
    value: Tensor  # (*batch, S), the multipliers v of the flow constraints
    status: Tensor  # (*batch,), see Status
    steps: Tensor  # (*batch,), Newton steps
    decrement: Tensor  # (*batch,), the Newton decrement at the last step
    flow_residual: Tensor  # (*batch,)
    dual_residual: Tensor  # (*batch,)

    @property
    def converged(self) -> Tensor:
        return self.status == Status.CONVERGED


def newton(flow: Flow, derive: Callable[[Tensor], Derivatives], loss: Tensor, start: Tensor, options: Options) -> Solution:
    """Minimize from `start`, the occupancy of some interior policy. All elements of the batch advance together, each at its own pace."""
    mdp, eps = flow.mdp, torch.finfo(loss.dtype).eps
    tolerance = eps ** (2 / 3) if options.tolerance is None else options.tolerance
    plan = optimal_policy(mdp, loss)
    source, no_inflow = flow_source(mdp), torch.zeros_like(plan.value)

    def retract(q: Tensor) -> Tensor:
        policy = policy_of(mdp, q)
        return flow.forward(policy, source).unsqueeze(-1) * policy

    q = retract(start.expand_as(plan.gaps))
    batch = q.shape[:-2]
    status = torch.full(batch, Status.MAX_STEPS, device=q.device)
    steps = torch.zeros_like(status)
    decrement = torch.full(batch, torch.inf, dtype=q.dtype, device=q.device)
    value, last = torch.zeros_like(plan.value), _Step.none(q)
    best, patience = decrement, torch.full_like(status, 6)
    active = torch.ones(batch, dtype=torch.bool, device=q.device)
    psi = derive(q)

    for _ in range(options.max_steps):
        downhill = -(psi.gradient + plan.gaps)
        dq, v = factorize(psi.hessian, flow).solve(downhill, no_inflow)
        squared = _dot(downhill, dq)
        fall, moved = _relative_change(mdp, psi, q, dq)
        step = _Step(q, dq, torch.where(fall <= 0.5, 1.0, 1 / (1 + fall)), squared)
        # Where the last step overshot, take it back and go a quarter as far. Close to the solution the test would only see rounding.
        overshot = (-_dot(downhill, last.direction) > 0.9 * last.squared) & (last.moved > 1e-3)
        step = step.unless(overshot, last.shortened())
        trial = retract(step.origin + _broadcast(step.length, 2) * step.direction)

        usable = dq.isfinite().all(-1).all(-1) & v.isfinite().all(-1)
        alive = (trial > 0).logical_or(~mdp.actions).all(-1).all(-1)
        status = torch.where(active & ~usable, Status.NOT_FINITE, status)
        status = torch.where(active & usable & ~alive, Status.UNDERFLOW, status)
        advance = active & usable & alive
        q = torch.where(_broadcast(advance, 2), trial, q)
        value = torch.where(_broadcast(advance, 1), v, value)
        decrement = torch.where(advance, squared.clamp(min=0).sqrt(), decrement)
        steps = steps + advance

        done = advance & (moved <= eps**0.5) & ~overshot
        improved = (moved < 0.5 * best) | (fall > 0.5) | overshot
        best, patience = torch.minimum(best, moved), torch.where(improved, 6, patience - 1)
        stalled = advance & ~done & (patience == 0)
        status = torch.where(done, Status.CONVERGED, torch.where(stalled, Status.STALLED, status))
        active = advance & ~done & ~stalled
        last = step
        psi = derive(q)
        if not bool(active.any()):
            break

    dual = psi.gradient + plan.gaps - flow_adjoint(mdp, value)
    scale = torch.where(mdp.actions, q * psi.hessian.curvature, torch.inf)
    dual_residual = (dual / scale).abs().amax((-2, -1))
    flow_error = (flow_residual(mdp, q) / q.sum(-1)).abs().amax(-1)
    certified = (dual_residual <= tolerance) & (flow_error <= tolerance)
    ended = (status == Status.CONVERGED) | (status == Status.STALLED)
    status = torch.where(ended, torch.where(certified, Status.CONVERGED, Status.STALLED), status)
    return Solution(q, value + plan.value, status, steps, decrement, flow_error, dual_residual)
