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


def play(name, losses, mean, learner=None, episodes=60):
    mdp = PROBLEMS[name]().mdp
    history = occ.simulate(
        mdp, learner or occ.OptimisticValueIteration(mdp), losses, episodes, range(4)
    )
    plan = optimal_policy(mdp, mean)
    return history, occ.game.self_bounding(
        history.regret[:, -1],
        history.cumulative_occupancy,
        plan.gaps,
        plan.policy,
        history.corruption[:, -1],
    )


@pytest.mark.parametrize("name", [*NAMES, "layers"])
def test_self_bounding_holds_with_equality_for_stochastic_losses(name):
    mean = random_loss(PROBLEMS[name]().mdp, seed=5)
    _, sides = play(name, occ.BernoulliLosses(mean), mean)
    torch.testing.assert_close(sides.left, sides.right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["contexts", "layers"])
def test_self_bounding_holds_with_equality_when_gaps_are_fixed(name):
    losses = occ.StochasticallyConstrained(random_loss(PROBLEMS[name]().mdp, seed=5))
    _, sides = play(name, losses, losses.gap_table)
    torch.testing.assert_close(sides.left, sides.right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strategy", ["front", "uniform", "targeted"])
@pytest.mark.parametrize("budget", [5.0, 1e9])
def test_self_bounding_holds_as_an_inequality_under_corruption(strategy, budget):
    mdp = PROBLEMS["layers"]().mdp
    mean = random_loss(mdp, seed=5)
    losses = occ.Corrupted(occ.BernoulliLosses(mean), budget, strategy, episodes=60, target=mean)
    history, sides = play("layers", losses, mean)
    assert bool((sides.left > sides.right).all())
    assert bool((history.corruption[:, -1] > 0).all())
    without = optimal_policy(mdp, mean)
    free = occ.game.self_bounding(
        history.regret[:, -1], history.cumulative_occupancy, without.gaps, without.policy
    )
    torch.testing.assert_close(free.right - history.corruption[:, -1], sides.right)


def test_self_bounding_by_hand():
    sides = occ.game.self_bounding(
        tensor([3.0]), tensor([[[4.0, 6.0]]]), tensor([[0.7, 0.5]]), tensor([[1.0, 0.0]]), 1.0
    )
    assert sides.left.tolist() == [3.0]
    assert sides.right.tolist() == [2.0]
