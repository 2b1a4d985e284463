import numpy as np
import pytest
import torch
from zoo import PROBLEMS, random_point

import torch_occ as occ

F64 = torch.float64


def point(problem):
    mdp = PROBLEMS[problem]().mdp
    return mdp, random_point(mdp, seed=5)


def over_pairs(term):
    """Sum term(q(s, a), q(s), number of other actions of s, of other pairs in the layer)."""

    def value(mdp, q):
        q, layer, total = q.numpy(), mdp.layer.numpy(), 0.0
        for s, a in mdp.actions.nonzero().tolist():
            in_layer = int(mdp.actions[layer == layer[s]].sum())
            total += term(q[s, a], q[s].sum(), int(mdp.actions[s].sum()) - 1, in_layer - 1)
        return total

    return value


def root_if(exists, x):
    """An argument that is identically zero takes no part."""
    return np.sqrt(x) if exists else 0.0


FORMULAS = {
    "half Tsallis": (occ.Tsallis(), over_pairs(lambda x, u, others, pairs: -np.sqrt(x))),
    "Tsallis": (occ.Tsallis(0.3), over_pairs(lambda x, u, others, pairs: -(x**0.3))),
    "HybridTsallis": (
        occ.HybridTsallis(0.6),
        over_pairs(lambda x, u, others, pairs: -np.sqrt(x) - 0.6 * root_if(others, u - x)),
    ),
    "alpha = 0": (occ.HybridTsallis(0.0), over_pairs(lambda x, u, others, pairs: -np.sqrt(x))),
    "HybridComplement": (
        occ.HybridComplement(),
        over_pairs(lambda x, u, others, pairs: -np.sqrt(x) - root_if(pairs, 1 - x)),
    ),
    "Shannon": (occ.Shannon(), over_pairs(lambda x, u, others, pairs: x * np.log(x))),
    "ConditionalEntropy": (
        occ.ConditionalEntropy(),
        over_pairs(lambda x, u, others, pairs: x * np.log(x / u)),
    ),
    "LogBarrier": (occ.LogBarrier(2.5), over_pairs(lambda x, u, others, pairs: -2.5 * np.log(x))),
    "beta = 0": (occ.LogBarrier(0.0), over_pairs(lambda x, u, others, pairs: 0.0)),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("psi", "formula"), FORMULAS.values(), ids=FORMULAS)
def test_values_are_those_of_the_formula(psi, formula, problem):
    mdp, q = point(problem)
    expected = formula(mdp, q)
    assert float(psi(q, 1.0, mdp).detach()) == pytest.approx(expected, rel=1e-13, abs=1e-13)
    batch = psi(q.expand(2, 3, *q.shape), 1.0, mdp)
    assert batch.shape == (2, 3)
    expected = torch.full((2, 3), expected, dtype=F64)
    torch.testing.assert_close(batch, expected, rtol=1e-13, atol=1e-13)
