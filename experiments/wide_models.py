"""The MDPs of experiments/wide.py: a grid with sparse transitions, and Gymnasium's taxi."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ import LayeredMDP


def grid(side: int, horizon: int, slip: float = 0.2) -> LayeredMDP:
    """A robot on a grid: it stays or goes to a neighbour, from a uniformly random start.

    With probability `slip` it does one of the five moves at random.
    """
    x, y = torch.arange(side * side) // side, torch.arange(side * side) % side
    moves = torch.tensor([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    rows = (x[:, None] + moves[:, 0]).clamp(0, side - 1)
    columns = (y[:, None] + moves[:, 1]).clamp(0, side - 1)
    goal = rows * side + columns  # (S, 5)
    stay = torch.eye(5, dtype=torch.float64)
    chance = torch.full((5, 5), slip / 5, dtype=torch.float64) + (1 - slip) * stay  # meant, done
    successors, chances = goal.unsqueeze(1).expand(-1, 5, -1), chance.expand(side * side, -1, -1)
    return unrolled(successors, chances, horizon)


def taxi(horizon: int) -> LayeredMDP:
    """Gymnasium's taxi: at most 500 reachable states per layer, 6 deterministic actions."""
    return LayeredMDP.from_gymnasium("Taxi-v4", horizon=horizon)


def unrolled(successors: Tensor, chances: Tensor, horizon: int) -> LayeredMDP:
    """An MDP of `horizon` equal, sparse layers, from successors and their chances `(S, A, m)`."""
    num_states, num_actions, most = successors.shape
    pair = torch.arange(num_states * num_actions).repeat_interleave(most)
    index, shape = torch.stack([pair, successors.flatten()]), (num_states * num_actions, num_states)
    step = torch.sparse_coo_tensor(
        index, chances.flatten(), shape, check_invariants=False
    ).coalesce()
    end = torch.ones(num_states * num_actions, 1, dtype=torch.float64).to_sparse()
    initial = torch.full((num_states,), 1 / num_states, dtype=torch.float64)
    return LayeredMDP([*[step] * (horizon - 1), end], initial=initial)


def losses(mdp: LayeredMDP, seed: int) -> Tensor:
    """Mean losses, uniform in [0, 1]."""
    return torch.rand(
        mdp.num_states,
        mdp.num_actions,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )
