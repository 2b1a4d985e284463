"""The FTRL step with many digits: an oracle in mpmath, over Python lists, that shares no code."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import mpmath
from mpmath import mp, mpf
from torch import Tensor

import torch_occ as occ

DIGITS = 40


@dataclass(frozen=True)
class Term:
    """c * alpha^i beta^j ... * sum over x of f(x), with x = offset + row . q; f by f' and f''."""

    slope: Callable[[mpf], mpf]
    bend: Callable[[mpf], mpf]
    coefficient: int
    exponents: dict[str, mpf]
    rows: list[tuple[int, dict[int, int]]]  # (offset, {pair: factor})

    def weight(self, theta: dict[str, mpf]) -> mpf:
        powers = [theta[name] ** power for name, power in self.exponents.items()]
        return mp.fprod([self.coefficient, *powers])


class Oracle:
    """F(q, v) = (grad psi + loss - E'v, E q - b) = 0 by Newton's method over Python lists."""

    def __init__(
        self, mdp: occ.LayeredMDP, loss: Tensor, theta: dict[str, float], terms: str
    ) -> None:
        self.pairs = [tuple(pair) for pair in mdp.actions.nonzero().tolist()]
        self.num_states = mdp.num_states
        self.theta = {name: mpf(value) for name, value in theta.items()}
        kinds = {"hybrid": self.hybrid, "shannon": self.shannon, "complement": self.complement}
        self.terms = kinds[terms]()
        self.loss = [mpf(float(loss[pair])) for pair in self.pairs]
        P = mdp.joint_transitions
        self.P = [[mpf(float(p)) for p in P[pair]] for pair in self.pairs]  # [pair][next state]
        self.source = [mpf(0)] * mdp.num_states
        self.source[: len(mdp.initial)] = [mpf(float(p)) for p in mdp.initial]

    def hybrid(self) -> list[Term]:
        rest = []
        for s, a in self.pairs:
            others = [j for j, (other, b) in enumerate(self.pairs) if other == s and b != a]
            rest += [(0, dict.fromkeys(others, 1))] if others else []
        barrier = Term(lambda x: -1 / x, lambda x: x**-2, 1, {"beta": 1}, self.each())
        return [self.root(-1, {}, self.each()), self.root(-1, {"alpha": 1}, rest), barrier]

    def shannon(self) -> list[Term]:
        exponents = {"gamma": -1, "t": mpf(0.5)}
        return [Term(lambda x: mp.log(x) + 1, lambda x: 1 / x, 1, exponents, self.each())]

    def complement(self) -> list[Term]:
        rows = [(1, {i: -1}) for i in range(len(self.pairs))]
        return [self.root(-1, {}, self.each()), self.root(-1, {"alpha": 1}, rows)]

    def each(self) -> list[tuple[int, dict[int, int]]]:
        return [(0, {i: 1}) for i in range(len(self.pairs))]

    def root(
        self, coefficient: int, exponents: dict[str, int], rows: list[tuple[int, dict[int, int]]]
    ) -> Term:
        slope, bend = lambda x: 1 / (2 * mp.sqrt(x)), lambda x: -1 / (4 * x * mp.sqrt(x))
        return Term(slope, bend, coefficient, {**exponents, "gamma": -1, "t": mpf(0.5)}, rows)

    def gradient(self, term: Term, q: list[mpf]) -> list[mpf]:
        """Of the term without its weight."""
        total = [mpf(0)] * len(q)
        for offset, row in term.rows:
            slope = term.slope(offset + sum(factor * q[i] for i, factor in row.items()))
            for i, factor in row.items():
                total[i] += factor * slope
        return total

    def residual(self, q: list[mpf], v: list[mpf]) -> mpmath.matrix:
        parts = []
        for term in self.terms:
            weight = term.weight(self.theta)
            parts.append([weight * g for g in self.gradient(term, q)])
        ahead = [sum(p * x for p, x in zip(row, v, strict=True)) for row in self.P]
        rows = zip(*parts, self.loss, self.pairs, ahead, strict=True)
        dual = [sum(g) + c - v[s] + x for *g, c, (s, _), x in rows]
        arrived = [sum(self.P[i][s] * x for i, x in enumerate(q)) for s in range(self.num_states)]
        gone = [mpf(0)] * self.num_states
        for x, (state, _) in zip(q, self.pairs, strict=True):
            gone[state] += x
        flow = [g - a - b for g, a, b in zip(gone, arrived, self.source, strict=True)]
        return mp.matrix([*dual, *flow])

    def jacobian(self, q: list[mpf]) -> mpmath.matrix:
        n = len(q)
        K = mp.zeros(n + self.num_states)
        for term in self.terms:
            for offset, row in term.rows:
                at = offset + sum(factor * q[i] for i, factor in row.items())
                bend = term.weight(self.theta) * term.bend(at)
                for (i, x), (j, y) in product(row.items(), row.items()):
                    K[i, j] += bend * x * y
        for (i, (state, _)), s in product(enumerate(self.pairs), range(self.num_states)):
            K[n + s, i] = int(state == s) - self.P[i][s]
            K[i, n + s] = -K[n + s, i]
        return K

    def solve(self, start: Tensor) -> tuple[list[mpf], list[mpf]]:
        n = len(self.pairs)
        q, v = [mpf(float(start[pair])) for pair in self.pairs], [mpf(0)] * self.num_states
        for _ in range(10):
            change = mp.lu_solve(self.jacobian(q), -self.residual(q, v))
            q = [x + dx for x, dx in zip(q, change[:n], strict=True)]
            v = [x + dx for x, dx in zip(v, change[n:], strict=True)]
            moved = max(abs(dx / x) for x, dx in zip(q, change[:n], strict=True))
            if moved < mpf(10) ** (5 - DIGITS):
                return q, v
        raise AssertionError("the oracle did not converge")

    def pull_back(
        self, q: list[mpf], v: list[mpf], q_bar: Tensor, v_bar: Tensor
    ) -> dict[str, object]:
        """The gradient of <q_bar, q> + <v_bar, v> in everything: K' m = z_bar, then - m . dF."""
        n = len(q)
        bars = [*(float(q_bar[pair]) for pair in self.pairs), *(float(x) for x in v_bar)]
        m = mp.lu_solve(self.jacobian(q).T, mp.matrix([mpf(x) for x in bars]))
        states = range(self.num_states)
        found: dict[str, object] = {"loss": [-x for x in m[:n]]}
        found["initial"] = m[n : n + len(self.source)]
        found["P"] = [[m[n + s] * q[i] - m[i] * v[s] for s in states] for i in range(n)]
        for name, value in self.theta.items():
            found[name] = mpf(0)
            for term in self.terms:
                rate = term.exponents.get(name, 0) * term.weight(self.theta) / value
                slopes = self.gradient(term, q)
                found[name] -= rate * sum(x * g for x, g in zip(m[:n], slopes, strict=True))
        return found
