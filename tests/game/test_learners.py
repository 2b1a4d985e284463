import math

import pytest
import torch
from zoo import Kept, random_loss

import torch_occ as occ
from torch_occ.game.checks import DIAGNOSTICS

MDP = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=1)


LEARNERS = {
    "jin_luo": (lambda: occ.FTRL(MDP, occ.jin_luo(MDP)), lambda: occ.jin_luo(MDP)),
    "tsallis": (lambda: occ.FTRL.tsallis(MDP, 0.7), lambda: occ.Tsallis() / occ.InverseSqrt(0.7)),
    "log_barrier": (
        lambda: occ.FTRL.log_barrier(MDP, 0.2),
        lambda: occ.LogBarrier(1.0) / occ.InverseSqrt(0.2),
    ),
    "o_reps": (
        lambda: occ.FTRL.o_reps(MDP, 50),
        lambda: occ.Shannon() / occ.Constant(math.sqrt(2 * math.log(6 / 2) / (50 * 6))),
    ),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_ftrl_is_the_loop_over_steps(name):
    """q of episode 6 is the step for the estimates of the five before."""
    (build, regularizer), kept = LEARNERS[name], Kept()
    losses, options = occ.BernoulliLosses(random_loss(MDP)), {"backend": "torch"}
    occ.simulate(MDP, build(), losses, 5, range(3), callbacks=[kept], **options)
    q = occ.simulate(MDP, build(), losses, 6, range(3), **options).last_q
    total, found = kept.learner.state["cumulative_loss"], kept.learner.diagnostics()
    assert bool((total.sum((-2, -1)) > 0).all())
    expected = occ.FTRLStep(MDP, regularizer())(total, 6.0).detach()
    torch.testing.assert_close(q, expected, rtol=1e-9, atol=0)
    assert set(found) == set(DIAGNOSTICS)
    assert all(value.shape == (3,) for value in found.values())
    assert not bool(found["uncertified"].any())


def test_o_reps_where_there_is_nothing_to_choose():
    mdp = occ.LayeredMDP([torch.ones(1, 1, 1, dtype=torch.float64)] * 2)
    learner = occ.FTRL.o_reps(mdp, 100)
    learner.start(1)
    assert torch.equal(learner.propose(1), torch.ones(1, 2, 1, dtype=torch.float64))


def test_a_learner_with_budgets_meets_them_in_every_episode():
    mdp = occ.LayeredMDP.random(2, 2, 3, seed=0)
    mean = random_loss(mdp, seed=1)
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, mean).policy)
    # What the best policy does is expensive; the second limit is never reached.
    costs = torch.stack([best + 0.1, torch.ones_like(best)])
    limits = 0.5 * (costs * best).sum((-2, -1)) + 0.5 * occ.game.comparator(mdp, costs[0])
    limits[1] = 9.0
    budgets = occ.Budgets(costs, limits)
    learner = occ.FTRL(mdp, occ.jin_luo(mdp, beta=0.5), constraints=budgets)

    class Watch(occ.Callback):
        def on_end(self, run, history):
            self.excess = run.learner.state["budget_excess"]

    watch = Watch()
    history = occ.simulate(mdp, learner, occ.BernoulliLosses(mean), 60, range(3), callbacks=[watch])
    assert not bool(history.uncertified.any())
    assert -1e-6 < float(watch.excess.max()) < 1e-13
    spent = (costs * history.cumulative_occupancy[:, None] / 60).sum((-2, -1))
    assert bool((spent <= limits + 1e-13).all())
    # Without budgets some runs spend more.
    free = occ.simulate(
        mdp, occ.FTRL(mdp, occ.jin_luo(mdp, beta=0.5)), occ.BernoulliLosses(mean), 60, range(3)
    )
    assert bool(((costs * free.cumulative_occupancy[:, None] / 60).sum((-2, -1)) > limits).any())
    with pytest.raises(ValueError, match="budgets without a batch"):
        occ.FTRL(mdp, occ.jin_luo(mdp), constraints=occ.Budgets(costs[None], limits[None]))
