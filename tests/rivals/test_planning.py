"""Optimistic planning and posterior sampling: bounds by hand, and what they promise."""

import math

import numpy as np
import pytest
import rival_oracles as oracles
import torch
from numba import njit
from scipy import stats
from zoo import Kept, random_loss

import torch_occ as occ
from torch_occ.engine import draws
from torch_occ.engine.layout import TRIAL, make_work
from torch_occ.rivals import kl_ucb
from torch_occ.step.arrays import model_of

R = occ.rivals
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MEAN = random_loss(MDP, seed=1)
OPTIMISTS = {
    "hoeffding": lambda mdp: R.UCBVI(mdp, 9000),
    "bernstein": lambda mdp: R.UCBVI(mdp, 9000, bonus="bernstein"),
    "sharp": lambda mdp: R.UCBVI(mdp, bonus="sharp"),
    "euler": R.EULER,
    "strong": R.StrongEuler,
}


# -- bounds ----------------------------------------------------------------------------------------


def lower_bounds(mdp, learner, losses, episodes, seeds, checkpoints=None):
    """Q_lower `(C, N, S, A)` of the plans of all checkpoints."""
    kept = []

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            kept.append(run.learner.state["lower"].clone())

    options = {"callbacks": [Look()], "checkpoints": checkpoints}
    occ.simulate(mdp, learner, losses, episodes, range(seeds), **options)
    return torch.stack(kept)


@pytest.mark.parametrize("name", ["sharp", "euler", "strong"])
def test_lower_values_are_below_the_optimal_ones(name):
    """In 200 runs: delta = 0.1 allows 20 violations at any time, and there are none."""
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=4)
    mean = random_loss(mdp, seed=5)
    losses = occ.BernoulliLosses(mean)
    found = lower_bounds(mdp, OPTIMISTS[name](mdp), losses, 4000, 200).amin(-1)
    above = (found > occ.optimal_policy(mdp, mean).value + 1e-12).any(-1).any(0)
    assert int(above.sum()) <= 2
    assert bool((found > 0).any())


def test_lower_bounds_never_fall_as_printed():
    losses = occ.BernoulliLosses(0.1 * MEAN)
    for name, falls in (("hoeffding", False), ("bernstein", False), ("sharp", True)):
        learner = OPTIMISTS[name](MDP)
        learner.delta = 0.999  # bounds above zero
        learner.log = lambda t: torch.full_like(t, 1e-3)
        found = lower_bounds(MDP, learner, losses, 60, 3, range(1, 61))
        assert bool((found[1:] < found[:-1]).any()) == falls
        assert bool(found.any())


def test_strong_optimism_means_no_positive_surplus():
    """Q_lower <= loss + P V_lower with the true P, wherever Q_lower is not clipped at 0."""
    losses = occ.BernoulliLosses(MEAN)
    lower = lower_bounds(MDP, R.StrongEuler(MDP), losses, 20_000, 20)
    value = lower.amin(-1)
    for k, P in enumerate(MDP.transitions[:-1]):
        here, after = MDP.layer_slices[k], MDP.layer_slices[k + 1]
        low = lower[..., here, :]
        ahead = torch.einsum("sap,cnp->cnsa", P, value[..., after])
        assert float(torch.where(low > 0, low - MEAN[here] - ahead, -1.0).max()) <= 0
    assert bool((lower[..., MDP.layer_slices[1], :] > 0).any())


def test_known_corruption_keeps_the_bounds_valid():
    """The budget makes the optimal actions look bad; the bonus covers it, and only then."""
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=4)
    mean = random_loss(mdp, seed=5) * 0.5
    best = occ.optimal_policy(mdp, mean).value
    losses = occ.Corrupted(occ.BernoulliLosses(mean), 200.0, "targeted", target=mean)
    for known in (0.0, 200.0):
        learner = R.UCBVI(mdp, bonus="sharp", corruption=known)
        value = lower_bounds(mdp, learner, losses, 400, 50).amin(-1)
        assert bool((value > best + 1e-12).any()) == (known == 0)


def test_slow_layers_keep_the_optimal_actions():
    """With C = 400, no layer with 2^r >= C excludes the best arm, and they exclude the other."""
    bandit = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=torch.float64)])
    mean = torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    losses = occ.Corrupted(occ.BernoulliLosses(mean), 400.0, "targeted", target=mean)
    learner, kept = R.MultiLayerUCBVI(bandit, 20_000), Kept()
    assert learner.layers == 15
    history = occ.simulate(bandit, learner, losses, 20_000, range(20), callbacks=[kept])
    assert float(history.corruption[:, -1].min()) == pytest.approx(400)
    possible = kept.learner.state["possible"] > 0
    assert possible.shape == (20, 15, 1, 2)
    assert bool(possible[:, 8:, 0, 0].all())  # 2^9 >= 400
    assert not bool(possible[:, 1:, 0, 1].all(1).any())  # slow layers have excluded the bad arm
    assert float(history.regret[:, -1].max()) < 100


def test_layers_are_drawn_with_halving_probabilities():
    oracle = oracles.MultiLayerUCBVI(R.MultiLayerUCBVI(MDP, 60))
    oracle.seeds = tuple(range(20_000))
    shares = torch.bincount(torch.from_numpy(oracle.drawn(5)), minlength=6) / 20_000
    expected = torch.tensor([1 / 2 + 1 / 64, *(0.5**r for r in range(2, 7))])
    torch.testing.assert_close(shares, expected, rtol=0, atol=4 * (0.25 / 20_000) ** 0.5)


def test_the_logarithm_of_the_printed_bonuses_is_that_of_the_paper():
    learner = R.UCBVI(MDP, 1000, delta=0.05)
    t = torch.tensor([1.0, 900.0], dtype=torch.float64)
    assert learner.log(t).tolist() == [math.log(5 * 7 * 3 * (3 * 1000) / 0.05)] * 2
    expected = [math.log(2 * 7 * 3 * t**2 / 0.1) for t in (1, 900)]
    assert R.EULER(MDP).log(t).tolist() == pytest.approx(expected, rel=1e-15)
    layers = R.MultiLayerUCBVI(MDP, 1000)
    assert layers.logarithm == pytest.approx(math.log(4 * 21 * 11 * 1000 / 0.1))
    assert layers.corruption == pytest.approx(2 * math.log(2 * 3 * 10 / 0.1) + 6)


# -- KL-UCB ----------------------------------------------------------------------------------------


@njit
def expanded_indices(logs, learner, work, found):
    """The indices at these values of log t, and how often each was expanded."""
    expanded = np.zeros(len(learner.visits))
    for n in range(len(logs)):
        before = learner.series[kl_ucb.BEGIN].copy()
        kl_ucb.write_indices(logs[n], learner, work)
        expanded += before != learner.series[kl_ucb.BEGIN]
        found[n] = work.pairs[TRIAL]
    return expanded


def indices(mean, visits, logs):
    size = len(visits)
    series, found = np.zeros((kl_ucb.SERIES_ROWS, size)), np.zeros((len(logs), size))
    series[kl_ucb.REACH] = np.inf
    form = kl_ucb.CompiledKLUCB(visits, mean * visits, logs, mean, visits, series, np.zeros(1))
    work = make_work(model_of(occ.LayeredMDP.random(1, 1, size, seed=0)))
    return found, expanded_indices(logs, form, work, found)


def test_indices_between_visits():
    """Power series replace most solves. The first pair has no visits, so its index is zero."""
    visits = np.array([0.0, 1.0, 1.0, 1.0, 7.0, 7.0, 200.0, 3e3, 3e4, 3e4, 3e4, 3e4, 3e6])
    mean = np.array([0.0, 0.0, 0.4, 1.0, 1.0, 0.1, 0.6, 0.01, 1e-4, 0.5, 1 - 1e-4, 0.0, 0.3])
    logs = np.linspace(np.log(2.0), np.log(1e6), 5000)
    found, expanded = indices(mean, visits, logs)
    width = torch.from_numpy(logs)[::50, None] / torch.from_numpy(visits).clamp(min=1)
    expected = oracles.kl_lower(torch.from_numpy(mean).expand(100, -1), width)
    assert abs(found[::50] - expected.numpy()).max() < 1e-10
    assert expanded.max() < 400


# -- variates --------------------------------------------------------------------------------------

SHAPES = (0.05, 1 / 3, 1.0, 1.5, 7.0, 300.0, 1e6)


@njit
def drawn_gammas(keys, shape):
    return np.array([draws.gamma(key, shape) for key in keys])


@njit
def drawn_betas(seed, t, a, b):
    """Keys, and Beta variates."""
    key = draws.episode_key(seed, t)
    keys = [draws.key_of(key, item) for item in range(len(a))]
    return keys, [draws.beta(key, i, a[i], b[i]) for i in range(len(a))]


def test_uniform_numbers_of_other_keys_are_other_numbers():
    keys = np.stack([oracles.keys_of((0, 1, 2**62), t, 50) for t in (0, 1, 2, 10**6)])
    numbers = np.stack([oracles.uniform(keys, counter) for counter in range(50)])
    assert len(np.unique(numbers)) == numbers.size
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3


@pytest.mark.bits
def test_keys_are_those_of_the_oracle():
    keys = oracles.keys_of((0, 3, 2**62), 12_345, 7)
    for n, seed in enumerate((0, 3, 2**62)):
        found, _ = drawn_betas(seed, 12_345, np.ones(7), np.ones(7))
        assert found == keys[n].tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_gammas_have_the_distribution_and_are_those_of_the_oracle(shape):
    keys = oracles.keys_of(range(20), 4, 1000)
    found = drawn_gammas(keys.ravel(), shape)
    assert stats.kstest(found, stats.gamma(shape).cdf).pvalue > 1e-3
    expected = oracles.gammas(keys[0], np.full(1000, shape))
    np.testing.assert_allclose(found[:1000], expected, rtol=1e-11)


def test_betas_have_the_distribution_and_are_those_of_the_oracle():
    a, b = (
        torch.tensor([x] * 4000, dtype=torch.float64)
        for x in ([1.0, 3.0, 40.0, 9e5], [1.0, 0.5, 70.0, 1e5])
    )
    found = oracles.betas(range(4000), 77, a, b).numpy()
    for i in range(4):
        expected = stats.beta(float(a[0, i]), float(b[0, i]))
        assert stats.kstest(found[:, i], expected.cdf).pvalue > 1e-3
    _, compiled = drawn_betas(3999, 77, a[0].numpy(), b[0].numpy())
    np.testing.assert_allclose(compiled, found[3999], rtol=1e-11)
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.08
