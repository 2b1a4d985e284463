"""Shaping: gaps to the last digit, and a potential that accounts for the rest."""

from fractions import Fraction

import pytest
import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import flow_adjoint
from torch_occ.step.newton import conserves_mass, potential, shape_finely, shape_loss


def exact_gaps(mdp: occ.LayeredMDP, loss: torch.Tensor) -> torch.Tensor:
    """By rational numbers, with rows of P read as distributions."""
    gaps, value = torch.zeros_like(loss), {}
    for k in reversed(range(mdp.horizon)):
        here, following = (
            mdp.layer_slices[k],
            [*mdp.layer_slices, slice(mdp.num_states, mdp.num_states)][k + 1],
        )
        for s in range(here.start, here.stop):
            Q = {}
            for a in mdp.actions[s].nonzero().flatten().tolist():
                row = [Fraction(p) for p in mdp.transitions[k][s - here.start, a].tolist()]
                ahead = [value[r] for r in range(following.start, following.stop)]
                Q[a] = Fraction(loss[s, a].item())
                if ahead:
                    Q[a] += sum(p * v for p, v in zip(row, ahead, strict=True)) / sum(row)
            value[s] = min(Q.values())
            for a, q in Q.items():
                gaps[s, a] = float(q - value[s])
    return gaps


@pytest.mark.parametrize("offset", [0.0, 1e12, -1e12])
@pytest.mark.parametrize("problem", ["masked", "layers", "corridor", "nearly_deterministic"])
def test_gaps_are_exact(problem, offset):
    mdp = PROBLEMS[problem]().mdp
    loss = offset + random_loss(mdp) * 10.0 ** torch.arange(mdp.num_states).remainder(9).unsqueeze(
        -1
    )
    expected = exact_gaps(mdp, loss)
    found = shape_finely(mdp, loss)
    assert conserves_mass(mdp)
    assert (found.gaps - expected).abs().max() <= 1e-15 * expected.max()
    assert ((found.gaps - expected).abs() <= 1e-15 * expected + found.rounding).all()
    if offset == 0:
        torch.testing.assert_close(
            shape_loss(mdp, loss).gaps, expected, rtol=0, atol=1e-14 * float(loss.max())
        )


@pytest.mark.parametrize("scale", [1.0, 0.9])
@pytest.mark.parametrize("shape", [shape_loss, shape_finely])
def test_the_potential_accounts_for_the_rest(shape, scale):
    """Where rows of P do not sum to one, too."""
    mdp = PROBLEMS["masked"]().mdp
    mdp = mdp.with_transitions([scale * p for p in mdp.transitions])
    assert conserves_mass(mdp) == (scale == 1.0)
    loss = 1e3 + random_loss(mdp, batch=(2,))
    gaps, value, _, constants = shape(mdp, loss)
    rebuilt = gaps + flow_adjoint(mdp, value + potential(mdp, constants))
    assert ((rebuilt - loss).abs() <= 1e-11)[..., mdp.actions].all()
    assert (gaps >= 0).all()
