"""alpha and gamma for stochastic losses (`app:appendix_parameter_choices`).

If every gap is Delta_min and C = 0, the bound is, up to constants, log T / Delta_min times

    f(alpha, gamma) = ( a / gamma + gamma b )^2 |S| |A| + ( (1 + alpha A) sqrt(|S| L) / gamma )^2,
    a = 1 + alpha,    b = L^2 ( sqrt(L) + 1/(alpha L) ).

For a given alpha the best gamma is known. With c^2 = (1 + alpha A)^2 |S| L / (|S||A|),

    f / (|S||A|) = (a^2 + c^2) / gamma^2 + 2 a b + gamma^2 b^2

has its minimum 2 b (a + sqrt(a^2 + c^2)) at gamma^2 = sqrt(a^2 + c^2) / b. These are generalized
posynomials, so the logarithm of the minimum is convex in log alpha. Bisection on its derivative
finds the best alpha to the last bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch_occ.mdp.layered import LayeredMDP


class Tuning(NamedTuple):
    """The minimizing parameters and the minimum; multiply it by log T / Delta_min."""

    alpha: float
    gamma: float
    value: float


def tuning_objective(mdp: LayeredMDP, alpha: float, gamma: float) -> float:
    """f(alpha, gamma), the coefficient of log T / Delta_min."""
    L, S, A, pairs = mdp.horizon, mdp.num_states, mdp.num_actions, mdp.num_pairs
    X = (1 + alpha) / gamma + gamma * L**2 * (math.sqrt(L) + 1 / (alpha * L))
    return X**2 * pairs + ((1 + alpha * A) * math.sqrt(S * L) / gamma) ** 2


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


def printed_tuning_order(mdp: LayeredMDP) -> float:
    """The order of the minimum as printed:

        |S| sqrt|A| L^(3/2) ( sqrt|A| L + L^(3/2) + |A| + |A|^(3/4) sqrt(L) ).

    The true minimum is between 2 and 4.6 times it in the tests.

    Read: A^(3/4) is |A|^(3/4).
    """
    L, A = mdp.horizon, mdp.num_actions
    return (
        mdp.num_pairs
        / math.sqrt(A)
        * L**1.5
        * (math.sqrt(A) * L + L**1.5 + A + A**0.75 * math.sqrt(L))
    )
