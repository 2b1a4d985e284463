"""OSSB: what it explores, how close it comes to the limit, corners and bad input."""

import math

import pytest
import torch

import torch_occ as occ
from experiments.growth import growth
from experiments.limit_worlds import few_successors, world_with_hidden_states
from torch_occ.game.learners.ossb import first_least


def slope(history, limit):
    return growth(history.episodes, history.regret).per_log.value / limit


@pytest.mark.slow
def test_the_slope_is_close_to_the_limit_where_optimism_is_far_from_it():
    """The optimal policy leaves out states; KL-UCB pays for them, OSSB as much as needed."""
    mdp, mean = world_with_hidden_states(3, 3, 3, 1, 1, 0.05)
    limit = occ.lower_bound(mdp, mean).value
    optimistic, exploring = (
        occ.simulate(mdp, learner, occ.BernoulliLosses(mean), 100_000, range(8))
        for learner in (occ.KLUCB(mdp), occ.OSSB(mdp))
    )
    far, close = slope(optimistic, limit), slope(exploring, limit)
    assert far > 2.5
    assert abs(close - 1) < 0.5 * (far - 1)
    assert exploring.regret[:, -1].mean() < 0.9 * optimistic.regret[:, -1].mean()


def started(learner, seeds=1):
    learner.start(seeds)
    return learner


def test_visits_come_close_to_what_the_limit_asks_for():
    """At T = 10,000 the costs of exploration are near C log T, in states that count."""
    mdp, mean = world_with_hidden_states(3, 3, 3, 2, 1, 0.05)
    limit, kept = occ.lower_bound(mdp, mean), []

    class Keep(occ.Callback):
        def on_end(self, run, history):
            kept.append(run.learner.state)

    occ.simulate(
        mdp, occ.OSSB(mdp), occ.BernoulliLosses(mean), 10_000, range(2), callbacks=[Keep()]
    )
    gaps, visits = occ.optimal_policy(mdp, mean).gaps, kept[0]["visits"]
    cost = (gaps * visits).sum((-1, -2)) / (limit.value * math.log(10_000))
    assert bool(((cost > 0.5) & (cost < 2)).all())


def test_a_state_that_is_hardly_ever_visited_is_not_waited_for():
    """A pair that was tried counts as visited: no exploration for 1 / probability episodes."""
    rare = 1e-6
    first = torch.tensor([[[1.0, 0.0], [1 - rare, rare]]], dtype=torch.float64)
    mdp = occ.LayeredMDP([first, torch.ones(2, 2, 1, dtype=torch.float64)])
    mean = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    history = occ.simulate(mdp, occ.OSSB(mdp), occ.BernoulliLosses(mean), 3000, range(4))
    assert float(history.regret[:, -1].max()) < 100


def test_tied_actions_do_not_make_exploration_endless():
    """They are explored for ever, at no cost, but other pairs no more than log t times for that."""
    mdp = occ.LayeredMDP.random(1, 1, 3)
    losses = occ.BernoulliLosses(torch.tensor([[0.2, 0.2, 0.9]], dtype=torch.float64))
    history = occ.simulate(mdp, occ.OSSB(mdp, share=0.1), losses, 20_000, range(4))
    assert float(history.regret[:, -1].max()) < 0.7 * 4 * math.log(20_000)


def test_greedy_pairs_are_known_best():
    """In a visited state the greedy action is played while it has fewer visits than others."""
    learner = started(occ.OSSB(occ.LayeredMDP.random(1, 1, 3)))
    state = learner.state
    state["visits"][0, 0] = torch.tensor([5.0, 5.0, 4.0])
    state["losses"][0, 0] = torch.tensor([2.0, 3.0, 1.0])
    plays = []
    for t in range(100, 103):
        q = learner.propose(t)[0, 0]
        plays.append(int(q.argmax()))
        state["visits"][0, 0] += q
        state["losses"][0, 0] += torch.tensor([0.4, 0.6, 0.25]) * q
    assert plays == [2, 2, 0]  # 4 visits and then 5; then the other action with 5


def test_it_explores_until_the_information_is_log_t():
    """One state, two actions: action 1 is played until N kl >= log t."""
    learner = started(occ.OSSB(occ.LayeredMDP.random(1, 1, 2), margin=0.5))
    learner.state["visits"][0, 0] = torch.tensor([1e6, 50.0])
    learner.state["losses"][0, 0] = torch.tensor([0.3e6, 25.0])
    learner.propose(1000)
    kl = 0.5 * math.log(0.5 / 0.3) + 0.5 * math.log(0.5 / 0.7)
    expected = 1.5 * math.log(1000) / kl
    assert expected > 50
    assert float(learner.state["goals"][0, 0, 1]) == math.ceil(expected)
    assert learner.state["next"].tolist() == [1301]
    assert learner.state["due"][0, 0].tolist() == [1_300_001, 66]


def test_masked_and_unreachable_pairs_are_left_out():
    mdp, mean = few_successors(3, 3, 3, 1, 1)
    actions = torch.ones(mean.shape, dtype=torch.bool)
    actions[0, 2] = False
    mdp = occ.LayeredMDP(mdp.transitions, actions=actions)
    assert not bool(mdp.reachable.all())
    for backend in ("torch", "engine"):
        history = occ.simulate(
            mdp, occ.OSSB(mdp), occ.BernoulliLosses(mean), 500, [1], backend=backend
        )
        assert float(history.cumulative_occupancy[:, ~actions].abs().max()) == 0.0
        assert float(history.regret[0, -1]) < 150


def test_the_first_of_equal_numbers():
    x = torch.tensor([[3.0, 1.0, 1.0], [math.inf, math.inf, math.inf]])
    assert first_least(x).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": -0.1}, "margin: expected a number of at least 0, got -0.1"),
        ({"share": 1.0}, "share: expected a number in \\[0, 1\\), got 1.0"),
        ({"growth": 0.0}, "growth: expected a positive number, got 0.0"),
        ({"growth": math.nan}, "growth: expected a positive number, got nan"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        occ.OSSB(occ.LayeredMDP.random(2, 2, 2), **change)
