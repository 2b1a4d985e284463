"""The alternative that the fewest observations rule out, by branch and bound.

An alternative lowers the means of entries and hidden pairs (torch_occ.theory.limits.excursions) and
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

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from torch_occ.theory.limits.excursions import Bools, Excursions, Floats, Ints
from torch_occ.theory.limits.families import Family

#: The range of log theta, and the steps of bisection in it. Every theta gives a valid bound, and
#: the bound is flat at the best one: an error of 1e-4 changes it by a relative 1e-8. An alternative
#: needs theta itself.
_RANGE, _COARSE, _FINE = (-32.0, 40.0), 20, 50

#: Fewer observations than this count as this many; none would make theta w / n infinite.
_FEWEST = 1e-12


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

    @property
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
        observations = np.maximum(n, _FEWEST)
        d = self.family.tilt(mean, x / observations)
        information = np.where(w > 0, self.family.information(mean, d), 0.0)
        return observations * information - x * (d - gap), w * (gap - d)

    def _dual(self, nodes: Nodes, n: Floats, log_theta: Floats) -> tuple[Floats, Floats]:
        """The bound at a multiplier, and its derivative by theta, `(B,)` each."""
        ex = self.excursions
        theta = np.exp(log_theta)[:, None]
        variables, w = self._fixed(nodes)
        values, slopes = self._bracket(
            n[variables], ex.mean[variables], ex.gap[variables], w, theta
        )
        value, slope = values.sum(1), slopes.sum(1)
        if not (nodes.inflow > 0).any():
            return value, slope
        E, A, U = len(ex.entries), ex.num_actions, len(ex.hidden)
        most = nodes.inflow @ ex.reach  # (B, U), the largest visits of each state
        chord = np.maximum(most, 1e-300)[:, :, None]
        observed, mean, gap = (x[E:].reshape(U, A) for x in (n, ex.mean, ex.gap))
        values, slopes = self._bracket(observed, mean, gap, most[:, :, None], theta[..., None])
        values, slopes = values / chord, slopes / chord
        values = np.where(self._exists, values, np.inf)
        ahead, slope_ahead = np.zeros((2, len(value), U))
        for k in sorted(set(ex.depth.tolist()), reverse=True):
            here, there = np.flatnonzero(ex.depth == k), np.flatnonzero(ex.depth == k + 1)
            moves = (
                ex.onward[np.ix_(here, np.arange(A), there)].reshape(len(here) * A, len(there)).T
            )
            total, slope_total = (
                part[:, here] + (later[:, there] @ moves).reshape(-1, len(here), A)
                for part, later in ((values, ahead), (slopes, slope_ahead))
            )
            best = total.argmin(-1)[..., None]
            ahead[:, here] = np.take_along_axis(total, best, -1)[..., 0]
            slope_ahead[:, here] = np.take_along_axis(slope_total, best, -1)[..., 0]
        return (
            value + (nodes.inflow * ahead).sum(1),
            slope + (nodes.inflow * slope_ahead).sum(1),
        )

    def _multiplier(self, nodes: Nodes, n: Floats, steps: int) -> tuple[Floats, Floats]:
        """The best log theta from below and from above, by bisection of the derivative."""
        low, high = (np.full(len(nodes.entry), x) for x in _RANGE)
        for _ in range(steps):
            middle = 0.5 * (low + high)
            rising = self._dual(nodes, n, middle)[1] > 0
            low, high = np.where(rising, middle, low), np.where(rising, high, middle)
        return low, high

    def _bound(self, nodes: Nodes, n: Floats) -> Floats:
        """A lower bound of the information, exact for nodes with no open state, `(B,)`."""
        low, high = self._multiplier(nodes, n, _COARSE)
        return np.maximum(self._dual(nodes, n, low)[0], self._dual(nodes, n, high)[0])

    def _alternatives(self, nodes: Nodes, n: Floats) -> Floats:
        """kl of the alternatives that let these excursions pay off, `(B, E + U * A)`."""
        _, high = self._multiplier(nodes, n, _FINE)
        variables, w = self._fixed(nodes)
        r = np.exp(high)[:, None] * w / np.maximum(n[variables], _FEWEST)
        mean = self.excursions.mean[variables]
        information = np.where(w > 0, self.family.information(mean, self.family.tilt(mean, r)), 0.0)
        rows = np.zeros((len(w), len(n)))
        np.add.at(rows, (np.arange(len(w))[:, None], variables), information)
        return rows
