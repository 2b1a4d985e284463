import math

import pytest
import torch
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from torch_occ.game.checks import DIAGNOSTICS

MDP = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=1)


def feedback_at(t, n, mdp=MDP):
    """Some trajectory of each of n runs, with losses."""
    generator = torch.Generator().manual_seed(t)
    states = torch.stack(
        [torch.randint(s.start, s.stop, (n,), generator=generator) for s in mdp.layer_slices], -1
    )
    actions = torch.randint(0, mdp.num_actions, (n, mdp.horizon), generator=generator)
    return occ.Feedback(
        states, actions, torch.rand(n, mdp.horizon, dtype=torch.float64, generator=generator), None
    )


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
    build, regularizer = LEARNERS[name]
    learner, step = build(), occ.FTRLStep(MDP, regularizer())
    learner.start(3)
    total = torch.zeros(3, MDP.num_states, MDP.num_actions, dtype=torch.float64)
    for t in range(1, 6):
        q, feedback = learner.propose(t), feedback_at(t, 3)
        for i in range(3):
            expected = step(total[i], t).detach()
            torch.testing.assert_close(q[i], expected, rtol=1e-9, atol=0)
            for s, a, loss in zip(
                feedback.states[i], feedback.actions[i], feedback.losses[i], strict=True
            ):
                total[i, s, a] += loss / expected[s, a]
        learner.observe(t, q, feedback)
        torch.testing.assert_close(learner.state["cumulative_loss"], total, rtol=1e-9, atol=0)
        found = learner.diagnostics()
        assert set(found) == set(DIAGNOSTICS)
        assert all(value.shape == (3,) for value in found.values())
        assert not bool(found["uncertified"].any())
    assert not q.requires_grad


def test_o_reps_where_there_is_nothing_to_choose():
    mdp = occ.LayeredMDP([torch.ones(1, 1, 1, dtype=torch.float64)] * 2)
    learner = occ.FTRL.o_reps(mdp, 100)
    learner.start(1)
    assert torch.equal(learner.propose(1), torch.ones(1, 2, 1, dtype=torch.float64))


def test_a_bad_floor_is_named():
    with pytest.raises(ValueError, match="floor"):
        occ.OptimisticValueIteration(MDP, floor=0.5)
    with pytest.raises(ValueError, match="more than one layer"):
        occ.OptimisticValueIteration(MDP, floor=-math.inf)


@pytest.mark.parametrize(
    ("psi", "problem"),
    [(occ.jin_luo, "layers"), (lambda _: 20 * occ.Shannon(), "masked"), (occ.jin_luo, "sparse")],
)
def test_a_learner_with_budgets_meets_them_in_every_episode(psi, problem):
    """Both backends play the same game, and a seed has the same bits in any company."""
    mdp = PROBLEMS["layers"]().mdp.to_sparse() if problem == "sparse" else PROBLEMS[problem]().mdp
    mean, found = random_loss(mdp, seed=1), {}
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, mean).policy)
    costs = torch.stack([best + 0.1, random_loss(mdp, seed=2) + best])  # the best is expensive
    safe = occ.occupancy(mdp, occ.optimal_policy(mdp, costs.sum(0)).policy)
    budgets = occ.Budgets(costs, (costs * (best + safe) / 2).sum((-2, -1)))
    for case in ("engine", "torch", "others"):
        keep, backend = Kept(), "torch" if case == "torch" else "engine"
        learner, seeds = occ.FTRL(mdp, psi(mdp), constraints=budgets), [2, *range(7, 9)]
        seeds = seeds if case == "others" else range(3)
        losses = occ.BernoulliLosses(mean)
        run = occ.simulate(mdp, learner, losses, 40, seeds, backend=backend, callbacks=[keep])
        assert not bool(run.uncertified.any())
        found[case] = keep.learner.state | {"regret": run.regret}
    for key in ("q", "multipliers", "regret", "cumulative_loss"):
        mine = found["engine"][key]
        torch.testing.assert_close(mine, found["torch"][key], rtol=1e-9, atol=1e-9)
        assert torch.equal(mine[2], found["others"][key][0])
    assert float(found["engine"]["budget_excess"].max()) < 1e-13
    assert float(found["engine"]["multipliers"].amax(-1).min()) > 0
    with pytest.raises(ValueError, match="budgets without a batch"):
        occ.FTRL(mdp, psi(mdp), constraints=occ.Budgets(costs[None], budgets.limits))
    learner = occ.FTRL(mdp, psi(mdp), constraints=occ.Budgets(costs, 0 * budgets.limits))
    with pytest.raises(occ.InfeasibleError, match="no policy meets the budgets"):
        occ.simulate(mdp, learner, occ.BernoulliLosses(mean), 5)
