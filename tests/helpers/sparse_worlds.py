"""Random MDPs whose pairs have few successors, so that optimal policies leave out states."""

from itertools import pairwise

import numpy as np
import torch

import torch_occ as occ


def sparse_world(horizon, width, num_actions, successors, seed):
    """An MDP with this many successors of a pair, and means uniform on [0.2, 0.8]."""
    generator = np.random.default_rng(seed)
    layers = []
    for here, there in pairwise([1, *[width] * (horizon - 1), 1]):
        layer = np.zeros((here, num_actions, there))
        count = min(successors, there)
        for row in layer.reshape(-1, there):
            row[generator.choice(there, count, replace=False)] = generator.dirichlet(np.ones(count))
        layers.append(torch.from_numpy(layer))
    mdp = occ.LayeredMDP(layers)
    return mdp, torch.from_numpy(generator.uniform(0.2, 0.8, (mdp.num_states, num_actions)))
