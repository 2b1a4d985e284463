"""The dual problem of the projection: one multiplier per state, by Newton's method.

Write q(s,a,s') = w(s,a) p(s'|s,a). The problem is

    minimize ⟨w, rate * loss⟩ + KL(w p || w̃ p̃)    over flow constraints and lower <= p <= upper.

Only the flow constraints couple the rows. With their multipliers v(s), and v = 0 at the end, the
rows are solved in closed form (torch_occ.step.projection.rows), and

    w(s,a) = w̃(s,a) exp(v(s) - rate * loss(s,a) - G(s,a; v)),
    D(v)   = sum_s initial(s) v(s) - sum w(s,a),     dD/dv(s) = inflow of w - w(s).

D is concave. Instead of v, the iteration moves g(s) = log w(s), as torch_occ.step.entropic does. A
pass backward through the layers gives v, the policy and p; a pass forward gives the occupancy u of
that policy under p, so every iterate satisfies all constraints. It is solved when log u = g.

**Newton's method.** With P the transitions of the policy, dv = dg + P dv, and dD = ⟨u - w, dg⟩. The
direction maximizes the quadratic model

    ⟨u - w, dg⟩ - 1/2 ⟨dg, Lambda dg⟩ - 1/2 ⟨dv, N dv⟩,

where N is the part of the Hessian that the changes of policies and of p contribute, block-diagonal
over layers. Lambda is the logarithmic mean of u and w. At the solution it is w, which is Newton's
method; if N = 0, the direction is log u - g, which solves the equation at once, however large it
is. Since Lambda and N are positive, it is always an ascent direction; steps are halved until D has
grown enough. Layers are eliminated one after the other, from matrices I + Y with Y >= 0.

**Derivatives.** The equations are made of differentiable operations. Two Newton steps from the
solution leave its value unchanged and give its first three derivatives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.kernels.constants import STALL_AFTER
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import join
from torch_occ.step.projection.rows import Active, Row, active_bounds, closest
from torch_occ.step.solution import Options, Status, over

#: The smallest share of the growth that the slope promises with which a step is accepted.
_ENOUGH = 1e-4

#: How often a step is halved. After that, the iteration goes on from its end.
_BACKTRACKS = 40


class Problem(NamedTuple):
    """A batch of projections. Tensors of layers are `(*batch, S_k, A, S_{k+1})`."""

    initial: Tensor  # (*batch, S_0)
    log_weight: Tensor  # (*batch, S, A), log w̃ - rate * loss; minus infinity on masked pairs
    log_rows: tuple[Tensor, ...]  # log p̃ of every layer
    lower: tuple[Tensor, ...]
    upper: tuple[Tensor, ...]


class Unfolded(NamedTuple):
    """What follows from a guess of log w(s); tuples have one entry per layer."""

    value: tuple[Tensor, ...]  # v
    policy: tuple[Tensor, ...]  # (*batch, S_k, A)
    rows: tuple[Tensor, ...]  # p
    free: tuple[Tensor, ...]  # p where it is free, zero at bounds
    active: tuple[Active, ...]
    occupancy: tuple[Tensor, ...]  # u
    off: Tensor  # (*batch, S), log u - g

    def dual(self, problem: Problem, guess: Tensor) -> Tensor:
        """D, `(*batch,)`."""
        return (problem.initial * self.value[0]).sum(-1) - guess.exp().sum(-1)

    def q(self) -> Tensor:
        """u(s) pi(a|s), `(*batch, S, A)`."""
        pairs = zip(self.occupancy, self.policy, strict=True)
        return join([u.unsqueeze(-1) * policy for u, policy in pairs], 2)


def unfold(
    mdp: LayeredMDP, problem: Problem, guess: Tensor, active: tuple[Active, ...] | None = None
) -> Unfolded:
    """Solve the rows backward and follow the policy forward, in differentiable operations.

    Args:
        active: the active bounds of every layer, if they are known.
    """
    weights, guesses = mdp.split(problem.log_weight, -2), mdp.split(guess, -1)
    behind = guess.new_zeros(1)
    values: list[Tensor] = []
    policies: list[Tensor] = []
    found: list[tuple[Row, Active]] = []
    for k in reversed(range(mdp.horizon)):
        scores = problem.log_rows[k] - behind[..., None, None, :]
        lower, upper = problem.lower[k], problem.upper[k]
        bounds = (
            active_bounds(scores.detach(), lower.detach(), upper.detach())
            if active is None
            else active[k]
        )
        row = closest(scores, lower, upper, bounds)
        logits = weights[k] - row.cost
        total = logits.logsumexp(-1)
        behind = guesses[k] - total
        values.insert(0, behind)
        policies.insert(0, (logits - total.unsqueeze(-1)).exp())
        found.insert(0, (row, bounds))
    u = [problem.initial]
    for policy, (row, _) in zip(policies[:-1], found[:-1], strict=True):
        u.append(arrive(row.p, u[-1].unsqueeze(-1) * policy))
    return Unfolded(
        tuple(values),
        tuple(policies),
        tuple(row.p for row, _ in found),
        tuple(row.free for row, _ in found),
        tuple(bounds for _, bounds in found),
        tuple(u),
        join(u, 1).log() - guess,
    )


def arrive(p: Tensor, x: Tensor) -> Tensor:
    """The mass that arrives in each successor, `(*batch, n)`."""
    return (p * x.unsqueeze(-1)).sum((-3, -2))


def direction(mdp: LayeredMDP, at: Unfolded, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Newton direction dg `(*batch, S)` and the slope of D along it `(*batch,)`.

    With X the curvature that the layers before see in dv, and s = Lambda^(-1/2),

        Y = s X s,  B = (I + Y)^-1,
        forward:   X <- N + P' s^-1 Y B s^-1 P,   y <- P' s^-1 (B s y - Y B s r),   r = u - w,
        backward:  dg = s B s (r + y) - s B Y s^-1 P dv,    dv <- dg + P dv.
    """
    mean = guess.exp() * _relative_growth(at.off)  # Lambda
    parts = zip(mdp.split(mean, -1), mdp.split(mean * at.off, -1), strict=True)
    curvature: Tensor | None = None  # X, zero in the first layer
    pull = torch.zeros_like(at.value[0])  # y
    stack = []
    for k, (weight, force) in enumerate(parts):
        s = weight.rsqrt()
        if curvature is None:
            scaled = torch.zeros_like(weight).unsqueeze(-1) * weight.unsqueeze(-2)
        else:
            scaled = s.unsqueeze(-1) * curvature * s.unsqueeze(-2)
        inverse = torch.linalg.inv_ex(
            scaled + torch.eye(scaled.shape[-1], dtype=s.dtype, device=s.device)
        ).inverse
        onward = (at.policy[k].unsqueeze(-1) * at.rows[k]).sum(-2)  # P, (*batch, S_k, n)
        stack.append((s, scaled, inverse, force + pull, onward))
        if k + 1 < mdp.horizon:
            lost = scaled @ inverse
            back = onward.mT / s.unsqueeze(-2)  # P' s^-1
            curvature = _curvature(at, k, weight, onward) + back @ lost @ back.mT
            pull = _times(back, _times(inverse, s * pull) - _times(lost, s * force))
    ahead = guess.new_zeros(1)
    steps: list[Tensor] = []
    for s, scaled, inverse, force, onward in reversed(stack):
        carried = _times(onward, ahead)
        dg = s * _times(inverse, s * force - _times(scaled, carried / s))
        ahead = dg + carried
        steps.insert(0, dg)
    step = join(steps, 1)
    return step, (mean * at.off * step).sum(-1)


def _curvature(at: Unfolded, k: int, weight: Tensor, onward: Tensor) -> Tensor:
    """Return N of layer k + 1, `(*batch, n, n)`; `weight` is Lambda of layer k."""
    pairs = (weight.unsqueeze(-1) * at.policy[k]).unsqueeze(-1)  # (*batch, S_k, A, 1)
    centred, free = at.rows[k] - onward.unsqueeze(-2), at.free[k]
    total = free.sum(-1, keepdim=True)
    share = pairs / torch.where(total > 0, total, 1.0)
    moving = torch.diag_embed((pairs * free).sum((-3, -2)))
    return moving + _gram(centred, pairs) - _gram(free, share)


def _gram(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of weight x x' over the pairs, `(*batch, n, n)`."""
    return x.flatten(-3, -2).mT @ (weight * x).flatten(-3, -2)


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _relative_growth(x: Tensor) -> Tensor:
    """(exp(x) - 1) / x, smooth at 0."""
    small = x.abs() < 1e-4
    return torch.where(small, 1 + x / 2 + x * x / 6, x.expm1() / torch.where(small, 1.0, x))


class Settled(NamedTuple):
    """The solution of the dual problem."""

    guess: Tensor  # (*batch, S), g
    at: Unfolded
    status: Tensor  # (*batch,)
    steps: Tensor  # (*batch,)


def settle(mdp: LayeredMDP, problem: Problem, guess: Tensor, options: Options) -> Settled:
    """Maximize D from a guess of log w(s) `(*batch, S)`, for plain tensors.

    The status is STALLED where the steps have become small; the caller certifies the result.
    """
    eps = torch.finfo(guess.dtype).eps
    smallest, tolerance = torch.finfo(guess.dtype).tiny / eps, options.tolerance_in(guess.dtype)
    status = torch.full(guess.shape[:-1], int(Status.MAX_STEPS), device=guess.device)
    running = torch.ones_like(status, dtype=torch.bool)
    steps, patience = torch.zeros_like(status), torch.full_like(status, STALL_AFTER)
    best = torch.full_like(guess[..., 0], torch.inf)
    at = unfold(mdp, problem, guess)
    dual = at.dual(problem, guess)

    def stop(where: Tensor, reason: Status) -> None:
        nonlocal status, running
        status = torch.where(running & where, int(reason), status)
        running = running & ~where

    for _ in range(options.max_steps):
        step, slope = direction(mdp, at, guess)
        moved = step.abs().amax(-1)
        stop(join(list(at.occupancy), 1).amin(-1) < smallest, Status.UNDERFLOW)
        stop(~moved.isfinite(), Status.NOT_FINITE)
        if not bool(running.any()):
            break
        step = torch.where(over(running, 1), step, 0.0)
        length = torch.ones_like(dual)
        for _ in range(_BACKTRACKS):
            trial = guess + length.unsqueeze(-1) * step
            at = unfold(mdp, problem, trial)
            found = at.dual(problem, trial)
            # Close to the solution, D changes less than its rounding errors.
            short = running & (moved > 1e-3) & ~(found >= dual + _ENOUGH * length * slope)
            if not bool(short.any()):
                break
            length = torch.where(short, length / 2, length)
        guess, dual = trial, found
        steps = steps + running
        patience = torch.where((moved < 0.5 * best) | (moved > 0.1), STALL_AFTER, patience - 1)
        best = torch.minimum(best, moved)
        # A short step leaves only rounding errors, unless a bound became active on its way.
        solved = (moved <= eps**0.5) & (at.off.abs().amax(-1) <= tolerance)
        stop(solved | (patience == 0), Status.STALLED)
        if not bool(running.any()):
            break
    return Settled(guess, at, status, steps)
