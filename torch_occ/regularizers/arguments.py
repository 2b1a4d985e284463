"""The arguments of separable regularizers, computed from q without cancellation.

    pair        q(s, a)
    rest        q(s) - q(s, a)        the other actions of the state
    state       q(s)
    complement  1 - q(s, a)           all other pairs of the layer

When one action takes nearly all of a state, the subtraction q(s) - q(s, a) leaves no correct
digit, and the regularizers of this package have infinite slope there. So `rest` and `complement`
are sums of the other entries.

An argument does not exist if it is identically zero (the rest of a state with one action) or
belongs to a masked pair. Its value is then set to 1, and its terms are left out of every sum.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP

Argument = Literal["pair", "rest", "state", "complement"]
ARGUMENTS: tuple[Argument, ...] = ("pair", "rest", "state", "complement")


def marginal(name: Argument, mdp: LayeredMDP, q: Tensor) -> Tensor:
    """Compute one argument at q.

    Args:
        q: `(*batch, S, A)`, zero on masked pairs.

    Returns:
        `(*batch, S)` for `state`, `(*batch, S, A)` for the others; 1 where it does not exist.
    """
    match name:
        case "pair":
            found = q
        case "rest":
            found = q @ mdp.other_actions
        case "state":
            found = q.sum(-1)
        case "complement":
            elsewhere = torch.cat([sum_of_others(layer) for layer in mdp.split(q.sum(-1), -1)], -1)
            accurate = q @ mdp.other_actions + elsewhere.unsqueeze(-1)
            # On Omega, `accurate` equals 1 - q. Take the value from `accurate`, which does not
            # cancel, and the derivative from 1 - q.
            found = accurate.detach() - (q - q.detach())
    return keep(name, mdp, found, 1.0)


def change(name: Argument, mdp: LayeredMDP, dq: Tensor) -> Tensor:
    """Return the change of the argument when q changes by dq; 0 where it does not exist."""
    match name:
        case "pair":
            moved = dq
        case "rest":
            moved = dq @ mdp.other_actions
        case "state":
            moved = dq.sum(-1)
        case "complement":
            moved = -dq
    return keep(name, mdp, moved, 0.0)


def pull_back(name: Argument, mdp: LayeredMDP, slope: Tensor) -> Tensor:
    """Return the gradient in q `(*batch, S, A)` of scalar terms with this slope.

    This is the adjoint of `change`.
    """
    slope = keep(name, mdp, slope, 0.0)
    match name:
        case "pair":
            return slope
        case "rest":
            return keep("pair", mdp, slope @ mdp.other_actions, 0.0)
        case "state":
            return keep("pair", mdp, slope.unsqueeze(-1).expand(*slope.shape, mdp.num_actions), 0.0)
        case "complement":
            return -slope


def keep(name: Argument, mdp: LayeredMDP, x: Tensor, otherwise: float) -> Tensor:
    """Return x where the argument exists, and `otherwise` elsewhere."""
    mask = mdp.missing[name]
    return x if mask is None else x.masked_fill(mask, otherwise)


def sum_of_others(x: Tensor) -> Tensor:
    """Return, for each entry along the last dimension, the sum of the others; nothing cancels."""
    before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
    after = torch.nn.functional.pad(x.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
    return before + after
