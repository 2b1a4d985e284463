from fractions import Fraction

import pytest
import torch

import torch_occ as occ
from torch_occ.regularizers.terms import marginal, sum_of_others

F64 = torch.float64
EPS = torch.finfo(F64).eps


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
        row = row if name == "rest" else [*row, *q[1 - s].tolist()]
        exact = sum(map(Fraction, row))
        assert float(abs(Fraction(float(found[s, a])) / exact - 1)) < 4 * EPS


# torch.func.hessian warns on its first call.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_nothing_made_inside_a_transform_outlives_it():
    # A size that no other test uses.
    x = torch.rand(11, dtype=F64, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        found = torch.func.hessian(lambda x: sum_of_others(x).square().sum())(x)
    torch.testing.assert_close(found, 18.0 + 2.0 * torch.eye(11, dtype=F64), rtol=1e-15, atol=0)
