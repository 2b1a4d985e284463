"""Gradients through the run: the run is that of `simulate`, and tangents are derivatives."""

import pytest
import torch
from zoo import random_problem

import torch_occ as occ


def test_the_run_is_that_of_simulate():
    mdp, mean = random_problem()
    losses = occ.BernoulliLosses(mean)
    psi = occ.jin_luo(mdp, beta=1.0)
    found = occ.run_gradients(mdp, psi, losses, 20, range(4), checkpoints=[5, 20], backend="torch")
    played = occ.simulate(
        mdp, occ.FTRL(mdp, psi), losses, 20, range(4), checkpoints=[5, 20], backend="torch"
    )
    assert found.backend == "torch"
    assert torch.allclose(found.regret, played.regret, rtol=1e-9)
    assert bool(found.certified.all())
    assert [name.rpartition(".")[2] for name in found.names] == ["alpha", "gamma", "beta"]


def test_pathwise_is_the_derivative_with_the_actions_held_fixed():
    """With these seeds a step of 1e-6 changes no sampled action, so differences are exact."""
    mdp, mean = random_problem()
    losses = occ.BernoulliLosses(mean)
    psi = occ.jin_luo(mdp, beta=1.0)
    found = occ.run_gradients(mdp, psi, losses, 15, range(6), checkpoints=[15])
    fixed = occ.finite_differences(mdp, psi, losses, 15, range(6), step=1e-6, checkpoints=[15])
    assert torch.allclose(found.pathwise.samples, fixed.samples, rtol=1e-4, atol=1e-6)


def test_unbiased_agrees_with_differences_and_pathwise_does_not():
    mdp, mean = random_problem(1)
    losses = occ.BernoulliLosses(mean)
    psi = occ.jin_luo(mdp, beta=2.0)
    found = occ.run_gradients(mdp, psi, losses, 40, range(600), checkpoints=[40])
    reference = occ.finite_differences(
        mdp, psi, losses, 40, range(1000, 2200), step=0.1, checkpoints=[40]
    )

    def distance(estimate):
        error = (estimate.standard_error**2 + reference.standard_error**2).sqrt()
        return (estimate.mean - reference.mean).abs() / error

    assert bool((distance(found.unbiased) < 3.5).all())
    assert float(distance(found.pathwise).max()) > 5


def test_an_estimate_says_when_one_seed_makes_its_error():
    samples = torch.tensor([1.0, 2.0, 3.0, 102.0], dtype=torch.float64)[:, None, None]
    found = occ.Estimate(samples)
    assert float(found.mean) == 27
    assert float(found.standard_error) == pytest.approx(float(samples.std()) / 2)
    assert float(found.heaviest) == pytest.approx(75**2 / (26**2 + 25**2 + 24**2 + 75**2))


def test_bad_input_is_named():
    mdp, mean = random_problem()
    losses = occ.BernoulliLosses(mean)
    with pytest.raises(
        ValueError, match="seeds: a leave-one-out baseline needs at least two, got 1"
    ):
        occ.run_gradients(mdp, occ.jin_luo(mdp), losses, 5, [0])
    with pytest.raises(
        ValueError, match=r"checkpoints: expected episodes from 1 to 5, got \[3, 6\]"
    ):
        occ.run_gradients(mdp, occ.jin_luo(mdp), losses, 5, [0, 1], checkpoints=[6, 3])
    with pytest.raises(ValueError, match=r"mean: expected torch\.float64 of shape"):
        occ.run_gradients(mdp, occ.jin_luo(mdp), occ.BernoulliLosses(torch.ones(1, 2)), 5, [0, 1])
    with pytest.raises(ValueError, match="regularizer: expected scalar parameters, at least one"):
        occ.run_gradients(mdp, occ.Shannon(), losses, 5, [0, 1])
    with pytest.raises(ValueError, match="backend: expected auto, torch or engine"):
        occ.run_gradients(mdp, occ.jin_luo(mdp), losses, 5, [0, 1], backend="numba")
    with pytest.raises(ValueError, match="regularizer: expected scalar parameters"):
        occ.run_gradients(
            mdp, occ.jin_luo(mdp, beta=torch.ones(2, dtype=torch.float64)), losses, 5, [0, 1]
        )
    with pytest.raises(ValueError, match="step: expected a positive number"):
        occ.finite_differences(mdp, occ.jin_luo(mdp), losses, 5, [0, 1], step=0.0)
