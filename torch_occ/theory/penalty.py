"""The penalty term phi_H(q_opt) - phi_H(q_t) and its bounds (`app:appendix_proof_penalty`).

A mapping pi: S -> A is a one-hot policy `(*batch, S, A)`, such as `optimal_policy(...).policy`. All
bounds are made of `outside(x, pi)`, the sum of x over all s and all a != pi(s). |S| counts the
non-terminal states. The proofs allow this, and it makes the bounds smaller.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, flow_of, flow_residual, occupancy, policy_of
from torch_occ.mdp.occupancy import reachability as state_reachability
from torch_occ.regularizers.terms import keep
from torch_occ.theory.curvatures import hybrid
from torch_occ.theory.statements import Statement, equality, statement


def outside(x: Tensor, mapping: Tensor) -> Tensor:
    """sum_s sum_{a != pi(s)} x(s,a), `(*batch,)`; x is zero on masked pairs."""
    return torch.where(mapping > 0, 0.0, x).sum((-2, -1))


def convex_combine(mdp: LayeredMDP, u: Tensor, v: Tensor, weight: Tensor | float) -> Statement:
    """`lem:convex_combine`: weight u + (1 - weight) v is in Omega if u and v are."""
    mixed = weight * u + (1 - weight) * v
    violation = flow_residual(mdp, mixed).abs().amax(-1)
    scale = mixed.amax((-2, -1))
    return equality("lem:convex_combine", violation, 0.0, mdp.num_pairs, scale)


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
    labels = "eq:key_ineq_sqrt_diff", "lem:sqrt_diff"
    return _roots(labels, mdp, policy, q, other, g, outside(q, mapping))


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
    return _roots(labels, mdp, mapping, q, q_other, g, outside(q_other, mapping))


def _roots(
    labels: tuple[str, str],
    mdp: LayeredMDP,
    policy: Tensor,
    q: Tensor,
    other: Tensor,
    g: Tensor,
    left_out: Tensor,
) -> tuple[Statement, Statement]:
    """The induction's condition for f = (q(s) - other(s))_+ and g, and the bound on the roots."""
    (visits, others), terms = (x.sum(-1) for x in (q, other)), mdp.num_pairs
    key, _ = induction(mdp, policy, (visits - others).clamp(min=0), g)
    root, root_other = visits.sqrt(), others.sqrt()
    scale = torch.maximum(key.right, visits)
    right = math.sqrt(mdp.num_states * mdp.horizon) * left_out.sqrt()
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
    label = "lem:key_lemma_bound_penalty"
    return statement(label, left, right, mdp.num_pairs, right - now)
