"""Every statement on random data, and a check that no statement of the package is left out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from theory_cases import batch_of_mdps, check

from experiments.statements import survey
from torch_occ.theory import Statement
from torch_occ.theory.statements import statement


@settings(max_examples=8)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 4)),
    st.integers(0, 10**6),
    st.sampled_from([1.0, 0.3, 0.05]),
)
def test_every_statement_holds(size, seed, concentration):
    mdp = batch_of_mdps(5, *size, seed, concentration)
    found = list(survey(mdp, torch.Generator().manual_seed(seed), count=6))
    check(*found)
    assert len({x.label for x in found}) >= 38


# -- statements ------------------------------------------------------------------------------------


def sides(left, right, relation="<="):
    left, right = (torch.tensor(x, dtype=torch.float64) for x in (left, right))
    return statement("x", left, right, 10, relation=relation)


def test_a_statement_holds_up_to_rounding_and_no_further():
    found = sides([1.0, 1.0 + 1e-15, 1.0 + 1e-12, float("nan")], [1.0, 1.0, 1.0, 1.0])
    assert found.holds.tolist() == [True, True, False, False]
    equal = sides([1.0, 1.0 - 1e-15, 0.9], [1.0, 1.0, 1.0], "=")
    assert equal.holds.tolist() == [True, True, False]
    torch.testing.assert_close(equal.slack, torch.tensor([0.0, 1e-15, 0.1], dtype=torch.float64))


def test_ratios_and_words():
    found = sides([0.0, 1.0], [0.0, 4.0])
    assert found.ratio.tolist() == [1.0, 0.25]
    assert repr(found) == "Statement(x: (2,), 2 of 2 hold)"
    assert repr(sides(1.0, 2.0)) == "Statement(x: 1 <= 2, 1 of 1 hold)"
    assert isinstance(found, Statement)
