"""The two terms of the regret bound, and their bounds: penalty and stability.

A mapping pi: S -> A is a one-hot policy `(*batch, S, A)`, such as `optimal_policy(...).policy`. All
bounds are made of `outside(x, pi)`, the sum of x over all s and all a != pi(s). |S| counts the
non-terminal states. The proofs allow this, and it makes the bounds smaller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.game.losses import second_moments
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, flow_of, flow_residual, occupancy, policy_of
from torch_occ.mdp.occupancy import reachability as state_reachability
from torch_occ.regularizers.terms import keep
from torch_occ.theory import curvatures
from torch_occ.theory.curvatures import Curvature, all_N, curvature, hybrid, inverse_hessian
from torch_occ.theory.statements import Statement, equality, statement

# -- The penalty phi_H(q_opt) - phi_H(q_t) (`app:appendix_proof_penalty`) --------------------------


def outside(x: Tensor, mapping: Tensor) -> Tensor:
    """sum_s sum_{a != pi(s)} x(s,a), `(*batch,)`; x is zero on masked pairs."""
    return torch.where(mapping > 0, 0.0, x).sum((-2, -1))


def convex_combine(mdp: LayeredMDP, u: Tensor, v: Tensor, weight: Tensor | float) -> Statement:
    """`lem:convex_combine`: weight u + (1 - weight) v is in Omega if u and v are."""
    mixed = weight * u + (1 - weight) * v
    violation = flow_residual(mdp, mixed).abs().amax(-1)
    return equality("lem:convex_combine", violation, 0.0, mdp.num_pairs, mixed.amax((-2, -1)))


def state_regularizer(mdp: LayeredMDP, policy: Tensor, alpha: float) -> Tensor:
    """h_s(pi) = sum_a ( sqrt(pi(a|s)) + alpha sqrt(1 - pi(a|s)) ), `(*batch, S)`.

    For a mapping it is 1 + alpha (A - 1).
    """
    others = keep("rest", mdp, policy @ mdp.other_actions, 0.0)
    return (keep("pair", mdp, policy, 0.0).sqrt() + alpha * others.sqrt()).sum(-1)


def penalty_decomposition(mdp: LayeredMDP, q: Tensor, optimal: Tensor, alpha: float) -> Statement:
    """`eq:penalty_decomposition`: phi_H(q_opt) - phi_H(q) equals

        sum_s sqrt(q(s)) ( h_s(pi) - h_s(pi_opt) )
          + sum_s ( sqrt(q(s)) - sqrt(q_opt(s)) ) h_s(pi_opt).

    pi is the policy of q, and q_opt is the occupancy of the mapping `optimal`.
    """
    best = occupancy(mdp, optimal)
    h = state_regularizer(mdp, policy_of(mdp, q), alpha)
    h_best = state_regularizer(mdp, optimal, alpha)
    root, root_best = q.sum(-1).sqrt(), best.sum(-1).sqrt()
    now = hybrid(mdp, q, alpha)
    right = (root * (h - h_best)).sum(-1) + ((root - root_best) * h_best).sum(-1)
    left = hybrid(mdp, best, alpha) - now
    return equality("eq:penalty_decomposition", left, right, mdp.num_pairs, -now)


def penalty_term_1(
    mdp: LayeredMDP, policy: Tensor, other: Tensor, mapping: Tensor, alpha: float
) -> Statement:
    """`lem:penalty_term_1`, for any policy pi_1, and mappings pi_2 = `other` and pi = `mapping`:

    sum_s sqrt(q_1(s)) ( h_s(pi_1) - h_s(pi_2) )
      <= (1 + alpha) sum_s sum_{a != pi(s)} sqrt(q_1(s,a)).
    """
    q = occupancy(mdp, policy)
    h, h_other = state_regularizer(mdp, policy, alpha), state_regularizer(mdp, other, alpha)
    left = (q.sum(-1).sqrt() * (h - h_other)).sum(-1)
    right, scale = (1 + alpha) * outside(q.sqrt(), mapping), -hybrid(mdp, q, alpha)
    return statement("lem:penalty_term_1", left, right, mdp.num_pairs, scale)


def reach(mdp: LayeredMDP, policy: Tensor) -> Tensor:
    """p^pi(s'|s,a), `eq:reachability`: reaching s' after a in s, by pi; `(*batch, S, A, S)`."""
    later = state_reachability(mdp, policy)  # (*batch, S, S)
    return (mdp.joint_transitions.flatten(-3, -2) @ later).unflatten(-2, mdp.actions.shape)


def state_reach_probability(mdp: LayeredMDP, policy: Tensor) -> tuple[Statement, Statement]:
    """`lem:state_reach_probabilty`: sum_{s' in S_k} p^pi(s'|s,a) <= 1, and <= L over all layers.

    The first statement is `eq:state_reach_prob_bound`. The left sides are those of the worst pair
    (s,a), and in the first statement of the worst layer.
    """
    reached = keep("pair", mdp, reach(mdp, policy).movedim(-1, 0), 0.0).movedim(0, -1)
    # (*batch, S, A, L)
    layers = torch.stack([layer.sum(-1) for layer in mdp.split(reached, -1)], -1)
    worst, every = layers.amax((-3, -2, -1)), reached.sum(-1).amax((-2, -1))
    return (
        statement("eq:state_reach_prob_bound", worst, 1.0, mdp.num_pairs),
        statement("lem:state_reach_probabilty", every, float(mdp.horizon), mdp.num_pairs),
    )


def induction(mdp: LayeredMDP, policy: Tensor, f: Tensor, g: Tensor) -> tuple[Statement, Statement]:
    """`lem:induction_state_reach_prob`: its condition, and its conclusion `eq:induction_ineq`.

    Condition:  f(s) <= sum_{s',a'} ( g(s',a') + f(s') pi(a'|s') ) P(s|s',a'),
                and f = 0 in the first layer.
    Conclusion: f(s) <= sum over earlier (s',a') of g(s',a') p^pi(s|s',a').

    f `(*batch, S)` and g `(*batch, S, A)` are non-negative. Both statements have one entry per
    state, `(*batch, S)`.
    """
    flow = flow_of(mdp)
    step = flow.inflow(g) + flow.inflow(f.unsqueeze(-1) * policy)
    follows = torch.einsum("...sa,...sat->...t", g, reach(mdp, policy))
    return (
        statement("lem:induction_state_reach_prob", f, step, mdp.num_pairs),
        statement("eq:induction_ineq", f, follows, mdp.num_pairs),
    )


def induction_equality(mdp: LayeredMDP, policy: Tensor, g: Tensor) -> Tensor:
    """The f `(*batch, S)` with equality in the condition of `lem:induction_state_reach_prob`."""
    return LayeredFlow(mdp).forward(policy, flow_of(mdp).inflow(g))


def sqrt_diff(mdp: LayeredMDP, policy: Tensor, mapping: Tensor) -> tuple[Statement, Statement]:
    """`lem:sqrt_diff`, for any policy pi_1 = `policy` and a mapping pi_2 = `mapping`:

        sum_s ( sqrt(q_1(s)) - sqrt(q_2(s)) )
          <= sqrt(|S| L) sqrt( sum_s sum_{a != pi_2(s)} q_1(s,a) ).

    The first statement returned is `eq:key_ineq_sqrt_diff`, in every state: the condition of the
    induction lemma for f = (q_1(s) - q_2(s))_+ and g = q_1(s,a) 1{a != pi_2(s)}. The second one is
    the lemma.
    """
    q, other = occupancy(mdp, policy), occupancy(mdp, mapping)
    g = torch.where(mapping > 0, 0.0, q)
    return _roots(("eq:key_ineq_sqrt_diff", "lem:sqrt_diff"), mdp, policy, q, other, g)


def sqrt_diff_2(mdp: LayeredMDP, mapping: Tensor, other: Tensor) -> tuple[Statement, Statement]:
    """`lem:sqrt_diff_2`, for two mappings:

        sum_s ( sqrt(q_1(s)) - sqrt(q_2(s)) )
          <= sqrt(|S| L) sqrt( sum_s sum_{a != pi_1(s)} q_2(s,a) ).

    The first statement returned is the condition of the induction lemma in its proof, with
    g(s,a) = pi_1(a|s) sum_{a' != pi_1(s)} q_2(s,a'). The second one is the lemma.
    """
    q, q_other = occupancy(mdp, mapping), occupancy(mdp, other)
    g = mapping * torch.where(mapping > 0, 0.0, q_other).sum(-1, keepdim=True)
    labels = "lem:sqrt_diff_2, key step", "lem:sqrt_diff_2"
    return _roots(labels, mdp, mapping, q, q_other, g)


def _roots(
    labels: tuple[str, str], mdp: LayeredMDP, policy: Tensor, q: Tensor, other: Tensor, g: Tensor
) -> tuple[Statement, Statement]:
    """The induction's condition for f = (q(s) - other(s))_+ and g, and the bound on the roots."""
    (visits, others), terms = (x.sum(-1) for x in (q, other)), mdp.num_pairs
    key, _ = induction(mdp, policy, (visits - others).clamp(min=0), g)
    root, root_other = visits.sqrt(), others.sqrt()
    scale = torch.maximum(key.right, visits)
    right = math.sqrt(mdp.num_states * mdp.horizon) * g.sum((-2, -1)).sqrt()
    size = (root + root_other).sum(-1)
    return (
        statement(labels[0], key.left, key.right, q.shape[-2] * q.shape[-1], scale),
        statement(labels[1], (root - root_other).sum(-1), right, terms, size),
    )


def penalty_bound(
    mdp: LayeredMDP, q: Tensor, best: Tensor, mapping: Tensor, alpha: float
) -> Tensor:
    """The right-hand side of `lem:key_lemma_bound_penalty`, `(*batch,)`:

        (1 + alpha) sum_s sum_{a != pi(s)} sqrt(q(s,a))
          + (1 + alpha A) sqrt(|S| L)
            min( 1, 2 sqrt( sum_s sum_{a != pi(s)} q(s,a) + q_opt(s,a) ) ).

    A is the largest number of actions of a state.
    """
    extra = (2 * (outside(q, mapping) + outside(best, mapping)).sqrt()).clamp(max=1)
    size = (1 + alpha * mdp.num_actions) * math.sqrt(mdp.num_states * mdp.horizon)
    return (1 + alpha) * outside(q.sqrt(), mapping) + size * extra


def bound_on_penalty(
    mdp: LayeredMDP, q: Tensor, optimal: Tensor, mapping: Tensor, alpha: float
) -> Statement:
    """`lem:key_lemma_bound_penalty`: phi_H(q_opt) - phi_H(q) <= `penalty_bound`.

    q_opt is the occupancy of the mapping `optimal`.
    """
    best = occupancy(mdp, optimal)
    now, right = hybrid(mdp, q, alpha), penalty_bound(mdp, q, best, mapping, alpha)
    left = hybrid(mdp, best, alpha) - now
    return statement("lem:key_lemma_bound_penalty", left, right, mdp.num_pairs, right - now)


# -- The stability E |loss_estimate|^2 (`app:stability_proof`) -------------------------------------
#
# The norm is that of H^-1. H is the Hessian of phi_H at q, given by its `curvature`. A statement
# X <= Y about symmetric matrices is evaluated in its worst direction: the largest eigenvalue of
# X - Y is compared with zero, after a scaling that makes the diagonal of one of the matrices 1.


def H_and_N(mdp: LayeredMDP, curve: Curvature, k: int, w: Tensor) -> Statement:
    """`lem:H_and_N`: (0, w_k, 0)' H^-1 (0, w_k, 0) <= w_k' N_k w_k for w `(*batch, S_k, A)`.

    In the last layer the two sides are equal.
    """
    first = sum(mdp.layer_sizes[:k]) * mdp.num_actions
    here = slice(first, first + mdp.layer_sizes[k] * mdp.num_actions)
    block, w = inverse_hessian(mdp, curve)[..., here, here], w.flatten(-2).unsqueeze(-1)
    left, right = ((w.mT @ x @ w)[..., 0, 0] for x in (block, all_N(mdp, curve)[k]))
    d_inverse = curve.d_inverse[..., mdp.layer_slices[k], :].flatten(-2)
    scale = w.shape[-2] * (w.square().squeeze(-1) * d_inverse).sum(-1)
    return statement("lem:H_and_N", left, right, mdp.num_pairs, scale)


def N_properties(
    mdp: LayeredMDP, curve: Curvature, k: int
) -> tuple[Statement, Statement, Statement]:
    """`lem:N_properties`: 0 < N_k, N_k <= D_k^-1, and N_k <= C_k^-1 + P_k' N_{k-1} P_k.

    For k = 0 the last one is N_0 <= C_0^-1. The left sides are the largest eigenvalues of -N_k,
    N_k - D_k^-1 and N_k - (...), over the pairs that exist, and the right sides are 0. The first
    two are scaled so that D_k^-1 is the identity, the last one so that the diagonal of its
    right-hand side is 1. If a state has one action, N_k is only positive semi-definite.
    """
    here, pairs = mdp.layer_slices[k], int(mdp.actions[mdp.layer_slices[k]].sum())
    exists = mdp.actions[here].flatten()
    c_inverse, d_inverse = (part[..., here, :].flatten(-2)[..., exists] for part in curve)
    layers = all_N(mdp, curve)
    block = layers[k][..., exists, :][..., exists]
    other, diagonal = torch.diag_embed(c_inverse), torch.diag_embed(d_inverse)
    if k:
        step = curvatures.P(mdp, k)[..., exists]
        other = other + step.mT @ layers[k - 1] @ step

    def negative(name: str, matrix: Tensor, scale: Tensor) -> Statement:
        size = scale.diagonal(dim1=-2, dim2=-1)
        root = torch.where(size > 0, size, torch.inf).rsqrt()
        largest = torch.linalg.eigvalsh(curvatures.scale(matrix, root))[..., -1]
        return statement(f"lem:N_properties, {name}", largest, 0.0, pairs, pairs)

    return (
        negative("positive", -block, diagonal),
        negative("D", block - diagonal, diagonal),
        negative("C", block - other, other),
    )


def quadratic_form_diagonal(matrix: Tensor, w: Tensor) -> Statement:
    """`lem:quadratic_form_diagonal`: w' M w <= (sum_j w(j)) sum_i M(i,i) w(i).

    M `(*batch, d, d)` is positive semi-definite and w `(*batch, d)` is non-negative.
    """
    left = torch.einsum("...i,...ij,...j->...", w, matrix, w)
    right = w.sum(-1) * (matrix.diagonal(dim1=-2, dim2=-1) * w).sum(-1)
    return statement("lem:quadratic_form_diagonal", left, right, w.shape[-1] ** 2)


def expected_norm(
    mdp: LayeredMDP, q: Tensor, inverse: Tensor, mean: Tensor, second_moment: Tensor
) -> Tensor:
    """E |loss_estimate|^2 in the norm of `inverse` `(*batch, SA, SA)`, given q; `(*batch,)`.

    `mean` and `second_moment`, both `(*batch, S, A)`, are E[loss] and E[loss^2] of every pair.
    Losses of different pairs are independent given their means.
    """
    return norm_of_moments(mdp, q, inverse, second_moments(mean, second_moment))


def norm_of_moments(mdp: LayeredMDP, q: Tensor, inverse: Tensor, moments: Tensor) -> Tensor:
    """E |loss_estimate|^2 in the norm of `inverse`, from the moments E[loss_i loss_j]; `(*batch,)`.

    The estimate is loss(s,a) 1{visited} / q(s,a), so the expectation is exactly

        sum_ij inverse_ij P(i and j are visited) / (q_i q_j) E[loss_i loss_j].

    It is linear in the moments: averages of moments over episodes give the average of the norm.
    `inverse` and `moments` are `(*batch, SA, SA)`. Of the moments only the entries i <= j are read,
    as `losses.second_moments` fills them.
    """
    product, pairs = inverse * moments, q.shape[-2:]
    single = weighed(mdp, q, product.diagonal(dim1=-2, dim2=-1).unflatten(-1, pairs))
    # Of two different pairs one comes later. The probability of meeting it depends on its state.
    met = reach(mdp, policy_of(mdp, q)).flatten(-3, -2) / q.sum(-1).unsqueeze(-2)
    later = product.unflatten(-1, pairs).sum(-1) * met  # (*batch, SA, S)
    return single.sum((-2, -1)) + 2 * later.sum((-2, -1))


def norm(inverse: Tensor, estimate: Tensor) -> Tensor:
    """|estimate|^2 `(*batch,)` in the norm of `inverse` `(*batch, SA, SA)`."""
    x = estimate.flatten(-2)
    return (x * (inverse @ x.unsqueeze(-1)).squeeze(-1)).sum(-1)


def N_over_q(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """N_k((s,a),(s,a)) / q(s,a), `(*batch, S, A)`."""
    return weighed(mdp, q, curvatures.N_diagonal(mdp, all_N(mdp, curvature(mdp, q, alpha))))


def first_step_bound(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """L sum_k sum_{U_k} N_k((s,a),(s,a)) / q(s,a), the right of `lem:stability_first_step`."""
    return mdp.horizon * N_over_q(mdp, q, alpha).sum((-2, -1))


def weighed(mdp: LayeredMDP, q: Tensor, R: Tensor) -> Tensor:
    """R(s,a) / q(s,a), zero on masked pairs."""
    return keep("pair", mdp, R / keep("pair", mdp, q, 1.0), 0.0)


def stability_first_step(
    mdp: LayeredMDP, q: Tensor, alpha: float, mean: Tensor, second_moment: Tensor
) -> Statement:
    """`lem:stability_first_step`: E |loss_estimate|^2_{H^-1} <= `first_step_bound`."""
    inverse = inverse_hessian(mdp, curvature(mdp, q, alpha))
    left = expected_norm(mdp, q, inverse, mean, second_moment)
    # The entries of D^1/2 H^-1 D^1/2 are at most 1; each has its own rounding error.
    size = (4 * q.sqrt() * mdp.actions).sum((-2, -1)) * mdp.num_pairs
    right = first_step_bound(mdp, q, alpha)
    return statement("lem:stability_first_step", left, right, mdp.num_pairs, size)


def second_step_bound(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> Tensor:
    """8 e L ( sqrt(L) + 1 / (alpha L) ) sum_s sum_{a != pi(s)} sqrt(q(s,a)), `(*batch,)`."""
    return 8 * math.e * mdp.horizon * _factor(mdp, alpha) * outside(q.sqrt(), mapping)


def _factor(mdp: LayeredMDP, alpha: float) -> float:
    return math.sqrt(mdp.horizon) + 1 / (alpha * mdp.horizon)


def stability_second_step(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> Statement:
    """`lem:stability_second_step`, for any mapping:

    sum_k sum_{(s,a) in U_k} N_k((s,a),(s,a)) / q(s,a) <= `second_step_bound`.
    """
    left = first_step_bound(mdp, q, alpha) / mdp.horizon
    right = second_step_bound(mdp, q, mapping, alpha)
    return statement("lem:stability_second_step", left, right, mdp.num_pairs)


def layer_recursion(
    mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float
) -> tuple[Statement, Statement, Statement]:
    """The steps of the proof of `lem:stability_second_step`, with R(s,a) = N_{k(s)}((s,a),(s,a)).

    `eq:R0`, in the first layer, `(*batch,)`:
        sum_a R / q <= 8 ( sqrt(L) + 1/(alpha L) ) sum_{a != pi(s)} sqrt(q(s,a));
    `eq:R`, in layer k >= 1, `(*batch, L - 1)`:
        sum_{U_k} R / q <= the same over S_k + (1 + 1/L) sum_{U_{k-1}} R / q;
    `eq:R_bound`, as the worst ratio over all pairs against 1, `(*batch,)`:
        R(s,a) <= 4 q(s,a)^(3/2).
    """
    weights = N_over_q(mdp, q, alpha)
    left_out = torch.where(mapping > 0, 0.0, q.sqrt())
    sums, roots = (
        torch.stack([x.sum((-2, -1)) for x in mdp.split(table, -2)], -1)  # (*batch, L)
        for table in (weights, left_out)
    )
    own = 8 * _factor(mdp, alpha) * roots
    grown = own[..., 1:] + (1 + 1 / mdp.horizon) * sums[..., :-1]
    worst = (weights / (4 * keep("pair", mdp, q, 1.0).sqrt())).amax((-2, -1))
    return (
        statement("eq:R0", sums[..., 0], own[..., 0], mdp.num_pairs),
        statement("eq:R", sums[..., 1:], grown, mdp.num_pairs),
        statement("eq:R_bound", worst, 1.0, mdp.num_pairs),
    )


def worst_case_stability(mdp: LayeredMDP) -> float:
    """4 sqrt(L |S| |A|), the first argument of the min in `lem:key_lemma_bound_stability`."""
    return 4 * math.sqrt(mdp.horizon * mdp.num_pairs)


def stability_bound(mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float) -> Tensor:
    """The right-hand side of `lem:key_lemma_bound_stability`, `(*batch,)`:

    min( 4 sqrt(L |S| |A|),
         8 e L^2 ( sqrt(L) + 1/(alpha L) ) sum_s sum_{a != pi(s)} sqrt(q(s,a)) ).
    """
    adaptive = mdp.horizon * second_step_bound(mdp, q, mapping, alpha)
    return adaptive.clamp(max=worst_case_stability(mdp))


def bound_on_stability(
    mdp: LayeredMDP, q: Tensor, mapping: Tensor, alpha: float, mean: Tensor, second_moment: Tensor
) -> tuple[Statement, Statement]:
    """`lem:key_lemma_bound_stability`: E |loss_estimate|^2_{H^-1} against each side of the min.

    `mean` and `second_moment` `(*batch, S, A)` are E[loss] and E[loss^2]. The first statement is
    the worst case, the second one is the adaptive bound.
    """
    first = stability_first_step(mdp, q, alpha, mean, second_moment)
    terms, worst = mdp.num_pairs, worst_case_stability(mdp)
    adaptive = mdp.horizon * second_step_bound(mdp, q, mapping, alpha)
    scale = first.rounding / (4 * terms * torch.finfo(q.dtype).eps)
    label = "lem:key_lemma_bound_stability"
    return (
        statement(f"{label}, worst case", first.left, worst, terms, scale),
        statement(f"{label}, adaptive", first.left, adaptive, terms, scale),
    )
