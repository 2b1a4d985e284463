"""Random counts, beliefs, policies and trajectories."""

import torch

import torch_occ as occ
from torch_occ.rivals.beliefs import transition_shapes


def random_counts(mdp, batch=(), seed=0, most=6):
    """Visit counts of pairs that exist, one tensor per layer."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(0, most, (*batch, *shape), generator=generator).double() * mask.unsqueeze(-1)
        for shape, mask in zip(transition_shapes(mdp), mdp.split(mdp.actions, 0), strict=True)
    )


def visits_of(mdp, counts):
    """m(s, a) = sum over s' of m(s, a, s'), `(*batch, S, A)`."""
    return torch.cat([layer.sum(-1) for layer in counts], -2)


def random_belief(mdp, name, seed=0, batch=(), most=6):
    """Counts, their empirical transitions, and widths of a source at T = 1,000."""
    m = random_counts(mdp, batch, seed, most)
    P = occ.rivals.empirical_transitions(mdp, m)
    return m, P, occ.rivals.Widths.of(name, mdp, 1000, 0.1)(mdp, P, visits_of(mdp, m))


def random_policy(mdp, seed=0, batch=()):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(*batch, *mdp.actions.shape, dtype=torch.float64, generator=generator)
    weights = torch.where(mdp.actions, weights**3, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def trajectories(mdp, t, n):
    """Some trajectory of n runs."""
    generator = torch.Generator().manual_seed(t)
    states = [torch.randint(s.start, s.stop, (n,), generator=generator) for s in mdp.layer_slices]
    rows = torch.stack(states, -1)
    weights = mdp.actions[rows].double() + 0.0
    actions = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view_as(rows)
    losses = torch.rand(n, mdp.horizon, dtype=torch.float64, generator=generator)
    table = torch.rand(n, *mdp.actions.shape, dtype=torch.float64, generator=generator)
    return occ.Feedback(rows, actions, losses, table)
