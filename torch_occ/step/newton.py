"""Damped Newton iterations on the manifold of occupancy measures.

Minimize ⟨q, loss⟩ + psi_t(q) over Omega. Three ideas keep it accurate for the large losses and
small occupancies of long runs:

- **Shaping.** Adding E'v to the loss does not change the solution. So the loss is first replaced by
  the gaps of its optimal policy, which are non-negative, and zero at every best action. Then no
  large numbers cancel (torch_occ.step.shaping). The gradient is treated in the same way: where one
  pair takes nearly all of a layer, its slope in 1 - q is huge. This slope is subtracted from all
  pairs of the layer, which changes the objective only by a constant.
- **Step length by relative change.** All elementary terms satisfy |x f'''(x)| <= 2 f''(x), with f''
  decreasing. If no argument of psi falls by more than the fraction rho along the Newton step, then
  the step of length 1/(1 + rho) decreases the objective, from every start. For rho <= 1/2 the full
  step does. No function values are compared, so rounding errors do not matter. For other
  regularizers the slope at the end of the step is checked: where the objective rises steeply, the
  step is shortened.
- **Retraction.** Each iterate is replaced by the occupancy of its own policy, q -> pi -> q, by
  additions of positive numbers only. So the flow constraints hold to the last digit in every state,
  however rarely it is visited.

The iteration stops when no pair changes by more than sqrt(eps) relative to itself. Newton's method
squares the error, so only rounding errors are left after the last step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_occ.kernels.constants import STALL_AFTER
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import Flow, flow_adjoint, flow_residual, flow_source, join
from torch_occ.regularizers.arguments import change, keep
from torch_occ.regularizers.derivatives import Derivatives
from torch_occ.step.kkt import factorize, is_convex
from torch_occ.step.shaping import (
    Shaped,
    at_likeliest_pairs,
    conserves_mass,
    cut_before_single_states,
    potential,
    rejoin,
    shape_finely,
    shape_loss,
)
from torch_occ.step.solution import Options, Solution, Status, over


def newton(
    flow: Flow,
    derive: Callable[[Tensor], Derivatives],
    loss: Tensor,
    start: Tensor,
    options: Options,
) -> Solution:
    """Minimize ⟨q, loss⟩ + psi_t(q) for a batch; each element stops on its own.

    Args:
        derive: q -> gradient and Hessian of psi_t at q.
        loss: `(*batch, S, A)`, with the full batch shape.
        start: the occupancy of an interior policy, which broadcasts against the loss.

    Returns:
        The solution with a status per element; failures do not raise.
    """
    solution, rounding = _descend(flow, derive, shape_loss(flow.mdp, loss), start, options)
    ended = (solution.status == Status.STALLED) | solution.converged
    coarse = ended & (rounding > options.tolerance_in(loss.dtype) * _COARSE)
    if bool(coarse.any()):
        # Sums of losses along an episode have too few digits for the certificate. Compute them
        # again without rounding errors.
        finely, _ = _descend(flow, derive, shape_finely(flow.mdp, loss), solution.q, options)
        finely.certificate[..., 1] += solution.certificate[..., 1]  # steps
        solution = solution.merge(finely, coarse)
    return solution


def _descend(
    flow: Flow,
    derive: Callable[[Tensor], Derivatives],
    shaped: Shaped,
    start: Tensor,
    options: Options,
) -> tuple[Solution, Tensor]:
    """Minimize for a loss that is shaped already.

    Returns:
        The solution, and the relative error of q from rounding in the shaping, `(*batch,)`.
    """
    mdp, dtype = flow.mdp, shaped.gaps.dtype
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    source, nothing = flow_source(mdp), torch.zeros_like(shaped.value)

    def retract(q: Tensor) -> Tensor:
        policy = q / q.sum(-1, keepdim=True)
        return flow.forward(policy, source).unsqueeze(-1) * policy

    def stop(running: Tensor, where: Tensor, reason: Status) -> Tensor:
        """Stop elements with a status; return those still running."""
        where = running & where
        if bool(where.any()):
            status[where] = reason
        return running & ~where

    def slope(psi: Derivatives, left_out: Tensor | None) -> Tensor:
        """Return the gradient of the objective, less the constants of the layers `(*batch, L)`."""
        gradient = psi.gradient
        if left_out is not None:
            gradient = keep("pair", mdp, gradient - left_out[..., mdp.layer].unsqueeze(-1), 0.0)
        return gradient + shaped.gaps

    q = retract(start.expand_as(shaped.gaps))
    psi = derive(q)
    lifted = "complement" in psi.scalars and conserves_mass(mdp)
    system = type(flow)(cut_before_single_states(mdp)) if lifted else flow
    status = torch.full(q.shape[:-2], Status.MAX_STEPS, device=q.device)
    running = torch.ones_like(status, dtype=torch.bool)
    steps, patience = torch.zeros_like(status), torch.full_like(status, STALL_AFTER)
    decrement = torch.full_like(status, torch.inf, dtype=q.dtype)
    value, best = nothing, decrement
    # The constants of the layers that were left out when `value` was computed.
    left_out = torch.zeros_like(at_likeliest_pairs(mdp, q, q)) if lifted else None

    for _ in range(options.max_steps):
        now = at_likeliest_pairs(mdp, q, psi.gradient) if lifted else None
        downhill = -slope(psi, now)
        dq, v = factorize(psi.hessian, system, q).solve(downhill, nothing, value)
        v = rejoin(mdp, v) if lifted else v
        squared = _dot(downhill, dq)
        fall, moved = _relative_change(flow, psi, q, dq)
        running = stop(running, ~moved.isfinite(), Status.NOT_FINITE)

        length = torch.where(fall <= 0.5, 1.0, 1 / (1 + fall))
        for _ in range(_BACKTRACKS):
            trial = retract(_step(mdp, q, dq, fall, length))
            alive = keep("pair", mdp, trial, 1.0).amin((-2, -1)) > smallest
            trial = torch.where(over(running & alive, 2), trial, q)
            psi = derive(trial)
            # Close to the solution the slope is only rounding error, and the full step is safe.
            overshot = running & (moved > 1e-3) & (_dot(slope(psi, now), dq) > 0.9 * squared)
            if not bool(overshot.any()):
                break
            length = torch.where(overshot, length / 4, length)

        running = stop(running, ~alive, Status.UNDERFLOW)
        q, value = trial, torch.where(over(running, 1), v, value)
        if now is not None and left_out is not None:
            left_out = torch.where(over(running, 1), now, left_out)
        decrement = torch.where(running, squared, decrement)
        steps += running
        patience = torch.where((moved < 0.5 * best) | (moved > 0.1), STALL_AFTER, patience - 1)
        best = torch.minimum(best, moved)
        # STALLED becomes CONVERGED below if the solution is certified.
        running = stop(running, (moved <= eps**0.5) | (patience == 0), Status.STALLED)
        if not bool(running.any()):
            break

    tolerance, uphill = options.tolerance_in(dtype), slope(psi, left_out)
    unit = keep("pair", mdp, psi.unit(q), torch.inf).abs()
    rounding = (shaped.rounding / unit).amax((-2, -1))
    if bool((rounding > tolerance * _COARSE).any()):
        rounding = (_others(mdp, psi.hessian.curvature) * shaped.rounding / unit).amax((-2, -1))
    residual = _residual(mdp, uphill, unit, value)
    if bool(((status == Status.STALLED) & ~(residual <= tolerance)).any()):
        # If the system is ill-conditioned, its multipliers may be less accurate than q. Others may
        # fit q better.
        v = _multipliers(mdp, uphill, unit)
        found = _residual(mdp, uphill, unit, v)
        value = torch.where(over(found < residual, 1), v, value)
        residual = torch.where(found < residual, found, residual)
    dual_residual = torch.where(rounding > tolerance * _COARSE, residual + rounding, residual)
    flow_error = (flow_residual(mdp, q) / q.sum(-1)).abs().amax(-1)
    accurate = (dual_residual <= tolerance) & (flow_error <= tolerance)
    certified = (status == Status.STALLED) & accurate
    if bool(certified.any()):
        convex = torch.where(is_convex(psi.hessian, mdp), Status.CONVERGED, Status.NOT_CONVEX)
        status = torch.where(certified, convex, status)
    decrement = decrement.clamp(min=0).sqrt()
    numbers = (status.to(q), steps.to(q), decrement, flow_error, dual_residual)
    certificate = torch.stack(numbers, -1)
    value = value + shaped.value + potential(mdp, shaped.constants) + potential(mdp, left_out)
    return Solution(q, value, certificate), rounding


#: Rounding errors of the shaping below this fraction of the tolerance are ignored. Above it, the
#: loss is shaped again without rounding errors, and what is left is added to the dual residual.
_COARSE = 1 / 4

#: How often a step is shortened to a quarter. After that, the iteration goes on from its end.
_BACKTRACKS = 30


def _relative_change(flow: Flow, psi: Derivatives, q: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest relative fall of an argument of psi, and relative change of a pair.

    Both are along dq and of shape `(*batch,)`.
    """
    relative = dq / keep("pair", flow.mdp, q, 1.0)
    fall = -relative.amin((-2, -1))
    for name, x in psi.scalars.items():
        if name != "pair":
            falls = -change(name, flow.mdp, dq) / x
            fall = torch.maximum(fall, falls.amax(-1) if name == "state" else falls.amax((-2, -1)))
    return fall, relative.abs().amax((-2, -1))


def _step(mdp: LayeredMDP, q: Tensor, dq: Tensor, fall: Tensor, length: Tensor) -> Tensor:
    """Return q + length dq, which is positive if length * fall < 1, however close to one."""
    damped = length < 1
    if not bool(damped.any()):
        return q + dq
    # 1 - fall / (1 + fall) is computed as 1 / (1 + fall), because the difference rounds to zero if
    # the fall is above 1/eps.
    left = torch.where(length * (1 + fall) < 0.5, 1 - length * fall, 1 / (1 + fall))
    relative = dq / keep("pair", mdp, q, 1.0)
    change = over(left, 2) + over(length, 2) * (over(fall, 2) + relative)
    return torch.where(over(damped, 2), q * change, q + dq)


def _others(mdp: LayeredMDP, curvature: Tensor) -> Tensor:
    """Return 1 - (1/D) / sum(1/D), the share of the other actions in the sum of 1/D.

    It is the response of q(s,a) to a change of its loss at constant q(s), relative to 1/D. A single
    action does not respond at all, and one that dominates its state hardly does.
    """
    softness = keep("pair", mdp, curvature.reciprocal(), 0.0)
    return keep("rest", mdp, 1 - softness / softness.sum(-1, keepdim=True), 0.0)


def _residual(mdp: LayeredMDP, slope: Tensor, unit: Tensor, value: Tensor) -> Tensor:
    """Return the largest |slope - E'v| in these units, `(*batch,)`."""
    shaping = flow_adjoint(mdp, value)
    alone = mdp.missing["rest"]
    if alone is not None:
        # A state with one action has no decision to make. Its equation only determines v, so the
        # residual is relative to the terms of the equation.
        terms = slope.abs() + shaping.abs() + torch.finfo(slope.dtype).tiny
        unit = torch.where(alone, torch.maximum(terms, unit), unit)
    return ((slope - shaping) / unit).abs().amax((-2, -1))


def _multipliers(mdp: LayeredMDP, slope: Tensor, unit: Tensor) -> Tensor:
    """Return the v that fits slope = E'v, state by state from the last layer to the first.

    In each state it is the least-squares fit in these units.
    """
    weight = (unit.amin(-1, keepdim=True) / unit).square()
    weight = weight / weight.sum(-1, keepdim=True)
    slopes, weights = mdp.split(slope, -2), mdp.split(weight, -2)
    values: list[Tensor] = []
    for k in reversed(range(mdp.horizon)):
        Q = slopes[k] + mdp.layers[k].ahead(values[0]) if values else slopes[k]
        values.insert(0, (weights[k] * Q).sum(-1))
    return join(values, 1)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-2, -1))
