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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ._support.constants import TIE
from torch_occ.mdp.checks import as_tensor
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
    """Entries and hidden states of an MDP with mean losses; E entries, U hidden states."""

    shape: torch.Size  # (S, A)
    entries: Ints  # (E,), the number s * A + a of each entry
    hidden: Ints  # (U,), hidden states in layer order
    depth: Ints  # (U,), the layer of each
    mean: Floats  # (E + U * A,), by variable
    gap: Floats  # (E + U * A,), Q(s,a) - V(s)
    exists: Bools  # (E + U * A,); False for masked pairs
    first: Floats  # (E, U), P(hidden state | entry)
    onward: Floats  # (U, A, U), transitions between hidden states
    reach: Floats  # (U, U), the largest probability of getting from one hidden state to another

    @property
    def num_actions(self) -> int:
        return self.onward.shape[1]

    def table(self, x: Floats) -> Tensor:
        """Put a vector of variables on its pairs: `(E + U * A,)` -> `(S, A)`."""
        own = self.hidden[:, None] * self.num_actions + np.arange(self.num_actions)
        found = torch.zeros(self.shape.numel(), dtype=torch.float64)
        found.numpy()[np.concatenate([self.entries, own.ravel()])] = np.where(self.exists, x, 0.0)
        return found.view(self.shape)

    def balance(self) -> Floats:
        """The flow constraints `(U, E + U * A)`: what a hidden state plays minus what arrives."""
        U, A = len(self.hidden), self.num_actions
        played = np.kron(np.eye(U), np.ones(A))
        arriving = np.concatenate([self.first.T, self.onward.reshape(U * A, U).T], 1)
        return np.concatenate([np.zeros((U, len(self.entries))), played], 1) - arriving


def excursions_of(mdp: LayeredMDP, mean: Tensor) -> Excursions:
    """Find the entries and the hidden states; actions with gaps of at most 1e-9 are optimal."""
    plan = optimal_policy(mdp, torch.where(mdp.actions, mean, 0.0))
    limit = TIE * plan.value.abs().clamp(min=1.0).unsqueeze(-1)
    optimal = mdp.actions & (plan.gaps <= limit)
    visited = _visited(mdp, optimal)
    entry = mdp.actions & ~optimal & visited.unsqueeze(-1)
    hidden = mdp.reachable & ~visited
    count, num_actions = int(hidden.sum()), mdp.num_actions
    if count * num_actions * count > LARGEST:
        raise ValueError(
            f"mdp: {count:,} states are reachable but not visited by an optimal policy; the limit "
            f"of regret is computed with a table of {count:,} x {num_actions} x {count:,} numbers, "
            f"and {LARGEST:,} are the most; use a smaller MDP"
        )
    place = hidden.cumsum(0) - 1  # the number of a hidden state among the hidden ones
    first = np.zeros((int(entry.sum()), count))
    onward = np.zeros((count, num_actions, count))
    number = (entry.flatten().cumsum(0) - 1).view_as(entry)
    for k, here in enumerate(mdp.layer_slices[:-1]):
        there = mdp.layer_slices[k + 1]
        into = hidden[there]
        if not bool(into.any()):
            continue
        columns = place[there][into].numpy()
        rows = mdp.layers[k].dense.detach()[..., into]  # (S_k, A, hidden states of layer k + 1)
        chosen, out = entry[here], hidden[here]
        first[np.ix_(number[here][chosen].numpy(), columns)] = rows[chosen].numpy()
        index = np.ix_(place[here][out].numpy(), np.arange(num_actions), columns)
        onward[index] = rows[out].numpy()

    def vector(table: Tensor) -> NDArray[Any]:
        """The variables of a table `(S, A)`."""
        return torch.cat([table[entry], table[hidden].flatten()]).numpy()

    depth = mdp.layer[hidden].numpy()
    return Excursions(
        shape=mdp.actions.shape,
        entries=entry.flatten().nonzero().squeeze(-1).numpy(),
        hidden=hidden.nonzero().squeeze(-1).numpy(),
        depth=depth,
        mean=vector(torch.where(mdp.actions, mean, 0.0)),
        gap=vector(plan.gaps),
        exists=vector(mdp.actions),
        first=first,
        onward=onward,
        reach=_reach(onward, mdp.actions[hidden].numpy(), depth),
    )


def _visited(mdp: LayeredMDP, optimal: Tensor) -> Tensor:
    """Whether some policy with optimal actions only visits a state, `(S,)`."""
    flags = [mdp.initial.detach() > 0]
    played = mdp.split(optimal, -2)
    for layer, actions in zip(mdp.layers[:-1], played[:-1], strict=True):
        mass = (flags[-1].unsqueeze(-1) & actions).to(mdp.dtype)
        flags.append(layer.arrive(mass).detach() > 0)
    return torch.cat(flags)


def _reach(onward: Floats, actions: Bools, depth: Ints) -> Floats:
    """The largest probability, over policies, of getting from one hidden state to another."""
    found = np.eye(len(onward))
    for k in sorted(set(depth.tolist()), reverse=True):
        here = depth == k
        ahead = np.where(actions[here][:, :, None], onward[here] @ found, 0.0)
        found[here] = np.maximum(found[here], ahead.max(1))
    return found


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

#: The range of log theta, and the steps of bisection for a bound and for an alternative. Every
#: theta gives a valid bound, flat at the best one: an error of 1e-4 changes it by 1e-8.
_RANGE, _COARSE, _FINE = (-32.0, 40.0), 20, 50

#: Fewer observations than this count as this many; none would make theta w / n infinite.
_FEWEST = 1e-12
#: A lower bound of the information as a function of log theta `(B,)`, and its derivative by theta.
Dual = Callable[[Floats], tuple[Floats, Floats]]


class Nodes(NamedTuple):
    """Partly fixed excursions, B of them."""

    entry: Ints  # (B,)
    action: Ints  # (B, U), -1 if it is not fixed
    mass: Floats  # (B, U), visits of states with a fixed action
    inflow: Floats  # (B, U), visits of other states that come directly from fixed pairs

    def take(self, rows: Ints) -> Nodes:
        """Some of the nodes."""
        return Nodes._make(part[rows] for part in self)

    def join(self, other: Nodes) -> Nodes:
        """All nodes of both."""
        return Nodes._make(map(np.concatenate, zip(self, other, strict=True)))


class Alternatives(NamedTuple):
    """The outcome of a search."""

    least: float  # a lower bound of the information about every confusing alternative
    exhaustive: bool  # whether no excursion was left out
    cuts: Floats  # (K, E + U * A), kl of confusing alternatives with little information


@dataclass(frozen=True)
class Separation:
    """Searches for confusing alternatives about which given observations say little."""

    excursions: Excursions
    batch: int = 256  # nodes that are bounded together
    budget: int = 20_000  # the most nodes in one search

    def search(self, n: Floats, target: float) -> Alternatives:
        """Excursions with less information than the target from observations n, worst first."""
        n, first = np.maximum(n, _FEWEST), self.excursions.first
        nodes = Nodes(np.arange(len(first)), np.full(first.shape, -1), 0 * first, first.copy())
        bounds, cuts, values = self._bound(nodes, n), [np.zeros((0, len(n)))], [np.zeros(0)]
        least, spent, queue = np.inf, len(bounds), None
        most_cuts = max(60, 2 * len(n))
        while True:
            complete = ~(nodes.inflow > 0).any(1)
            least = min(least, *bounds[complete], np.inf)
            low = bounds < target
            if len(leaves := np.flatnonzero(complete & low)):
                cuts.append(self._alternatives(nodes.take(leaves), n))
                values.append(bounds[leaves])
            least = min(least, *bounds[~low], np.inf)
            rest = np.flatnonzero(~complete & low)
            nodes, bounds = nodes.take(rest), bounds[rest]
            if queue is not None:
                nodes = queue[0].join(nodes)
                bounds = np.concatenate([queue[1], bounds])
            enough = sum(map(len, values)) >= most_cuts
            if not len(bounds) or spent >= self.budget or enough:
                break
            order = np.argsort(bounds, kind="stable")
            now, later = order[: self.batch], order[self.batch :]
            queue = (nodes.take(later), bounds[later])
            nodes = self._children(nodes.take(now))
            bounds = self._bound(nodes, n)
            spent += len(bounds)
        order = np.argsort(np.concatenate(values), kind="stable")[:most_cuts]
        least = min(least, *bounds, np.inf)
        return Alternatives(float(least), not len(bounds), np.concatenate(cuts)[order])

    def _children(self, nodes: Nodes) -> Nodes:
        """Fix the action of the first state with inflow, in every possible way."""
        state = (nodes.inflow > 0).argmax(1)
        parent, action = np.nonzero(self._exists[state])
        child, at = nodes.take(parent), state[parent]
        rows = np.arange(len(parent))
        amount = child.inflow[rows, at]
        inflow = child.inflow + amount[:, None] * self.excursions.onward[at, action]
        mass, fixed = child.mass.copy(), child.action.copy()
        mass[rows, at], inflow[rows, at], fixed[rows, at] = amount, 0.0, action
        return Nodes(child.entry, fixed, mass, inflow)

    @cached_property
    def _exists(self) -> Bools:
        """Whether a pair of a hidden state exists, `(U, A)`."""
        E = len(self.excursions.entries)
        return self.excursions.exists[E:].reshape(-1, self.excursions.num_actions)

    def _fixed(self, nodes: Nodes) -> tuple[Ints, Floats]:
        """The variables that are fixed and their visits, `(B, 1 + U)` each."""
        E, A = len(self.excursions.entries), self.excursions.num_actions
        states = np.arange(nodes.action.shape[1])
        pairs = E + states * A + np.maximum(nodes.action, 0)
        variables = np.concatenate([nodes.entry[:, None], pairs], 1)
        return variables, np.concatenate([np.ones((len(pairs), 1)), nodes.mass], 1)

    def _bracket(
        self, n: Floats, mean: Floats, gap: Floats, w: Floats, theta: Floats
    ) -> tuple[Floats, Floats]:
        """The bracket for every pair, and its derivative by theta."""
        x = theta * w
        d = tilt(mean, x / n)
        told = np.where(w > 0, information(mean, d), 0.0)
        return n * told - x * (d - gap), w * (gap - d)

    def _dual(self, nodes: Nodes, n: Floats) -> Dual:
        """The bound as a function of the multiplier."""
        ex = self.excursions
        E, A, U = len(ex.entries), ex.num_actions, len(ex.hidden)
        variables, w = self._fixed(nodes)
        fixed = n[variables], ex.mean[variables], ex.gap[variables], w
        most = nodes.inflow @ ex.reach  # (B, U), the largest visits of each state
        chord = np.maximum(most, 1e-300)[:, :, None]
        observed, mean, gap = (x[E:].reshape(U, A) for x in (n, ex.mean, ex.gap))
        is_open = bool((nodes.inflow > 0).any())

        def dual(log_theta: Floats) -> tuple[Floats, Floats]:
            theta = np.exp(log_theta)[:, None]
            values, slopes = self._bracket(*fixed, theta)
            value, slope = values.sum(1), slopes.sum(1)
            if not is_open:
                return value, slope
            values, slopes = self._bracket(observed, mean, gap, most[:, :, None], theta[..., None])
            values = np.where(self._exists, values / chord, np.inf)
            ahead, slope_ahead = self._backward(values, slopes / chord)
            rest, slope_rest = ((nodes.inflow * part).sum(1) for part in (ahead, slope_ahead))
            return value + rest, slope + slope_rest

        return dual

    def _backward(self, values: Floats, slopes: Floats) -> tuple[Floats, Floats]:
        """The least sum of values `(B, U, A)` from every state on, and the sum of its slopes."""
        A = self.excursions.num_actions
        ahead, slope_ahead = np.zeros((2, *values.shape[:2]))
        for here, there, moves in self._moves:
            total, slope_total = (
                part[:, here] + (later[:, there] @ moves).reshape(len(part), -1, A)
                for part, later in ((values, ahead), (slopes, slope_ahead))
            )
            best = total == total.min(-1, keepdims=True)
            ahead[:, here] = total.min(-1)
            # Of tied actions, any slope is a derivative; the largest one is taken.
            slope_ahead[:, here] = np.where(best, slope_total, -np.inf).max(-1)
        return ahead, slope_ahead

    @cached_property
    def _moves(self) -> list[tuple[slice, slice, Floats]]:
        """Per layer, last first: its hidden states, those of the next, `(next, here * A)`."""
        ex, A, found = self.excursions, self.excursions.num_actions, []
        for k in sorted(set(ex.depth.tolist()), reverse=True):
            first, stop, end = np.searchsorted(ex.depth, [k, k + 1, k + 2]).tolist()
            moves = ex.onward[first:stop, :, stop:end].reshape((stop - first) * A, end - stop).T
            found.append((slice(first, stop), slice(stop, end), moves))
        return found

    def _multiplier(self, dual: Dual, count: int, steps: int) -> tuple[Floats, Floats]:
        """The best log theta from below and from above, by bisection of the derivative."""
        low, high = (np.full(count, x) for x in _RANGE)
        for _ in range(steps):
            middle = 0.5 * (low + high)
            rising = dual(middle)[1] > 0
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        return low, high

    def _bound(self, nodes: Nodes, n: Floats) -> Floats:
        """A lower bound of the information, exact for nodes with no open state, `(B,)`."""
        dual = self._dual(nodes, n)
        low, high = self._multiplier(dual, len(nodes.entry), _COARSE)
        return np.maximum(dual(low)[0], dual(high)[0])

    def _alternatives(self, nodes: Nodes, n: Floats) -> Floats:
        """kl of the alternatives that let these excursions pay off, `(B, E + U * A)`."""
        _, high = self._multiplier(self._dual(nodes, n), len(nodes.entry), _FINE)
        variables, w = self._fixed(nodes)
        r = np.exp(high)[:, None] * w / n[variables]
        mean = self.excursions.mean[variables]
        told = np.where(w > 0, information(mean, tilt(mean, r)), 0.0)
        rows = np.zeros((len(w), len(n)))
        np.add.at(rows, (np.arange(len(w))[:, None], variables), told)
        return rows


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
    mdp, mean = _checked(mdp, mean)
    for name, number in (("tolerance", tolerance), ("budget", budget), ("max_rounds", max_rounds)):
        if not number > 0:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    excursions = excursions_of(mdp, mean)
    if len(excursions.hidden):
        return _by_cutting_planes(Separation(excursions, budget=budget), tolerance, max_rounds)
    possible = excursions.gap < excursions.mean
    told = information(excursions.mean, excursions.gap)
    n = np.divide(1.0, told, out=np.zeros_like(told), where=possible)
    value = float(excursions.gap @ n)
    return LowerBound(value, value, excursions.table(n), 0, True, "closed form")


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


def _checked(mdp: LayeredMDP, mean: Tensor) -> tuple[LayeredMDP, Tensor]:
    """The MDP and the means in float64 on the CPU, or a ValueError."""
    if not isinstance(mdp, LayeredMDP):
        raise TypeError(f"mdp: expected an occ.LayeredMDP, got {type(mdp).__name__}")
    if mdp.batch_shape:
        raise ValueError(f"mdp: expected a single MDP, got a batch of {tuple(mdp.batch_shape)}")
    mean = as_tensor(mean)
    if not isinstance(mean, Tensor):
        raise TypeError(f"mean: expected a torch tensor, got {type(mean).__name__}")
    if mean.shape != mdp.actions.shape:
        shape = tuple(mdp.actions.shape)
        raise ValueError(f"mean: expected shape {shape}, got {tuple(mean.shape)}")
    mdp, mean = mdp.to("cpu", torch.float64), mean.detach().to("cpu", torch.float64)
    matters = mdp.actions & mdp.reachable.unsqueeze(-1)
    for state, action in (matters & ~((mean >= 0) & (mean <= 1))).nonzero().tolist():
        raise ValueError(
            f"mean: {mdp.locate(state)}, action {action} is {float(mean[state, action])}; means of "
            "these losses must be in [0, 1]"
        )
    return mdp, torch.where(matters, mean, 0.0)
