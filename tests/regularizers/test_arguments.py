from fractions import Fraction

import pytest
import torch
from zoo import mdps, random_loss

import torch_occ as occ
from torch_occ.regularizers.terms import ARGUMENTS, change, marginal, pull_back, sum_of_others

F64 = torch.float64
EPS = torch.finfo(F64).eps

every_argument = pytest.mark.parametrize("name", ARGUMENTS)


def masked_mdp():
    """Layers {0}, {1, 2}, {3}: states with 3, 1, 2, 1 actions; the last layer has one pair."""
    actions = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1], [1, 0, 0]], dtype=torch.bool)
    halves = torch.full((1, 3, 2), 0.5, dtype=F64)
    ones = [torch.ones(width, 3, 1, dtype=F64) for width in (2, 1)]
    return occ.LayeredMDP([halves, *ones], actions=actions)


every_mdp = mdps(three_actions=masked_mdp)


# -- which exist -----------------------------------------------------------------------------------


def test_missing_and_groups():
    mdp = masked_mdp()
    assert mdp.missing["state"] is None
    assert torch.equal(mdp.missing["pair"], ~mdp.actions)
    several_actions = torch.tensor([[1], [0], [1], [0]], dtype=torch.bool)
    several_pairs = torch.tensor([[1], [1], [1], [0]], dtype=torch.bool)  # in the layer
    assert torch.equal(~mdp.missing["rest"], mdp.actions & several_actions)
    assert torch.equal(~mdp.missing["complement"], mdp.actions & several_pairs)
    groups = [(states.tolist(), actions.tolist()) for states, actions in mdp.action_groups]
    assert groups == [([1, 3], [[1], [0]]), ([2], [[0, 2]]), ([0], [[0, 1, 2]])]
    assert all(mask is None for mask in occ.LayeredMDP.random(3, 2, 2).missing.values())


# -- their values ----------------------------------------------------------------------------------


@every_argument
@every_mdp
def test_values_on_omega(name, build):
    mdp = build()
    q = occ.interior_point(mdp)
    state = q.sum(-1)
    plain = {"pair": q, "rest": state.unsqueeze(-1) - q, "state": state, "complement": 1 - q}[name]
    missing = mdp.missing[name]
    expected = plain if missing is None else torch.where(missing, 1.0, plain)
    found = marginal(name, mdp, q.expand(2, *q.shape))
    torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=4 * EPS)
    assert bool((found > 0).all())


def exact_sum(numbers):
    return sum(map(Fraction, numbers), Fraction(0))


@pytest.mark.parametrize(
    ("largest", "others"),
    [(1 - 3e-14, 1e-14), (1.0, 1e-20), (1 - EPS / 2, 1e-20), (1 - EPS, 1e-30)],
)
@pytest.mark.parametrize("name", ["rest", "complement"])
def test_no_digit_is_lost_when_one_action_takes_nearly_all(name, largest, others):
    """One of two states has nearly all of the mass, in one action; `largest` may be an ulp off."""
    initial = torch.tensor([0.5, 0.5], dtype=F64)
    mdp = occ.LayeredMDP([torch.ones(2, 3, 1, dtype=F64)], initial=initial)
    rows = [[others, largest, 0.3 * others], [0.7 * others, 0.1 * others, 0.9 * others]]
    q = torch.tensor(rows, dtype=F64)
    found = marginal(name, mdp, q)
    for s, a in ((s, a) for s in range(2) for a in range(3)):
        row = [float(q[s, b]) for b in range(3) if b != a]
        exact = exact_sum(row if name == "rest" else [*row, *q[1 - s].tolist()])
        assert float(abs(Fraction(float(found[s, a])) / exact - 1)) < 4 * EPS


# -- their derivatives -----------------------------------------------------------------------------


@every_argument
@every_mdp
def test_change_is_the_derivative_of_the_argument_and_pull_back_its_adjoint(name, build):
    mdp = build()
    q, dq = occ.interior_point(mdp), random_loss(mdp) * mdp.actions
    _, derivative = torch.autograd.functional.jvp(lambda q: marginal(name, mdp, q), q, dq)
    moved = change(name, mdp, dq)
    torch.testing.assert_close(moved, derivative, rtol=1e-14, atol=1e-15)
    slope = torch.rand(moved.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    pulled = pull_back(name, mdp, slope)
    assert not bool(pulled[~mdp.actions].any())
    torch.testing.assert_close((moved * slope).sum(), (dq * pulled).sum(), rtol=1e-14, atol=1e-14)


# torch.func.hessian warns on its first call.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_nothing_made_inside_a_transform_outlives_it():
    # A size that no other test uses.
    x = torch.rand(11, dtype=F64, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        found = torch.func.hessian(lambda x: sum_of_others(x).square().sum())(x)
    torch.testing.assert_close(found, 18.0 + 2.0 * torch.eye(11, dtype=F64), rtol=1e-15, atol=0)
