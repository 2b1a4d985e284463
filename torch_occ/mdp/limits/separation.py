"""The alternative that the fewest observations rule out, by branch and bound.

An alternative lowers the means of entries and hidden pairs (torch_occ.mdp.limits.excursions) and
is confusing if some policy becomes optimal. Let w(z) be the expected visits of a pair z during an
excursion that begins with the entry e and follows a policy on hidden states. Then a policy with the
entry e pays off if the reductions d satisfy

    sum_z w(z) (d(z) - gap(z)) >= 0.

If a policy with several entries is optimal, then at least one of its excursions pays off. So it is
enough to consider every entry alone. Observations n carry the information sum_z n(z) kl(z, d(z)).
Its minimum over all d that let a given excursion pay off is a convex problem with one multiplier:

    max over theta >= 0 of sum_z [ min over d of n kl(z, d) - theta w d ] + theta w gap.

The bracket is concave in w. So for policies that are only partly fixed, a chord over [0, largest w]
bounds it from below, and the minimum over the rest of the policy is backward induction. Branching
fixes the actions of hidden states in layer order. Deterministic transitions, for example, have
w in {0, 1}, and the chord is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from torch_occ.mdp.limits.excursions import Bools, Excursions, Floats, Ints
from torch_occ.mdp.limits.families import Family

#: The range of log theta. Every theta gives a valid bound, and the bound is flat at the best one:
#: an error of 1e-4 changes it by a relative 1e-8. An alternative needs theta itself.
_RANGE = (-32.0, 40.0)

#: The steps of bisection for a bound, and for an alternative.
_COARSE, _FINE = 20, 50

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
        return Nodes(self.entry[rows], self.action[rows], self.mass[rows], self.inflow[rows])

    def join(self, other: Nodes) -> Nodes:
        """All nodes of both."""
        entry, action, mass, inflow = (
            np.concatenate([mine, theirs]) for mine, theirs in zip(self, other, strict=True)
        )
        return Nodes(entry, action, mass, inflow)


class Found(NamedTuple):
    """The outcome of a search."""

    least: float  # a lower bound of the information about every confusing alternative
    exhaustive: bool  # whether no excursion was left out
    cuts: Floats  # (K, E + U * A), kl of confusing alternatives with little information


@dataclass(frozen=True)
class Separation:
    """Searches for confusing alternatives about which given observations say little."""

    excursions: Excursions
    family: Family
    batch: int = 256  # nodes that are bounded together
    budget: int = 20_000  # the most nodes in one search

    @property
    def most_cuts(self) -> int:
        """How many alternatives a search returns at most."""
        return max(60, 2 * len(self.excursions.gap))

    def search(self, n: Floats, target: float) -> Found:
        """Excursions whose information is less than the target, the worst of them first.

        Args:
            n: observations of every variable, `(E + U * A,)`.
            target: excursions with at least this much information are not listed.
        """
        nodes = self._roots()
        bounds, cuts, values = self._bound(nodes, n), [np.zeros((0, len(n)))], [np.zeros(0)]
        least, spent, queue = np.inf, len(bounds), None
        while True:
            complete = ~(nodes.inflow > 0).any(1)
            least = min(least, *bounds[complete], np.inf)
            low = bounds < target
            leaves = np.flatnonzero(complete & low)
            if len(leaves):
                cuts.append(self._alternatives(nodes.take(leaves), n))
                values.append(bounds[leaves])
            least = min(least, *bounds[~low], np.inf)
            rest = np.flatnonzero(~complete & low)
            nodes, bounds = nodes.take(rest), bounds[rest]
            if queue is not None:
                nodes = queue[0].join(nodes)
                bounds = np.concatenate([queue[1], bounds])
            enough = sum(map(len, values)) >= self.most_cuts
            if not len(bounds) or spent >= self.budget or enough:
                break
            order = np.argsort(bounds, kind="stable")
            now, later = order[: self.batch], order[self.batch :]
            queue = (nodes.take(later), bounds[later])
            nodes = self._children(nodes.take(now))
            bounds = self._bound(nodes, n)
            spent += len(bounds)
        order = np.argsort(np.concatenate(values), kind="stable")[: self.most_cuts]
        least = min(least, *bounds, np.inf)
        return Found(float(least), not len(bounds), np.concatenate(cuts)[order])

    # -- the tree ------------------------------------------------------------------------------

    def _roots(self) -> Nodes:
        count, U = self.excursions.first.shape
        return Nodes(
            np.arange(count),
            np.full((count, U), -1),
            np.zeros((count, U)),
            self.excursions.first.copy(),
        )

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

    # -- bounds --------------------------------------------------------------------------------

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
        d = self.family.tilt(mean, x / n)
        information = np.where(w > 0, self.family.information(mean, d), 0.0)
        return n * information - x * (d - gap), w * (gap - d)

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
            return (
                value + (nodes.inflow * ahead).sum(1),
                slope + (nodes.inflow * slope_ahead).sum(1),
            )

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
        dual = self._dual(nodes, np.maximum(n, _FEWEST))
        low, high = self._multiplier(dual, len(nodes.entry), _COARSE)
        return np.maximum(dual(low)[0], dual(high)[0])

    def _alternatives(self, nodes: Nodes, n: Floats) -> Floats:
        """kl of the alternatives that let these excursions pay off, `(B, E + U * A)`."""
        n = np.maximum(n, _FEWEST)
        _, high = self._multiplier(self._dual(nodes, n), len(nodes.entry), _FINE)
        variables, w = self._fixed(nodes)
        r = np.exp(high)[:, None] * w / n[variables]
        mean = self.excursions.mean[variables]
        information = np.where(w > 0, self.family.information(mean, self.family.tilt(mean, r)), 0.0)
        rows = np.zeros((len(w), len(n)))
        np.add.at(rows, (np.arange(len(w))[:, None], variables), information)
        return rows
