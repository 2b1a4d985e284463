"""Closed forms of the Hessian and of its inverse against their definitions.

A statement compares the largest relative difference with zero. Matrices are scaled by D first:
D^-1/2 H D^-1/2 >= I and D^1/2 H^-1 D^1/2 <= I, so that every pair has the same weight. Every state
needs all of at least two actions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_of, policy_of, reachability
from torch_occ.theory.curvatures import M, M_inverse, N, W, curvature, hessian, quadratic_form
from torch_occ.theory.statements import Statement, equality


def quadratic_form_of_hessian(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Statement:
    """`eq:quadratic_form`: the sum of squares equals w' H w; w `(*batch, S, A)`."""
    H, x = hessian(mdp, q, alpha), w.flatten(-2).unsqueeze(-1)
    added = (x.abs().mT @ H.abs() @ x.abs())[..., 0, 0]  # sum of absolute values
    dense = (x.mT @ H @ x)[..., 0, 0]
    form = quadratic_form(mdp, q, w, alpha)
    return equality("eq:quadratic_form", dense, form, mdp.num_pairs**2, added)


def hessian_by_layers(mdp: LayeredMDP, q: Tensor, alpha: float) -> Statement:
    """`lem:def_M`: H = M_{L-1}."""
    curve = curvature(mdp, q, alpha)
    root = curve.d_inverse.flatten(-2).sqrt()
    expected = _scale(hessian(mdp, q, alpha), root)
    found = _scale(M(mdp, curve, mdp.horizon - 1), root)
    error = _largest_entry(found - expected) / _largest_entry(expected)
    return equality("lem:def_M", error, 0.0, mdp.num_pairs, 1.0)


def inverse_by_layers(mdp: LayeredMDP, q: Tensor, alpha: float) -> tuple[Statement, Statement]:
    """`lem:M_inverse` and `eq:def_N`, each in its worst layer k.

    The first statement: M_k times its Woodbury inverse is the identity, relative to |M_k|. The
    second one: N_k is D_k^-1 - D_k^-1 W_k D_k^-1. For k = 0, W_0 = (C_0^-1 + D_0^-1)^-1 makes that
    M_0^-1.
    """
    curve = curvature(mdp, q, alpha)
    products, blocks = [], []
    for k, here in enumerate(mdp.layer_slices):
        d_inverse = curve.d_inverse[..., : here.stop, :].flatten(-2)
        matrix = _scale(M(mdp, curve, k), d_inverse.sqrt())
        inverse = _scale(M_inverse(mdp, curve, k), d_inverse.rsqrt())
        error = matrix @ inverse - torch.eye(matrix.shape[-1], dtype=q.dtype, device=q.device)
        products.append(_largest_entry(error) / torch.linalg.matrix_norm(matrix))
        own, c_inverse = (part[..., here, :].flatten(-2) for part in reversed(curve))
        weight = W(mdp, curve, k) if k else torch.diag_embed(1 / (own + c_inverse))
        identity = torch.eye(own.shape[-1], dtype=q.dtype, device=q.device)
        defined = identity - _scale(weight, own.sqrt())
        blocks.append(_largest_entry(_scale(N(mdp, curve, k), own.rsqrt()) - defined))
    product, block = (torch.stack(x).amax(0) for x in (products, blocks))
    return (
        equality("lem:M_inverse", product, 0.0, mdp.num_pairs, 1.0),
        equality("eq:def_N", block, 0.0, mdp.num_pairs, 1.0),
    )


def both_definitions(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Statement:
    """`eq:hybrid` and `eq:hybrid_alternative` have the same second derivative along a tangent w.

    w `(*batch, S, A)` is tangent to Omega. With q(s) = sum_a q(s,a), w' H w is

        sum_{s,a} w^2 / (4 q^(3/2)) + alpha (w(s) - w(s,a))^2 / (4 (q(s) - q(s,a))^(3/2)).
    """
    rest, others = q @ mdp.other_actions, w @ mdp.other_actions
    own = w.square() / (4 * q**1.5) + alpha * others.square() / (4 * rest**1.5)
    # Inflow and outflow of w differ by rounding, which the curvature of the rest magnifies.
    moved = (flow_of(mdp).inflow(w.abs()) + w.abs().sum(-1)).unsqueeze(-1)
    scale = (own + alpha * others.abs() * moved / (2 * rest**1.5)).sum((-2, -1))
    form = quadratic_form(mdp, q, w, alpha)
    return equality("eq:hybrid_alternative", form, own.sum((-2, -1)), mdp.num_pairs, scale)


def tangent(mdp: LayeredMDP, q: Tensor, w: Tensor) -> Tensor:
    """A direction inside Omega made from any w `(*batch, S, A)`; it has the same shape.

    In every state the most likely action of q loses what w gives to the other actions. The change
    of the inflow of later states is passed on with the policy of q.
    """
    policy, likeliest = policy_of(mdp, q), q.argmax(-1, keepdim=True)
    others = torch.scatter(w, -1, likeliest, 0.0)
    moved = others.scatter(-1, likeliest, -others.sum(-1, keepdim=True))
    arriving = torch.einsum("...sa,...sat->...t", moved, mdp.joint_transitions)
    flowing = torch.einsum("...s,...st->...t", arriving, reachability(mdp, policy))
    return moved + policy * flowing.unsqueeze(-1)


def _scale(matrix: Tensor, root: Tensor) -> Tensor:
    return root.unsqueeze(-1) * matrix * root.unsqueeze(-2)


def _largest_entry(matrix: Tensor) -> Tensor:
    return matrix.abs().amax((-2, -1))
