"""The positive numbers that a separable regularizer reads off an occupancy measure, each without cancellation.

    pair        q(s, a)
    rest        q(s) - q(s, a)        the other actions of the state
    state       q(s)
    complement  1 - q(s, a)           all other pairs of the layer

When one action takes nearly all of a state, q(s) - q(s, a) computed as written has no correct digit left, and the regularizers of this
package have infinite slope there. So `rest` and `complement` are summed from the other entries instead.

An argument that is identically zero (the rest of a state with one action) or that belongs to a masked pair does not exist: it takes
no part in anything, and a harmless 1 stands in its place.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP

Argument = Literal["pair", "rest", "state", "complement"]
ARGUMENTS: tuple[Argument, ...] = ("pair", "rest", "state", "complement")


def marginal(name: Argument, mdp: LayeredMDP, q: Tensor) -> Tensor:
    """One argument at q `(*batch, S, A)`, which must vanish on masked pairs. `state` is `(*batch, S)`, the others `(*batch, S, A)`."""
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
            # On Omega both are equal; `accurate` has the digits, and 1 - q the derivative that this package means.
            found = accurate.detach() - (q - q.detach())
    return keep(name, mdp, found, 1.0)


def change(name: Argument, mdp: LayeredMDP, dq: Tensor) -> Tensor:
    """How the argument moves when q moves by dq."""
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
    """The gradient in q of scalar terms with this slope, `(*batch, S, A)`: the adjoint of `change`."""
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
    """x where the argument exists, `otherwise` elsewhere."""
    mask = mdp.missing[name]
    return x if mask is None else x.masked_fill(mask, otherwise)


def sum_of_others(x: Tensor) -> Tensor:
    """Along the last dimension, the sum of all entries but this one, adding only what belongs to it."""
    before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
    after = torch.nn.functional.pad(x.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
    return before + after
