import math

import pytest
import torch
from zoo import PROBLEMS, Kept, random_loss, tensor

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


@pytest.mark.parametrize(
    ("psi", "problem"),
    [(occ.jin_luo, "layers"), (lambda _: 5 * occ.Tsallis(), "masked"), (occ.jin_luo, "sparse")],
)
def test_a_learner_with_budgets_meets_them_in_every_episode(psi, problem):
    """Both backends play the same game, and a seed has the same bits in any company."""
    mdp = PROBLEMS["layers"]().mdp.to_sparse() if problem == "sparse" else PROBLEMS[problem]().mdp
    mean, found = random_loss(mdp, seed=1), {}
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, mean).policy)
    # What the best policy does is expensive; the last limit is never reached.
    costs = torch.stack([best + 0.1, random_loss(mdp, seed=2) + best, 0.1 * torch.ones_like(best)])
    safe = occ.occupancy(mdp, occ.optimal_policy(mdp, costs.sum(0)).policy)
    budgets = occ.Budgets(costs, (costs * (best + safe) / 2).sum((-2, -1)) * tensor([1, 1, 2]))
    losses, learner = occ.BernoulliLosses(mean), occ.FTRL(mdp, psi(mdp), constraints=budgets)
    for case in ("engine", "torch", "others"):
        keep, backend = Kept(), "torch" if case == "torch" else "engine"
        seeds = [2, 7, 8] if case == "others" else range(3)
        run = occ.simulate(mdp, learner, losses, 40, seeds, backend=backend, callbacks=[keep])
        assert not bool(run.uncertified.any())
        found[case] = keep.learner.state | {"regret": run.regret}
    for key in ("q", "multipliers", "regret", "cumulative_loss"):
        mine = found["engine"][key]
        torch.testing.assert_close(mine, found["torch"][key], rtol=1e-9, atol=1e-9)
        assert torch.equal(mine[2], found["others"][key][0])
    assert -1e-6 < float(found["engine"]["budget_excess"].max()) < 1e-13
    assert not bool(found["engine"]["multipliers"][:, 2].any())
    assert bool(found["engine"]["multipliers"][:, :2].any(-1).all())
    assert occ.FTRL(mdp, occ.Shannon(), constraints=budgets).why_not_compiled(mdp)
    learner = occ.FTRL(mdp, psi(mdp), constraints=occ.Budgets(costs, 0 * budgets.limits))
    with pytest.raises(occ.InfeasibleError, match="no policy meets the budgets"):
        occ.simulate(mdp, learner, losses, 5)
