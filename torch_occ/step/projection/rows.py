"""One row of transitions: the distribution closest to a reference between lower and upper bounds.

For a reference p̃ and multipliers v of the successors,

    G = min of sum_s' p(s') (log(p(s') / p̃(s')) + v(s'))    over lower <= p <= upper, sum p = 1.

With the scores log p̃ - v, the minimizer is p = clip(c exp(score), lower, upper), where c makes the
sum one. The sum is piecewise linear and increasing in c. Its 2n breakpoints are sorted, and the
piece that passes through one is found by running sums. On that piece everything is a closed
formula, which autograd differentiates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Active(NamedTuple):
    """The entries at a bound, `(*batch, S, A, n)`; the others are free."""

    low: Tensor
    high: Tensor


def active_bounds(scores: Tensor, lower: Tensor, upper: Tensor) -> Active:
    """Find which entries of the minimizer are at a bound; the result has no derivative.

    Entries with upper = 0 count as entries at the lower bound.
    """
    possible = upper > 0
    scores = torch.where(possible, scores, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    z = torch.where(possible, (scores - top).exp().clamp(min=torch.finfo(scores.dtype).tiny), 1.0)
    # Increasing c, an entry is at its lower bound up to lower / z, free, and from upper / z on at
    # its upper bound. Lower bounds are first, so that the order of ties is right.
    shape = torch.broadcast_shapes(z.shape, lower.shape, upper.shape)
    z, lower, upper = z.expand(shape), lower.expand(shape), upper.expand(shape)
    ends, order = torch.cat([lower / z, upper / z], -1).sort(dim=-1, stable=True)
    slope = torch.cat([z, -z], -1).gather(-1, order).cumsum(-1)
    level = torch.cat([-lower, upper], -1).gather(-1, order).cumsum(-1)
    sums = lower.sum(-1, keepdim=True) + level + slope * ends
    passed = (sums < 1).sum(-1, keepdim=True)  # the breakpoints before c
    rank = order.argsort(-1)
    low = (rank[..., : z.shape[-1]] >= passed) | ~possible
    return Active(low, (rank[..., z.shape[-1] :] < passed) & ~low)


class Row(NamedTuple):
    """The minimizer of a row, and the minimum."""

    p: Tensor  # (*batch, S, A, n)
    free: Tensor  # (*batch, S, A, n), p where it is free, zero at bounds
    cost: Tensor  # (*batch, S, A), G


def closest(scores: Tensor, lower: Tensor, upper: Tensor, active: Active) -> Row:
    """Return the minimizer for known active bounds, in differentiable operations."""
    low, high = active
    free = ~(low | high)
    some = free.any(-1, keepdim=True)
    bound = torch.where(low, lower, upper)
    fixed = torch.where(free, 0.0, bound)
    # Divide among the free entries what the others leave. If there is none, avoid 0 / 0.
    smallest = torch.finfo(scores.dtype).tiny
    rest = torch.where(some, (1 - fixed.sum(-1, keepdim=True)).clamp(min=smallest), 1.0)
    among = torch.where(free | ~some, scores, -torch.inf)
    total = among.logsumexp(-1, keepdim=True)
    # Rounding may move an entry that is free by a hair across its bound.
    share = torch.where(free, rest * (among - total).exp(), 0.0)
    share = torch.where(free, share.clamp(lower, upper), 0.0)
    log_bound = torch.where(fixed > 0, fixed, 1.0).log()
    terms = torch.where(fixed > 0, fixed * (log_bound - scores), 0.0)
    cost = terms.sum(-1) + torch.where(some, rest * (rest.log() - total), 0.0).squeeze(-1)
    return Row(fixed + share, share, cost)
