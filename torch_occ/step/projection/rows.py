"""One row of transitions: the distribution closest to a reference between lower and upper bounds.

For a reference p̃ and multipliers v of the successors,

    G = min of sum_s' p(s') (log(p(s') / p̃(s')) + v(s'))    over lower <= p <= upper, sum p = 1.

With the scores log p̃ - v, the minimizer is p = clip(c exp(score), lower, upper), where c makes the
sum one. The sum is piecewise linear and increasing in c. Its 2n breakpoints are sorted, and the
piece that passes through one is found by bisection. Logarithms of c are compared, so the scores may
differ by any amount. On that piece everything is a closed formula, which autograd differentiates.
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
    shape = torch.broadcast_shapes(scores.shape, lower.shape, upper.shape)
    scores, lower, upper = scores.expand(shape), lower.expand(shape), upper.expand(shape)
    # With log c increasing, an entry is at its lower bound up to log(lower) - score, then free, and
    # from log(upper) - score on at its upper bound.
    leave, arrive = lower.log() - scores, upper.log() - scores
    ends = torch.cat([leave, arrive], -1).sort(-1).values
    # Bisect for the number of breakpoints whose sum is below one.
    few = torch.zeros_like(ends[..., :1], dtype=torch.long)
    many = few + ends.shape[-1]
    for _ in range(ends.shape[-1].bit_length()):
        middle = (few + many) // 2
        at = ends.gather(-1, middle.clamp(max=ends.shape[-1] - 1))
        below = (at + scores).exp().clamp(lower, upper).sum(-1, keepdim=True) < 1
        below = below & (few < many)
        few, many = torch.where(below, middle + 1, few), torch.where(below, many, middle)
    last = ends.gather(-1, (few - 1).clamp(min=0))
    last = torch.where(few > 0, last, -torch.inf)  # the last breakpoint before c
    ahead = ends.gather(-1, few.clamp(max=ends.shape[-1] - 1))
    low = torch.where(few < ends.shape[-1], leave >= ahead, False) | (upper <= 0)
    return Active(low, (arrive <= last) & ~low)


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
