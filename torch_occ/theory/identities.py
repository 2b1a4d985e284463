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
from torch_occ.theory.statements import Statement, statement


def quadratic_form_of_hessian(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Statement:
    """`eq:quadratic_form`: the sum of squares equals w' H w; w `(*batch, S, A)`."""
    H, x = hessian(mdp, q, alpha), w.flatten(-2).unsqueeze(-1)
    added = (x.abs().mT @ H.abs() @ x.abs())[..., 0, 0]  # sum of absolute values
    dense = (x.mT @ H @ x)[..., 0, 0]
    return statement(
        "eq:quadratic_form",
        dense,
        quadratic_form(mdp, q, w, alpha),
        mdp.num_pairs**2,
        scale=added,
        relation="=",
    )


def hessian_by_layers(mdp: LayeredMDP, q: Tensor, alpha: float) -> Statement:
    """`lem:def_M`: H = M_{L-1}."""
    curve = curvature(mdp, q, alpha)
    root = curve.d_inverse.flatten(-2).sqrt()
    found, expected = (
        _scale(x, root) for x in (M(mdp, curve, mdp.horizon - 1), hessian(mdp, q, alpha))
    )
    return statement(
        "lem:def_M",
        _largest_entry(found - expected) / _largest_entry(expected),
        0.0,
        mdp.num_pairs,
        scale=1.0,
        relation="=",
    )


def inverse_by_layers(mdp: LayeredMDP, q: Tensor, alpha: float) -> tuple[Statement, Statement]:
    """`lem:M_inverse` and `eq:def_N`, each in its worst layer k.

    The first statement: M_k times its Woodbury inverse is the identity, relative to |M_k|. The
    second one: N_k is D_k^-1 - D_k^-1 W_k D_k^-1. For k = 0, W_0 = (C_0^-1 + D_0^-1)^-1 makes that
    M_0^-1.
    """
    curve = curvature(mdp, q, alpha)
    products, blocks = [], []
    for k in range(mdp.horizon):
        d_inverse = curve.d_inverse[..., : mdp.layer_slices[k].stop, :].flatten(-2)
        inverse, matrix = M_inverse(mdp, curve, k), M(mdp, curve, k)
        scaled, scaled_inverse = (
            _scale(matrix, d_inverse.sqrt()),
            _scale(inverse, d_inverse.rsqrt()),
        )
        difference = scaled @ scaled_inverse - torch.eye(
            matrix.shape[-1], dtype=q.dtype, device=q.device
        )
        products.append(_largest_entry(difference) / torch.linalg.matrix_norm(scaled))
        own = d_inverse[..., -mdp.layer_sizes[k] * mdp.num_actions :]
        weight = (
            W(mdp, curve, k)
            if k
            else torch.diag_embed(
                1 / (own + curve.c_inverse[..., mdp.layer_slices[k], :].flatten(-2))
            )
        )
        defined = torch.eye(own.shape[-1], dtype=q.dtype, device=q.device) - _scale(
            weight, own.sqrt()
        )
        blocks.append(_largest_entry(_scale(N(mdp, curve, k), own.rsqrt()) - defined))
    product, block = (torch.stack(x).amax(0) for x in (products, blocks))
    terms = mdp.num_pairs
    return (
        statement("lem:M_inverse", product, 0.0, terms, scale=1.0, relation="="),
        statement("eq:def_N", block, 0.0, terms, scale=1.0, relation="="),
    )


def both_definitions(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Statement:
    """`eq:hybrid` and `eq:hybrid_alternative` have the same second derivative along a tangent w.

    w `(*batch, S, A)` is tangent to Omega. With q(s) = sum_a q(s,a), w' H w is

        sum_{s,a} w^2 / (4 q^(3/2)) + alpha (w(s) - w(s,a))^2 / (4 (q(s) - q(s,a))^(3/2)).
    """
    rest = q @ mdp.other_actions
    others = w @ mdp.other_actions
    own = w.square() / (4 * q**1.5) + alpha * others.square() / (4 * rest**1.5)
    # Inflow and outflow of w differ by rounding, which the curvature of the rest magnifies.
    moved = (flow_of(mdp).inflow(w.abs()) + w.abs().sum(-1)).unsqueeze(-1)
    scale = (own + alpha * others.abs() * moved / (2 * rest**1.5)).sum((-2, -1))
    return statement(
        "eq:hybrid_alternative",
        quadratic_form(mdp, q, w, alpha),
        own.sum((-2, -1)),
        mdp.num_pairs,
        scale=scale,
        relation="=",
    )


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
