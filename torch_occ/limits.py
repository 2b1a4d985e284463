"""The least regret of any learner: the Graves-Lai constant, by cutting planes.

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
variable. A linear program with the constraints so far has a value below C. Its n, divided by the
least information about a confusing table, satisfies all constraints, so its cost is above C.

If optimal policies visit every state, then C = sum gap / kl(mean, mean - gap), over suboptimal
pairs; for L = 1 this is the bound of Lai and Robbins (1985). A pair whose loss cannot be lower by
its gap contributes nothing, since no table lets it be optimal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ._support.constants import TIE
from torch_occ.mdp.checks import as_tensor, check_kind, check_that, check_type
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy

__all__ = ["LowerBound", "lower_bound"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# -- How much information an observation carries about its mean ------------------------------------
#
# kl(m, x) is the relative entropy between losses 0 and 1 of mean m and of mean x. For learners that
# know only that losses are in [0, 1], the limit is the same.


def information(mean: Floats, reduction: Floats) -> Floats:
    """kl(mean, mean - reduction), infinite where the reduction is impossible."""
    other = mean - reduction
    with np.errstate(divide="ignore", invalid="ignore"):
        # log1p keeps the digits of small reductions.
        ones = np.where(mean > 0, -mean * np.log1p(-reduction / mean), 0.0)
        zeros = np.where(mean < 1, -(1 - mean) * np.log1p(reduction / (1 - mean)), 0.0)
    found = np.where(other > 0, ones + zeros, np.inf)
    return np.where(reduction > 0, found, 0.0)


def tilt(mean: Floats, r: Floats) -> Floats:
    """The reduction d >= 0 that minimizes kl(mean, mean - d) - r d, for r >= 0."""
    # The other mean x solves m - x = r x (1 - x), and m / x = 1 + excess.
    root = np.sqrt((1 - r) ** 2 + 4 * r * (1 - mean))
    excess = 0.5 * r * (1 + (r + 2 - 4 * mean) / (root + 1))
    # No more than the largest number below 1: a loss of mean zero would have infinite kl.
    return mean * np.minimum(excess / (1 + excess), 1 - 2.0**-53)


# -- The ways of leaving the states that optimal policies visit ------------------------------------
#
# A state is visited if some optimal policy visits it, and a pair is free if some optimal policy
# plays it: observing it costs no regret. A suboptimal pair of a visited state is an entry. After
# it, an episode may pass through hidden states, which no optimal policy visits, until it is back in
# a visited state or ends. This part of an episode is an excursion. Only entries and the pairs of
# hidden states cost regret or are worth observing; the program has one variable for each, the
# entries first.

#: The most numbers in the dense table of transitions between hidden states.
LARGEST = 50_000_000


@dataclass(frozen=True)
class Excursions:
    """Entries and hidden states of an MDP with mean losses; E entries, U hidden states.

    The V = E + U A variables are the entries, and the pairs of hidden states in layer order.
    """

    pairs: Ints  # (V,), the number s * A + a of each variable
    mean: Floats  # (V,)
    gap: Floats  # (V,), Q(s,a) - V(s)
    exists: Bools  # (V,); False for masked pairs
    first: Floats  # (E, U), P(hidden state | entry)
    onward: Floats  # (U, A, U), transitions between hidden states
    layers: list[slice]  # the hidden states of each layer

    @cached_property
    def reach(self) -> Floats:
        """The largest probability, over policies, of getting from one hidden state to another."""
        found = np.eye(len(self.onward))
        for here in reversed(self.layers):
            found[here] = np.maximum(found[here], (self.onward[here] @ found).max(1))
        return found

    def on_states(self, x: NDArray[Any]) -> NDArray[Any]:
        """The part of a vector of variables that belongs to hidden states, `(U, A)`."""
        return x[len(self.first) :].reshape(self.onward.shape[:2])


def excursions_of(mdp: LayeredMDP, mean: Tensor) -> Excursions:
    """Find the entries and the hidden states; actions with gaps of at most 1e-9 are optimal."""
    plan = optimal_policy(mdp, torch.where(mdp.actions, mean, 0.0))
    limit = TIE * plan.value.abs().clamp(min=1.0).unsqueeze(-1)
    optimal = mdp.actions & (plan.gaps <= limit)
    visited = LayeredMDP(mdp.transitions, actions=optimal, initial=mdp.initial).reachable
    entry, hidden = mdp.actions & ~optimal & visited.unsqueeze(-1), mdp.reachable & ~visited
    count, num_actions = int(hidden.sum()), mdp.num_actions
    if count * num_actions * count > LARGEST:
        raise ValueError(
            f"mdp: {count:,} states are reachable but not visited by an optimal policy; the limit "
            f"of regret is computed with a table of {count:,} x {num_actions} x {count:,} numbers, "
            f"and {LARGEST:,} are the most; use a smaller MDP"
        )

    def by_layer(mask: Tensor) -> list[slice]:
        """The entries or the hidden states of each layer."""
        sizes = [int(part.sum()) for part in mdp.split(mask, 0)]
        return [slice(*both) for both in pairwise(accumulate(sizes, initial=0))]

    first, onward = np.zeros((int(entry.sum()), count)), np.zeros((count, num_actions, count))
    entries, layers = by_layer(entry), by_layer(hidden)
    for k, (here, there) in enumerate(pairwise(mdp.layer_slices)):
        if bool(hidden[there].any()):  # other layers are not made dense
            rows = mdp.layers[k].dense.detach()[..., hidden[there]]
            onward[layers[k], :, layers[k + 1]] = rows[hidden[here]]
            first[entries[k], layers[k + 1]] = rows[entry[here]]

    def vector(table: Tensor) -> NDArray[Any]:
        """The variables of a table `(S, A)`."""
        return torch.cat([table[entry], table[hidden].flatten()]).numpy()

    numbers = torch.arange(entry.numel()).view(entry.shape)
    tables = numbers, torch.where(mdp.actions, mean, 0.0), plan.gaps, mdp.actions
    pairs, means, gaps, exists = map(vector, tables)
    return Excursions(pairs, means, gaps, exists, first, onward, layers)


# -- The alternative that the fewest observations rule out, by branch and bound --------------------
#
# An alternative lowers the means of entries and hidden pairs and is confusing if some policy
# becomes optimal. Let w(z) be the expected visits of a pair z during an excursion that begins with
# the entry e and follows a policy on hidden states. Then a policy with the entry e pays off if the
# reductions d satisfy
#
#     sum_z w(z) (d(z) - gap(z)) >= 0.
#
# If a policy with several entries is optimal, then at least one of its excursions pays off. So it
# is enough to consider every entry alone. Observations n carry the information sum_z n(z) kl(z,
# d(z)). Its minimum over all d that let a given excursion pay off is a convex problem with one
# multiplier:
#
#     max over theta >= 0 of sum_z [ min over d of n kl(z, d) - theta w d ] + theta w gap.
#
# The bracket is concave in w. So for policies that are only partly fixed, a chord over [0, largest
# w] bounds it from below, and the minimum over the rest of the policy is backward induction.
# Branching fixes the actions of hidden states in layer order.

#: The range of log theta, and the steps of bisection: an error of 3e-7. Every theta gives a bound.
_RANGE, _STEPS = (-32.0, 40.0), 28

#: Fewer observations than this count as this many; none would make theta w / n infinite.
_FEWEST = 1e-12

#: Nodes that are bounded together.
_BATCH = 256


class Nodes(NamedTuple):
    """Partly fixed excursions, B of them."""

    entry: Ints  # (B,)
    action: Ints  # (B, U), -1 if it is not fixed
    mass: Floats  # (B, U), visits of states with a fixed action
    inflow: Floats  # (B, U), visits of other states that come directly from fixed pairs

    def take(self, rows: Ints) -> Nodes:
        """Some of the nodes."""
        return Nodes._make(part[rows] for part in self)


class Search(NamedTuple):
    """Searches for confusing alternatives about which observations n `(V,)` say little."""

    excursions: Excursions
    n: Floats

    def run(self, target: float, budget: int) -> tuple[float, bool, Floats]:
        """Excursions with less information than the target.

        Returns a lower bound of the information about every confusing alternative; whether no
        excursion was left out, with at most so many nodes; and kl of confusing alternatives, those
        with the least information first, `(K, V)`.
        """
        first, cuts, values = self.excursions.first, [np.zeros((0, len(self.n)))], [np.zeros(0)]
        fresh = Nodes(np.arange(len(first)), np.full(first.shape, -1), 0 * first, first)
        nodes, bounds, least, spent = fresh.take(np.arange(0)), np.zeros(0), np.inf, 0
        most_cuts = max(60, 2 * len(self.n))
        while True:
            found, log_theta = self.bound(fresh)
            complete, low = ~(fresh.inflow > 0).any(1), found < target
            least, spent = min(least, *found[complete | ~low], np.inf), spent + len(found)
            leaves, rest = np.flatnonzero(complete & low), np.flatnonzero(~complete & low)
            cuts.append(self.alternatives(fresh.take(leaves), log_theta[leaves]))
            values.append(found[leaves])
            nodes = Nodes._make(map(np.concatenate, zip(nodes, fresh.take(rest), strict=True)))
            bounds = np.concatenate([bounds, found[rest]])
            if not len(bounds) or spent >= budget or sum(map(len, values)) >= most_cuts:
                break
            order = np.argsort(bounds, kind="stable")
            fresh, order = self.children(nodes.take(order[:_BATCH])), order[_BATCH:]
            nodes, bounds = nodes.take(order), bounds[order]
        order = np.argsort(np.concatenate(values), kind="stable")[:most_cuts]
        return float(min(least, *bounds, np.inf)), not len(bounds), np.concatenate(cuts)[order]

    def children(self, nodes: Nodes) -> Nodes:
        """Fix the action of the first state with inflow, in every possible way."""
        state = (nodes.inflow > 0).argmax(1)
        parent, action = np.nonzero(self.excursions.on_states(self.excursions.exists)[state])
        child, at = nodes.take(parent), state[parent]
        rows = np.arange(len(parent))
        amount = child.inflow[rows, at]
        inflow = child.inflow + amount[:, None] * self.excursions.onward[at, action]
        child.mass[rows, at], inflow[rows, at], child.action[rows, at] = amount, 0.0, action
        return child._replace(inflow=inflow)

    def fixed(self, nodes: Nodes) -> tuple[Ints, Floats]:
        """The variables that are fixed and their visits, `(B, 1 + U)` each."""
        (E, U), A = self.excursions.first.shape, self.excursions.onward.shape[1]
        pairs = E + np.arange(U) * A + np.maximum(nodes.action, 0)
        variables = np.concatenate([nodes.entry[:, None], pairs], 1)
        return variables, np.concatenate([np.ones((len(pairs), 1)), nodes.mass], 1)

    def bound(self, nodes: Nodes) -> tuple[Floats, Floats]:
        """A lower bound of the information, exact for nodes with no open state, and log theta.

        The best log theta, by bisection of the derivative, is given from above; `(B,)` each.
        """
        ex, (variables, w) = self.excursions, self.fixed(nodes)
        fixed = self.n[variables], ex.mean[variables], ex.gap[variables], w
        most = nodes.inflow @ ex.reach  # (B, U), the largest visits of each state
        chord = np.maximum(most, 1e-300)[:, :, None]
        observed, mean, gap = (ex.on_states(x) for x in (self.n, ex.mean, ex.gap))

        def dual(log_theta: Floats) -> tuple[Floats, Floats]:
            """The bound as a function of the multiplier, and its derivative by theta."""
            theta = np.exp(log_theta)[:, None]
            value, slope = (part.sum(1) for part in bracket(*fixed, theta))
            if (nodes.inflow > 0).any():
                here = most[:, :, None], theta[..., None]
                values, slopes = bracket(observed, mean, gap, *here)
                values = np.where(ex.on_states(ex.exists), values / chord, np.inf)
                rest, slope_rest = self.least_from(values, slopes / chord)
                value = value + (nodes.inflow * rest).sum(1)
                slope = slope + (nodes.inflow * slope_rest).sum(1)
            return value, slope

        low, high = (np.full(len(w), x) for x in _RANGE)
        for _ in range(_STEPS):
            middle = 0.5 * (low + high)
            rising = dual(middle)[1] > 0
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        return np.maximum(dual(low)[0], dual(high)[0]), high

    def least_from(self, values: Floats, slopes: Floats) -> tuple[Floats, Floats]:
        """The least sum of values `(B, U, A)` from every state on, and the sum of its slopes."""
        ahead, slope_ahead = np.zeros((2, *values.shape[:2]))
        for here in reversed(self.excursions.layers):
            onward = self.excursions.onward[here]
            total = values[:, here] + np.tensordot(ahead, onward, (1, 2))
            slope = slopes[:, here] + np.tensordot(slope_ahead, onward, (1, 2))
            ahead[:, here] = least = total.min(-1)
            # Of tied actions, any slope is a derivative; the largest one is taken.
            slope_ahead[:, here] = np.where(total == least[..., None], slope, -np.inf).max(-1)
        return ahead, slope_ahead

    def alternatives(self, nodes: Nodes, log_theta: Floats) -> Floats:
        """kl of the alternatives that let these excursions pay off, `(B, V)`."""
        variables, w = self.fixed(nodes)
        mean = self.excursions.mean[variables]
        d = tilt(mean, np.exp(log_theta)[:, None] * w / self.n[variables])
        rows = np.zeros((len(w), len(self.n)))
        rows[np.arange(len(w))[:, None], variables] = np.where(w > 0, information(mean, d), 0.0)
        return rows


def bracket(
    n: Floats, mean: Floats, gap: Floats, w: Floats, theta: Floats
) -> tuple[Floats, Floats]:
    """The bracket for every pair, with theta w gap, and its derivative by theta."""
    x = theta * w
    d = tilt(mean, x / n)
    told = np.where(w > 0, information(mean, d), 0.0)
    return n * told - x * (d - gap), w * (gap - d)


# -- The bound -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LowerBound:
    """Bounds of the Graves-Lai constant C(mean): value <= C <= upper."""

    value: float  # the lower bound of regret / log T
    upper: float  # no less than C
    #: `(S, A)`: visits per log T of an exploration of cost `upper` that rules out every confusing
    #: table. Pairs of optimal policies are visited for free and have 0.
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
    tolerance: float = 1e-5,
    budget: int = 20_000,
    max_rounds: int = 200,
) -> LowerBound:
    """The least d regret / d log T of any consistent learner that knows the transitions.

    Losses are 0 or 1; the bound is the same if the learner knows only that they lie in [0, 1].
    Unreachable states and masked actions play no part. Actions with gaps of at most 1e-9 are tied,
    and all of them are optimal.

    Args:
        mean: mean losses `(S, A)`.
        tolerance: stop if upper - value <= tolerance * value.
        budget: the most partial policies that one search examines. It is reached only by MDPs in
            which optimal policies leave out many states; then `exact` is False, and `value` and
            `upper` are still bounds of C.
        max_rounds: the most linear programs.

    Raises:
        ValueError: if a mean is not in [0, 1], the MDP is a batch, or too many states are left out
            by optimal policies.
        ImportError: if SciPy is needed but not installed.
    """
    check_kind("mdp", mdp, LayeredMDP)
    batch = tuple(mdp.batch_shape)
    check_that(not batch, "mdp", "a single MDP", f"a batch of {batch}")
    mean, shape = as_tensor(mean), tuple(mdp.actions.shape)
    check_type("mean", mean, Tensor, "a torch tensor")
    check_that(mean.shape == shape, "mean", f"shape {shape}", tuple(mean.shape))
    mdp, mean = mdp.to("cpu", torch.float64), mean.detach().to("cpu", torch.float64)
    matters = mdp.actions & mdp.reachable.unsqueeze(-1)
    for state, action in (matters & ~((mean >= 0) & (mean <= 1))).nonzero().tolist():
        raise ValueError(
            f"mean: {mdp.locate(state)}, action {action} is {float(mean[state, action])}; means of "
            "these losses must be in [0, 1]"
        )
    for name, number in (("tolerance", tolerance), ("budget", budget), ("max_rounds", max_rounds)):
        check_that(number > 0, name, "a positive number", number)
    excursions = excursions_of(mdp, torch.where(matters, mean, 0.0))
    visits = torch.zeros(mdp.actions.shape, dtype=torch.float64)
    if len(excursions.onward):
        n, found = _by_cutting_planes(excursions, visits, tolerance, budget, max_rounds)
    else:
        n = 1.0 / information(excursions.mean, excursions.gap)  # 0 if no table has such a loss
        value = float(excursions.gap @ n)
        found = LowerBound(value, value, visits, 0, True, "closed form")
    visits.view(-1).numpy()[excursions.pairs] = np.where(excursions.exists, n, 0.0)
    return found


def _by_cutting_planes(
    excursions: Excursions, visits: Tensor, tolerance: float, budget: int, max_rounds: int
) -> tuple[Floats, LowerBound]:
    """Add violated constraints to the linear program until the bounds agree; return n, too."""
    # One visit of every entry, and uniform actions in hidden states.
    gap, exists = excursions.gap, excursions.on_states(excursions.exists)
    arriving, uniform = excursions.first.sum(0), exists / exists.sum(1, keepdims=True)
    for u, onward in enumerate(excursions.onward):
        uniform[u] *= arriving[u]
        arriving = arriving + uniform[u] @ onward
    spread = np.concatenate([np.ones(len(excursions.first)), uniform.ravel()])
    # Any small number of observations: every excursion that can pay off violates them.
    n, value, rounds, exact = 1e-6 * spread, 0.0, 0, False
    # The cheapest exploration so far that satisfies all constraints, and its cost.
    best, cost, cuts = n, np.inf, np.zeros((0, len(n)))
    while rounds < max_rounds:
        search = Search(excursions, np.maximum(n, _FEWEST))
        least, exhaustive, more = search.run(1.0 - tolerance / 4, budget)
        if least > 0 and float(gap @ n) / least < cost:
            best, cost = n / least, float(gap @ n) / least
        exact = cost - value <= tolerance * value or np.isinf(least)
        if exact or not (len(more) or exhaustive):
            break
        cuts, rounds = np.concatenate([cuts, more]), rounds + 1
        cheapest = _cheapest(excursions, cuts)
        value = float(gap @ cheapest)
        # Observations of zero give weak constraints. A little of everything avoids them, and
        # becomes less with every round.
        n = cheapest + 0.1**rounds * value / float(gap @ spread) * spread
    if np.isinf(cost) and not rounds:  # nothing can be confused
        best, cost = np.zeros_like(n), 0.0
    upper = max(cost, value)
    return best, LowerBound(value, upper, visits, rounds, bool(exact), "cutting planes")


def _cheapest(excursions: Excursions, cuts: Floats) -> Floats:
    """The cheapest n with the flow constraints and the cuts `(K, V)`."""
    with extra("limits", "the limit of regret of this MDP needs SciPy"):
        from scipy.optimize import linprog
    U, A, _ = excursions.onward.shape
    # What a hidden state plays, minus what arrives there.
    balance = np.concatenate([0 * excursions.first, np.repeat(np.eye(U), A, 0)])
    balance -= np.concatenate([excursions.first, excursions.onward.reshape(U * A, U)])
    found: Any = linprog(
        excursions.gap,
        A_ub=-cuts,
        b_ub=-np.ones(len(cuts)),
        A_eq=balance.T,
        b_eq=np.zeros(U),
        bounds=[(0, None if exists else 0) for exists in excursions.exists],
        method="highs",
    )
    if found.status != 0:
        raise RuntimeError(f"the linear program of the limit was not solved: {found.message}")
    return np.maximum(found.x, 0.0)
