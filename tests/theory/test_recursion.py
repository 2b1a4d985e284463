import pytest
import torch
from hypothesis import given, settings
from theory_cases import F64, cases, check, masked, tightest

import torch_occ as occ
from torch_occ import theory
from torch_occ.theory.curvatures import P
from torch_occ.theory.surveys import draw_policy

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


@settings(max_examples=25)
@given(cases())
def test_the_hessian_is_the_last_m(case):
    """lem:def_M."""
    curve = theory.curvatures.curvature(case.mdp, case.q, case.alpha)
    H, M = (
        theory.hessian(case.mdp, case.q, case.alpha),
        theory.curvatures.M(case.mdp, curve, case.mdp.horizon - 1),
    )
    assert bool(
        (
            (H - M).abs() <= 64 * case.mdp.num_pairs * EPS * H.abs().amax((-2, -1), keepdim=True)
        ).all()
    )


@settings(max_examples=25)
@given(cases())
def test_woodbury_is_the_inverse(case):
    """lem:M_inverse, in every layer; and N_k is its last block, eq:def_N."""
    curve = theory.curvatures.curvature(case.mdp, case.q, case.alpha)
    for k in range(case.mdp.horizon):
        d = torch.cat(case.mdp.split(curve.d_inverse, -2)[: k + 1], -2)
        found = theory.curvatures.M_inverse(case.mdp, curve, k)
        check_inverse(found, theory.curvatures.M(case.mdp, curve, k), d)
        n = case.mdp.layer_sizes[k] * case.mdp.num_actions
        own = d[..., -case.mdp.layer_sizes[k] :, :]
        torch.testing.assert_close(
            scaled(found[..., -n:, -n:], own),
            scaled(theory.curvatures.N(case.mdp, curve, k), own),
            rtol=0,
            atol=1e-12,
        )


def check_N(mdp, curve, k, found):
    """N_k is the last block of the dense inverse of M_k."""
    n = mdp.layer_sizes[k] * mdp.num_actions
    own = curve.d_inverse[..., mdp.layer_slices[k], :]
    expected = torch.linalg.inv(theory.curvatures.M(mdp, curve, k))[..., -n:, -n:]
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
    before = theory.curvatures.N(mdp, curve, k - 1)
    W = torch.linalg.inv(C + D + P(mdp, k).mT @ before @ P(mdp, k))
    torch.testing.assert_close(
        theory.curvatures.W(mdp, curve, k), W, rtol=1e-10, atol=1e-10 * float(W.abs().max())
    )
    check_N(mdp, curve, k, D - D @ W @ D)
    check_N(mdp, curve, k, theory.curvatures.N(mdp, curve, k))
    check_N(
        mdp,
        curve,
        k,
        torch.linalg.inv(
            torch.linalg.inv(D) + torch.linalg.inv(C + P(mdp, k).mT @ before @ P(mdp, k))
        ),
    )


def test_a_broken_n_is_found():
    """The proof of lem:N_properties prints N_{k-1}^-1 for N_{k-1}; and a wrong factor."""
    mdp, curve = moderate()
    C, D = (torch.diag(part[mdp.layer_slices[2]].flatten()) for part in curve)
    step, before = P(mdp, 2), theory.curvatures.N(mdp, curve, 1)
    printed = torch.linalg.inv(
        torch.linalg.inv(D) + torch.linalg.inv(C + step.mT @ torch.linalg.inv(before) @ step)
    )
    good = theory.curvatures.N(mdp, curve, 2)
    check_N(mdp, curve, 2, good)
    for broken in (
        printed,
        1.001 * good,
        theory.curvatures.N(mdp, curve._replace(c_inverse=2 * curve.c_inverse), 2),
    ):
        with pytest.raises(AssertionError):
            check_N(mdp, curve, 2, broken)


def test_the_factored_form_is_the_dense_one():
    mdp, curve = moderate()
    found = torch.cat([block.diagonal() for block in theory.curvatures.blocks(mdp, curve)])
    torch.testing.assert_close(found, theory.curvatures.N_diagonal(mdp, curve), rtol=0, atol=0)
    for k, block in enumerate(theory.curvatures.blocks(mdp, curve)):
        assert block.core.shape == (mdp.layer_sizes[k], mdp.layer_sizes[k])
        torch.testing.assert_close(
            block.dense().diagonal(), found[mdp.layer_slices[k]].flatten(), rtol=1e-14, atol=0
        )
    with pytest.raises(ValueError, match="k: expected a layer from 0 to 3, got 4"):
        theory.curvatures.N(mdp, curve, 4)


@settings(max_examples=20)
@given(cases())
def test_the_inverse_of_the_steps_hessian_is_the_same_recursion(case):
    parameters = theory.Parameters(case.alpha, 64.0 * case.mdp.horizon, 0.7)
    t = torch.tensor([3.0, 5000.0], dtype=F64)
    curve = theory.curvatures.curvature(
        case.mdp, case.q, case.alpha, eta=parameters.eta(t), beta=parameters.beta
    )
    check_inverse(
        theory.inverse_hessian(case.mdp, curve),
        theory.hessian_of_step(case.mdp, case.q, parameters, t),
        curve.d_inverse,
    )


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
    inflow = mdp.joint_transitions.flatten(0, 1).mT.repeat_interleave(
        3, 0
    )  # (SA, SA): row (s,a) is the inflow of s
    difference = inflow - torch.eye(n, dtype=F64)
    H = torch.diag(d.flatten()) + difference.mT @ torch.diag(c.flatten()) @ difference
    row = difference[9]  # w(3, 0) = inflow(3)
    kept = (
        torch.linalg.svd(row[exists].unsqueeze(0)).Vh[1:].mT
    )  # directions that satisfy the constraint
    expected = kept @ torch.linalg.inv(kept.mT @ H[exists][:, exists] @ kept) @ kept.mT
    torch.testing.assert_close(found[exists][:, exists], expected, rtol=1e-9, atol=1e-12)


def test_what_the_recursion_refuses():
    mdp = masked()
    with pytest.raises(ValueError, match="alpha: the recursion needs a positive number, got 0"):
        theory.curvatures.curvature(mdp, occ.interior_point(mdp), 0.0)
    with pytest.raises(ValueError, match="M_k is finite only if"):
        theory.curvatures.M(mdp, theory.curvatures.curvature(mdp, occ.interior_point(mdp), 0.5), 1)


# -- properties ------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(cases())
def test_n_bounds_the_inverse_hessian_and_is_bounded(case):
    """lem:H_and_N, an equality in the last layer, and lem:N_properties, in every layer."""
    curve = theory.curvatures.curvature(case.mdp, case.q, case.alpha)
    for k in range(case.mdp.horizon):
        w = torch.randn(
            2, case.mdp.layer_sizes[k], case.mdp.num_actions, dtype=F64, generator=case.generator
        )
        found = theory.H_and_N(case.mdp, curve, k, w / case.q[:, case.mdp.layer_slices[k]])
        check(found, *theory.N_properties(case.mdp, curve, k))
    torch.testing.assert_close(found.left, found.right, rtol=1e-9, atol=0)


def test_the_properties_with_masks_and_a_state_of_one_action():
    mdp = masked()
    curve = theory.curvatures.curvature(
        mdp, occ.occupancy(mdp, draw_policy(mdp, torch.Generator().manual_seed(4))), 0.6
    )
    for k in range(3):
        w = torch.randn(
            mdp.layer_sizes[k], 3, dtype=F64, generator=torch.Generator().manual_seed(k)
        )
        check(theory.H_and_N(mdp, curve, k, w), *theory.N_properties(mdp, curve, k))


def test_how_tight_the_properties_are():
    mdp = occ.LayeredMDP.random(3, 3, 3, seed=1)
    q = occ.interior_point(mdp)
    earlier = theory.H_and_N(
        mdp, theory.curvatures.curvature(mdp, q, 1.0), 1, torch.ones(3, 3, dtype=F64)
    )
    assert (
        0.3 < tightest(earlier) < 0.32
    )  # in earlier layers there is a gap: what the later ones add to H
    # N_k = D_k^-1 as alpha -> 0, and N_k = C_k^-1 + P_k' N_{k-1} P_k as one action takes all
    # (both as D^1/2 (.) D^1/2).
    _, by_D, _ = theory.N_properties(mdp, theory.curvatures.curvature(mdp, q, 1e-8), 2)
    assert -1e-6 < float(by_D.left) <= 1e-15
    policy = torch.full((7, 3), 1e-6, dtype=F64)
    policy[:, 0] = 1 - 2e-6
    _, _, by_C = theory.N_properties(
        mdp, theory.curvatures.curvature(mdp, occ.occupancy(mdp, policy), 100.0), 1
    )
    assert -1e-9 < float(by_C.left) <= 1e-15
