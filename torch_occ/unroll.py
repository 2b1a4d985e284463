"""Unrolling: an ordinary finite MDP becomes one with layers, a copy of each state for every step at which it can be occupied."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_occ.validation import check_rows, row_tolerance

#: `origin` of a state that stands for "the episode is over" in an unrolled MDP.
ABSORBING = -1


def unroll(transition: Tensor, horizon: int, initial: Tensor | int, terminal: tuple[int, ...], actions: Tensor | None) -> dict[str, Any]:
    """The arguments of `LayeredMDP` for `horizon` steps of a finite MDP; see `LayeredMDP.from_tables`."""
    if transition.dim() != 3 or transition.shape[0] != transition.shape[2]:
        raise ValueError(f"transition: expected shape (S, A, S), got {tuple(transition.shape)}")
    if horizon < 1:
        raise ValueError(f"horizon: expected at least 1, got {horizon}")
    num_states, num_actions, _ = transition.shape
    for state in terminal:
        if not 0 <= state < num_states:
            raise ValueError(f"terminal: state {state} is not one of the {num_states} states")
    if isinstance(initial, int):
        if not 0 <= initial < num_states:
            raise ValueError(f"initial: state {initial} is not one of the {num_states} states")
        initial = torch.nn.functional.one_hot(torch.tensor(initial, device=transition.device), num_states).to(transition)
    if tuple(initial.shape) != (num_states,):
        raise ValueError(f"initial: expected shape ({num_states},), got {tuple(initial.shape)}")
    check_rows("initial", initial.detach(), None, ())
    if actions is None:
        actions = torch.ones(num_states, num_actions, dtype=torch.bool, device=transition.device)
    if actions.dtype != torch.bool or tuple(actions.shape) != (num_states, num_actions):
        raise ValueError(
            f"actions: expected a boolean mask of shape {(num_states, num_actions)}, got {actions.dtype} {tuple(actions.shape)}"
        )
    idle = (~actions.any(-1)).index_fill(0, torch.tensor(terminal, dtype=torch.long, device=actions.device), False).nonzero()
    if len(idle):
        raise ValueError(f"actions: state {int(idle[0])} has no action; give every state at least one, or name it in terminal")
    _check_tables(transition, actions, terminal)

    # One more state, the absorbing end: terminal states lead there whatever is done, and it leads to itself.
    end = num_states
    alive = torch.ones(num_states, dtype=torch.bool, device=transition.device)
    alive[list(terminal)] = False
    extended = transition.new_zeros(end + 1, num_actions, end + 1)
    extended[:end, :, :end] = torch.where(alive, transition, 0.0)
    extended[:end, :, end] = torch.where(alive, 0.0, transition).sum(-1)  # entering a terminal state is the end
    extended[end, 0, end] = 1.0
    mask = torch.cat([actions, torch.arange(num_actions, device=transition.device).eq(0).unsqueeze(0)])
    start = torch.cat([torch.where(alive, initial, 0.0), torch.where(alive, 0.0, initial).sum().unsqueeze(0)])

    layers = [start.nonzero().squeeze(-1)]
    for _ in range(horizon - 1):
        here = torch.where(mask[layers[-1]].unsqueeze(-1), extended[layers[-1]], 0.0)
        layers.append((here > 0).flatten(0, 1).any(0).nonzero().squeeze(-1))
    transitions = [extended[here][:, :, there] for here, there in pairwise(layers)]
    transitions.append(transition.new_ones(len(layers[-1]), num_actions, 1))
    states = torch.cat(layers)
    return {
        "transitions": transitions,
        "actions": mask[states],
        "initial": start[layers[0]],
        "origin": torch.where(states == end, ABSORBING, states),
    }


def _check_tables(transition: Tensor, actions: Tensor, terminal: tuple[int, ...]) -> None:
    """Report a bad row by the user's own state numbers, before layers exist."""
    used = actions.clone()
    used[list(terminal)] = False
    sums_to_one = (transition.sum(-1) - 1).abs() <= row_tolerance(transition.dtype)
    proper = (transition.isfinite() & (transition >= 0)).all(-1) & sums_to_one
    wrong = (used & ~proper).nonzero()
    if len(wrong):
        state, action = wrong[0].tolist()
        row = transition[state, action]
        raise ValueError(
            f"transition: state {state}, action {action}: expected non-negative probabilities that sum to 1, "
            f"got smallest {float(row.min()):.12g} and sum {float(row.sum()):.12g}"
        )
