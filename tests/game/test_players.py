"""The engine and torch play the same games, with every learner of torch_occ.game.

The step is compared, too: for the whole zoo.
"""

from __future__ import annotations

import math

import pytest
import torch
from games import check_same_game, same
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MEAN = random_loss(MDP, seed=1)
LOSSES = occ.BernoulliLosses(MEAN)
TABLES = random_loss(MDP, seed=2, batch=(5,))


GAMES = {
    "bernoulli": LOSSES,
    "uniform": occ.UniformLosses(MEAN),
    "switching": occ.SwitchingLosses(TABLES, 20),
    "corrupted": occ.Corrupted(LOSSES, 50.0),
    "adaptive": occ.GreedyAdversary(),
    "constrained": occ.StochasticallyConstrained(MEAN),
}


def paper(mdp, estimator=None):
    return occ.FTRL(mdp, occ.jin_luo(mdp, beta=0.5), estimator)


BASELINES = {
    "uniform": occ.FixedPolicy,
    "leader": occ.FollowTheLeader,
    "optimistic": occ.OptimisticValueIteration,
    "more optimistic": lambda mdp: occ.OptimisticValueIteration(mdp, scale=2.0, floor=-1.0),
}
FOLLOWERS = {
    "importance weighted": paper,
    "implicit exploration": lambda mdp: paper(mdp, occ.ImplicitExploration(0.01)),
    "reduced variance": lambda mdp: paper(mdp, occ.ReducedVariance(occ.InverseSqrt())),
    "full information": lambda mdp: paper(mdp, occ.FullInformation()),
    "shifted": occ.ShiftedFTRL,
    "shifted, closing": lambda mdp: occ.ShiftedFTRL(mdp, cap=20.0, budget=0.05),
    "shifted, smooth": lambda mdp: occ.ShiftedFTRL(mdp, budget=0.05, ledger="smooth"),
    "shifted frozen": lambda mdp: occ.ShiftedFTRL(mdp, budget=0.02, ledger="frozen"),
    "shifted, other psi": lambda mdp: occ.ShiftedFTRL(
        mdp, occ.Tsallis() / occ.InverseSqrt(0.5) + occ.LogBarrier(occ.PerState(mdp, 0.2))
    ),
    "shifted, no hints": lambda mdp: occ.ShiftedFTRL(mdp, hints=False),
}


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_plays_the_same_game(name, game):
    check_same_game(MDP, BASELINES[name], GAMES[game], 300)


@pytest.mark.parametrize("game", GAMES)
def test_ftrl_plays_the_same_game(game):
    check_same_game(MDP, paper, GAMES[game], 60, 1e-9)


@pytest.mark.parametrize("game", ["bernoulli", "uniform", "adaptive"])
@pytest.mark.parametrize("name", list(FOLLOWERS)[1:])
def test_its_kin_plays_the_same_game(name, game):
    check_same_game(MDP, FOLLOWERS[name], GAMES[game], 60, 1e-9)


@pytest.mark.parametrize("problem", ["masked", "contexts", "layers", "no_choice", "bandit"])
@pytest.mark.parametrize("name", ["uniform", "leader", "optimistic", *list(FOLLOWERS)[4::4]])
def test_the_game_is_the_same_in_any_mdp(name, problem):
    mdp = PROBLEMS[problem]().mdp
    build, tolerance = (BASELINES | FOLLOWERS)[name], 0.0 if name in BASELINES else 1e-9
    losses = occ.BernoulliLosses(random_loss(mdp, seed=3))
    check_same_game(mdp, build, losses, 40, tolerance)
    check_same_game(mdp, build, occ.GreedyAdversary(), 40, tolerance)


@pytest.mark.parametrize("name", ["importance weighted", "shifted", "zeros in q"])
@pytest.mark.bits
def test_a_run_continues_where_it_was_interrupted(name, tmp_path):
    """Against the adversary, though the end of a chunk is no checkpoint. More are in the record."""

    class Crash(occ.Callback):
        def on_chunk(self, run):
            if run.t > 4000:
                raise KeyboardInterrupt

    entropy = {"zeros in q": lambda mdp: occ.FTRL(mdp, occ.Shannon() / occ.Constant(1000.0))}
    build, losses = (FOLLOWERS | entropy)[name], occ.GreedyAdversary()
    arguments = {"episodes": 9000, "seeds": [3], "backend": "engine"}
    whole = occ.simulate(MDP, build(MDP), losses, **arguments)
    assert bool((whole.last_q == 0).any()) == (name == "zeros in q")
    arguments |= {"save_to": tmp_path / "run", "save_every": 0.0}
    with pytest.raises(KeyboardInterrupt):
        occ.simulate(MDP, build(MDP), losses, callbacks=[Crash()], **arguments)
    same(occ.simulate(MDP, build(MDP), losses, **arguments), whole)


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


def test_a_shift_is_within_its_cap_and_without_a_cap_there_is_none():
    learner, kept = occ.ShiftedFTRL(MDP), Kept()
    occ.simulate(MDP, learner, GAMES["adaptive"], 500, range(2), callbacks=[kept])
    state = kept.learner.state
    most = learner.cap * (1 + state["stability"])[:, MDP.layer].unsqueeze(-1)
    assert bool((state["shift"].abs() <= most).all())
    assert bool((state["shift"] != 0).any())
    learners = occ.ShiftedFTRL(MDP, cap=0.0, hints=False), occ.FTRL.tsallis(MDP, 0.85)
    found = (occ.simulate(MDP, x, GAMES["bernoulli"], 200, range(2)).regret for x in learners)
    assert torch.equal(*found)


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
