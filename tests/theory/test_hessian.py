import pytest
import torch
from hypothesis import given, settings
from theory_cases import F64, bandit, cases
from torch.autograd.functional import hessian as autograd_hessian

import torch_occ as occ
from experiments.statements import draw_policy
from torch_occ import theory
from torch_occ.theory.curvatures import inflow_rest

EPS = torch.finfo(F64).eps


def by_autograd(mdp, q, alpha, function=theory.curvatures.hybrid_alternative):
    n = mdp.num_states * mdp.num_actions
    return autograd_hessian(lambda x: function(mdp, x, alpha), q).reshape(n, n)


def single(mdp, i):
    """The i-th MDP of a batch."""
    return occ.LayeredMDP([p[i] for p in mdp.transitions])


def check_hessian(mdp, q, alpha, found):
    """Entries against autograd, relative to the diagonal: sums of at most S A positive terms."""
    expected = by_autograd(mdp, q, alpha)
    root = expected.diagonal().rsqrt()
    # autograd computes q(s) - q(s,a) as a difference, with an error that the power 3/2 magnifies.
    lost = float((q.sum(-1, keepdim=True) / inflow_rest(mdp, q)).max())
    torch.testing.assert_close(
        root[:, None] * found * root,
        root[:, None] * expected * root,
        rtol=0,
        atol=64 * mdp.num_pairs * EPS * lost,
    )


@settings(max_examples=20)
@given(cases())
def test_the_hessian_is_that_of_autograd(case):
    found = theory.hessian(case.mdp, case.q, case.alpha)
    for i in range(2):
        # Elsewhere, autograd's own cancellation would make the test empty.
        if float(inflow_rest(case.mdp, case.q)[i].min()) > 1e-6:
            check_hessian(single(case.mdp, i), case.q[i], case.alpha, found[i])


def test_both_definitions_agree_on_omega_and_on_its_tangent_space_and_nowhere_else():
    mdp, alpha = occ.LayeredMDP.random(3, 3, 3, seed=1), 0.7
    generator = torch.Generator().manual_seed(0)
    q = occ.occupancy(mdp, draw_policy(mdp, generator))
    other = occ.interior_point(mdp)
    torch.testing.assert_close(
        theory.hybrid(mdp, q, alpha),
        theory.curvatures.hybrid_alternative(mdp, q, alpha),
        rtol=1e-13,
        atol=0,
    )
    assert float(theory.hybrid(mdp, q, alpha)) == pytest.approx(
        float(occ.HybridTsallis(alpha)(q, 1.0, mdp).detach()), rel=1e-14
    )
    inflow, outflow = by_autograd(mdp, other, alpha), by_autograd(mdp, other, alpha, theory.hybrid)
    E = torch.eye(mdp.num_states, dtype=F64).unsqueeze(1) - mdp.joint_transitions
    basis = torch.linalg.svd(E.flatten(0, 1).mT).Vh[mdp.num_states :]  # the whole tangent space
    first, second = (basis @ x @ basis.mT for x in (inflow, outflow))
    atol = 1e-12 * float(inflow.abs().max())
    torch.testing.assert_close(first, second, rtol=1e-12, atol=atol)
    off = torch.zeros(len(inflow), dtype=F64)
    off[-1] = 1.0
    assert abs(float(off @ inflow @ off) / float(off @ outflow @ off) - 1) > 0.1
    assert float((inflow - outflow).abs().max()) > 0.1
    # The inflow couples layers, the sum over actions does not.
    assert float(inflow[:3, 3:12].abs().max()) > 0
    assert not bool(outflow[:3, 3:12].any())


def test_a_state_of_one_action_has_no_hessian_but_masks_are_fine():
    actions = torch.tensor([[True, True, False], [True, True, True]])
    mdp = occ.LayeredMDP(
        [torch.ones(1, 3, 1, dtype=F64), torch.ones(1, 3, 1, dtype=F64)], actions=actions
    )
    q = occ.interior_point(mdp)
    H = theory.hessian(mdp, q, 0.5)
    assert not bool(H[2].any() | H[:, 2].any())
    exists = actions.flatten()

    def function(x):
        full = torch.zeros(6, dtype=F64).masked_scatter(exists, x).view(2, 3)
        return theory.curvatures.hybrid_alternative(mdp, full, 0.5)

    torch.testing.assert_close(
        H[exists][:, exists], autograd_hessian(function, q[actions]), rtol=1e-12, atol=1e-12
    )


# -- divergences -----------------------------------------------------------------------------------


@settings(max_examples=20)
@given(cases())
def test_the_divergence_is_the_difference_of_values_and_slopes(case):
    parameters, t = theory.Parameters(case.alpha, 3.0, 0.5), torch.tensor(50.0, dtype=F64)
    mdp = single(case.mdp, 0)
    p, q = case.q[0], occ.occupancy(mdp, draw_policy(mdp, case.generator))
    psi = parameters.regularizer(mdp)
    slope = torch.func.grad(lambda x: psi(x, t, mdp))(p).detach()
    parts = [psi(q, t, mdp).detach(), -psi(p, t, mdp).detach(), -(slope * (q - p)).sum()]
    found = theory.bregman(mdp, q, p, parameters, t)
    size = float((slope * (q - p)).abs().sum() + parts[0].abs() + parts[1].abs())
    assert float(found) == pytest.approx(float(sum(parts)), abs=64 * mdp.num_pairs * EPS * size)
    assert float(found) >= 0
    assert float(theory.bregman(mdp, p, p, parameters, t)) == 0


def test_a_small_divergence_keeps_its_digits():
    """Close points: half the squared norm, where a difference of values would be all rounding."""
    mdp, parameters = bandit(3), theory.Parameters(0.6, 64.0, 1.0)
    t = torch.tensor(100.0, dtype=F64)
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=F64)
    step = torch.tensor([[1.0, -2.0, 1.0]], dtype=F64) * 1e-7
    H = theory.hessian_of_step(mdp, p, parameters, t)
    expected = float(step.flatten() @ H @ step.flatten()) / 2
    found = theory.bregman(mdp, p + step, p, parameters, t)
    assert float(found) == pytest.approx(expected, rel=1e-5)
