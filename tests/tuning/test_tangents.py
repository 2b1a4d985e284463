"""Tangents in the engine agree with torch, for every table of terms; failures are reported."""

import pytest
import torch
from zoo import PROBLEMS, REGULARIZERS, random_loss

import torch_occ as occ
from torch_occ._support.spacing import CHUNK
from torch_occ.step.compiled.inputs import why_not
from torch_occ.tuning import compiled_tangents
from torch_occ.tuning.compiled_tangents import play_compiled
from torch_occ.tuning.tangents import play_in_torch

TABLES = [
    name
    for name, build in REGULARIZERS.items()
    if why_not(PROBLEMS["masked"]().mdp, build(PROBLEMS["masked"]().mdp)) is None
    and not build(PROBLEMS["masked"]().mdp).places()  # run_gradients takes scalars
]
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
LOSSES = occ.BernoulliLosses(random_loss(MDP))


def check_both(mdp, psi, losses, episodes, seeds):
    runs = [
        occ.run_gradients(mdp, psi, losses, episodes, seeds, backend=backend)
        for backend in ("engine", "torch")
    ]
    assert [run.backend for run in runs] == ["engine", "torch"]
    assert runs[0].names == runs[1].names
    assert torch.equal(runs[0].certified, runs[1].certified)
    torch.testing.assert_close(runs[0].regret, runs[1].regret, rtol=1e-12, atol=1e-12)
    for name in ("pathwise", "unbiased"):
        found, expected = (getattr(run, name).samples for run in runs)
        assert float(expected.abs().amax()) > 0
        torch.testing.assert_close(
            found, expected, rtol=1e-9, atol=1e-11 * float(expected.abs().amax())
        )


@pytest.mark.parametrize("regularizer", TABLES)
def test_the_engine_carries_the_tangents_of_the_torch_path(regularizer):
    """Every argument, function and schedule; some states have masked actions, or only one."""
    mdp = PROBLEMS["masked"]().mdp
    check_both(mdp, REGULARIZERS[regularizer](mdp), occ.UniformLosses(random_loss(mdp)), 3, [0, 5])


def test_the_engine_carries_the_tangents_of_the_torch_path_for_the_paper():
    check_both(MDP, occ.jin_luo(MDP, beta=1.0), LOSSES, 12, range(3))


def test_sparse_transitions_carry_them_too():
    sparse = MDP.to_sparse()
    check_both(sparse, occ.jin_luo(sparse, beta=1.0), LOSSES, 40, [0, 1])


@pytest.mark.bits
def test_the_run_goes_on_over_chunks_and_is_that_of_simulate():
    psi, seeds, stops = occ.jin_luo(MDP, beta=50.0), [3, 1, 2], [256, 257, 300]
    found = occ.run_gradients(MDP, psi, LOSSES, 600, seeds, checkpoints=stops)
    played = occ.simulate(MDP, occ.FTRL(MDP, psi), LOSSES, 300, seeds, checkpoints=stops)
    assert found.backend == played.backend == "engine"
    torch.testing.assert_close(found.regret, played.regret, rtol=1e-9, atol=0)
    again = occ.run_gradients(MDP, psi, LOSSES, 300, seeds, checkpoints=[300])
    assert torch.equal(again.unbiased.samples[:, 0], found.unbiased.samples[:, 2])
    # no sampled action changes
    moved = occ.finite_differences(MDP, psi, LOSSES, 300, [3, 1, 2], step=1e-6, checkpoints=stops)
    torch.testing.assert_close(found.pathwise.samples, moved.samples, rtol=1e-4, atol=1e-6)


def test_a_parameter_at_zero_has_no_derivative_in_its_logarithm():
    psi = occ.jin_luo(MDP, alpha=0.0, beta=1.0)
    found = occ.run_gradients(MDP, psi, LOSSES, 5, [0, 1])
    assert float(found.unbiased.samples[..., 0].abs().max()) == 0
    assert bool(found.unbiased.samples.isfinite().all())


def test_the_standard_error_says_where_the_estimators_fail():
    """The unbiased estimator is good at T = 100; at T = 1,000 only differences are.

    There its error is many times the gradient.
    """
    psi, stops = occ.jin_luo(MDP, beta=10.0), [100, 1000]
    found = occ.run_gradients(MDP, psi, LOSSES, 1000, range(20), checkpoints=stops).unbiased
    reference = occ.finite_differences(
        MDP, psi, LOSSES, 1000, range(20, 40), step=0.2, checkpoints=stops
    )
    relative = found.standard_error / reference.mean.abs()
    assert bool((relative[0, 1:] < 0.5).all())
    assert bool((relative[1] > 5).all())
    assert bool((reference.standard_error[1, 1:] < 0.3 * reference.mean[1, 1:].abs()).all())


def test_steps_without_certificate_are_not_averaged_in():
    psi = occ.jin_luo(MDP, beta=1.0)
    for play in (play_compiled, play_in_torch):
        (stretch, *_) = play(occ.FTRLStep(MDP, psi, tolerance=1e-30), LOSSES, 2, [0, 1])
        assert not bool(stretch.certified.any())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(occ.FTRLStep.__init__.__kwdefaults__, "tolerance", 1e-30)
        found = occ.run_gradients(MDP, psi, LOSSES, 2, [0, 1])
        assert not bool(found.certified.any())
        assert bool(found.unbiased.samples.isnan().all())
        assert bool(occ.finite_differences(MDP, psi, LOSSES, 2, [0, 1]).samples.isnan().all())


def test_who_plays():
    class Doubled(occ.BernoulliLosses):
        def draw(self, mean, uniform):
            return super().draw(mean / 2, uniform)

    own = REGULARIZERS["custom_separable"](MDP)
    assert occ.run_gradients(MDP, own, LOSSES, 1, [0, 1]).backend == "torch"
    with pytest.raises(
        ValueError,
        match="backend: SmoothedHybrid is not a table of elementary terms; use backend='torch'",
    ):
        occ.run_gradients(MDP, own, LOSSES, 1, [0, 1], backend="engine")
    with pytest.raises(ValueError, match="backend: Doubled draws its losses in its own way"):
        occ.run_gradients(MDP, occ.jin_luo(MDP), Doubled(LOSSES.mean), 1, [0, 1], backend="engine")


@pytest.mark.bits
@pytest.mark.parametrize("regularizer", ["jin_luo", "shannon", "tsallis_power"])
def test_a_seed_has_the_same_bits_beside_any_others(regularizer):
    psi, seeds = REGULARIZERS[regularizer](MDP), list(range(17))

    def play(some):
        return list(play_compiled(occ.FTRLStep(MDP, psi), LOSSES, CHUNK + 5, some))

    whole = play(seeds)
    for some in (seeds[4:5], seeds[5:8], seeds[8:16], seeds[::-1]):
        for found, expected in zip(play(some), whole, strict=True):
            for mine, theirs in zip(found, expected, strict=True):
                assert torch.equal(mine, theirs[some])


def test_lanes_carry_the_tangents_of_single_seeds(monkeypatch):
    psi, runs = occ.jin_luo(MDP, beta=5.0), []
    for lanes in (8, None):
        monkeypatch.setattr(compiled_tangents, "lanes_in", lambda *_, lanes=lanes: lanes)
        (run,) = play_compiled(occ.FTRLStep(MDP, psi), LOSSES, 50, range(10))
        runs.append(run)
    for mine, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
