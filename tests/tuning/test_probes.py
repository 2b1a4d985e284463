"""Probes: their covariance is the exact one, and the forecast by probes is the exact forecast."""

import pytest
import torch
from zoo import random_problem

import torch_occ as occ
from torch_occ.step.implicit import Linearization
from torch_occ.tuning import forecast as mean_path
from torch_occ.tuning.forecast import Estimates, draw_fluctuations, outer, second_moment


@pytest.mark.parametrize("noise", ["bernoulli", "none"])
def test_fluctuations_have_the_covariance_of_loss_estimates(noise):
    mdp, mean = random_problem(3, (3, 2, 2))
    q = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.3))(20 * mean, t=20).detach()
    b = torch.full_like(q, 0.3)
    generator = torch.Generator().manual_seed(0)
    count = 200_000
    given = Estimates(mean[None], noise, b[None])
    drawn = draw_fluctuations(mdp, q[None], given, count, generator)
    assert drawn.shape == (count, 1, *q.shape)
    x = drawn.flatten(1)
    exact = second_moment(mdp, q, given)[0] - outer((mean - b).flatten())
    scale = exact.diagonal().sqrt()
    # A correlation of normal numbers has a standard error of at most sqrt(2 / count).
    apart = ((x.T @ x / count - exact) / outer(scale)).abs().max()
    assert float(apart) < 5 * (2 / count) ** 0.5


@pytest.mark.parametrize("estimator", [None, occ.ReducedVariance(occ.InverseSqrt(0.001))])
def test_probes_agree_with_matrices(estimator):
    mdp, mean = random_problem(1, (3, 3, 3))
    psi = occ.Tsallis() / occ.InverseSqrt(0.7) + occ.LogBarrier(1.0)
    exact = occ.forecast(mdp, psi, mean, 10_000, estimator=estimator, probes=0)
    probed = occ.forecast(mdp, psi, mean, 10_000, estimator=estimator, probes=64)
    assert torch.equal(exact.drift, probed.drift)
    assert not bool(exact.noise_error.any())
    with torch.no_grad():
        assert abs(probed.noise[-1] - exact.noise[-1]) < 4 * probed.noise_error[-1]
        assert probed.noise_error[-1] < 0.05 * exact.noise[-1]
    assert torch.allclose(probed.stability[-1], exact.stability[-1], rtol=0.05)
    slopes = (torch.autograd.grad(x.final, list(psi.parameters())) for x in (probed, exact))
    for one, other in zip(*slopes, strict=True):
        assert torch.allclose(one, other, rtol=0.1, atol=0.02 * float(exact.final.detach()))


def test_gradients_of_probes_are_those_of_their_numbers():
    mdp, mean = random_problem(2, (3, 2, 3))

    def final(gamma, beta):
        psi = occ.jin_luo(mdp, gamma=float(gamma), beta=float(beta))
        return psi, occ.forecast(mdp, psi, mean, 300, probes=4, seed=7).final

    psi, value = final(0.8, 0.7)
    value.backward()
    slopes = {name.rpartition(".")[2]: float(p.grad) for name, p in psi.named_parameters()}
    h = 1e-5
    with torch.no_grad():
        in_gamma = (final(0.8 + h, 0.7)[1] - final(0.8 - h, 0.7)[1]) / (2 * h)
        in_beta = (final(0.8, 0.7 + h)[1] - final(0.8, 0.7 - h)[1]) / (2 * h)
    assert slopes["gamma"] == pytest.approx(float(in_gamma), rel=1e-5)
    assert slopes["beta"] == pytest.approx(float(in_beta), rel=1e-5)


class PerState(occ.StatewiseRegularizer):
    def per_state(self, q_s):
        return -q_s.sqrt().sum(-1)


def test_bends_are_the_same_at_every_level_of_a_regularizer():
    mdp, mean = random_problem(2, (2, 2, 3))
    t = torch.tensor([20.0, 40.0], dtype=torch.float64)
    found, noises = [], []
    for leaf in (occ.Tsallis(0.5), PerState()):
        psi = leaf / occ.InverseSqrt(0.5) + occ.LogBarrier(0.1)
        noises.append(occ.forecast(mdp, psi, mean, 60).noise)
        step = occ.FTRLStep(mdp, psi)
        q = step(t[:, None, None] * mean, t).detach()
        linear = Linearization(step, q, t)
        generator = torch.Generator().manual_seed(0)
        y = torch.randn(3, *q.shape, dtype=torch.float64, generator=generator)
        u = linear.apply(mean.expand_as(q))
        bends = linear.bend_along(u, linear.apply(y)).detach()
        assert bends.shape == (3, 2)
        for r in range(3):
            moved = linear.apply(y[r]).flatten(-2)
            matrix = moved.unsqueeze(-1) * moved.unsqueeze(-2)
            assert torch.allclose(bends[r], linear.bend(u, matrix).detach(), rtol=1e-9)
        found.append(bends)
    assert torch.allclose(*found, rtol=1e-8)
    assert torch.allclose(*noises, rtol=1e-8)


def test_sparse_layers_have_the_same_probes():
    mdp, mean = random_problem(1, (3, 3, 2))
    psi = occ.Tsallis() / occ.InverseSqrt(0.7)
    one = occ.forecast(mdp, psi, mean, 200, probes=3).noise
    other = occ.forecast(mdp.to_sparse(), psi, mean, 200, probes=3).noise
    assert torch.allclose(one, other, rtol=1e-8)


def test_a_batch_of_settings_shares_its_probes():
    mdp, mean = random_problem(1, (2, 3, 2))
    gammas = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    both = occ.forecast(mdp, occ.Tsallis() / occ.InverseSqrt(gammas), mean[None], 200, probes=3)
    for i, gamma in enumerate((0.5, 1.0)):
        alone = occ.forecast(mdp, occ.Tsallis() / occ.InverseSqrt(gamma), mean, 200, probes=3)
        assert torch.allclose(both.noise[i, 0], alone.noise, rtol=1e-8)


def test_large_mdps_are_probed_and_too_large_matrices_refused(monkeypatch):
    mdp, mean = random_problem(0, (2, 2, 2))
    psi = occ.Tsallis() / occ.InverseSqrt(0.7)
    assert not bool(occ.forecast(mdp, psi, mean, 50).noise_error.any())
    monkeypatch.setattr(mean_path, "EXACT_PAIRS", 3)
    assert bool((occ.forecast(mdp, psi, mean, 50).noise_error[1:] > 0).all())
    monkeypatch.setattr(mean_path, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"probes: without probes .* GB, for 6 pairs at \d+ nodes"):
        occ.forecast(mdp, psi, mean, 50, probes=0)
    for probes in (-1, 1):
        with pytest.raises(ValueError, match="probes: expected at least 2"):
            occ.forecast(mdp, psi, mean, 50, probes=probes)
