import pytest
import torch
from zoo import PROBLEMS, Centred, Coupled, SmoothedHybrid, expect

import torch_occ as occ
from torch_occ.regularizers.terms import Log, Term

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
        (A + B + C, (1, 1, 1)),
        (A + (B + A), (2, 1, 0)),
        (sum([A, B]), (1, 1, 0)),
        (3 * A, (3, 0, 0)),
        (A / 4, (0.25, 0, 0)),
        (2 * (A + B / 4) + C, (2, 0.5, 1)),
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


def test_the_parameters_of_a_sum_are_those_of_its_terms():
    psi = occ.HybridTsallis(0.5) / occ.InverseSqrt(2.0) + occ.LogBarrier(3.0)
    assert sorted(p.item() for p in psi.parameters()) == [0.5, 2.0, 3.0]
    assert {(type(p), p.dtype) for p in psi.parameters()} == {(torch.nn.Parameter, F64)}
    assert len(list((psi + occ.LogBarrier(4.0)).parameters())) == 4


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


@pytest.mark.parametrize(
    ("given", "dtype"),
    [(2, F64), (1 / 3, F64), (torch.tensor(2), F64), (torch.tensor(0.5), torch.float32)],
)
def test_a_parameter_is_a_copy_with_all_digits_of_a_python_number(given, dtype):
    barrier = occ.LogBarrier(given)
    assert barrier.beta.dtype == dtype
    assert barrier.beta.item() == given
    if isinstance(given, torch.Tensor):
        given.fill_(-1.0)
        assert barrier.beta.item() > 0


# -- new regularizers ------------------------------------------------------------------------------


def test_a_table_has_numbers_and_names():
    class Weighted(occ.LogBarrier):
        def table(self):
            return (Term("pair", Log(), -self.beta),)

    with expect("Weighted.table: expected numbers and names", "tensor", error=TypeError):
        occ.FTRLStep(point()[1], Weighted())


def test_a_new_schedule_is_a_forward():
    class Halving(occ.Schedule):
        def forward(self, t):
            return 0.5**t

    q = torch.tensor([[0.25, 0.75]], dtype=F64)
    psi = occ.Shannon() / Halving()
    torch.testing.assert_close(psi(q, 3.0), 8 * occ.Shannon()(q), rtol=1e-15, atol=0)
