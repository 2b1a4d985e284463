"""Optimistic planning and posterior sampling: bounds by hand, and what they promise."""

import math

import mpmath
import numpy as np
import pytest
import rival_oracles as oracles
import torch
from numba import njit
from scipy import stats
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from torch_occ.engine import draws
from torch_occ.engine.layout import TRIAL, make_work
from torch_occ.rivals import kl_ucb
from torch_occ.step.arrays import model_of

R = occ.rivals
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MEAN = random_loss(MDP, seed=1)
BANDIT = PROBLEMS["bandit"]().mdp
OPTIMISTS = {
    "hoeffding": lambda mdp: R.UCBVI(mdp, 9000),
    "bernstein": lambda mdp: R.UCBVI(mdp, 9000, bonus="bernstein"),
    "sharp": lambda mdp: R.UCBVI(mdp, bonus="sharp"),
    "corrupted": lambda mdp: R.UCBVI(mdp, bonus="sharp", corruption=40.0),
    "euler": R.EULER,
    "strong": R.StrongEuler,
}


# -- bounds ----------------------------------------------------------------------------------------


def informed(learner, most, seed=0):
    """Give a learner random visits from 0 to `most`, sums of losses, and counts."""
    learner.start(2)
    state, generator = learner.state, np.random.default_rng(seed)
    visits = generator.integers(0, most + 1, state["visits"].shape) * learner.mdp.actions.numpy()
    state["visits"] = torch.from_numpy(visits.astype(float))
    state["losses"] = state["visits"] * torch.from_numpy(generator.random(visits.shape))
    counts = []
    for here, P in zip(learner.mdp.layer_slices, learner.mdp.transitions, strict=True):
        n = P.shape[-1]
        rows = [generator.multinomial(m, np.full(n, 1 / n)) for m in visits[:, here].ravel()]
        counts.append(np.reshape(rows, (2, -1, *P.shape[1:])).astype(float))
    flat = [x.reshape(2, -1) for x in counts]
    state["counts"] = torch.from_numpy(np.concatenate(flat, 1))
    return counts


@pytest.mark.parametrize(
    ("problem", "most"), [("masked", 3), ("contexts", 300), (None, 3), (None, 100_000)]
)
@pytest.mark.parametrize("name", OPTIMISTS)
def test_plans_are_those_by_hand(name, most, problem):
    mdp = MDP if problem is None else PROBLEMS[problem]().mdp.to_dense()
    learner = OPTIMISTS[name](mdp)
    counts = informed(learner, most)
    found, state = learner.plan(11), learner.state
    log = float(learner.log(torch.tensor(11.0, dtype=torch.float64)))
    for n in range(2):
        kind = "sharp" if name == "corrupted" else name
        sums = (state["visits"][n], state["losses"][n], [x[n] for x in counts])
        expected = oracles.plan(mdp, [(kind, learner.corruption, *sums)], log)
        for mine, theirs in zip((found.lower, found.upper, found.value), expected, strict=False):
            np.testing.assert_allclose(mine[n], theirs, rtol=1e-12, atol=1e-12)
        assert found.policy[n].argmax(-1).tolist() == expected[3]
        assert bool((found.policy[n].sum(-1) == 1).all())


def test_lower_bounds_never_fall_as_printed():
    learner = OPTIMISTS["hoeffding"](MDP)
    informed(learner, 10**9)
    plain = learner.plan(5).lower
    learner.state["lower"] = least = random_loss(MDP, scale=3.0, batch=(2,))
    assert torch.equal(learner.plan(5).lower, torch.maximum(least, learner.plan(5).lower))
    assert bool((learner.plan(5).lower >= plain).all())


@pytest.mark.parametrize("name", ["sharp", "euler", "strong"])
def test_a_pair_seen_for_ever_has_no_bonus(name):
    """The bounds meet at the optimal values of the true MDP."""
    learner, n = OPTIMISTS[name](MDP), 1e14
    learner.start(1)
    learner.state["visits"] += n
    learner.state["losses"] += n * MEAN
    learner.state["counts"] += n * torch.cat([P.flatten() for P in MDP.transitions])
    found, expected = learner.plan(1), occ.optimal_policy(MDP, MEAN)
    for bound in (found.lower, found.upper):
        torch.testing.assert_close(bound[0], expected.Q, rtol=0, atol=1e-5)
    assert torch.equal(found.policy[0], expected.policy)


def test_at_one_layer_the_sharp_bonus_is_ucb1_with_its_logarithm():
    """Played by hand: mean loss - sqrt(log(2 K t^2 / delta) / (2 n)), every arm once first."""
    table = torch.rand(300, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    visits, losses = [0] * 4, [0.0] * 4
    for t in range(1, 301):
        log = float(torch.tensor(2 * 4 / 0.1 * float(t) ** 2, dtype=torch.float64).log())
        seen = [
            losses[a] / visits[a] - math.sqrt(log / (2 * visits[a])) if visits[a] else -math.inf
            for a in range(4)
        ]
        arm = seen.index(min(seen))
        visits[arm] += 1
        losses[arm] += float(table[t - 1, 0, arm])
    learner, kept = R.UCBVI(BANDIT, bonus="sharp", floor=-math.inf), Kept()
    occ.simulate(BANDIT, learner, occ.TableLosses(table), 300, callbacks=[kept])
    assert kept.learner.state["visits"].flatten().tolist() == visits
    assert kept.learner.state["losses"].flatten().tolist() == losses
    log = float(learner.log(torch.tensor(301.0, dtype=torch.float64)))
    index = [losses[a] / visits[a] - math.sqrt(log / (2 * visits[a])) for a in range(4)]
    assert kept.learner.plan(301).lower.flatten().tolist() == pytest.approx(index, rel=1e-14)


@pytest.mark.parametrize("name", ["sharp", "euler", "strong"])
def test_lower_values_are_below_the_optimal_ones(name):
    """In 1,000 short runs: delta = 0.1 allows 100 violations at any time, and there are none.

    The upper values of EULER and StrongEuler are above the values of the policies played.
    """
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=4)
    mean = random_loss(mdp, seed=5)
    best = occ.optimal_policy(mdp, mean).value
    violated = torch.zeros(1000, dtype=torch.bool)

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            bounds = run.learner.plan(run.t + 1)
            violated.logical_or_((bounds.value > best + 1e-12).any(-1))
            high = (bounds.upper * bounds.policy).nan_to_num(posinf=0.0).sum(-1)
            violated.logical_or_((high < best - 1e-12).any(-1))

    losses, points = occ.BernoulliLosses(mean), range(1, 121, 7)
    options = {"checkpoints": points, "callbacks": [Look()]}
    occ.simulate(mdp, OPTIMISTS[name](mdp), losses, 120, range(1000), **options)
    assert int(violated.sum()) <= 10


def test_strong_optimism_means_no_positive_surplus():
    """Q_lower <= loss + P V_lower with the true P, wherever Q_lower is not clipped at 0."""
    surplus = []

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            bounds = run.learner.plan(run.t + 1)
            for k, P in enumerate(MDP.transitions[:-1]):
                here, after = MDP.layer_slices[k], MDP.layer_slices[k + 1]
                ahead = torch.einsum("sap,np->nsa", P, bounds.value[:, after])
                low = bounds.lower[:, here]
                surplus.append(torch.where(low > 0, low - MEAN[here] - ahead, -1.0).max())

    losses = occ.BernoulliLosses(MEAN)
    occ.simulate(MDP, R.StrongEuler(MDP), losses, 20_000, range(20), callbacks=[Look()])
    assert max(surplus) <= 0


def test_known_corruption_keeps_the_bounds_valid():
    """The budget makes the optimal actions look bad; the bonus covers it, and only then."""
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=4)
    mean = random_loss(mdp, seed=5) * 0.5
    best = occ.optimal_policy(mdp, mean).value
    losses = occ.Corrupted(occ.BernoulliLosses(mean), 200.0, "targeted", target=mean)
    broken = {}

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            above = (run.learner.plan(run.t + 1).value > best + 1e-12).any(-1)
            broken.setdefault(run.learner.corruption, above.clone()).logical_or_(above)

    for known in (0.0, 200.0):
        learner = R.UCBVI(mdp, bonus="sharp", corruption=known)
        occ.simulate(mdp, learner, losses, 400, range(50), callbacks=[Look()])
    assert not bool(broken[200.0].any())
    assert bool(broken[0.0].any())


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


def test_the_index_of_kl_ucb():
    """kl(mean, index) = log t / visits, in forty digits; Pinsker's inequality bounds the index."""
    means, widths = (0.0, 1e-6, 0.01, 0.5, 0.98, 1 - 1e-9, 1.0), (1e-7, 1e-3, 0.3, 2.0, 14.0)
    pairs = np.array([(mean, width) for mean in means for width in widths])
    for (mean, width), index in zip(
        pairs, indices(pairs[:, 0], 1 / pairs[:, 1], np.ones(1))[0][0], strict=True
    ):
        check_index(float(mean), float(width), float(index))


def check_index(mean, width, found):
    assert found >= mean - math.sqrt(width / 2) - 1e-12
    if mean == 0.0 or width > 700 * mean:  # zero, or so little that exp(log x) is zero
        assert found == 0.0
        return
    with mpmath.workdps(40):
        p, x = mpmath.mpf(mean), mpmath.mpf(found)
        information = p * mpmath.log(p / x)
        information += (1 - p) * mpmath.log((1 - p) / (1 - x)) if mean < 1 else 0
        assert float(information) == pytest.approx(width, rel=1e-7)


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
