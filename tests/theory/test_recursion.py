import pytest
import torch
from hypothesis import given, settings
from theory_cases import F64, cases, check, masked

import torch_occ as occ
from experiments.statements import draw_policy, recursive_hessian
from torch_occ import theory
from torch_occ.theory.curvatures import P

EPS = torch.finfo(F64).eps


def scaled(matrix, d):
    """D^1/2 X D^1/2 with d = 1 / D: where inverses are at most one."""
    root = d.flatten(-2).rsqrt()
    return root.unsqueeze(-1) * matrix * root.unsqueeze(-2)


def check_inverse(found, matrix, d):
    """Both in the scale of D, where the dense inverse has the error of its condition number."""
    n = matrix.shape[-1]
    root = d.flatten(-2).sqrt()
    dense = root.unsqueeze(-1) * matrix * root.unsqueeze(-2)  # D^-1/2 M D^-1/2 >= I
    expected = torch.linalg.inv(dense)
    error = (scaled(found, d) - expected).abs().amax((-2, -1))
    assert bool((error <= 16 * n * EPS * torch.linalg.matrix_norm(dense)).all()), error


def check_N(mdp, curve, k, found):
    """N_k is the last block of the dense inverse of M_k."""
    n = mdp.layer_sizes[k] * mdp.num_actions
    own = curve.d_inverse[..., mdp.layer_slices[k], :]
    expected = torch.linalg.inv(recursive_hessian(mdp, curve, k))[..., -n:, -n:]
    torch.testing.assert_close(scaled(found, own), scaled(expected, own), rtol=0, atol=1e-10)


def moderate():
    mdp = occ.LayeredMDP.random(4, 3, 3, seed=2)
    return mdp, theory.curvatures.curvature(mdp, occ.interior_point(mdp), 0.8)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_n_by_its_definition(k):
    """eq:def_N and W_k written out with dense inverses."""
    mdp, curve = moderate()
    C, D = (torch.diag(part[mdp.layer_slices[k]].flatten()) for part in curve)
    if k == 0:
        check_N(mdp, curve, 0, C @ torch.linalg.inv(C + D) @ D)
        return
    layers = theory.curvatures.all_N(mdp, curve)
    before = layers[k - 1]
    W = torch.linalg.inv(C + D + P(mdp, k).mT @ before @ P(mdp, k))
    found, atol = theory.curvatures.W(mdp, curve, k, before), 1e-10 * float(W.abs().max())
    torch.testing.assert_close(found, W, rtol=1e-10, atol=atol)
    check_N(mdp, curve, k, D - D @ W @ D)
    check_N(mdp, curve, k, layers[k])
    core = torch.linalg.inv(C + P(mdp, k).mT @ before @ P(mdp, k))
    check_N(mdp, curve, k, torch.linalg.inv(torch.linalg.inv(D) + core))


def test_a_broken_n_is_found():
    """The proof of lem:N_properties prints N_{k-1}^-1 for N_{k-1}; and a wrong factor."""
    mdp, curve = moderate()
    C, D = (torch.diag(part[mdp.layer_slices[2]].flatten()) for part in curve)
    step, (_, before, good, _) = P(mdp, 2), theory.curvatures.all_N(mdp, curve)
    printed = torch.linalg.inv(
        torch.linalg.inv(D) + torch.linalg.inv(C + step.mT @ torch.linalg.inv(before) @ step)
    )
    check_N(mdp, curve, 2, good)
    for broken in (
        printed,
        1.001 * good,
        theory.curvatures.all_N(mdp, curve._replace(c_inverse=2 * curve.c_inverse))[2],
    ):
        with pytest.raises(AssertionError):
            check_N(mdp, curve, 2, broken)


@settings(max_examples=20)
@given(cases())
def test_the_inverse_of_the_steps_hessian_is_the_same_recursion(case):
    parameters = theory.Parameters(case.alpha, 64.0 * case.mdp.horizon, 0.7)
    t = torch.tensor([3.0, 5000.0], dtype=F64)
    curve = theory.curvatures.curvature(
        case.mdp, case.q, case.alpha, eta=parameters.eta(t), beta=parameters.beta
    )
    H = theory.hessian_of_step(case.mdp, case.q, parameters, t)
    check_inverse(theory.inverse_hessian(case.mdp, curve), H, curve.d_inverse)


def test_a_state_of_one_action_is_the_limit_of_a_stiff_one():
    """c = infinity means w(s,a) = inflow of w. Against a dense inverse with that constraint."""
    mdp, alpha = masked(), 0.6
    q = occ.occupancy(mdp, draw_policy(mdp, torch.Generator().manual_seed(4)))
    curve = theory.curvatures.curvature(mdp, q, alpha)
    exists = mdp.actions.flatten()
    found = theory.inverse_hessian(mdp, curve)
    assert not bool(found[~exists].any() | found[:, ~exists].any())
    # H from its quadratic form, without the term of state 3, which has one action; then the pair
    # of that state as a constraint.
    lonely = mdp.actions.sum(-1) == 1
    rest = torch.where(lonely.unsqueeze(-1), 1.0, q @ mdp.other_actions)
    c = torch.where(mdp.actions & ~lonely.unsqueeze(-1), alpha / (4 * rest**1.5), 0.0)
    d = torch.where(mdp.actions, 1 / (4 * q**1.5), 0.0)
    n = exists.numel()
    # (SA, SA): row (s,a) is the inflow of s.
    inflow = mdp.joint_transitions.flatten(0, 1).mT.repeat_interleave(3, 0)
    difference = inflow - torch.eye(n, dtype=F64)
    H = torch.diag(d.flatten()) + difference.mT @ torch.diag(c.flatten()) @ difference
    row = difference[9]  # w(3, 0) = inflow(3)
    kept = torch.linalg.svd(row[exists].unsqueeze(0)).Vh[1:].mT  # that satisfy the constraint
    expected = kept @ torch.linalg.inv(kept.mT @ H[exists][:, exists] @ kept) @ kept.mT
    torch.testing.assert_close(found[exists][:, exists], expected, rtol=1e-9, atol=1e-12)


# -- properties ------------------------------------------------------------------------------------


def test_the_properties_with_masks_and_a_state_of_one_action():
    mdp = masked()
    generator = torch.Generator().manual_seed(4)
    q = occ.occupancy(mdp, draw_policy(mdp, generator))
    curve = theory.curvatures.curvature(mdp, q, 0.6)
    for k, size in enumerate(mdp.layer_sizes):
        w = torch.randn(size, 3, dtype=F64, generator=generator)
        found = theory.H_and_N(mdp, curve, k, w)
        check(found, *theory.N_properties(mdp, curve, k))
    torch.testing.assert_close(found.left, found.right, rtol=1e-9, atol=0)  # in the last layer
