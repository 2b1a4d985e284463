import pytest
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ
from torch_occ.mdp.occupancy import optimal_policy


def both_sides(name, losses, mean):
    """A run, and the paper's self-bounding condition at its end."""
    mdp, plan = PROBLEMS[name]().mdp, optimal_policy(PROBLEMS[name]().mdp, mean)
    history = occ.simulate(mdp, occ.OptimisticValueIteration(mdp), losses, 60, range(4))
    played, spent = history.cumulative_occupancy, history.corruption[:, -1]
    return history, occ.theory.self_bounding_condition(
        history.regret[:, -1], played, plan.gaps, plan.policy, spent
    )


@pytest.mark.parametrize("strategy", ["front", "uniform", "targeted"])
@pytest.mark.parametrize("budget", [5.0, 1e9])
def test_self_bounding_holds_as_an_inequality_under_corruption(strategy, budget):
    mean = random_loss(PROBLEMS["layers"]().mdp, seed=5)
    losses = occ.Corrupted(occ.BernoulliLosses(mean), budget, strategy, episodes=60, target=mean)
    history, found = both_sides("layers", losses, mean)
    assert bool((found.left < found.right).all())
    assert bool((history.corruption[:, -1] > 0).all())


def test_self_bounding_by_hand():
    found = occ.theory.self_bounding_condition(
        tensor([3.0]), tensor([[[4.0, 6.0]]]), tensor([[0.7, 0.5]]), tensor([[1.0, 0.0]]), 1.0
    )
    assert (found.left.tolist(), found.right.tolist()) == ([2.0], [3.0])
