"""Leaping: leaps of one episode are the algorithm, backends agree, and gradients are correct."""

import math

import pytest
import torch
from threads import THREADS
from zoo import REGULARIZERS, played_regrets, random_problem

import torch_occ as occ
from torch_occ.step.implicit import Setting
from torch_occ.tuning import compiled_leaps
from torch_occ.tuning.leaps import longest_leap


def apart(a, b):
    """The difference of two means in standard errors."""
    return float((a.mean() - b.mean()).abs() / (a.var() / len(a) + b.var() / len(b)).sqrt())


class Slow(occ.Schedule):
    """A schedule of one's own, which is no power of t."""

    def forward(self, t):
        return 1 / (1 + t.log())


class Halfway(occ.game.CentredEstimator):
    """A baseline of 1/2 everywhere, which no engine knows of."""

    def baseline(self, q, t):
        return torch.full_like(q, 0.5)


@pytest.mark.parametrize("backend", ["torch", "engine"])
@pytest.mark.parametrize("estimator", [None, occ.ReducedVariance(occ.InverseSqrt(0.2))])
def test_leaps_of_one_episode_are_the_algorithm(backend, estimator):
    mdp, mean = random_problem()
    psi = occ.jin_luo(mdp, beta=0.1, gamma=2.0)
    options = {"estimator": estimator, "particles": 128, "accuracy": 1e-9, "backend": backend}
    found = occ.leap(mdp, psi, mean, 60, **options)
    assert found.leaps.tolist() == [60] * 128
    played = played_regrets(mdp, psi, mean, 60, range(128), estimator)
    assert apart(found.regret[:, -1], played) < 4
    # The spread of the runs is the same too.
    assert float(found.regret[:, -1].std() / played.std()) == pytest.approx(1, abs=0.35)


def test_backends_agree_and_leaps_grow_like_the_logarithm():
    mdp, mean = random_problem(1)
    psi = occ.jin_luo(mdp, beta=0.5, gamma=1.0)
    compiled = occ.leap(mdp, psi, mean, 10**4, particles=128)
    plain = occ.leap(mdp, psi, mean, 10**4, particles=48, backend="torch")
    assert apart(compiled.regret[:, -1], plain.regret[:, -1]) < 4
    much_longer = occ.leap(mdp, psi, mean, 10**8, particles=8)
    few, same, many = (float(x.leaps.double().mean()) for x in (compiled, plain, much_longer))
    assert few == pytest.approx(same, rel=0.1)
    assert many < 3.5 * few
    assert int(much_longer.uncertified.sum()) == 0


def test_a_baseline_of_ones_own_is_leapt_with_in_torch():
    mdp, mean = random_problem(1)
    psi = occ.ConditionalEntropy() / occ.InverseSqrt(0.3) + occ.LogBarrier(0.5)
    everywhere = occ.ReducedVariance(occ.InverseSqrt(1e-6))
    own = occ.leap(mdp, psi, mean, 3000, estimator=Halfway(), particles=48)
    known = occ.leap(mdp, psi, mean, 3000, estimator=everywhere, particles=48, backend="torch")
    assert torch.equal(own.regret, known.regret)
    compiled = occ.leap(mdp, psi, mean, 3000, estimator=everywhere, particles=128, backend="engine")
    played = played_regrets(mdp, psi, mean, 3000, range(64), everywhere)
    assert apart(compiled.regret[:, -1], own.regret[:, -1]) < 4
    assert apart(compiled.regret[:, -1], played) < 4
    for options, message in (
        ({"estimator": Halfway()}, "the engine does not know the estimator Halfway"),
        ({"estimator": occ.ReducedVariance(Slow())}, "the weights are not powers of t"),
        ({"regularizer": occ.Tsallis() / Slow()}, "the weights are not powers of t"),
    ):
        given = {"regularizer": psi, "losses": mean, "episodes": 10} | options
        assert int(occ.leap(mdp, particles=2, **given).leaps.min()) > 0  # in torch
        with pytest.raises(ValueError, match=message):
            occ.leap(mdp, backend="engine", **given)


@pytest.mark.parametrize("estimator", [None, occ.ReducedVariance(occ.InverseSqrt(0.01))])
def test_leaping_forecasts_the_under_regularized_corner(estimator):
    mdp, mean = random_problem(0)
    psi = occ.jin_luo(mdp, beta=0.05, gamma=3.0)
    played = played_regrets(mdp, psi, mean, 2000, range(64), estimator)
    found = occ.tuning.predict(mdp, psi, mean, 2000, estimator=estimator, particles=256)
    assert found.method == "leaping"
    error = math.hypot(float(found.standard_error), float(played.std()) / 8)
    assert abs(float(found.regret) - float(played.mean())) < 3 * error + 0.07 * float(played.mean())
    assert occ.tuning.predict(mdp, occ.jin_luo(mdp, beta=20.0), mean, 2000).method == "mean path"


def test_leaping_sees_what_a_visit_without_loss_overturns():
    mdp, mean = random_problem(1)
    psi = occ.ConditionalEntropy() / occ.InverseSqrt(0.5) + occ.LogBarrier(0.1)
    baseline = occ.ReducedVariance(occ.InverseSqrt(1e-3))
    played = played_regrets(mdp, psi, mean, 3000, range(128), baseline)
    found = occ.leap(mdp, psi, mean, 3000, estimator=baseline, particles=256, accuracy=0.25)
    assert apart(found.regret[:, -1], played) < 4
    with torch.no_grad():
        path = occ.forecast(mdp, psi, mean, 3000, estimator=baseline)
    assert bool(path.reliable)  # by its own noise, which knows nothing of rare events
    assert float(path.final) < 0.85 * float(found.final)
    for estimator, method in ((baseline, "leaping"), (occ.ImportanceWeighted(), "mean path")):
        options = {"estimator": estimator, "particles": 16}
        assert occ.tuning.predict(mdp, psi, mean, 3000, **options).method == method


@pytest.mark.bits
def test_same_seed_same_bits():
    mdp, mean = random_problem()
    psi = occ.jin_luo(mdp, beta=1.0)
    for backend in ("engine", "torch"):
        first, second, other = (
            occ.leap(mdp, psi, mean, 500, particles=6, seed=seed, backend=backend).regret
            for seed in (7, 7, 8)
        )
        assert torch.equal(first, second)
        assert not torch.equal(first, other)


@pytest.mark.bits
@pytest.mark.parametrize("threads", [1, 2])
def test_a_particle_has_the_same_bits_beside_any_others(threads):
    mdp, mean = random_problem()
    psi = occ.ConditionalEntropy() / occ.InverseSqrt(0.3) + occ.LogBarrier(0.5)
    losses = occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 300, noise="uniform")
    torch.set_num_threads(threads)
    try:
        runs = [
            occ.leap(mdp, psi, losses, 2000, particles=n, seed=7, backend="engine")
            for n in (17, 1, 3, 8)
        ]
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
        monkeypatch.setattr(compiled_leaps, "lanes_in", lambda *_, lanes=lanes: lanes)
        psi = REGULARIZERS[regularizer](mdp)
        runs.append(occ.leap(mdp, psi, mean, 300, particles=10, backend="engine"))
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


def test_the_longest_leap_is_what_keeps_q_from_changing():
    mdp, mean = random_problem(0, (2, 2, 3))
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.5))
    t = torch.tensor(200.0, dtype=torch.float64)
    q = step(200 * mean, t).detach()
    bound = Setting(mdp, step.evaluator, False).bind([t, *step.evaluator.parameters(t)])
    hessian = bound.deriver(torch.Size())(q).hessian
    short, long = (float(longest_leap(mdp, hessian, q, accuracy)) for accuracy in (0.01, 0.02))
    assert 2 * short - 1e-9 <= long <= 4 * short + 1e-9
    # A force of one for that many episodes on a single pair moves it by no more than a small
    # multiple of the accuracy.
    for s in range(mdp.num_states):
        for a in range(mdp.num_actions):
            pushed = 200 * mean
            pushed[s, a] += short
            assert abs(float(step(pushed, t)[s, a].detach() / q[s, a]) - 1) < 0.05


def test_bad_input_is_named():
    mdp, mean = random_problem()
    given = {"losses": mean, "episodes": 10}
    for options, message in (
        ({"particles": 0}, "particles: expected at least 1"),
        ({"accuracy": 0.0}, "accuracy: expected a positive number"),
        ({"backend": "gpu"}, "backend: expected auto, torch or engine"),
        ({"episodes": 0}, "episodes: expected a number from 1 to 1e12, got 0"),
        ({"losses": mean.expand(2, -1, -1)}, "one MDP and one table of means"),
    ):
        with pytest.raises(ValueError, match=message):
            occ.leap(mdp, occ.jin_luo(mdp), **(given | options))
