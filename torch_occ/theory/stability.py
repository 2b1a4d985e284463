"""The stability term: E |loss_estimate|^2 in the norm of the inverse Hessian, and its bounds (`app:stability_proof`).

H stands for the Hessian of phi_H at q, given by its `curvature`; a statement about the Loewner order, X <= Y, is evaluated at its worst
direction, as the largest eigenvalue of X - Y against zero, in a scale in which the diagonal of one of them is 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import policy_of
from torch_occ.regularizers.arguments import keep
from torch_occ.theory.penalty import outside, reach
from torch_occ.theory.recursion import Curvature, N, N_diagonal, P, curvature, inverse_hessian
from torch_occ.theory.statements import Statement, statement

# -- N_k ------------------------------------------------------------------------------------------------------------------


def H_and_N(mdp: LayeredMDP, curve: Curvature, k: int, w: Tensor) -> Statement:
    """`lem:H_and_N`: (0, w_k, 0)' H^-1 (0, w_k, 0) <= w_k' N_k w_k for w `(*batch, S_k, A)`; equal in the last layer."""
    first = sum(mdp.layer_sizes[:k]) * mdp.num_actions
    here = slice(first, first + mdp.layer_sizes[k] * mdp.num_actions)
    block, w = inverse_hessian(mdp, curve)[..., here, here], w.flatten(-2).unsqueeze(-1)
    left, right = ((w.mT @ x @ w)[..., 0, 0] for x in (block, N(mdp, curve, k)))
    scale = (w.square().squeeze(-1) * curve.d_inverse[..., mdp.layer_slices[k], :].flatten(-2)).sum(-1)
    return statement("lem:H_and_N", left, right, mdp.num_pairs, scale=w.shape[-2] * scale)


def N_properties(mdp: LayeredMDP, curve: Curvature, k: int) -> tuple[Statement, Statement, Statement]:
    """`lem:N_properties`: N_k is positive definite, N_k <= D_k^-1, and N_k <= C_k^-1 + P_k' N_{k-1} P_k (for k = 0, N_0 <= C_0^-1).

    Largest eigenvalues of -N_k, N_k - D_k^-1 and N_k - (...), against 0, over the pairs that exist: the first two in the scale of D_k,
    where D_k^-1 is the identity, the last in that of its right-hand side, whose diagonal becomes 1. If a state has one action, N_k is
    only positive semi-definite.
    """
    exists = mdp.actions[mdp.layer_slices[k]].flatten()
    c_inverse, d_inverse = (part[..., mdp.layer_slices[k], :].flatten(-2)[..., exists] for part in curve)
    block = N(mdp, curve, k)[..., exists, :][..., exists]
    other = torch.diag_embed(c_inverse)
    if k:
        step = P(mdp, k)[..., exists]
        other = other + step.mT @ N(mdp, curve, k - 1) @ step
    diagonal = torch.diag_embed(d_inverse)
    found = [
        statement(f"lem:N_properties, {name}", _largest_eigenvalue(left - right, scale), 0.0, block.shape[-1], scale=block.shape[-1])
        for name, left, right, scale in (
            ("positive", torch.zeros_like(block), block, diagonal),
            ("D", block, diagonal, diagonal),
            ("C", block, other, other),
        )
    ]
    return found[0], found[1], found[2]


def _largest_eigenvalue(matrix: Tensor, scale: Tensor) -> Tensor:
    """Of the matrix with rows and columns divided by the roots of the diagonal of `scale`."""
    diagonal = scale.diagonal(dim1=-2, dim2=-1)
    root = torch.where(diagonal > 0, diagonal, torch.inf).rsqrt()
    return torch.linalg.eigvalsh(root.unsqueeze(-1) * matrix * root.unsqueeze(-2))[..., -1]


def quadratic_form_diagonal(matrix: Tensor, w: Tensor) -> Statement:
    """`lem:quadratic_form_diagonal`: w' M w <= (sum_j w(j)) sum_i M(i,i) w(i) for M >= 0 `(*batch, d, d)` and w >= 0 `(*batch, d)`."""
    left = torch.einsum("...i,...ij,...j->...", w, matrix, w)
    right = w.sum(-1) * (matrix.diagonal(dim1=-2, dim2=-1) * w).sum(-1)
    return statement("lem:quadratic_form_diagonal", left, right, w.shape[-1] ** 2)


# -- the loss estimate ----------------------------------------------------------------------------------------------------


def joint_visits(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """P(both pairs are visited in an episode) / (q(s,a) q(s',a')), `(*batch, SA, SA)`.

    1 / q(s,a) on the diagonal, p^pi(s'|s,a) / q(s') if s' comes later than s, and zero for two pairs of one layer.
    """
    later = reach_over_q(mdp, q).repeat_interleave(mdp.num_actions, -1)
    single = keep("pair", mdp, 1 / keep("pair", mdp, q, 1.0), 0.0)
    return later + later.mT + torch.diag_embed(single.flatten(-2))


def reach_over_q(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """p^pi(s'|s,a) / q(s') for the policy of q, `(*batch, SA, S)`."""
    return (reach(mdp, policy_of(mdp, q)) / q.sum(-1)[..., None, None, :]).flatten(-3, -2)


def expected_norm(mdp: LayeredMDP, q: Tensor, inverse: Tensor, mean: Tensor, second_moment: Tensor) -> Tensor:
    """E |loss_estimate|^2 in the norm of `inverse` `(*batch, SA, SA)`, given q and losses with these moments; `(*batch,)`.

    The estimate is ell(s,a) 1{visited} / q(s,a), so this is sum_ij inverse_ij P(i and j visited) / (q_i q_j) E[ell_i ell_j], exactly;
    losses of different pairs are independent given their means `(*batch, S, A)`.
    """
    single = (weighed(mdp, q, inverse.diagonal(dim1=-2, dim2=-1).unflatten(-1, q.shape[-2:])) * second_moment).sum((-2, -1))
    # Of two different pairs, one comes later; what it adds depends on its action through the inverse and the mean alone.
    later = (inverse.unflatten(-1, q.shape[-2:]) * mean.unsqueeze(-3)).sum(-1) * reach_over_q(mdp, q)  # (*batch, SA, S)
    return single + 2 * (mean.flatten(-2) * later.sum(-1)).sum(-1)


def norm(inverse: Tensor, estimate: Tensor) -> Tensor:
    """|estimate|^2 in the norm of `inverse`: `(*batch, SA, SA)`, `(*batch, S, A)` -> `(*batch,)`."""
    x = estimate.flatten(-2)
    return (x * (inverse @ x.unsqueeze(-1)).squeeze(-1)).sum(-1)


# -- the two steps --------------------------------------------------------------------------------------------------------


def first_step_bound(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """L sum_k sum_{(s,a) in U_k} N_k((s,a),(s,a)) / q(s,a), the right-hand side of `lem:stability_first_step`; `(*batch,)`."""
    return mdp.horizon * weighed(mdp, q, N_diagonal(mdp, curvature(mdp, q, alpha))).sum((-2, -1))


def weighed(mdp: LayeredMDP, q: Tensor, R: Tensor) -> Tensor:
    """R(s,a) / q(s,a), zero on masked pairs."""
    return keep("pair", mdp, R / keep("pair", mdp, q, 1.0), 0.0)


def stability_first_step(mdp: LayeredMDP, q: Tensor, alpha: float, mean: Tensor, second_moment: Tensor) -> Statement:
    """`lem:stability_first_step`: E |loss_estimate|^2_{H^-1} <= L sum_k sum_{(s,a) in U_k} N_k((s,a),(s,a)) / q(s,a).

    Read: the norm is printed without its square, and so the statement would be false (for example L = 1, two actions, q = 1/2 each,
    alpha = 100, loss 1: 0.24 on the left, 0.06 on the right). Its proof, and its use, have the square.
    """
    left = expected_norm(mdp, q, inverse_hessian(mdp, curvature(mdp, q, alpha)), mean, second_moment)
    # |D^1/2 H^-1 D^1/2| <= 1 and its own rounding, entry by entry, weighed as the sum weighs it.
    size = (4 * q.sqrt() * mdp.actions).sum((-2, -1)) * mdp.num_pairs
    return statement("lem:stability_first_step", left, first_step_bound(mdp, q, alpha), mdp.num_pairs, scale=size)


def second_step_bound(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> Tensor:
    """8 e L ( sqrt(L) + 1 / (alpha L) ) sum_s sum_{a != pi(s)} sqrt(q(s,a)), the right-hand side of `lem:stability_second_step`."""
    return 8 * math.e * mdp.horizon * _factor(mdp, alpha) * outside(q.sqrt(), mapping)


def _factor(mdp: LayeredMDP, alpha: float) -> float:
    return math.sqrt(mdp.horizon) + 1 / (alpha * mdp.horizon)


def stability_second_step(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> Statement:
    """`lem:stability_second_step`: sum_k sum_{(s,a) in U_k} N_k((s,a),(s,a)) / q(s,a) <= `second_step_bound`, for any mapping."""
    left = first_step_bound(mdp, q, alpha) / mdp.horizon
    return statement("lem:stability_second_step", left, second_step_bound(mdp, q, mapping, alpha), mdp.num_pairs)


def layer_recursion(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> tuple[Statement, Statement, Statement]:
    """The steps of the proof of `lem:stability_second_step`, with R(s,a) = N_{k(s)}((s,a),(s,a)):

    `eq:R0`, in the first layer:   sum_a R / q <= 8 ( sqrt(L) + 1/(alpha L) ) sum_{a != pi(s)} sqrt(q(s,a)),          `(*batch,)`
    `eq:R`, in layer k >= 1:       sum_{U_k} R / q <= the same over S_k + (1 + 1/L) sum_{U_{k-1}} R / q,              `(*batch, L - 1)`
    `eq:R_bound`, for every pair:  R(s,a) <= 4 q(s,a)^(3/2), as the worst ratio against 1,                          `(*batch,)`

    Read: pi(s) in `eq:R0` is pi(s_0), q there is q_t, and with several start states the sum runs over them.
    """
    R = N_diagonal(mdp, curvature(mdp, q, alpha))
    sums = torch.stack([x.sum((-2, -1)) for x in mdp.split(weighed(mdp, q, R), -2)], -1)  # (*batch, L)
    left_out = torch.where(mapping > 0, 0.0, q.sqrt())
    own = 8 * _factor(mdp, alpha) * torch.stack([x.sum((-2, -1)) for x in mdp.split(left_out, -2)], -1)
    worst = (weighed(mdp, q, R) / (4 * keep("pair", mdp, q, 1.0).sqrt())).amax((-2, -1))
    return (
        statement("eq:R0", sums[..., 0], own[..., 0], mdp.num_pairs),
        statement("eq:R", sums[..., 1:], own[..., 1:] + (1 + 1 / mdp.horizon) * sums[..., :-1], mdp.num_pairs),
        statement("eq:R_bound", worst, 1.0, mdp.num_pairs),
    )


# -- the lemma ------------------------------------------------------------------------------------------------------------


def worst_case_stability(mdp: LayeredMDP) -> float:
    """4 sqrt(L |S| |A|), the first argument of the min in `lem:key_lemma_bound_stability`; |S| |A| counts the pairs that exist."""
    return 4 * math.sqrt(mdp.horizon * mdp.num_pairs)


def stability_bound(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> Tensor:
    """min( 4 sqrt(L |S| |A|), 8 e L^2 ( sqrt(L) + 1/(alpha L) ) sum_s sum_{a != pi(s)} sqrt(q(s,a)) ) of `lem:key_lemma_bound_stability`.

    Read: a != pi(a) is a != pi(s).
    """
    return (mdp.horizon * second_step_bound(mdp, q, mapping, alpha)).clamp(max=worst_case_stability(mdp))


def bound_on_stability(
    mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float, mean: Tensor, second_moment: Tensor
) -> tuple[Statement, Statement]:
    """`lem:key_lemma_bound_stability`: E |loss_estimate|^2 (norm of the inverse Hessian of phi_H) against each argument of its min."""
    first = stability_first_step(mdp, q, alpha, mean, second_moment)
    label, adaptive = "lem:key_lemma_bound_stability", mdp.horizon * second_step_bound(mdp, q, mapping, alpha)
    terms, scale = mdp.num_pairs, first.rounding / (4 * mdp.num_pairs * torch.finfo(q.dtype).eps)
    return (
        statement(f"{label}, worst case", first.left, worst_case_stability(mdp), terms, scale=scale),
        statement(f"{label}, adaptive", first.left, adaptive, terms, scale=scale),
    )
