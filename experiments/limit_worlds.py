"""MDPs with few successors, in which optimal policies leave out states."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import torch
from torch import Tensor

import torch_occ as occ


def few_successors(
    horizon: int, width: int, num_actions: int, successors: int, seed: int
) -> tuple[occ.LayeredMDP, Tensor]:
    """A random MDP with this many successors of a pair, and means `(S, A)` uniform on [0.2, 0.8].

    The probabilities of the successors are uniform on the simplex.
    """
    generator = np.random.default_rng(seed)
    layers = []
    for here, there in pairwise([1, *[width] * (horizon - 1), 1]):
        layer, kept = np.zeros((here, num_actions, there)), min(successors, there)
        for row in layer.reshape(-1, there):
            row[generator.choice(there, kept, replace=False)] = generator.dirichlet(np.ones(kept))
        layers.append(torch.from_numpy(layer))
    mdp = occ.LayeredMDP(layers)
    mean = generator.uniform(0.2, 0.8, (mdp.num_states, num_actions))
    return mdp, torch.from_numpy(mean)


def world_with_hidden_states(
    horizon: int, width: int, num_actions: int, successors: int, seed: int, gap: float
) -> tuple[occ.LayeredMDP, Tensor]:
    """The first of these MDPs, from `seed` on, that suits a measurement of the limit.

    The optimal policy leaves out at least two reachable states, and no suboptimal action of a
    reachable state has less than this gap: smaller gaps would need more than a million episodes.
    States that no policy reaches are removed.
    """
    for candidate in count(seed):
        mdp, mean = few_successors(horizon, width, num_actions, successors, candidate)
        plan = occ.optimal_policy(mdp, mean)
        hidden = mdp.reachable & (occ.occupancy(mdp, plan.policy).sum(-1) == 0)
        other = (plan.policy == 0) & mdp.reachable.unsqueeze(-1)
        if int(hidden.sum()) >= 2 and float(plan.gaps[other].min()) >= gap:
            return mdp.prune(), mean[mdp.reachable]
    raise AssertionError("count has no end")
