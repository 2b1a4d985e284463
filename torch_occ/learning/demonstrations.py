"""Demonstrations: trajectories that the MDP must be able to produce, and their probabilities.

N trajectories are two tensors of integers `(*batch, N, L)`: the state in each layer, numbered over
all layers, and the action taken there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ._support.private import values_are_hidden
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import DenseLayer, Layer
from torch_occ.mdp.validation import broadcast


def check_demonstrations(mdp: LayeredMDP, states: Tensor, actions: Tensor) -> None:
    """Check that the MDP can produce the trajectories.

    Raises:
        TypeError: if one argument is not a tensor of integers.
        ValueError: if a shape is wrong, or if a state, an action or a transition is impossible; the
            message names the trajectory and the layer. Inside transforms of torch.func, where
            control flow cannot depend on values, only the shapes are checked.
    """
    for name, x in (("states", states), ("actions", actions)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: expected a tensor of integers (torch.int64), got {kind}")
        if x.dim() < 2 or x.shape[-1] != mdp.horizon or x.shape[-2] == 0:
            raise ValueError(
                f"{name}: expected shape (*batch, N, {mdp.horizon}), one entry per layer, "
                f"got {tuple(x.shape)}"
            )
    if states.shape != actions.shape:
        raise ValueError(
            f"actions: expected the shape of states, {tuple(states.shape)}, "
            f"got {tuple(actions.shape)}"
        )
    if values_are_hidden():
        return
    bounds = torch.tensor([(part.start, part.stop) for part in mdp.layer_slices])
    first, stop = bounds.to(states.device).unbind(-1)
    if at := _first((states < first) | (states >= stop)):
        here = mdp.layer_slices[at[-1]]
        raise ValueError(
            f"states: {_place(at)} is {int(states[at])}, which is not a state of this layer; "
            f"those are {here.start} to {here.stop - 1}"
        )
    inside = (actions >= 0) & (actions < mdp.num_actions)
    if at := _first(~inside | ~mdp.actions[states, torch.where(inside, actions, 0)]):
        raise ValueError(
            f"actions: {_place(at)} is {int(actions[at])}, an action that does not exist in "
            f"{mdp.locate(int(states[at]))}"
        )
    if at := _first(~(arrivals(mdp, states, actions).detach() > 0)):
        *_, k = at
        if k == 0:
            why = "where no episode of this MDP begins"
        else:
            before = (*at[:-1], k - 1)
            why = (
                f"which cannot follow {mdp.locate(int(states[before]))}, "
                f"action {int(actions[before])}"
            )
        raise ValueError(
            f"states: {_place(at)} is {int(states[at])} ({mdp.locate(int(states[at]))}), {why}"
        )


def arrivals(mdp: LayeredMDP, states: Tensor, actions: Tensor) -> Tensor:
    """Return initial(s_0), P(s_1 | s_0, a_0), ... of each trajectory, `(*batch, N, L)`.

    It is differentiable in the probabilities.
    """
    index = states - torch.tensor([part.start for part in mdp.layer_slices], device=states.device)
    found = [_at(mdp.initial, index[..., 0])]
    for k, layer in enumerate(mdp.layers[:-1]):
        pair = index[..., k] * mdp.num_actions + actions[..., k]
        found.append(_moved(layer, pair, index[..., k + 1]))
    batch = broadcast(*(part.shape for part in found))
    return torch.stack([part.expand(batch) for part in found], -1)


def _moved(layer: Layer, pair: Tensor, following: Tensor) -> Tensor:
    """Return P(s' | s, a) of pairs s * A + a and states s', `(*batch, N)` each."""
    width = layer.sizes[-1]
    wanted = pair * width + following
    if isinstance(layer, DenseLayer):
        return _at(layer.probabilities.flatten(-3), wanted)
    stored = layer.pattern.pair.long() * width + layer.pattern.next  # sorted
    entry = torch.searchsorted(stored, wanted).clamp(max=max(len(stored) - 1, 0))
    return torch.where(stored[entry] == wanted, _at(layer.probabilities, entry), 0.0)


def _at(table: Tensor, index: Tensor) -> Tensor:
    """Return the entries of a table `(*batch, n)` at an index `(*batch, N)`."""
    batch = broadcast(table.shape[:-1], index.shape[:-1])
    index = index.long().expand(*batch, index.shape[-1])
    return table.expand(*batch, table.shape[-1]).gather(-1, index)


def _first(wrong: Tensor) -> tuple[int, ...]:
    """Return the index of the first True; empty if there is none."""
    found = wrong.nonzero()
    return tuple(found[0].tolist()) if len(found) else ()


def _place(at: tuple[int, ...]) -> str:
    *batch, trajectory, k = at
    element = f"batch element {tuple(batch)}, " if batch else ""
    return f"{element}trajectory {trajectory}, layer {k}"
