"""The Graves-Lai constant of an MDP with known transitions, by cutting planes.

Every consistent learner (regret o(T^a) for every a > 0, whatever the means are) has

    liminf of E[regret(T)] / log T >= C(mean)

(Graves and Lai, 1997; for MDPs: Dann, Marinov, Mohri and Zimmert, 2021, Theorem 4.2). If the
transitions are known, an episode of policy pi tells sum_{s,a} q(s,a) kl(mean, other) about another
table of means. So C depends on the policies only through the expected visits n, per log T:

    C = min over n >= 0 of sum n(s,a) gap(s,a)
        subject to  sum_a n(s,a) = visits that arrive in s,                 for hidden states s,
                    sum n(s,a) kl(mean(s,a), other(s,a)) >= 1               for confusing tables.

A table is confusing if it agrees with the means on all pairs that optimal policies play, and some
other policy is optimal for it. Pairs of optimal policies are observed for free, so they have no
variable; torch_occ.limits.separation says which others matter, and finds the violated constraints.
A linear program with the constraints so far has a value below C. Its n, divided by the least
information about a confusing table, satisfies all constraints, so its cost is above C.

If optimal policies visit every state, then C = sum gap / kl(mean, mean - gap), over suboptimal
pairs; for L = 1 this is the bound of Lai and Robbins (1985). A pair whose loss cannot be lower by
its gap contributes nothing, since no table lets it be optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ.limits.separation import (
    Bernoulli,
    Excursions,
    Family,
    Floats,
    Gaussian,
    Separation,
    excursions_of,
)
from torch_occ.mdp.checks import as_tensor
from torch_occ.mdp.layered import LayeredMDP


@dataclass(frozen=True)
class LowerBound:
    """Bounds of the Graves-Lai constant C(mean): value <= C <= upper."""

    value: float  # the lower bound of regret / log T
    upper: float  # no less than C
    #: `(S, A)`: visits per log T of a cheapest exploration that rules out every confusing table.
    #: Its cost is `upper`. Pairs of optimal policies are visited for free and have 0.
    allocation: Tensor
    rounds: int  # of cutting planes; 0 for the closed form
    exact: bool  # whether value and upper agree up to the tolerance
    method: Literal["closed form", "cutting planes"]

    def __str__(self) -> str:
        if self.method == "closed form":
            return f"C = {self.value:.6g} (closed form)"
        how = f"{self.method}, {self.rounds} rounds"
        if self.exact:
            return f"C = {self.value:.6g} ({how})"
        return f"{self.value:.6g} <= C <= {self.upper:.6g} ({how}; the search was cut short)"


def lower_bound(
    mdp: LayeredMDP,
    mean: Tensor,
    *,
    noise: Literal["bernoulli", "gaussian"] = "bernoulli",
    variance: float | None = None,
    tolerance: float = 1e-5,
    budget: int = 20_000,
    max_rounds: int = 200,
) -> LowerBound:
    """The least d regret / d log T of any consistent learner that knows the transitions.

    For Bernoulli losses the bound is the same whether the learner knows that losses are 0 or 1, or
    only that they lie in [0, 1]. Unreachable states and masked actions play no part. Actions with
    gaps of at most 1e-9 are tied, and all of them are optimal.

    Args:
        mean: mean losses `(S, A)`.
        noise: the family of the losses. "gaussian" has losses of any mean and a known variance.
        variance: of Gaussian losses.
        tolerance: stop if upper - value <= tolerance * value.
        budget: the most partial policies that one search examines. It is reached only by MDPs in
            which optimal policies leave out many states; then `exact` is False, and `value` and
            `upper` are still bounds of C.
        max_rounds: the most linear programs.

    Returns:
        The bounds, the cheapest exploration, and how they were found.

    Raises:
        ValueError: if a mean is not possible, the noise has no known bound, the MDP is a batch, or
            too many states are left out by optimal policies.
        ImportError: if SciPy is needed but not installed.
    """
    family = _family(noise, variance)
    mdp, mean = _checked(mdp, mean, family)
    for name, number in (("tolerance", tolerance), ("budget", budget), ("max_rounds", max_rounds)):
        if not number > 0:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    excursions = excursions_of(mdp, mean)
    if len(excursions.hidden):
        separation = Separation(excursions, family, budget=budget)
        return _by_cutting_planes(separation, tolerance, max_rounds)
    possible = excursions.gap < family.most(excursions.mean)
    information = family.information(excursions.mean, excursions.gap)
    n = np.divide(1.0, information, out=np.zeros_like(information), where=possible)
    value = float(excursions.gap @ n)
    return LowerBound(value, value, excursions.table(n), 0, True, "closed form")


# -- cutting planes --------------------------------------------------------------------------------


def _by_cutting_planes(separation: Separation, tolerance: float, max_rounds: int) -> LowerBound:
    """Add violated constraints to the linear program until the bounds agree."""
    excursions = separation.excursions
    gap, spread = excursions.gap, _uniform_visits(excursions)
    # Any small number of observations: every excursion that can pay off violates them.
    n, value, rounds, exact = 1e-6 * spread, 0.0, 0, False
    # The cheapest exploration so far that satisfies all constraints, and its cost.
    best, cost, cuts = n, np.inf, np.zeros((0, len(n)))
    while rounds < max_rounds:
        found = separation.search(n, 1.0 - tolerance / 4)
        if found.least > 0 and float(gap @ n) / found.least < cost:
            best, cost = n / found.least, float(gap @ n) / found.least
        exact = cost - value <= tolerance * value or np.isinf(found.least)
        if exact or not (len(found.cuts) or found.exhaustive):
            break
        cuts, rounds = np.concatenate([cuts, found.cuts]), rounds + 1
        least = _cheapest(excursions, cuts)
        value = float(gap @ least)
        # Observations of zero give weak constraints. A little of everything avoids them, and
        # becomes less with every round.
        n = least + 0.1**rounds * value / float(gap @ spread) * spread
    if np.isinf(cost) and not rounds:  # nothing can be confused
        best, cost = np.zeros_like(n), 0.0
    allocation, upper = excursions.table(best), max(cost, value)
    return LowerBound(value, upper, allocation, rounds, bool(exact), "cutting planes")


def _cheapest(excursions: Excursions, cuts: Floats) -> Floats:
    """The cheapest n with the flow constraints and the cuts `(K, E + U * A)`."""
    with extra("limits", "the limit of regret of this MDP needs SciPy"):
        from scipy.optimize import linprog
    found: Any = linprog(
        excursions.gap,
        A_ub=-cuts,
        b_ub=-np.ones(len(cuts)),
        A_eq=excursions.balance(),
        b_eq=np.zeros(len(excursions.hidden)),
        bounds=[(0, None if exists else 0) for exists in excursions.exists],
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the linear program of the limit was not solved: {found.message}")
    return np.maximum(found.x, 0.0)


def _uniform_visits(excursions: Excursions) -> Floats:
    """One visit of every entry, and uniform actions in hidden states."""
    E, U, A = len(excursions.entries), len(excursions.hidden), excursions.num_actions
    exists = excursions.exists[E:].reshape(U, A)
    n, arriving = np.zeros((U, A)), excursions.first.sum(0)
    for u in range(U):
        n[u] = arriving[u] * exists[u] / exists[u].sum()
        arriving = arriving + n[u] @ excursions.onward[u]
    return np.concatenate([np.ones(E), n.ravel()])


# -- arguments -------------------------------------------------------------------------------------

#: Why there is no bound for a noise of `LossProcess`.
_NO_BOUND = {
    "none": "one visit reveals a loss without noise, so regret need not grow with log T",
    "uniform": "the limit for losses uniform around their mean is not implemented",
}


def _family(noise: str, variance: float | None) -> Family:
    if noise == "gaussian":
        if variance is None or not 0 < variance < np.inf:
            raise ValueError(
                f"variance: Gaussian losses need a positive, finite variance, got {variance}"
            )
        return Gaussian(float(variance))
    if noise != "bernoulli":
        reason = _NO_BOUND.get(noise, "unknown noise")
        raise ValueError(f"noise: expected bernoulli or gaussian, got {noise!r}; {reason}")
    if variance is not None:
        raise ValueError("variance: that of Bernoulli losses follows from their mean; leave it out")
    return Bernoulli()


def _checked(mdp: LayeredMDP, mean: Tensor, family: Family) -> tuple[LayeredMDP, Tensor]:
    """The MDP and the means in float64 on the CPU, or a ValueError."""
    if not isinstance(mdp, LayeredMDP):
        raise TypeError(f"mdp: expected an occ.LayeredMDP, got {type(mdp).__name__}")
    if mdp.batch_shape:
        raise ValueError(f"mdp: expected a single MDP, got a batch of {tuple(mdp.batch_shape)}")
    mean = as_tensor(mean)
    if not isinstance(mean, Tensor):
        raise TypeError(f"mean: expected a torch tensor, got {type(mean).__name__}")
    shape = (mdp.num_states, mdp.num_actions)
    if tuple(mean.shape) != shape:
        raise ValueError(f"mean: expected shape {shape}, got {tuple(mean.shape)}")
    mdp, mean = mdp.to("cpu", torch.float64), mean.detach().to("cpu", torch.float64)
    matters = mdp.actions & mdp.reachable.unsqueeze(-1)
    inside = (mean >= 0) & (mean <= 1) if isinstance(family, Bernoulli) else mean.isfinite()
    wrong: Sequence[list[int]] = (matters & ~inside).nonzero().tolist()
    if wrong:
        state, action = wrong[0]
        expected = "in [0, 1]" if isinstance(family, Bernoulli) else "finite"
        raise ValueError(
            f"mean: {mdp.locate(state)}, action {action} is {float(mean[state, action])}; means of "
            f"these losses must be {expected}"
        )
    return mdp, torch.where(matters, mean, 0.0)
