import re

import pytest
import torch
from zoo import PROBLEMS, Centred, Coupled, SmoothedHybrid

import torch_occ as occ

F64 = torch.float64


def tensor(values):
    return torch.tensor(values, dtype=F64)


def point(*batch):
    mdp = PROBLEMS["masked"]().mdp
    return occ.interior_point(mdp).expand(*batch, 4, 2), mdp


# -- the algebra -----------------------------------------------------------------------------------

A, B, C = occ.Tsallis(), Centred(0.5), Coupled(0.25)


@pytest.mark.parametrize(
    ("psi", "weights"),
    [
        (A + B, (1, 1, 0)),
        (A + B + C, (1, 1, 1)),
        (A + (B + C), (1, 1, 1)),
        (A + A, (2, 0, 0)),
        (3 * A, (3, 0, 0)),
        (A * 0.5, (0.5, 0, 0)),
        (A / 4, (0.25, 0, 0)),
        (2 * (A + B / 4) + C, (2, 0.5, 1)),
        (A / occ.InverseSqrt(2.0), (1.5, 0, 0)),
        (A * occ.Constant(3.0), (3, 0, 0)),
        (occ.Constant(3.0) * A, (3, 0, 0)),
        ((A / occ.InverseSqrt(0.5) + B) / occ.InverseSqrt(0.25) + C, (72, 12, 1)),
        ((A + C) * occ.InverseSqrt() / occ.Constant(0.5), (2 / 3, 0, 2 / 3)),
    ],
)
def test_values_follow_the_algebra(psi, weights):
    q, mdp = point()
    pairs = zip(weights, (A, B, C), strict=True)
    expected = sum(weight * part(q, 9.0, mdp) for weight, part in pairs)
    torch.testing.assert_close(psi(q, 9.0, mdp), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "combine",
    [
        lambda psi: psi + 1,
        lambda psi: 1 + psi,
        lambda psi: psi - psi,
        lambda psi: psi * psi,
        lambda psi: 1 / psi,
        lambda psi: psi / psi,
        lambda psi: psi * torch.tensor(2.0),
        lambda psi: torch.tensor(2.0) * psi,
        lambda psi: psi + occ.Constant(1.0),
        lambda psi: (psi + psi) + None,
    ],
)
def test_an_operation_without_a_meaning_is_a_type_error(combine):
    with pytest.raises(TypeError, match="unsupported operand"):
        combine(occ.Shannon())


@pytest.mark.parametrize("factor", [0, 0.0, -1.0, torch.nan, torch.inf])
def test_only_positive_numbers_scale(factor):
    for combine in (
        lambda: occ.Shannon() * factor,
        lambda: factor * occ.Shannon(),
        lambda: occ.Shannon() / factor,
    ):
        with pytest.raises(ValueError, match=re.escape(f"positive number, got {factor}")):
            combine()


def test_the_parameters_of_a_sum_are_those_of_its_terms():
    psi = occ.HybridTsallis(0.5) / occ.InverseSqrt(2.0) + occ.LogBarrier(3.0)
    named = {name: parameter.item() for name, parameter in psi.named_parameters()}
    assert sorted(named.values()) == [0.5, 2.0, 3.0]
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in psi.parameters())
    assert all(parameter.dtype == F64 for parameter in psi.parameters())
    twice = psi + occ.LogBarrier(4.0)
    assert len(list(twice.parameters())) == 4


@pytest.mark.parametrize(
    "psi", [A, SmoothedHybrid(0.5), B, C], ids=["built-in", "separable", "statewise", "joint"]
)
def test_without_an_mdp_all_states_form_one_layer(psi):
    q = tensor([[0.1, 0.2, 0.3], [0.2, 0.1, 0.1]])
    mdp = occ.LayeredMDP([torch.ones(2, 3, 1, dtype=F64)], initial=tensor([0.5, 0.5]))
    torch.testing.assert_close(psi(q), psi(q, 1.0, mdp), rtol=0, atol=0)
    batched = torch.func.vmap(lambda q: psi(q, 1.0, mdp))(torch.stack([q, q.flip(0)]))
    torch.testing.assert_close(batched, torch.stack([psi(q), psi(q.flip(0))]), rtol=1e-15, atol=0)


# -- parameters ------------------------------------------------------------------------------------

BUILT_IN = {
    "Tsallis": ("power", [0.0, 1.0, -0.5, 2.0, torch.nan]),
    "HybridTsallis": ("alpha", [-1e-9, torch.inf, torch.nan]),
    "HybridComplement": ("alpha", [-0.5, torch.nan]),
    "LogBarrier": ("beta", [-1.0, torch.inf]),
    "Constant": ("rate", [0.0, -2.0]),
    "InverseSqrt": ("gamma", [0.0, torch.nan]),
    "Polynomial": ("exponent", [-0.5, torch.inf]),
}
CASES = [(owner, name, value) for owner, (name, values) in BUILT_IN.items() for value in values]


@pytest.mark.parametrize(("owner", "name", "value"), CASES)
def test_a_parameter_outside_its_domain_is_named(owner, name, value):
    message = re.escape(f"{owner}: {name} must satisfy ") + ".*" + re.escape(f"got {float(value)}")
    for given in (value, torch.tensor(value, dtype=F64), tensor([0.5, value])):
        with pytest.raises(ValueError, match=message):
            getattr(occ, owner)(**{name: given})


def test_a_parameter_that_leaves_its_domain_later_is_found_inside_a_sum():
    psi = occ.HybridTsallis(0.5) / occ.InverseSqrt(2.0) + occ.LogBarrier(3.0)
    psi.validate()
    with torch.no_grad():
        psi.terms[1].beta.fill_(-1.0)
    with pytest.raises(ValueError, match=r"LogBarrier: beta must satisfy .* got -1"):
        psi.validate()


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.6, 1e-300])
def test_a_python_number_keeps_all_its_digits(value):
    assert occ.LogBarrier(value).beta.item() == value
    assert occ.InverseSqrt(value).gamma.item() == value


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(2, F64), (0.5, F64), (torch.tensor(2), F64), (torch.tensor(0.5), torch.float32)],
)
def test_the_number_type_of_a_parameter(given, dtype):
    assert occ.LogBarrier(given).beta.dtype == dtype


def test_a_parameter_is_a_copy():
    beta = tensor(2.0)
    barrier = occ.LogBarrier(beta)
    beta.fill_(-1.0)
    assert barrier.beta.item() == 2.0


# -- new regularizers ------------------------------------------------------------------------------


def test_a_regularizer_without_a_level_says_what_to_derive_it_from():
    class Nothing(occ.Regularizer):
        pass

    q, mdp = point()
    for psi in (Nothing(), occ.Shannon() + Nothing() / 2):
        with pytest.raises(TypeError, match="Nothing: derive it from SeparableRegularizer"):
            psi(q, 1.0, mdp)
