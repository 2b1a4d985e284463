"""Leaping: leaps of one episode are the algorithm, and longer ones have the same regret."""

import math

import pytest
import torch
from threads import THREADS
from zoo import REGULARIZERS, played_regrets, random_problem

import torch_occ as occ
from torch_occ.tuning import leaps


def apart(a, b):
    """The difference of two means in standard errors."""
    return float((a.mean() - b.mean()).abs() / (a.var() / len(a) + b.var() / len(b)).sqrt())


class Slow(occ.Schedule):
    """A schedule of one's own, which is no power of t."""

    def forward(self, t):
        return 1 / (1 + t.log())


class PerState(occ.StatewiseRegularizer):
    """A regularizer that is no table of terms."""

    def per_state(self, q_s):
        return -q_s.sqrt().sum(-1)


class Halfway(occ.game.CentredEstimator):
    """A baseline of 1/2 everywhere, which no engine knows of."""

    def baseline(self, q, t):
        return torch.full_like(q, 0.5)


@pytest.mark.parametrize("estimator", [None, occ.ReducedVariance(occ.InverseSqrt(0.2))])
def test_leaps_of_one_episode_are_the_algorithm(estimator):
    mdp, mean = random_problem()
    psi = occ.jin_luo(mdp, beta=0.1, gamma=2.0)
    found = occ.leap(mdp, psi, mean, 60, estimator=estimator, particles=128, accuracy=1e-9)
    assert found.leaps.tolist() == [60] * 128
    played = played_regrets(mdp, psi, mean, 60, range(128), estimator)
    assert apart(found.regret[:, -1], played) < 4
    # The spread of the runs is the same too.
    assert float(found.regret[:, -1].std() / played.std()) == pytest.approx(1, abs=0.35)


@pytest.mark.parametrize("estimator", [None, occ.ReducedVariance(occ.InverseSqrt(0.01))])
def test_leaping_forecasts_the_under_regularized_corner(estimator):
    mdp, mean = random_problem(0)
    psi = occ.jin_luo(mdp, beta=0.05, gamma=3.0)
    played = played_regrets(mdp, psi, mean, 2000, range(64), estimator)
    found = occ.leap(mdp, psi, mean, 2000, estimator=estimator, particles=256)
    error = math.hypot(float(found.standard_error[-1]), float(played.std()) / 8)
    assert abs(float(found.final) - float(played.mean())) < 3 * error + 0.07 * float(played.mean())
    with torch.no_grad():
        assert not bool(occ.forecast(mdp, psi, mean, 2000).reliable)


@pytest.mark.bits
@pytest.mark.parametrize("threads", [1, 2])
def test_a_particle_has_the_same_bits_beside_any_others(threads):
    mdp, mean = random_problem()
    psi = occ.ConditionalEntropy() / occ.InverseSqrt(0.3) + occ.LogBarrier(0.5)
    losses = occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 300, noise="uniform")
    torch.set_num_threads(threads)
    try:
        runs = [occ.leap(mdp, psi, losses, 2000, particles=n, seed=7) for n in (17, 1, 3, 8)]
    finally:
        torch.set_num_threads(THREADS)
    whole = runs[0]
    assert len(set(whole.leaps[:8].tolist())) > 1  # some lanes wait for others
    for run in runs[1:]:
        assert torch.equal(run.regret, whole.regret[: len(run.regret)])
        assert torch.equal(run.leaps, whole.leaps[: len(run.regret)])


@pytest.mark.parametrize("regularizer", ["jin_luo", "per_place"])
def test_lanes_leap_as_single_particles_do(regularizer, monkeypatch):
    """From the same random numbers."""
    mdp, mean = random_problem()
    runs = []
    for lanes in (8, None):
        monkeypatch.setattr(leaps, "lanes_in", lambda *_, lanes=lanes: lanes)
        psi = REGULARIZERS[regularizer](mdp)
        runs.append(occ.leap(mdp, psi, mean, 300, particles=10))
    assert torch.equal(runs[0].leaps, runs[1].leaps)
    torch.testing.assert_close(runs[0].regret, runs[1].regret, rtol=1e-9, atol=1e-9)


def test_phases_are_leapt_through_against_the_best_policy_in_hindsight():
    mdp, mean = random_problem(1)
    psi = occ.jin_luo(mdp, beta=5.0, gamma=0.5)
    losses = occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 300, noise="bernoulli")
    played = occ.simulate(
        mdp, occ.FTRL(mdp, psi), losses, 1000, range(64), checkpoints=[300, 600, 1000]
    )
    found = occ.leap(mdp, psi, losses, 1000, particles=128, accuracy=0.25)
    for i, t in enumerate(played.episodes.tolist()):
        mine = found.regret[:, found.episodes == t].squeeze(-1)
        assert apart(mine, played.regret[:, i]) < 4.5
