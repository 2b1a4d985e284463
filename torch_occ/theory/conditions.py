"""Gaps, corruption and the self-bounding condition (`sec:preliminaries_self_bounding`)."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.regret import self_bounding
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy
from torch_occ.theory.penalty import outside
from torch_occ.theory.statements import Statement, statement


def gaps(mdp: LayeredMDP, mean: Tensor) -> Tensor:
    """Delta(s,a) = Q(s,a) - min_{a'} Q(s,a') of the optimal policy for the mean losses.

    `(*batch, S, A)` -> `(*batch, S, A)`.

    Read: the minimum is printed over a' != a. For a suboptimal action that is the same. For the
    optimal one it would be negative, but the paper asks for a non-negative function.
    """
    return optimal_policy(mdp, mean).gaps


def minimal_gap(mdp: LayeredMDP, gap: Tensor, mapping: Tensor) -> Tensor:
    """Delta_min = min over s and a != pi*(s) of Delta(s,a), `(*batch,)`.

    It is zero if the optimal action of a state is not unique, and infinite if no state has a
    choice.
    """
    return torch.where(mdp.actions & (mapping == 0), gap, torch.inf).amin((-2, -1))


def corruption(mdp: LayeredMDP, losses: Tensor, clean: Tensor) -> Tensor:
    """C = 2 sum_t sum_{k < L} max_{s in S_k, a} |loss_t(s,a) - clean_t(s,a)|.

    Both arguments are `(T, *batch, S, A)`; the result is `(*batch,)`.
    """
    difference = torch.where(mdp.actions, (losses - clean).abs(), 0.0)
    return 2 * torch.stack([layer.amax((-2, -1)) for layer in mdp.split(difference, -2)]).sum(
        0
    ).sum(0)


def performance_difference(mdp: LayeredMDP, q: Tensor, mean: Tensor) -> Statement:
    """⟨q - q_opt, mean⟩ = sum_s sum_{a != pi*(s)} q(s,a) Delta(s,a).

    So stochastic losses satisfy the self-bounding condition with equality and C = 0.
    """
    plan = optimal_policy(mdp, mean)
    left = ((q - occupancy(mdp, plan.policy)) * mean).sum((-2, -1))
    size = (q * mean).sum((-2, -1)) + mdp.horizon
    return statement(
        "performance difference",
        left,
        outside(q * plan.gaps, plan.policy),
        mdp.num_pairs,
        scale=size,
        relation="=",
    )


def self_bounding_condition(
    regret: Tensor, occupancies: Tensor, gap: Tensor, mapping: Tensor, corruption: Tensor | float
) -> Statement:
    """`eq:self_bounding_constraint`: sum_t sum_s sum_{a != pi*(s)} q_t(s,a) Delta(s,a) - C <= Reg.

    `occupancies` is sum_t q_t `(*batch, S, A)`, as in
    `History.cumulative_occupancy`.
    """
    right, left = self_bounding(
        regret, occupancies, gap, mapping, corruption
    )  # that function has the regret on the left
    pairs = occupancies.shape[-2] * occupancies.shape[-1]
    return statement(
        "eq:self_bounding_constraint",
        left,
        right,
        pairs,
        scale=occupancies.sum((-2, -1)) + regret.abs(),
    )


def opt_implicit_bound(
    mdp: LayeredMDP,
    best: Tensor,
    gap: Tensor,
    mapping: Tensor,
    episodes: int,
    corruption: Tensor | float,
) -> Statement:
    """`lem:opt_implict_bound`: T sum_s sum_{a != pi*(s)} q_opt(s,a) Delta(s,a) <= C.

    It follows from the self-bounding condition. q_opt is `best` `(*batch, S, A)`.
    """
    left = episodes * outside(best * gap, mapping)
    right = torch.as_tensor(corruption, dtype=best.dtype, device=best.device)
    return statement(
        "lem:opt_implict_bound", left, right, mdp.num_pairs, scale=float(episodes * mdp.horizon)
    )
