"""Expectations by enumerating every trajectory of a small MDP with masks and two start states."""

import pytest
import torch
from zoo import PROBLEMS, random_loss, trajectories

import torch_occ as occ
from torch_occ.mdp.occupancy import occupancy

PROBLEM = PROBLEMS["masked"]()
MDP = PROBLEM.mdp
LOSS = random_loss(MDP, seed=6)


def some_q(mdp, seed=0):
    weights = random_loss(mdp, seed=seed) * mdp.actions + 0.01 * mdp.actions
    return occupancy(mdp, weights / weights.sum(-1, keepdim=True))


def all_feedback(q):
    """Every trajectory as a batch of feedback, and their probabilities."""
    states, actions, chances = trajectories(MDP, q)
    table = LOSS.expand(len(chances), -1, -1)
    return occ.Feedback(states, actions, LOSS[states, actions], table), chances


def expectation(estimator, t=1, seed=0):
    q = some_q(MDP, seed)
    feedback, chances = all_feedback(q)
    assert abs(float(chances.sum()) - 1) < 1e-14
    estimates = estimator(feedback, q.expand(len(chances), -1, -1), t)
    return q, estimates, (chances[:, None, None] * estimates).sum(0)


EXISTING = torch.where(MDP.actions, LOSS, 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_importance_weights_are_unbiased(seed):
    q, estimates, mean = expectation(occ.ImportanceWeighted(), seed=seed)
    torch.testing.assert_close(mean, EXISTING, rtol=1e-13, atol=1e-14)
    assert bool(((estimates == 0) | torch.isclose(estimates, LOSS / q)).all())
    assert bool(((estimates != 0).sum((-2, -1)) == MDP.horizon).all())


# The baseline applies everywhere, somewhere (twice), and nowhere.
@pytest.mark.parametrize("gamma", [1e-3, 0.05, 0.11, 10.0])
@pytest.mark.parametrize("t", [1, 4])
def test_reduced_variance_is_unbiased(gamma, t):
    q, estimates, mean = expectation(occ.ReducedVariance(occ.InverseSqrt(gamma)), t)
    torch.testing.assert_close(mean, EXISTING, rtol=1e-13, atol=1e-13)
    eta = 4 * gamma / t**0.5  # of Zimmert and Seldin
    baseline = torch.where(q >= eta**2, 0.5, 0.0).double()
    states, actions, chances = trajectories(MDP, q)
    visits = torch.zeros(len(chances), *q.shape, dtype=q.dtype)
    visits[torch.arange(len(chances))[:, None], states, actions] = 1.0
    above = torch.where(visits > 0, (LOSS - baseline) / q, 0.0)
    torch.testing.assert_close(estimates, baseline + above)


@pytest.mark.parametrize("bias", [1e-3, 0.2])
def test_implicit_exploration_is_biased_by_the_known_amount(bias):
    q, estimates, mean = expectation(occ.ImplicitExploration(bias))
    torch.testing.assert_close(mean, EXISTING * q / (q + bias), rtol=1e-13, atol=1e-14)
    assert float(estimates.max()) <= 1 / bias
    assert bool((mean <= EXISTING).all())
