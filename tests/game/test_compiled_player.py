"""The compiled engine and the torch path hold each other to account."""

from __future__ import annotations

import math

import pytest
import torch
from games import check_same_game
from zoo import PROBLEMS, REGULARIZERS, Kept, random_loss, refused_by_the_engine

import torch_occ as occ

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MEAN = random_loss(MDP, seed=1)
TABLES = random_loss(MDP, seed=2, batch=(5,))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_the_step_is_the_same(regularizer, problem):
    mdp, loss, t = PROBLEMS[problem]()
    psi = REGULARIZERS[regularizer](mdp)
    if refused_by_the_engine(mdp, psi):
        return
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
@pytest.mark.bits
def test_the_game_is_the_same(game):
    """Random numbers and trajectories are the same; q agrees to fewer digits.

    Importance weights amplify rounding errors along the run.
    """
    estimator, losses = GAMES[game]
    torch_run, engine_run = (
        occ.simulate(
            MDP,
            occ.FTRL(MDP, occ.jin_luo(MDP, beta=0.5), estimator),
            losses,
            60,
            [0, 7],
            backend=backend,
        )
        for backend in ("torch", "engine")
    )
    assert (torch_run.backend, engine_run.backend) == ("torch", "engine")
    alone = occ.simulate(
        MDP, occ.FTRL(MDP, occ.jin_luo(MDP, beta=0.5), estimator), losses, 60, [7], backend="engine"
    )
    assert torch.equal(alone.regret[0], engine_run.regret[1])
    torch.testing.assert_close(
        engine_run.realised_regret, torch_run.realised_regret, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(engine_run.newton_steps, torch_run.newton_steps, rtol=0, atol=1e-12)
    for name in (
        "regret",
        "comparator",
        "corruption",
        "uncertified",
        "cumulative_occupancy",
        "total_mean",
    ):
        torch.testing.assert_close(
            getattr(engine_run, name), getattr(torch_run, name), rtol=1e-9, atol=1e-9
        )
    torch.testing.assert_close(engine_run.last_q, torch_run.last_q, rtol=1e-8, atol=0)


BASELINES = {
    "uniform": occ.FixedPolicy,
    "leader": occ.FollowTheLeader,
    "optimistic": occ.OptimisticValueIteration,
    "more optimistic": lambda mdp: occ.OptimisticValueIteration(mdp, scale=2.0, floor=-1.0),
}


@pytest.mark.parametrize(
    "game",
    ["importance weighted", "implicit exploration", "reduced variance", "corrupted", "adaptive"],
)
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_baseline_plays_the_same_game(baseline, game):
    check_same_game(MDP, BASELINES[baseline], GAMES[game][1], 300)


@pytest.mark.parametrize("problem", ["masked", "contexts", "layers"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_baseline_plays_the_same_game_in_any_mdp(baseline, problem):
    mdp = PROBLEMS[problem]().mdp
    check_same_game(mdp, BASELINES[baseline], occ.BernoulliLosses(random_loss(mdp, seed=3)), 100)
    check_same_game(mdp, BASELINES[baseline], occ.GreedyAdversary(), 100)


def test_ucb1_is_the_index_of_auer_and_others():
    """Played by hand: mean loss - sqrt(2 log t / n), every arm once first."""
    bandit = PROBLEMS["bandit"]().mdp
    table = torch.rand(200, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    visits, losses, pulls = [0] * 4, [0.0] * 4, []
    for t in range(1, 201):
        seen = [
            losses[a] / visits[a] - math.sqrt(2 * math.log(max(t, 2)) / visits[a])
            if visits[a]
            else -math.inf
            for a in range(4)
        ]
        arm = seen.index(min(seen))
        pulls.append(arm)
        visits[arm] += 1
        losses[arm] += float(table[t - 1, 0, arm])
    for backend in ("torch", "engine"):
        learner, kept = occ.OptimisticValueIteration(bandit, scale=2**0.5, floor=-math.inf), Kept()
        occ.simulate(
            bandit, learner, occ.TableLosses(table), 200, backend=backend, callbacks=[kept]
        )
        assert kept.learner.state["visits"].flatten().tolist() == visits
        torch.testing.assert_close(
            kept.learner.state["losses"].flatten(), torch.tensor(losses, dtype=torch.float64)
        )
    assert pulls[:4] == [0, 1, 2, 3]


@pytest.mark.parametrize("beta", [192.0, 1.0])
@pytest.mark.bits
def test_factors_from_earlier_episodes_do_no_harm(beta):
    """Late in a run, factors serve many episodes. q is still the solution.

    Neither checkpoints nor chunks change a bit of the run.
    """
    learner, losses = occ.FTRL(MDP, occ.jin_luo(MDP, beta=beta)), occ.BernoulliLosses(MEAN)
    episodes, kept = 5000, Kept()
    occ.simulate(
        MDP,
        learner,
        losses,
        episodes - 1,
        [3],
        backend="engine",
        checkpoints=[4000, 4999],
        callbacks=[kept],
    )
    before = kept.learner.state["cumulative_loss"]
    history = occ.simulate(MDP, learner, losses, episodes, [3], backend="engine")
    expected = occ.FTRLStep(MDP, occ.jin_luo(MDP, beta=beta), backend="torch").solve(
        before, float(episodes)
    )
    torch.testing.assert_close(history.last_q, expected.q.detach(), rtol=1e-11, atol=0)
    assert float(history.uncertified[0, -1]) == 0
    assert float(history.dual_residual.max()) < 1e-11
    assert float(history.flow_residual.max()) < 1e-15


@pytest.mark.parametrize(
    "build",
    [
        occ.OptimisticValueIteration,
        occ.FixedPolicy,
        lambda mdp: occ.FTRL(mdp, occ.jin_luo(mdp, beta=1.0)),
    ],
)
@pytest.mark.bits
def test_a_compiled_learner_continues_where_it_was_interrupted(build, tmp_path):
    """Against the adversary too, though the end of a chunk is no checkpoint."""

    class Crash(occ.Callback):
        def on_chunk(self, run):
            if run.t > 9000:
                raise RuntimeError("crash")

    arguments = {"episodes": 17_000, "seeds": [3], "backend": "engine"}
    whole = occ.simulate(MDP, build(MDP), occ.GreedyAdversary(), **arguments)
    saved = {"save_to": tmp_path / "run", "save_every": 0.0}
    with pytest.raises(RuntimeError, match="crash"):
        occ.simulate(
            MDP, build(MDP), occ.GreedyAdversary(), **arguments, **saved, callbacks=[Crash()]
        )
    assert saved["save_to"].exists()
    again = occ.simulate(MDP, build(MDP), occ.GreedyAdversary(), **arguments, **saved)
    for name in ("regret", "realised_regret", "cumulative_occupancy", "last_q"):
        assert torch.equal(getattr(again, name), getattr(whole, name))


def test_auto_takes_the_engine_where_it_can_and_says_so():
    class Custom(occ.SeparableRegularizer):
        def pair(self, x):
            return -x.sqrt()

    class Own(occ.FollowTheLeader):
        pass

    def play(learner, backend):
        return occ.simulate(MDP, learner, occ.BernoulliLosses(MEAN), 2, backend=backend).backend

    assert play(occ.FTRL(MDP, occ.jin_luo(MDP)), "auto") == "engine"
    assert play(occ.FTRL(MDP, Custom()), "auto") == "torch"
    assert play(occ.FollowTheLeader(MDP), "auto") == "engine"
    assert play(Own(MDP), "auto") == "torch"
    with pytest.raises(ValueError, match="Custom is not a table"):
        play(occ.FTRL(MDP, Custom()), "engine")
    with pytest.raises(ValueError, match="does not know the learner Own"):
        play(Own(MDP), "engine")
    with pytest.raises(ValueError, match="auto, torch or engine"):
        play(occ.FollowTheLeader(MDP), "gpu")
