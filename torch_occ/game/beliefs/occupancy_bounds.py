"""Upper occupancy bounds: the largest probability of a state under transitions in a set (Comp-UOB).

The set has one box per pair: every P' with |P'(s' | s, a) - P(s' | s, a)| <= B(s, a, s') and rows
that sum to one. For a target state x,

    f(s) = 1{s = x} + sum_a pi(a | s) max{ sum_s' p(s') f(s') : lo <= p <= hi, sum p = 1 },

from the last layer to the first, with lo = max(0, P - B) and hi = min(1, P + B). The upper
occupancy bound is u(x) = sum_s initial(s) f(s). The maximum is greedy: p = lo, and the remaining
mass 1 - sum lo goes to the successors in the order of decreasing f, to each up to hi - lo. The set
is a product over pairs, so the maxima are attained by one P' (Jin, Jin, Luo, Sra and Yu, 2020).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_occ.game.beliefs.counts import check_table
from torch_occ.mdp.layered import LayeredMDP

#: The largest number of entries of a tensor in memory, unless one target has more.
_MOST = 1 << 22


def upper_occupancy(
    mdp: LayeredMDP, policy: Tensor, transitions: Sequence[Tensor], widths: Sequence[Tensor]
) -> Tensor:
    """u(s), the largest q(s) of a policy over all transitions in the confidence set.

    For pairs, u(s, a) = pi(a | s) u(s). If all widths are zero, u is the occupancy measure.

    Args:
        mdp: the layout and the initial distribution; its transitions are not used.
        policy: `(*batch, S, A)`.
        transitions: the centre P of the set, one tensor `(*batch, S_k, A, S_{k+1})` per layer.
        widths: B, one tensor of the same shape per layer.

    Returns:
        u, `(*batch, S)`.

    Raises:
        ValueError: if a shape does not fit the layout.
    """
    check_table("transitions", mdp, transitions)
    check_table("widths", mdp, widths)
    if tuple(policy.shape[-2:]) != (mdp.num_states, mdp.num_actions):
        raise ValueError(
            f"policy: expected shape (*batch, {mdp.num_states}, {mdp.num_actions}), got "
            f"{tuple(policy.shape)}"
        )
    least = [(P - B).clamp(min=0.0) for P, B in zip(transitions, widths, strict=True)]
    caps = [
        (P + B).clamp(max=1.0) - low for P, B, low in zip(transitions, widths, least, strict=True)
    ]
    policies = mdp.split(policy, -2)
    batch = torch.broadcast_shapes(policy.shape[:-2], *(low.shape[:-3] for low in least))
    each = batch.numel() * max(low.shape[-3:].numel() for low in least)  # entries per target
    targets = torch.eye(mdp.num_states, dtype=mdp.dtype, device=mdp.device)
    found = []
    for part in targets.split(max(1, _MOST // each)):  # (X, S), one target per row
        goals = mdp.split(part, -1)
        f = goals[-1]  # (*batch, X, S_k)
        for k in reversed(range(mdp.horizon - 1)):
            ahead = _largest(least[k], caps[k], f)  # (*batch, X, S_k, A)
            f = goals[k] + (policies[k].unsqueeze(-3) * ahead).sum(-1)
        found.append((f * mdp.initial.unsqueeze(-2)).sum(-1).expand(*batch, -1))
    return torch.cat(found, -1)


def _largest(least: Tensor, cap: Tensor, f: Tensor) -> Tensor:
    """max of sum_s' p(s') f(s') over p between `least` and `least + cap` with sum one.

    Args:
        least: `(*batch, S, A, S')`.
        cap: `(*batch, S, A, S')`.
        f: one row per target, `(*batch, X, S')`.

    Returns:
        The maxima, `(*batch, X, S, A)`.
    """
    ordered, order = f.sort(-1, descending=True)
    ordered = ordered[..., None, None, :]  # (*batch, X, 1, 1, S')
    least, cap = least.unsqueeze(-4), cap.unsqueeze(-4)  # (*batch, 1, S, A, S')
    shape = torch.broadcast_shapes(ordered.shape, least.shape)
    places = order[..., None, None, :].expand(shape)
    low, room = (x.expand(shape).gather(-1, places) for x in (least, cap))
    # What is left for a successor after those before it were filled.
    left = (1 - low.sum(-1, keepdim=True)) - (room.cumsum(-1) - room)
    return ((low + torch.minimum(room, left.clamp(min=0.0))) * ordered).sum(-1)
