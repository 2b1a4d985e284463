"""Conditions, constants and right-hand sides of the theorems, and parameters for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.game.losses import size_of_change
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy
from torch_occ.theory.statements import Parameters, Statement, equality, statement
from torch_occ.theory.terms import outside, penalty_bound, stability_bound

# -- Gaps, corruption and the self-bounding condition (`sec:preliminaries_self_bounding`) ----------


def gaps(mdp: LayeredMDP, mean: Tensor) -> Tensor:
    """Delta(s,a) = Q(s,a) - min_{a'} Q(s,a') of the optimal policy, `(*batch, S, A)`."""
    return optimal_policy(mdp, mean).gaps


def minimal_gap(mdp: LayeredMDP, gap: Tensor, mapping: Tensor) -> Tensor:
    """Delta_min = min over s and a != pi*(s) of Delta(s,a), `(*batch,)`; inf without choice."""
    return torch.where(mdp.actions & (mapping == 0), gap, torch.inf).amin((-2, -1))


def corruption(mdp: LayeredMDP, losses: Tensor, clean: Tensor) -> Tensor:
    """C = 2 sum_t sum_{k < L} max_{s in S_k, a} |loss_t(s,a) - clean_t(s,a)|, `(*batch,)`."""
    return size_of_change(mdp, losses - clean).sum(0)


def performance_difference(mdp: LayeredMDP, q: Tensor, mean: Tensor) -> Statement:
    """⟨q - q_opt, mean⟩ = sum_s sum_{a != pi*(s)} q(s,a) Delta(s,a).

    So stochastic losses satisfy the self-bounding condition with equality and C = 0.
    """
    plan = optimal_policy(mdp, mean)
    left = ((q - occupancy(mdp, plan.policy)) * mean).sum((-2, -1))
    size = (q * mean).sum((-2, -1)) + mdp.horizon
    right = outside(q * plan.gaps, plan.policy)
    return equality("performance difference", left, right, mdp.num_pairs, size)


def self_bounding_condition(
    regret: Tensor, occupancies: Tensor, gap: Tensor, mapping: Tensor, corruption: Tensor | float
) -> Statement:
    """`eq:self_bounding_constraint`: sum_t sum_s sum_{a != pi*(s)} q_t(s,a) Delta(s,a) - C <= Reg.

    `occupancies` is sum_t q_t `(*batch, S, A)`, as in `History.cumulative_occupancy`.
    """
    left = outside(occupancies * gap, mapping) - corruption
    pairs, scale = math.prod(occupancies.shape[-2:]), occupancies.sum((-2, -1)) + regret.abs()
    return statement("eq:self_bounding_constraint", left, regret, pairs, scale)


def opt_implicit_bound(
    mdp: LayeredMDP,
    best: Tensor,
    gap: Tensor,
    mapping: Tensor,
    episodes: int,
    corruption: Tensor | float,
) -> Statement:
    """`lem:opt_implict_bound`: T sum_s sum_{a != pi*(s)} q_opt(s,a) Delta(s,a) <= C.

    It follows from the self-bounding condition. q_opt is `best` `(*batch, S, A)`.
    """
    left, scale = episodes * outside(best * gap, mapping), float(episodes * mdp.horizon)
    return statement("lem:opt_implict_bound", left, corruption, mdp.num_pairs, scale)


# -- Constants and right-hand sides of the theorems and corollaries (`sec:result`) -----------------
#
# The paper states them up to constants. The theorem has its coefficients as printed and explicit,
# with every constant from the proofs (`app:appendix_theorem_main`); the corollaries are explicit.
# |S| |A| counts the pairs that exist, |S| the non-terminal states.


class Coefficients(NamedTuple):
    """X, Y and Z of `thm:main_general`, or their explicit versions."""

    X: float
    Y: float
    Z: float


def proof_constants(mdp: LayeredMDP, parameters: Parameters) -> tuple[float, float, float, float]:
    """C_1, ..., C_4 of the proof of `thm:main_general`:

    C_1 = (1 + alpha) / gamma,               C_2 = (1 + alpha A) sqrt(|S| L) / gamma,
    C_3 = gamma sqrt(L |S| |A|),             C_4 = gamma L^2 (sqrt(L) + 1/(alpha L)).
    """
    alpha, gamma, L = parameters.alpha, parameters.gamma, mdp.horizon
    return (
        (1 + alpha) / gamma,
        (1 + alpha * mdp.num_actions) * math.sqrt(mdp.num_states * L) / gamma,
        gamma * math.sqrt(L * mdp.num_pairs),
        gamma * L**2 * (math.sqrt(L) + 1 / (alpha * L)),
    )


def main_general(mdp: LayeredMDP, parameters: Parameters) -> Coefficients:
    """X, Y and Z of `thm:main_general` as printed:

    X = (1 + alpha) / gamma + gamma L^2 (sqrt(L) + 1/(alpha L)),
    Y = sqrt(L |S|) (1 + alpha A) / gamma,
    Z = sqrt(L |S| |A|) ( (1 + alpha sqrt(A)) / gamma + gamma ).
    """
    C1, C2, _, C4 = proof_constants(mdp, parameters)
    alpha, gamma = parameters.alpha, parameters.gamma
    factor = (1 + alpha * math.sqrt(mdp.num_actions)) / gamma + gamma
    return Coefficients(C1 + C4, C2, math.sqrt(mdp.horizon * mdp.num_pairs) * factor)


def main(mdp: LayeredMDP) -> tuple[float, float]:
    """B = L^(5/2) + L sqrt(A) and D = sqrt(L |S| |A|), coefficients of `thm:main`, `eq:main`."""
    L, pairs = mdp.horizon, mdp.num_pairs
    return L**2.5 + L * math.sqrt(mdp.num_actions), math.sqrt(L * pairs)


def explicit(mdp: LayeredMDP, parameters: Parameters) -> Coefficients:
    """X, Y and Z of `thm:main_general` with the constants of its proof:

    X = C_1 + 64 e C_4,    Y = 2 C_2,    Z = C_1 sqrt(L |S| |A|) + C_2 + 32 C_3.

    It has the 8 of `lem:key_lemma_ftrl` times the 8 e or the 4 of `lem:key_lemma_bound_stability`,
    and the 2 inside the min of `lem:key_lemma_bound_penalty`.
    """
    C1, C2, C3, C4 = proof_constants(mdp, parameters)
    Z = C1 * math.sqrt(mdp.horizon * mdp.num_pairs) + C2 + 32 * C3
    return Coefficients(C1 + 64 * math.e * C4, 2 * C2, Z)


def lower_order(mdp: LayeredMDP, parameters: Parameters, episodes: Tensor) -> Tensor:
    """The O(L |S| |A| log T) of `lem:key_lemma_ftrl`, explicit; shaped like `episodes`:

        2 L + beta |S| |A| log T + (1 + alpha) |S| |A| / (gamma sqrt(T)).

    These are the three parts of `lem:proper_comparator`, the last one times 1/eta_T. With beta = 64
    L the second one is the paper's 64 L |S| |A| log T.
    """
    alpha, beta, gamma = parameters.alpha, parameters.beta, parameters.gamma
    return (
        2 * mdp.horizon
        + beta * mdp.num_pairs * episodes.log()
        + (1 + alpha) * mdp.num_pairs / (gamma * episodes.sqrt())
    )


class Summands(NamedTuple):
    """J_1(t), J_2(t) and J_3(t) of the proof of `thm:main_general`, `(*batch,)` each.

    J_2 is the summand of `eq:main_goal` and, for one state, of `eq:mab_main_result`.
    """

    J1: Tensor  # 1 / sqrt(t)
    J2: Tensor  # sum_s sum_{a != pi(s)} sqrt(q_t(s,a) / t)
    J3: Tensor  # sqrt( sum_s sum_{a != pi(s)} (q_t(s,a) + q_opt(s,a)) / t )


def summands(q: Tensor, best: Tensor, mapping: Tensor, t: Tensor) -> Summands:
    """J_1, J_2 and J_3 at episode t, for q_t `(*batch, S, A)`, q_opt = `best` and any mapping."""
    J2 = outside(q.sqrt(), mapping)
    J3 = (outside(q, mapping) + outside(best, mapping)).sqrt()
    return Summands(t.rsqrt().expand_as(J2), J2 / t.sqrt(), J3 / t.sqrt())


def cauchy_schwarz(mdp: LayeredMDP, J: Summands) -> Statement:
    """J_2(t) <= sqrt(L |S| |A|) J_1(t), from the adaptive bound to the worst case."""
    right = math.sqrt(mdp.horizon * mdp.num_pairs) * J.J1
    return statement("J_2 <= sqrt(L|S||A|) J_1", J.J2, right, mdp.num_pairs)


def theorem_summand(
    mdp: LayeredMDP, parameters: Parameters, q: Tensor, best: Tensor, mapping: Tensor, t: Tensor
) -> Statement:
    """From the lemmas to `thm:main_general` in one episode, with the explicit X, Y and Z:

    (1/eta_t - 1/eta_{t-1}) `penalty_bound` + 8 eta_t `stability_bound`
      <= min( X J_2(t) + Y J_3(t), Z J_1(t) ).
    """
    penalty = parameters.eta_step(t) * penalty_bound(mdp, q, best, mapping, parameters.alpha)
    stability = 8 * parameters.eta(t) * stability_bound(mdp, q, mapping, parameters.alpha)
    (X, Y, Z), J = explicit(mdp, parameters), summands(q, best, mapping, t)
    right = torch.minimum(X * J.J2 + Y * J.J3, Z * J.J1)
    return statement("thm:main_general", penalty + stability, right, mdp.num_pairs)


def adversarial_bound(mdp: LayeredMDP, parameters: Parameters, episodes: Tensor) -> Tensor:
    """`col:adversarial_bound`, explicit; shaped like `episodes`:

        sqrt(T) ( C_1 sqrt(L |S| |A|) + C_2 + 64 C_3 ) + `lower_order`.

    The weights of the penalty sum to 1/eta_T = sqrt(T) / gamma, and those of the stability to
    sum_t eta_t <= 2 gamma sqrt(T).
    """
    C1, C2, C3, _ = proof_constants(mdp, parameters)
    rate = C1 * math.sqrt(mdp.horizon * mdp.num_pairs) + C2 + 64 * C3
    return rate * episodes.sqrt() + lower_order(mdp, parameters, episodes)


def stochastic_bound(
    mdp: LayeredMDP,
    parameters: Parameters,
    gap: Tensor,
    mapping: Tensor,
    episodes: Tensor,
    corruption: Tensor | float = 0.0,
) -> Tensor:
    """`col:stochastic_bound`, explicit, under `eq:self_bounding_constraint` with C; `(*batch,)`.

    Let X and Y be those of `explicit`, V = `lower_order`, and
    u = (1 + log T)/2 ( X^2 sum 1/Delta + Y^2 / Delta_min ). The proof gives
    Reg <= Reg/z + 3C/(2z) + z u + V for every z > 1, and the best z gives

        2 sqrt( u (3C/2 + V + u) ) + 2 u + V.
    """
    X, Y, _ = explicit(mdp, parameters)
    V = lower_order(mdp, parameters, episodes)
    inverse_gaps = outside(torch.where(mdp.actions, 1 / gap, 0.0), mapping)
    sums = X**2 * inverse_gaps + Y**2 / minimal_gap(mdp, gap, mapping)
    u = (1 + episodes.log()) / 2 * sums
    return 2 * (u * (1.5 * corruption + V + u)).sqrt() + 2 * u + V


# -- alpha and gamma for stochastic losses (`app:appendix_parameter_choices`) ----------------------
#
# If every gap is Delta_min and C = 0, the bound is, up to constants, log T / Delta_min times
#
#     f(alpha, gamma) = |S| |A| X^2 + Y^2 = |S| |A| ( (a^2 + c^2) / gamma^2 + 2 a b + gamma^2 b^2 ),
#
# a = 1 + alpha, b = L^2 ( sqrt(L) + 1/(alpha L) ), c^2 = (1 + alpha A)^2 |S| L / (|S||A|). Its
# minimum over gamma is |S| |A| 2 b (a + sqrt(a^2 + c^2)), at gamma^2 = sqrt(a^2 + c^2) / b. This is
# a generalized posynomial, so its logarithm is convex in log alpha, and bisection finds the best.


class Tuning(NamedTuple):
    """The minimizing parameters and the minimum; multiply it by log T / Delta_min."""

    alpha: float
    gamma: float
    value: float


def tuning_objective(mdp: LayeredMDP, alpha: float, gamma: float) -> float:
    """f(alpha, gamma), the coefficient of log T / Delta_min: X^2 |S| |A| + Y^2."""
    X, Y, _ = main_general(mdp, Parameters(alpha, 0.0, gamma))
    return X**2 * mdp.num_pairs + Y**2


def tune_stochastic(mdp: LayeredMDP) -> Tuning:
    """The alpha and gamma that minimize `tuning_objective`, and its minimum."""
    L, A, weight = mdp.horizon, mdp.num_actions, mdp.num_states * mdp.horizon / mdp.num_pairs

    def slope(log_alpha: float) -> float:
        """The derivative of log( b (a + sqrt(a^2 + c^2)) ) in log alpha."""
        alpha = math.exp(log_alpha)
        a, b = 1 + alpha, L**2 * (math.sqrt(L) + 1 / (alpha * L))
        root = math.sqrt(a**2 + weight * (1 + alpha * A) ** 2)
        rising = 1 + (a + weight * A * (1 + alpha * A)) / root
        return alpha * rising / (a + root) - L / (alpha * b)

    low, high = -100.0, 100.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    alpha = math.exp(middle)
    b = L**2 * (math.sqrt(L) + 1 / (alpha * L))
    gamma = math.sqrt(math.hypot(1 + alpha, math.sqrt(weight) * (1 + alpha * A)) / b)
    return Tuning(alpha, gamma, tuning_objective(mdp, alpha, gamma))
