"""The compiled engine and the torch path hold each other to account."""

from __future__ import annotations

import pytest
import torch
from zoo import PROBLEMS, REGULARIZERS

import torch_occ as occ
from torch_occ.engine.arrays import why_not

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MEAN = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TABLES = torch.rand(5, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_the_step_is_the_same(regularizer, problem):
    mdp, loss, t = PROBLEMS[problem]()
    psi = REGULARIZERS[regularizer](mdp)
    if why_not(mdp, psi) is not None:
        pytest.skip(why_not(mdp, psi))
    expected = occ.FTRLStep(mdp, psi, backend="torch").solve(loss, t, check=False)
    found = occ.FTRLStep(mdp, psi, backend="engine").solve(loss, t, check=False)
    assert (expected.backend, found.backend) == ("torch", "engine")
    assert torch.equal(found.status, expected.status)
    if bool(expected.converged.all()):
        assert torch.equal(found.steps, expected.steps)
        assert float(torch.maximum(found.flow_residual, found.dual_residual).max()) < 4e-11
        torch.testing.assert_close(found.q, expected.q, rtol=1e-11, atol=0)
        scale = float(expected.value.detach().abs().max())
        torch.testing.assert_close(found.value, expected.value, rtol=1e-11, atol=1e-11 * scale)


GAMES = {
    "importance weighted": (None, occ.BernoulliLosses(MEAN)),
    "implicit exploration": (occ.ImplicitExploration(0.01), occ.UniformLosses(MEAN)),
    "reduced variance": (occ.ReducedVariance(occ.InverseSqrt()), occ.SwitchingLosses(TABLES, 20)),
    "full information": (occ.FullInformation(), occ.BernoulliLosses(MEAN)),
    "corrupted": (None, occ.Corrupted(occ.BernoulliLosses(MEAN), 50.0)),
    "adaptive": (None, occ.GreedyAdversary()),
    "constrained": (None, occ.StochasticallyConstrained(MEAN)),
}


@pytest.mark.parametrize("game", GAMES)
def test_the_game_is_the_same(game):
    """Same random numbers, same trajectories; importance weights amplify rounding along the run, so q agrees to fewer digits."""
    estimator, losses = GAMES[game]
    torch_run, engine_run = (
        occ.simulate(MDP, occ.FTRL(MDP, occ.jin_luo(MDP, beta=0.5), estimator), losses, 60, [0, 7], backend=backend)
        for backend in ("torch", "engine")
    )
    assert (torch_run.backend, engine_run.backend) == ("torch", "engine")
    alone = occ.simulate(MDP, occ.FTRL(MDP, occ.jin_luo(MDP, beta=0.5), estimator), losses, 60, [7], backend="engine")
    assert torch.equal(alone.regret[0], engine_run.regret[1])
    torch.testing.assert_close(engine_run.realised_regret, torch_run.realised_regret, rtol=0, atol=1e-12)
    torch.testing.assert_close(engine_run.newton_steps, torch_run.newton_steps, rtol=0, atol=1e-12)
    for name in ("regret", "comparator", "corruption", "uncertified", "cumulative_occupancy", "total_mean"):
        torch.testing.assert_close(getattr(engine_run, name), getattr(torch_run, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(engine_run.last_q, torch_run.last_q, rtol=1e-8, atol=0)


def test_auto_takes_the_engine_where_it_can_and_says_so():
    class Custom(occ.SeparableRegularizer):
        def pair(self, x):
            return -x.sqrt()

    play = lambda learner, backend: occ.simulate(MDP, learner, occ.BernoulliLosses(MEAN), 2, backend=backend).backend  # noqa: E731
    assert play(occ.FTRL(MDP, occ.jin_luo(MDP)), "auto") == "engine"
    assert play(occ.FTRL(MDP, Custom()), "auto") == "torch"
    assert play(occ.FollowTheLeader(MDP), "auto") == "torch"
    with pytest.raises(ValueError, match="Custom is not a table"):
        play(occ.FTRL(MDP, Custom()), "engine")
    with pytest.raises(ValueError, match="FollowTheLeader"):
        play(occ.FollowTheLeader(MDP), "engine")
    with pytest.raises(ValueError, match="auto, torch or engine"):
        play(occ.FollowTheLeader(MDP), "gpu")
