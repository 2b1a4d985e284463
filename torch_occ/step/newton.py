"""Potential-based shaping: the loss is replaced by its gaps.

Adding E'v to the loss does not change the solution of the FTRL step, for any potential v. With the
value of the optimal policy as potential, the loss becomes its gaps, which are non-negative, and
zero at every best action. `shape_loss` computes them in ordinary arithmetic, with an error of eps
times the values. Gaps can be tiny compared with the values. `shape_finely` then computes them
almost without rounding errors:

- The smallest loss of each state is moved from its losses to its value. The common part of each
  layer is taken out of its values: it is a constant of the objective, because each layer has mass
  one.
- Values are sums of two numbers, high + low. For E[v(s') | s, a], P and v are split into leading
  parts and small remainders. The leading parts have so few digits that the sum of their products is
  exact.
- A row p of P is read as p / sum(p), because floating-point numbers sum to one only up to rounding.
  If sums differ from one by more than rounding, rows are read as they are, and the common parts of
  layers are not taken out.

The remaining error is about `fineness(eps)` times the values; `_expect` estimates it. If the
weights of psi differ much, pairs of small weight depend on digits of the multipliers that numbers
do not have. Then the multipliers found become the potential (`recenter`), and the iteration goes
on: what is left of them is small, and has all digits that count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.constants import STALL_AFTER
from torch_occ.mdp.layered import LayeredMDP, remembered
from torch_occ.mdp.layers import DenseLayer, SparseLayer
from torch_occ.mdp.occupancy import (
    Flow,
    LayeredFlow,
    flow_adjoint,
    flow_residual,
    flow_source,
    join,
    optimal_policy,
)
from torch_occ.regularizers.derivatives import Derivatives
from torch_occ.regularizers.terms import change, keep
from torch_occ.step.solution import Options, Solution, Status, merge, over
from torch_occ.step.system import factorize, is_convex


class Shaped(NamedTuple):
    """loss = gaps + E'(value + potential of the constants of the layers)."""

    gaps: Tensor  # (*batch, S, A), zero on masked pairs
    value: Tensor  # (*batch, S)
    low: Tensor  # (*batch, S), what rounding took from the value
    rounding: Tensor  # (*batch, S, A) or (*batch, S, 1), estimated rounding errors of the gaps
    constants: Tensor | None  # (*batch, L), the common parts of the layers, if taken out


def shape_loss(mdp: LayeredMDP, loss: Tensor) -> Shaped:
    """Compute the gaps of the optimal policy, by backward induction."""
    plan = optimal_policy(mdp, loss)
    rounding = torch.finfo(loss.dtype).eps * plan.value.abs()
    low = torch.zeros_like(plan.value)
    return Shaped(plan.gaps, plan.value, low, rounding.unsqueeze(-1), None)


def shape_finely(mdp: LayeredMDP, loss: Tensor) -> Shaped:
    """Compute the gaps almost without rounding errors; see the module."""
    conserved, eps = conserves_mass(mdp), torch.finfo(loss.dtype).eps
    gaps: list[Tensor] = []
    values: list[tuple[Tensor, Tensor]] = []
    rounding: list[Tensor] = []
    constants: list[Tensor] = []
    for k in reversed(range(mdp.horizon)):
        here = mdp.layer_slices[k]
        exists, own = mdp.actions[here], loss[..., here, :]
        base = torch.where(exists, own, torch.inf).amin(-1)
        high, low = two_sum(torch.where(exists, own, 0.0), -base.unsqueeze(-1))
        ahead = rest = torch.zeros_like(high)
        if values:
            ahead, rest, size, small = _expect(mdp.layers[k], *values[0], conserved)
            high, lost = two_sum(high, ahead)
            low = low + lost + rest
        high, low = two_sum(high, low)
        best = torch.where(exists, high, torch.inf).amin(-1, keepdim=True)
        # Actions with the same best `high` part differ in the `low` part.
        tail = torch.where(exists & (high == best), low, torch.inf).amin(-1, keepdim=True)
        # Beside huge values, both may be equal although the losses differ.
        tied = exists & (high == best) & (low == tail)
        first = torch.where(tied, own, torch.inf).argmin(-1, keepdim=True)
        gap = (high - best) + (low - tail)
        rounding.insert(0, torch.zeros_like(high))
        if values:
            # Equal expectations have equal rounding errors, which cancel in the gap.
            apart = (ahead != ahead.gather(-1, first)) | (rest != rest.gather(-1, first))
            apart = apart & exists
            size = (size + size.gather(-1, first.expand(*size.shape[:-1], 1))) * apart
            # Where rows of P differ, equal expectations may have lost what sets them apart. A sum
            # tells rows apart by large probabilities, and one of logarithms by tiny ones.
            probe = torch.arange(1.0, values[0][0].shape[-1] + 1, dtype=loss.dtype).sqrt()
            P, unlike = mdp.layers[k].probabilities.detach(), torch.zeros_like(apart)
            for row in (P, P.clamp(min=torch.finfo(P.dtype).tiny).log()):
                seen = mdp.layers[k].with_probabilities(row).ahead(probe.to(loss.device))
                seen = seen.expand_as(ahead)
                unlike = unlike | ((seen != seen.gather(-1, first)) & exists)
            lost = eps * (small + small.gather(-1, first)) * unlike
            rounding[0] = (fineness(eps) * size + lost).detach()
            gap = torch.where(apart, gap, own - own.gather(-1, first))
        gaps.insert(0, torch.where(exists, gap, 0.0).clamp(min=0))
        # The common part is the base closest to zero: subtracting it makes no number larger.
        constant = base.amin(-1).clamp(min=0) + base.amax(-1).clamp(max=0)
        constant = constant if conserved else torch.zeros_like(constant)
        high, low = two_sum(base, -constant.unsqueeze(-1))
        high, lost = two_sum(high, best.squeeze(-1))
        values.insert(0, two_sum(high, low + lost + tail.squeeze(-1)))
        constants.insert(0, constant)
    batch = gaps[0].shape[:-2]
    return Shaped(
        join(gaps, 2),
        join([high for high, _ in values], 1),
        join([low for _, low in values], 1),
        join(rounding, 2),
        torch.stack([constant.expand(batch) for constant in constants], -1) if conserved else None,
    )


def recenter(mdp: LayeredMDP, loss: Tensor, q: Tensor, value: Tensor, tail: Tensor) -> Shaped:
    """Return loss - E'v for v = value + tail `(*batch, S)`, almost without rounding errors.

    They replace the gaps of the optimal policy where these are large beside what decides. What all
    pairs of a state lose, by their shares in q, is an error of v for the layers before.
    """
    conserved, fine, common = conserves_mass(mdp), fineness(torch.finfo(loss.dtype).eps), value
    gaps, rounding = list[Tensor](), list[Tensor]()
    after: tuple[Tensor, Tensor] | None = None
    for k in reversed(range(mdp.horizon)):
        here = mdp.layer_slices[k]
        exists, own, less = mdp.actions[here], value[..., here], tail[..., here]
        high, low = two_sum(torch.where(exists, loss[..., here, :], 0.0), -own.unsqueeze(-1))
        low, size = low - less.unsqueeze(-1), own.abs().unsqueeze(-1)
        if after is not None:
            ahead, rest, more, _ = _expect(mdp.layers[k], *after, conserved)
            high, lost = two_sum(high, ahead)
            low, size = low + lost + rest, size + more + mdp.layers[k].ahead(common) / fine
        gap, lost = two_sum(high, low)
        gaps.insert(0, torch.where(exists, gap, 0.0))
        rounding.insert(0, (fine * size + lost.abs()).detach())
        share = q[..., here, :] / q[..., here, :].sum(-1, keepdim=True)
        after, common = (own, less), (share * (fine * size)).sum(-1).detach()
    return Shaped(join(gaps, 2), value, tail, join(rounding, 2), None)


def fineness(eps: float) -> float:
    """Return the error of a finely shaped loss, relative to the values."""
    return eps * 4.0 ** (1 - _digits(eps)[1])


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b and its rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _digits(eps: float) -> tuple[int, int]:
    """Return the binary digits of the leading parts of P and v.

    The sum of their products fits into a floating-point number exactly.
    """
    return (26, 24) if eps < 1e-12 else (11, 9)


def _expect(
    layer: DenseLayer | SparseLayer, high: Tensor, low: Tensor, normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E[v(s') | s, a] for v = high + low `(*batch, S')`, as two parts `(*batch, S, A)`.

    The third number times `fineness(eps)` estimates their rounding errors; the fourth is the size
    of all that was added to the second part. v is cut twice, because the leading part is zero where
    v is small beside the largest value.
    """
    P, (of_rows, of_values) = layer.probabilities.detach(), _digits(torch.finfo(high.dtype).eps)
    leading = _cut(P, 2.0 ** -torch.tensor(of_rows, dtype=P.dtype))
    second = _cut(P - leading, 4.0 ** -torch.tensor(of_rows, dtype=P.dtype))
    rows = [layer.with_probabilities(p) for p in (leading, second, (P - leading) - second)]
    coarse = _cut_values(high, of_values)
    finer = _cut_values(high - coarse, of_values)
    left = ((high - coarse) - finer) + low
    ahead, rest = rows[0].ahead(coarse), layer.ahead(left) + rows[2].ahead(coarse + finer)
    tiny = layer.with_probabilities(rows[2].probabilities.abs())
    small = layer.ahead(left.abs()) + tiny.ahead(coarse.abs() + finer.abs())
    for part in (rows[0].ahead(finer), rows[1].ahead(coarse), rows[1].ahead(finer)):
        ahead, lost = two_sum(ahead, part)
        rest, small = rest + lost, small + lost.abs()
    if normalized:
        ones = torch.ones_like(high)
        off = (rows[0].ahead(ones) - 1) + rows[1].ahead(ones)
        shift = (ahead + rest) * (off + rows[2].ahead(ones))
        rest, small = rest - shift, small + shift.abs()
    size = layer.ahead(coarse.abs() + finer.abs() + 4.0**of_values * left.abs())
    return ahead, rest, size, small


def _cut(x: Tensor, grid: Tensor) -> Tensor:
    """Round x to multiples of a power of two."""
    large = 1.5 * grid / torch.finfo(x.dtype).eps
    return (x + large) - large


def _cut_values(x: Tensor, digits: int) -> Tensor:
    """Round x `(*batch, S')` to this number of binary digits of the largest."""
    size = x.abs().amax(-1, keepdim=True)
    return _cut(x, torch.exp2(torch.where(size > 0, size, 1.0).log2().ceil() - digits))


@remembered
def conserves_mass(mdp: LayeredMDP) -> bool:
    """Return whether all rows of P sum to one up to rounding."""
    eps = torch.finfo(mdp.dtype).eps
    for layer, exists in zip(mdp.layers[:-1], mdp.split(mdp.actions, -2), strict=False):
        width = layer.sizes[-1]
        ones = torch.ones(width, dtype=mdp.dtype, device=mdp.device)
        off = (layer.ahead(ones).detach() - 1).abs() > (64 + width) * eps
        if bool((off & exists).any()):
            return False
    return True


def at_likeliest_pairs(mdp: LayeredMDP, q: Tensor, x: Tensor) -> Tensor:
    """Return x at the pair with the largest q of each layer, `(*batch, L)`."""
    parts = zip(mdp.split(q, -2), mdp.split(x, -2), strict=True)
    found = [x.flatten(-2).gather(-1, q.flatten(-2).argmax(-1, keepdim=True)) for q, x in parts]
    return torch.cat(found, -1)


def potential(mdp: LayeredMDP, constants: Tensor | None) -> Tensor | float:
    """Return the v `(*batch, S)` with E'v equal to constants `(*batch, L)` in each layer.

    None stands for zero.
    """
    if constants is None:
        return 0.0
    return constants.flip(-1).cumsum(-1).flip(-1)[..., mdp.layer]


def cut_before_single_states(mdp: LayeredMDP) -> LayeredMDP:
    """Return the MDP without transitions into layers of one state.

    All mass goes through such a state under every policy, so the feasible changes of q are the same
    for both MDPs. But their sums over transitions have rounding errors where the exact result is
    zero, and a pair that takes nearly all of its layer would amplify these errors.
    """
    kept = [
        torch.zeros_like(layer.probabilities) if layer.sizes[-1] == 1 else layer.probabilities
        for layer in mdp.layers
    ]
    return mdp.with_probabilities(mdp.initial, *kept)


def rejoin(mdp: LayeredMDP, v: Tensor) -> Tensor:
    """Return multipliers of the MDP from those of `cut_before_single_states`.

    In the cut MDP, E'v lacks the v of the single state that follows, a constant of the layer.
    """
    zero = torch.zeros_like(v[..., 0])
    following = zip(mdp.layer_sizes[1:], mdp.layer_slices[1:], strict=True)
    constants = [v[..., there.start] if width == 1 else zero for width, there in following]
    constants.append(zero)
    return v + potential(mdp, torch.stack(constants, -1))


# -- Damped Newton iterations on the manifold of occupancy measures --------------------------------
#
# docs/step.md says why a step has the length 1/(1 + fall), and why each iterate is replaced by the
# occupancy of its own policy. The gradient is shaped like the loss: where one pair takes nearly all
# of a layer, its slope in 1 - q is huge. This slope is subtracted from all pairs of the layer,
# which changes the objective only by a constant.


def newton(
    flow: Flow,
    derive: Callable[[Tensor], Derivatives],
    loss: Tensor,
    start: Tensor,
    options: Options,
) -> Solution:
    """Minimize ⟨q, loss⟩ + psi_t(q); each element of the batch stops on its own, with a status.

    The loss `(*batch, S, A)` has the full batch shape, `derive` is q -> gradient and Hessian of
    psi_t, and the start is the occupancy of an interior policy.
    """
    mdp, share = flow.mdp, max(_PAUSE, options.max_steps // (1 + _REFINEMENTS))
    finer = replace(options, max_steps=min(options.max_steps, share))
    first = replace(finer, steady=False)
    solution, rounding, base = _descend(flow, derive, shape_loss(mdp, loss), start, first)
    ended = (solution.status == Status.STALLED) | solution.converged
    again = ended & (rounding > options.tolerance_in(loss.dtype) * _COARSE)
    for count in range(1 + _REFINEMENTS):
        paused = (solution.status == Status.MAX_STEPS) & (solution.steps < options.max_steps)
        again = paused | (solution.status == Status.STALLED if count else again)
        if not bool(again.any()):
            continue
        # Sums of losses along an episode have too few digits for the certificate. Compute them
        # again without rounding errors, and then relative to the multipliers found.
        shaped = recenter(mdp, loss, solution.q, *base) if count else shape_finely(mdp, loss)
        found, _, more = _descend(flow, derive, shaped, solution.q, finer)
        found.certificate[..., 1] += solution.certificate[..., 1]  # steps
        better = found.dual_residual < solution.dual_residual
        better = again & (better | paused) if count else again
        solution, base = solution.merge(found, better), merge(again, more, base)
    return solution


def _descend(
    flow: Flow,
    derive: Callable[[Tensor], Derivatives],
    shaped: Shaped,
    start: Tensor,
    options: Options,
) -> tuple[Solution, Tensor, Sequence[Tensor]]:
    """Minimize for a shaped loss; also return the error of q from rounding there, `(*batch,)`.

    The third result is v without what belongs to slopes in 1 - q, `(*batch, S)`, as two parts.
    """
    mdp, dtype, tolerance = flow.mdp, shaped.gaps.dtype, options.tolerance_in(shaped.gaps.dtype)
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    source, nothing = flow_source(mdp), torch.zeros_like(shaped.value)
    enough = tolerance if options.steady else eps**0.5

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
        # Solved for the change of v, rounding errors are relative to it; small MDPs have few.
        guess = value if isinstance(system, LayeredFlow) else nothing
        x = downhill + (guess.unsqueeze(-1) - system.lookahead(guess))
        dq, v = factorize(psi.hessian, system, q).solve(x, nothing, inexact=True)
        v = guess + v
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
        running = stop(running, (moved <= enough) | (patience == 0), Status.STALLED)
        if not bool(running.any()):
            break

    uphill = slope(psi, left_out)
    unit = keep("pair", mdp, psi.unit(q), torch.inf).abs()
    residual = _residual(mdp, uphill, unit, value)
    lost = shaped.rounding + eps * keep("pair", mdp, psi.gradient.abs(), 0.0)
    rounding = (lost / unit).amax((-2, -1))
    if bool((rounding > tolerance * _COARSE).any()):
        softness = keep("pair", mdp, psi.hessian.curvature.reciprocal(), 0.0)
        share = softness / softness.sum(-1, keepdim=True)
        rounding = (spread_errors(lost, share) / unit).amax((-2, -1))
    dual_residual = torch.where(rounding > tolerance * _COARSE, residual + rounding, residual)
    if options.steady:
        dual_residual = torch.maximum(dual_residual, moved)
    flow_error = (flow_residual(mdp, q) / q.sum(-1)).abs().amax(-1)
    # An infinite curvature would make every residual zero.
    overflow = keep("pair", mdp, unit, 0.0).isinf().any(-1).any(-1)
    status = torch.where((status == Status.STALLED) & overflow, Status.NOT_FINITE, status)
    dual_residual = torch.where(overflow, torch.nan, dual_residual)
    accurate = (dual_residual <= tolerance) & (flow_error <= tolerance)
    certified = (status == Status.STALLED) & accurate
    if bool(certified.any()):
        convex = torch.where(is_convex(psi.hessian, mdp), Status.CONVERGED, Status.NOT_CONVEX)
        status = torch.where(certified, convex, status)
    failed = status != Status.CONVERGED
    if bool(failed.any()):
        flat = (keep("pair", mdp, psi.hessian.curvature, 1.0) <= 0).any(-1).any(-1)
        flat = flat & psi.gradient.isfinite().all(-1).all(-1)
        status = torch.where(failed & flat, Status.NOT_CONVEX, status)
    decrement = decrement.clamp(min=0).sqrt()
    numbers = (status.to(q), steps.to(q), decrement, flow_error, dual_residual)
    certificate = torch.stack(numbers, -1)
    base = two_sum(shaped.value + potential(mdp, shaped.constants), value + shaped.low)
    return Solution(q, base[0] + potential(mdp, left_out), certificate), rounding, base


#: Rounding errors of the shaping below this fraction of the tolerance are ignored. Above it, the
#: loss is shaped again without rounding errors, and what is left is added to the dual residual.
_COARSE = 1 / 4

#: How often a step is shortened to a quarter. After that, the iteration goes on from its end.
_BACKTRACKS = 30

#: The least number of steps before the loss is shaped again, since rounding errors may be what
#: keeps them from ending, and how often that is done with multipliers of more digits.
_PAUSE, _REFINEMENTS = 40, 4


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


def spread_errors(errors: Tensor, share: Tensor) -> Tensor:
    """Return by how much errors of losses move q(s,a) at constant q(s), at most; `(*batch, S, A)`.

    They count relative to their mean, with the share of each action in the sum of 1/D: an error of
    all actions moves nothing. That of an action that dominates its state moves the others.
    """
    own = share * errors
    return (errors - own) + (own.sum(-1, keepdim=True) - own)


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


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum((-2, -1))
