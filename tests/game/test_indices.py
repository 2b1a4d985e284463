"""KL-UCB and Thompson sampling: indices, the same game in both backends, known results."""

import mpmath
import numpy as np
import pytest
import torch
from games import check_same_game, same
from numba import njit
from zoo import random_loss

import torch_occ as occ
from experiments.distance_to_limit import few_successors
from torch_occ.engine.layout import TRIAL, make_work
from torch_occ.engine.play_indices import BEGIN, REACH, SERIES_ROWS, bound
from torch_occ.engine.play_old import Seen
from torch_occ.rivals.kl_ucb import kl_lower
from torch_occ.step.arrays import model_of

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
LEARNERS = {"kl-ucb": occ.rivals.KLUCB, "thompson": occ.rivals.Thompson}


@pytest.mark.parametrize("mean", [0.0, 1e-6, 0.01, 0.5, 0.98, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("width", [1e-7, 1e-3, 0.3, 2.0, 14.0])
def test_the_index_of_kl_ucb(mean, width):
    found = float(kl_lower(*torch.tensor([mean, width], dtype=torch.float64)))
    if mean == 0.0 or width > 700 * mean:  # zero, or so little that exp(log x) is zero
        assert found == 0.0
        return
    with mpmath.workdps(40):
        p, x = mpmath.mpf(mean), mpmath.mpf(found)
        information = p * mpmath.log(p / x)
        information += (1 - p) * mpmath.log((1 - p) / (1 - x)) if mean < 1 else 0
        assert float(information) == pytest.approx(width, rel=1e-7)


@njit
def indices(logs, seen, series, work, found):
    """The indices of the engine at these values of log t, and how often each was expanded."""
    expanded = np.zeros(len(seen.visits))
    for n in range(len(logs)):
        before = series[BEGIN].copy()
        bound(logs[n], seen, series, work)
        expanded += before != series[BEGIN]
        found[n] = work.pairs[TRIAL]
    return expanded


def test_the_indices_of_the_engine_between_visits():
    """The first pair has no visits, so its index is zero."""
    visits = np.array([0.0, 1.0, 1.0, 1.0, 7.0, 7.0, 200.0, 3e3, 3e4, 3e4, 3e4, 3e4, 3e6])
    mean = np.array([0.0, 0.0, 0.4, 1.0, 1.0, 0.1, 0.6, 0.01, 1e-4, 0.5, 1 - 1e-4, 0.0, 0.3])
    logs, size = np.linspace(np.log(2.0), np.log(1e6), 5000), len(visits)
    series, found = np.zeros((SERIES_ROWS, size)), np.zeros((len(logs), size))
    series[REACH] = np.inf
    one = occ.LayeredMDP.random(1, 1, size, seed=0)
    seen = Seen(visits, mean * visits, mean, visits, np.zeros(0), np.zeros(0, np.int64))
    expanded = indices(logs, seen, series, make_work(model_of(one)), found)
    seen_often = torch.from_numpy(visits).clamp(min=1)
    expected = kl_lower(
        torch.from_numpy(mean).expand(5000, -1), torch.from_numpy(logs)[:, None] / seen_often
    )
    assert abs(found - expected.numpy()).max() < 1e-10
    assert expanded.max() < 400


def masked():
    actions = torch.ones(MDP.num_states, 3, dtype=torch.bool)
    actions[1, 0] = actions[4, 2] = actions[5, 0] = False
    return occ.LayeredMDP(MDP.transitions, actions=actions)


GAMES = {
    "dense": lambda: (MDP, occ.BernoulliLosses(random_loss(MDP))),
    "masked": lambda: (masked(), occ.BernoulliLosses(random_loss(MDP))),
    "sparse": lambda: (MDP.to_sparse(), occ.UniformLosses(random_loss(MDP))),
    "adversary": lambda: (MDP, occ.GreedyAdversary()),
    "ends": lambda: (MDP, occ.BernoulliLosses(random_loss(MDP).round())),
    "deterministic": lambda: [
        f(x)
        for f, x in zip(
            (lambda x: x, occ.BernoulliLosses), few_successors(3, 3, 3, 1, 1), strict=True
        )
    ],
}


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("name", LEARNERS)
def test_both_backends_play_the_same_game(game, name):
    mdp, losses = GAMES[game]()
    check_same_game(mdp, LEARNERS[name], losses, 300)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_run_that_was_interrupted_continues_to_the_same_bits(name, tmp_path):
    losses, path = occ.BernoulliLosses(random_loss(MDP)), tmp_path / "run"

    class Stop(occ.Callback):
        def on_chunk(self, run):
            if run.t < 10_000:
                raise KeyboardInterrupt

    def play(episodes=10_000, **options):
        return occ.simulate(
            MDP, LEARNERS[name](MDP), losses, episodes, [3, 1], backend="engine", **options
        )

    with pytest.raises(KeyboardInterrupt):
        play(save_to=path, callbacks=[Stop()])
    same(play(), play(save_to=path))


@pytest.mark.parametrize("name", LEARNERS)
def test_a_seed_plays_the_same_game_alone_and_among_others(name):
    losses = occ.BernoulliLosses(random_loss(MDP))
    alone, among = (
        occ.simulate(MDP, LEARNERS[name](MDP), losses, 3000, seeds) for seeds in ([5], [2, 5, 9])
    )
    assert torch.equal(alone.regret[0], among.regret[1])


@pytest.mark.parametrize("name", LEARNERS)
def test_one_state_comes_close_to_lai_and_robbins(name):
    """At T = 1e5, the slope is within a factor of 1.6 of the limit (24 seeds)."""
    mdp = occ.LayeredMDP.random(1, 1, 3)
    mean = torch.tensor([[0.3, 0.5, 0.6]], dtype=torch.float64)
    history = occ.simulate(mdp, LEARNERS[name](mdp), occ.BernoulliLosses(mean), 100_000, range(24))
    limit = occ.limits.lower_bound(mdp, mean).value
    late = history.episodes >= 10_000
    log, regret = history.episodes[late].double().log(), history.regret[:, late].mean(0)
    slope = (regret[-1] - regret[0]) / (log[-1] - log[0])
    assert 0.6 * limit < float(slope) < 1.6 * limit


def test_kl_ucb_explores_less_than_hoeffding():
    """Pinsker's inequality: the bonus of UCB with sqrt(log t / (2 N)) is never smaller."""
    learner, other = occ.rivals.KLUCB(MDP), occ.OptimisticValueIteration(MDP)
    for x in (learner, other):
        x.start(2)
        generator = torch.Generator().manual_seed(0)
        x.state["visits"] = torch.randint(
            0, 50, x.state["visits"].shape, generator=generator
        ).double()
        share = torch.rand(x.state["visits"].shape, generator=generator, dtype=torch.float64)
        x.state["losses"] = (x.state["visits"] * share).round()
    assert bool((learner.index(500) >= other.index(500) - 1e-12).all())
