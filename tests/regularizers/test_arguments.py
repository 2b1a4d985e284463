from fractions import Fraction

import pytest
import torch
from zoo import PROBLEMS, random_loss

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


MDPS = {name: (lambda build=build: build().mdp) for name, build in PROBLEMS.items()}
MDPS["three actions"] = masked_mdp
every_mdp = pytest.mark.parametrize("build", MDPS.values(), ids=MDPS)


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


@every_argument
def test_an_argument_that_does_not_exist_takes_no_part(name):
    mdp = masked_mdp()
    q, missing = occ.interior_point(mdp), mdp.missing[name]
    if missing is not None:
        assert bool((marginal(name, mdp, q)[missing] == 1).all())
        assert not bool(change(name, mdp, q)[missing].any())
        slope = missing.to(F64)
        assert not bool(pull_back(name, mdp, slope).any())
    assert bool((marginal(name, mdp, q) > 0).all())


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
    expected = expected.expand(2, *expected.shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * EPS)


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


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 200])
def test_sum_of_others_adds_exactly_the_others(size):
    """Entries differ by twenty orders of magnitude; errors are relative to each sum."""
    generator = torch.Generator().manual_seed(size)
    x = 10 ** (-20 * torch.rand(3, size, dtype=F64, generator=generator))
    x[:, size // 2] = 1.0
    found = sum_of_others(x)
    for row, sums in zip(x.tolist(), found.tolist(), strict=True):
        total = exact_sum(row)
        for entry, other in zip(row, sums, strict=True):
            exact = total - Fraction(entry)
            assert abs(Fraction(other) - exact) <= 2 * size * EPS * exact


# -- their derivatives -----------------------------------------------------------------------------


@every_argument
@every_mdp
def test_pull_back_is_the_adjoint_of_change(name, build):
    mdp = build()
    dq = random_loss(mdp, batch=(3,)) * mdp.actions
    moved = change(name, mdp, dq)
    slope = torch.rand(moved.shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    pulled = pull_back(name, mdp, slope)
    assert not bool(pulled[..., ~mdp.actions].any())
    left, right = (moved * slope).flatten(1).sum(-1), (dq * pulled).flatten(1).sum(-1)
    torch.testing.assert_close(left, right, rtol=1e-14, atol=1e-14)


@every_argument
@every_mdp
def test_change_is_the_derivative_of_the_argument(name, build):
    mdp = build()
    q, dq = occ.interior_point(mdp), random_loss(mdp) * mdp.actions
    _, derivative = torch.autograd.functional.jvp(lambda q: marginal(name, mdp, q), q, dq)
    torch.testing.assert_close(change(name, mdp, dq), derivative, rtol=1e-14, atol=1e-15)


# torch.func.hessian warns on its first call.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_nothing_made_inside_a_transform_outlives_it():
    # A size that no other test uses.
    x = torch.rand(11, dtype=F64, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        found = torch.func.hessian(lambda x: sum_of_others(x).square().sum())(x)
    torch.testing.assert_close(found, 18.0 + 2.0 * torch.eye(11, dtype=F64), rtol=1e-15, atol=0)
