import itertools

import pytest
import torch
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ
from torch_occ.mdp.occupancy import occupancy, optimal_policy

NAMES = ["masked", "contexts", "bandit", "no_choice"]


def brute_force(mdp, total):
    """The best of all deterministic policies, one by one."""
    choices = [mask.nonzero().flatten().tolist() for mask in mdp.actions]
    identity = torch.eye(mdp.num_actions, dtype=torch.float64)
    return min(
        float((occupancy(mdp, identity[list(picks)]) * total).sum())
        for picks in itertools.product(*choices)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_comparator_is_the_best_deterministic_policy(name):
    mdp = PROBLEMS[name]().mdp
    totals = random_loss(mdp, 50.0, batch=(2, 3))
    best = occ.game.comparator(mdp, totals)
    assert best.shape == (2, 3)
    for index in itertools.product(range(2), range(3)):
        assert float(best[index]) == pytest.approx(brute_force(mdp, totals[index]), rel=1e-13)


def both_sides(name, losses, mean):
    """A run, and the paper's self-bounding condition at its end."""
    mdp, plan = PROBLEMS[name]().mdp, optimal_policy(PROBLEMS[name]().mdp, mean)
    history = occ.simulate(mdp, occ.OptimisticValueIteration(mdp), losses, 60, range(4))
    played, spent = history.cumulative_occupancy, history.corruption[:, -1]
    return history, occ.theory.self_bounding_condition(
        history.regret[:, -1], played, plan.gaps, plan.policy, spent
    )


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", [*NAMES, "layers"])
def test_self_bounding_holds_with_equality_where_gaps_are_fixed(name, constrained):
    mean = random_loss(PROBLEMS[name]().mdp, seed=5)
    losses = occ.StochasticallyConstrained(mean) if constrained else occ.BernoulliLosses(mean)
    _, found = both_sides(name, losses, losses.gap_table if constrained else mean)
    torch.testing.assert_close(found.left, found.right, rtol=1e-11, atol=1e-11)


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
