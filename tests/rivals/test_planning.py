"""Optimistic planning and posterior sampling: bounds by hand, and what they promise."""

import numpy as np
import pytest
import rival_oracles as oracles
import torch
from numba import njit
from scipy import stats
from zoo import Kept, random_loss

import torch_occ as occ
from torch_occ.engine import draws
from torch_occ.rivals.kl_ucb import ORDER, TOLERANCE, CompiledKLUCB, expand

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
    assert bool(possible[:, 12:].all())  # too slow to exclude an arm, whatever faster layers do
    assert not bool(possible[:, 1:, 0, 1].all(1).any())  # slow layers have excluded the bad arm
    assert float(history.regret[:, -1].max()) < 100


def test_layers_are_drawn_with_halving_probabilities():
    learner, kept = R.MultiLayerUCBVI(MDP, 60), Kept()
    occ.simulate(MDP, learner, occ.BernoulliLosses(MEAN), 1, range(20_000), callbacks=[kept])
    visits = kept.learner.state["visits"][..., 0, :].sum(-1)  # all begin in state 0
    shares, every = visits[:, :-1].mean(0), visits[:, -1]
    assert torch.equal(every, torch.ones_like(every))  # the last row has the data of all layers
    expected = torch.tensor([1 / 2 + 1 / 64, *(0.5**r for r in range(2, 7))])
    torch.testing.assert_close(shares, expected.double(), rtol=0, atol=4 * (0.25 / 20_000) ** 0.5)


# -- KL-UCB ----------------------------------------------------------------------------------------


@njit
def expand_all(now, guess, own):
    for i in range(len(guess)):
        expand(now, i, guess[i], own)


def test_indices_from_any_guess_and_later():
    visits = np.array([1.0, 7.0, 200.0, 3e3, 3e4, 3e4, 3e4, 3e6])
    mean = np.array([0.4, 0.1, 0.6, 0.01, 1e-4, 0.5, 1 - 1e-4, 0.3])
    own = CompiledKLUCB(visits, *[mean] * 4, np.zeros((ORDER + 1, 8)), *np.zeros((3, 8)))
    for log in np.linspace(np.log(2.0), np.log(1e6), 20):
        for now in (log, 1.005 * log):
            expected = oracles.kl_lower(*map(torch.from_numpy, (mean, now / visits))).numpy()
            for guess in (1 + 0 * mean, 1e-9 * mean, expected, mean, 0.5 * (expected + mean)):
                expand_all(log, guess, own)
                terms = own.series * (now - log) ** np.arange(ORDER + 1.0)[:, None]
                assert abs(terms[ORDER]).max() <= TOLERANCE
                assert abs(terms.sum(0) - expected).max() < 1e-10


@njit
def drawn_gammas(keys, shape):
    return np.array([draws.gamma(key, shape) for key in keys])


@njit
def drawn(seeds, t, a, b):
    """Keys, and Beta variates, for every seed and item."""
    keys, betas = np.zeros((len(seeds), len(a)), np.uint64), np.zeros((len(seeds), len(a)))
    for n, seed in enumerate(seeds):
        episode = draws.episode_key(seed, t)
        for i in range(len(a)):
            keys[n, i] = draws.key_of(episode, i)
            betas[n, i] = draws.beta(episode, i, a[i], b[i])
    return keys, betas


def test_keys_of_other_seeds_episodes_and_items_are_other_keys():
    ones, seeds = np.ones(50), np.array([0, 1, 2**62])
    keys = np.stack([drawn(seeds, t, ones, ones)[0] for t in (0, 1, 2, 10**6)])
    assert len(np.unique(keys)) == keys.size


@pytest.mark.parametrize("shape", [0.05, 1 / 3, 1.0, 1.5, 7.0, 300.0, 1e6])
def test_gammas_have_the_distribution(shape):
    keys, _ = drawn(np.arange(20), 4, np.ones(1000), np.ones(1000))
    assert stats.kstest(drawn_gammas(keys.ravel(), shape), stats.gamma(shape).cdf).pvalue > 1e-3


def test_betas_have_the_distribution():
    a, b = np.array([1.0, 3.0, 40.0, 9e5]), np.array([1.0, 0.5, 70.0, 1e5])
    _, found = drawn(np.arange(4000), 77, a, b)
    for i in range(4):
        assert stats.kstest(found[:, i], stats.beta(a[i], b[i]).cdf).pvalue > 1e-3
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.08
