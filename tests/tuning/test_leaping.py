"""Leaping: leaps of one episode are the algorithm, and longer ones have the same regret."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from zoo import played_regrets, random_problem

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
def test_the_same_seed_gives_the_same_bits():
    mdp, mean = random_problem()
    psi = occ.ConditionalEntropy() / occ.InverseSqrt(0.3) + occ.LogBarrier(0.5)
    losses = occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 300, noise="uniform")
    runs = [occ.leap(mdp, psi, losses, 2000, particles=5, seed=seed) for seed in (7, 7, 8)]
    assert torch.equal(runs[0].regret, runs[1].regret)
    assert torch.equal(runs[0].leaps, runs[1].leaps)
    assert not torch.equal(runs[0].regret[:, -1], runs[2].regret[:, -1])
    means = mean.float()  # exact in both number types
    few = [occ.leap(mdp, psi, x, 9, seed=np.int64(3)) for x in (means, means.double())]
    assert torch.equal(few[0].regret, few[1].regret)


@pytest.mark.parametrize(
    ("own", "noise"), [("schedule", "uniform"), ("regularizer", "none"), ("estimator", "bernoulli")]
)
def test_what_users_write_leaps_as_it_plays(own, noise):
    mdp, mean = random_problem()
    psi = occ.jin_luo(mdp, beta=1.0)
    psi = {"schedule": occ.Tsallis() / Slow() + occ.LogBarrier(1.0), "regularizer": PerState()}.get(
        own, psi
    )
    estimator = Halfway() if own == "estimator" else None
    losses = occ.game.losses.Stationary(mean, noise)
    played = occ.simulate(mdp, occ.FTRL(mdp, psi, estimator), losses, 60, range(64))
    found = occ.leap(mdp, psi, losses, 60, estimator=estimator, particles=256, accuracy=0.1)
    assert apart(found.regret[:, -1], played.regret[:, -1]) < 4


@pytest.mark.parametrize(("count", "p"), [(7, 0.9), (400, 0.01), (1000, 0.3), (10**12, 0.25)])
def test_visits_have_their_distribution(count, p):
    mdp = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=torch.float64)])
    q = torch.tensor([[[p, 1 - p]]], dtype=torch.float64).expand(20_000, 1, 2)
    length = torch.full((20_000,), float(count), dtype=torch.float64)
    found = leaps.Draw(mdp, 0).visits(length, q)[:, 0].numpy()
    assert (found.sum(-1) == count).all()
    expected = stats.binom(count, p)
    edges = np.unique(expected.ppf(np.linspace(0, 1, 31)[1:-1]))
    shares = np.diff(np.concatenate([[0.0], expected.cdf(edges), [1.0]]))
    cells = np.bincount(np.searchsorted(edges, found[:, 0]), minlength=len(shares))
    assert stats.chisquare(cells[shares > 0], 20_000 * shares[shares > 0]).pvalue > 1e-3


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
