"""Comparators, and the self-bounding condition, under which the paper's bounds are logarithmic."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.in_order import total
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy


def comparator(mdp: LayeredMDP, total_mean: Tensor) -> Tensor:
    """The smallest total expected loss of any policy.

    The result has the same bits for a seed alone and in any batch.

    Args:
        total_mean: the sum of the mean losses of all episodes, `(*batch, S, A)`.

    Returns:
        A tensor `(*batch,)`.
    """
    first = optimal_policy(mdp, total_mean, in_order=True).value[..., : mdp.layer_sizes[0]]
    return total(mdp.initial * first, -1)


class SelfBounding(NamedTuple):
    """Both sides of `eq:self_bounding_constraint`; it holds where left >= right."""

    left: Tensor  # (N,), the regret
    right: Tensor  # (N,), sum_t sum_{s, a != pi*(s)} q_t(s,a) gap(s,a) - C


def self_bounding(
    regret: Tensor,
    cumulative_occupancy: Tensor,
    gaps: Tensor,
    policy: Tensor,
    corruption: Tensor | float = 0.0,
) -> SelfBounding:
    """Both sides of the self-bounding condition for a finished run.

    Args:
        regret: pseudo-regret of each seed `(N,)`.
        cumulative_occupancy: sum_t q_t `(N, S, A)`.
        gaps: the gap function `(S, A)`.
        policy: the mapping pi*, one-hot `(S, A)`.
        corruption: C, one number for all seeds or one for each.

    Returns:
        `SelfBounding(left, right)`, each `(N,)`.
    """
    suboptimal = torch.where(policy > 0, 0.0, gaps)
    return SelfBounding(regret, (cumulative_occupancy * suboptimal).sum((-2, -1)) - corruption)
