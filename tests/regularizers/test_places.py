"""Parameters with one value per layer, state or pair: in both backends, with derivatives, tuned."""

from __future__ import annotations

import copy

import pytest
import torch
from zoo import expect

import torch_occ as occ
from torch_occ._support.fingerprints import fingerprints
from torch_occ.game.callbacks import parameters

F64 = torch.float64
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
S, A, L = MDP.num_states, MDP.num_actions, MDP.horizon
LOSS = 10 * torch.rand(S, A, dtype=F64, generator=torch.Generator().manual_seed(1))
MEAN = torch.rand(S, A, dtype=F64, generator=torch.Generator().manual_seed(2))
KINDS = {"layer": occ.PerLayer, "state": occ.PerState, "pair": occ.PerPair}
SHAPES = {"layer": (L,), "state": (S,), "pair": (S, A)}


def random(kind, low, high, seed=0, batch=()):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(*batch, *SHAPES[kind], dtype=F64, generator=generator)
    return KINDS[kind](MDP, low + (high - low) * uniform)


def varied(batch=()):
    """A parameter of every kind, and every elementary function."""
    return {
        "hybrid": occ.HybridTsallis(random("state", 0.1, 1, 1, batch))
        / occ.InverseSqrt(random("pair", 1, 2, 2, batch))
        + occ.LogBarrier(random("layer", 0.1, 1, 3, batch)),
        "powers": occ.Tsallis(random("state", 0.2, 0.7, 4, batch))
        / occ.Polynomial(random("pair", 1, 2, 5, batch), random("layer", 0.2, 0.6, 6, batch)),
        "entropy": occ.ConditionalEntropy() / occ.InverseSqrt(random("state", 1, 2, 7, batch)),
        "complement": occ.HybridComplement(random("pair", 0.1, 1, 8, batch))
        / occ.Constant(random("layer", 0.1, 0.3, 9, batch)),
        "barrier": occ.LogBarrier(random("pair", 0.1, 1, 10, batch)),
    }


@pytest.mark.parametrize("name", varied())
def test_backends_agree_with_derivatives(name):
    psi = varied()[name]
    t = torch.tensor([10.0, 20.0, 3.0], dtype=F64, requires_grad=True)
    loss = LOSS.clone().requires_grad_()
    weight = torch.rand(3, S, A, dtype=F64, generator=torch.Generator().manual_seed(3))
    inputs, found = [loss, t, *psi.parameters()], []
    for backend in ("torch", "engine"):
        step = occ.FTRLStep(MDP, psi, backend=backend)
        solution = step.solve(loss, t)
        assert solution.backend == backend
        grads = torch.autograd.grad(
            (solution.q * weight).sum(), inputs, allow_unused=True, materialize_grads=True
        )
        found.append([solution.q.detach(), *grads])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("backend", ["torch", "engine"])
@pytest.mark.parametrize("name", varied())
def test_a_batch_of_parameters_is_in_front(name, backend):
    together = varied(batch=(2,))[name]
    weight = torch.rand(2, S, A, dtype=F64, generator=torch.Generator().manual_seed(3))
    q = occ.FTRLStep(MDP, together, backend=backend)(LOSS, 9.0)
    grads = torch.autograd.grad((q * weight).sum(), list(together.parameters()))
    for i in range(2):
        alone = copy.deepcopy(together)
        for module in alone.modules():
            for key, value in module.named_parameters(recurse=False):
                setattr(module, key, torch.nn.Parameter(value.detach()[i]))
        own = occ.FTRLStep(MDP, alone, backend=backend)(LOSS, 9.0)
        torch.testing.assert_close(q[i], own, rtol=1e-10, atol=1e-14)
        expected = torch.autograd.grad((own * weight[i]).sum(), list(alone.parameters()))
        torch.testing.assert_close([g[i] for g in grads], list(expected), rtol=1e-8, atol=1e-12)


def test_a_value_per_layer_is_one_per_state_and_one_per_pair():
    layers = random("layer", 0.5, 1.0).values
    pairs = layers[MDP.layer][:, None].expand(S, A)
    given = occ.PerLayer(MDP, layers), occ.PerState(MDP, pairs[:, 0]), occ.PerPair(MDP, pairs)
    found = [occ.FTRLStep(MDP, occ.LogBarrier(x), backend="torch")(LOSS) for x in given]
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=1e-12, atol=0)


def test_users_functions_see_them_spread():
    class Mine(occ.SeparableRegularizer):
        def pair(self, x):
            return -self.strength * x.log()

        def state(self, x):
            return self.strength * x.square()

    for batch in ((), (2,)):
        values = random("state", 0.5, 1.0, batch=batch)
        q = occ.FTRLStep(MDP, Mine(strength=values))(LOSS)
        same = occ.FTRLStep(MDP, Mine(strength=1.0) * occ.Constant(values))(LOSS)
        torch.testing.assert_close(q, same, rtol=1e-10, atol=1e-14)
    with expect("one value per pair", "one value per state"):
        occ.FTRLStep(MDP, Mine(strength=random("pair", 0.5, 1.0)))(LOSS)


def test_they_are_tuned_entry_by_entry():
    rate = occ.InverseSqrt(occ.PerLayer(MDP, 1.0))
    psi = occ.Tsallis() / rate + occ.LogBarrier(occ.PerState(MDP, 2.0))
    objective = occ.tuning.ForecastObjective([occ.tuning.World("random", MDP, MEAN)], 1000)
    options = {"only": ["gamma", "beta"], "bounds": {"beta": (1.5, 2.5)}}
    tuned = occ.tune(objective, psi, steps=2, starts=2, **options)
    assert tuned.path.shape == (3, 2, L + S)
    assert [len(x) for x in tuned.parameters.values()] == [L, S]
    assert "7 numbers from" in str(tuned)
    with torch.no_grad():
        assert tuned.value < float(objective(psi).value)
        tuned.load_into(psi)
        assert float(objective(psi).value) == pytest.approx(tuned.value, rel=1e-9)
    beta = psi.terms[1].beta.detach().clone()
    assert beta.unique().numel() > 1
    assert bool(((beta >= 1.5) & (beta <= 2.5)).all())


def test_they_are_saved_told_apart_and_logged():
    psi = occ.LogBarrier(random("state", 1, 2))
    other = occ.LogBarrier(occ.PerState(MDP, 1.0))
    other.load_state_dict(psi.state_dict())
    torch.testing.assert_close(other.beta, psi.beta)
    assert fingerprints(x=psi) == fingerprints(x=other)
    square = occ.LayeredMDP.random(2, 1, 2, seed=0)  # as many layers as states
    same = [occ.LogBarrier(kind(square, 1.0)) for kind in (occ.PerLayer, occ.PerState)]
    assert fingerprints(x=same[0]) != fingerprints(x=same[1])
    logged = parameters(occ.FTRL(MDP, psi), 1)
    assert logged["beta"] == pytest.approx(float(psi.beta.detach().mean()))
    assert logged["beta_least"] < logged["beta"] < logged["beta_largest"]
