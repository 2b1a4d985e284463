"""Shaping, compiled: the loss as the gaps of its optimal policy.

`shape_loss` adds up as the numbers come. Rounding leaves an error of eps times the values; where that
is too much for the certificate, `shape_finely` does what torch_occ.step.shaping explains.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.layout import (
    GAPS,
    LIFT,
    OTHERS,
    PAIR,
    PLAN,
    PULL,
    RESPONSE,
    ROUNDING,
    TRIAL,
    Floats,
    M,
    Model,
    Rows,
    Terms,
    U,
    V,
    Work,
    ahead,
    either,
    inlined,
    kernel,
    part,
    span,
    unsigned,
)
from torch_occ.kernels.psi import bend_at_one

EPS = float(np.finfo(np.float64).eps)
#: Binary digits of the leading parts of values, and what adds a number to cut P after 26 of them.
DIGITS, CUTTER = 24, 1.5 * 2.0**26
FINE = EPS * 2.0 ** (2 - DIGITS)

# Rows of the states that nobody else needs while the loss is shaped.
LOW, LEADING, LEFT, BASE = PULL, U, M, OTHERS


@part
def shape_loss(model: Model, loss: Floats, work: Work) -> float:
    """Replace the loss by the gaps of its optimal policy. Returns the largest value, PLAN."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    largest = 0.0
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in span(start[k], behind):
            best = np.inf
            for i in span(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    total = loss[i] + ahead(model.next_state, i, states, PLAN, behind, after)
                    pairs[GAPS, i] = total
                    best = min(best, total)
            states[PLAN, s] = best
            largest = max(largest, abs(best))
            states[V, s] = 0.0  # where an iterative solver begins
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[GAPS, i] = pairs[GAPS, i] - best if model.exists[PAIR, i] else 0.0
    return largest


@part
def least_unit(terms: Terms, weights: Floats) -> float:
    """A lower bound of q times its curvature: x f''(x) falls with x, and q is at most 1."""
    unit = 0.0
    for term in range(len(weights)):
        if terms.argument[term] == PAIR:
            unit += bend_at_one(terms.function[term], terms.exponent[term]) * weights[term]
    return unit


@kernel
def shape_finely(model: Model, loss: Floats, work: Work) -> None:
    """The same as `shape_loss` without rounding errors, and ROUNDING, an estimate of what is left of them.

    The layers' constants go into LIFT, at their first state.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    exists = model.exists
    for k in range(len(start) - 2, -1, -1):
        here, behind = start[k], start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        cut_values(behind, behind + after, states)
        lowest, highest = np.inf, -np.inf
        for s in range(here, behind):
            first, base = s * num_actions, np.inf
            for i in range(first, first + num_actions):
                base = min(base, loss[i]) if exists[PAIR, i] else base
            states[BASE, s] = base
            lowest, highest = min(lowest, base), max(highest, base)
            best = -1
            for i in range(first, first + num_actions):
                pairs[GAPS, i], pairs[TRIAL, i], pairs[ROUNDING, i] = 0.0, 0.0, 0.0
                if exists[PAIR, i]:
                    high, low = two_sum(loss[i], -base)
                    expected, rest, off, size = expect(model.next_state, i, states, behind, after)
                    rest -= expected * off if model.conserved else 0.0
                    high, lost = two_sum(high, expected)
                    pairs[GAPS, i], pairs[TRIAL, i] = two_sum(high, low + lost + rest)
                    pairs[ROUNDING, i], pairs[RESPONSE, i] = size, expected + rest
                    if best < 0 or before(pairs, i, best) < 0.0:
                        best = i
            high, low, same = pairs[GAPS, best], pairs[TRIAL, best], pairs[RESPONSE, best]
            size = pairs[ROUNDING, best]
            for i in range(first, first + num_actions):
                if exists[PAIR, i]:
                    gap = (pairs[GAPS, i] - high) + (pairs[TRIAL, i] - low)
                    pairs[GAPS, i] = gap
                    # Where the same is expected, rounding did the same.
                    both = pairs[ROUNDING, i] + size
                    pairs[ROUNDING, i] = FINE * both if pairs[RESPONSE, i] != same else 0.0
            states[PLAN, s], states[LOW, s] = high, low
            states[V, s] = 0.0  # where an iterative solver begins
        # The base of this layer that is closest to zero: no number becomes larger by taking it out.
        constant = max(lowest, 0.0) + min(highest, 0.0) if model.conserved else 0.0
        states[LIFT, here] = constant
        for s in range(here, behind):
            high, low = two_sum(states[BASE, s], -constant)
            high, lost = two_sum(high, states[PLAN, s])
            states[PLAN, s], states[LOW, s] = two_sum(high, low + lost + states[LOW, s])
    total = 0.0
    for k in range(len(start) - 2, -1, -1):
        total += states[LIFT, start[k]]
        for s in range(start[k], start[k + 1]):
            states[PLAN, s] += total


@inlined
def before(pairs: Floats, i: int, j: int) -> float:
    """Negative if the total of pair i is less than that of pair j."""
    return (pairs[GAPS, i] - pairs[GAPS, j]) + (pairs[TRIAL, i] - pairs[TRIAL, j])


@inlined
def two_sum(a: float, b: float) -> tuple[float, float]:
    """a + b, and what its rounding left out (Knuth)."""
    total = a + b
    piece = total - a
    return total, (a - (total - piece)) + (b - piece)


@part
def cut_values(first: int, stop: int, states: Floats) -> None:
    """Values PLAN + LOW as LEADING + LEFT, the former with few digits."""
    size = 0.0
    for s in range(first, stop):
        size = max(size, abs(states[PLAN, s]))
    grid = 2.0 ** (np.ceil(np.log2(size)) - DIGITS) if size > 0.0 else 1.0
    cutter = 1.5 * grid / EPS
    for s in range(first, stop):
        states[LEADING, s] = (states[PLAN, s] + cutter) - cutter
        states[LEFT, s] = (states[PLAN, s] - states[LEADING, s]) + states[LOW, s]


@inlined
def _expect_dense(
    next_state: Floats, pair: int, states: Floats, first: int, width: int
) -> tuple[float, float, float, float]:
    """E[value | pair] as two numbers, by how much the row sums to more than one, and E|value|."""
    exact, rest, total, more, size = 0.0, 0.0, 0.0, 0.0, 0.0
    for j in range(width):
        s = unsigned(first + j)
        p = next_state[pair, j]
        high = (p + CUTTER) - CUTTER
        exact += high * states[LEADING, s]
        rest += (p - high) * states[LEADING, s] + p * states[LEFT, s]
        total += high
        more += p - high
        size += p * abs(states[LEADING, s])
    return exact, rest, (total - 1.0) + more, size


@inlined
def _expect_sparse(
    next_state: Rows, pair: int, states: Floats, first: int, width: int
) -> tuple[float, float, float, float]:
    exact, rest, total, more, size = 0.0, 0.0, 0.0, 0.0, 0.0
    for entry in range(next_state.starts[pair], next_state.starts[pair + 1]):
        s = next_state.state[entry]
        p = next_state.probability[entry]
        high = (p + CUTTER) - CUTTER
        exact += high * states[LEADING, s]
        rest += (p - high) * states[LEADING, s] + p * states[LEFT, s]
        total += high
        more += p - high
        size += p * abs(states[LEADING, s])
    return exact, rest, (total - 1.0) + more, size


expect = either(_expect_dense, _expect_sparse)
