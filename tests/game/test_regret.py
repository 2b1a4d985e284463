import pytest
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ


@pytest.mark.parametrize("strategy", ["front", "uniform", "targeted"])
@pytest.mark.parametrize("budget", [5.0, 1e9])
def test_self_bounding_holds_as_an_inequality_under_corruption(strategy, budget):
    mdp = PROBLEMS["layers"]().mdp
    mean = random_loss(mdp, seed=5)
    losses = occ.Corrupted(occ.BernoulliLosses(mean), budget, strategy, episodes=60, target=mean)
    history = occ.simulate(mdp, occ.OptimisticValueIteration(mdp), losses, 60, range(4))
    plan, played = occ.optimal_policy(mdp, mean), history.cumulative_occupancy
    regret, spent = history.regret[:, -1], history.corruption[:, -1]
    given = (regret, played, plan.gaps, plan.policy, spent)
    found = occ.theory.self_bounding_condition(*given)
    assert bool((found.left < found.right).all())
    assert bool((spent > 0).all())


def test_self_bounding_by_hand():
    found = occ.theory.self_bounding_condition(
        tensor([3.0]), tensor([[[4.0, 6.0]]]), tensor([[0.7, 0.5]]), tensor([[1.0, 0.0]]), 1.0
    )
    assert (found.left.tolist(), found.right.tolist()) == ([2.0], [3.0])
