"""Potential-based shaping, compiled: replace the loss by the gaps of its optimal policy.

This is the compiled form of torch_occ.step.newton. `shape_loss` is plain backward induction, with
a rounding error of eps times the values. If that is too much for the certificate, `shape_finely`
computes the gaps with compensated sums; torch_occ.step.newton explains how.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, lane, lanes_of, where
from torch_occ.engine.layout import (
    Floats,
    Model,
    Terms,
    Work,
    ahead,
    inlined,
    likelihoods,
    routine,
    span,
    successor,
    unsigned,
)
from torch_occ.engine.psi import bend_at_one, number_of, varies

EPS = float(np.finfo(np.float64).eps)

# Rows of the states that are free while the loss is shaped.
BASE, LOST = at.OTHERS, at.V  # LOST: the rounding error of PLAN + LOW


@routine(inline=True)
def shape_loss(model: Model, loss: Floats, work: Work) -> Any:
    """Write the gaps of the loss into GAPS, its values into PLAN; returns the largest |value|."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    largest = 0.0
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in span(start[k], behind):
            best = np.inf
            for i in span(s * num_actions, (s + 1) * num_actions):
                if model.exists[at.PAIR, i]:
                    total = loss[i] + ahead(model.next_state, i, states, at.PLAN, behind, after)
                    pairs[at.GAPS, i] = total
                    best = min(best, total)
            states[at.PLAN, s], states[at.LOW, s] = best, 0.0
            largest = max(largest, abs(best))
            states[at.V, s] = 0.0  # the start of an iterative solver
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[at.GAPS, i] = pairs[at.GAPS, i] - best if model.exists[at.PAIR, i] else 0.0
    return largest


@routine(inline=True)
def least_unit(model: Model, terms: Terms, weights: Floats) -> Any:
    """A lower bound of q times the curvature of psi: x f''(x) decreases in x, and q <= 1."""
    if varies(terms, weights):
        return least_of_each(model, terms, weights)
    unit = 0.0
    for term in range(len(terms.argument)):
        if terms.argument[term] == at.PAIR:
            unit += bend_at_one(terms.function[term], terms.exponent[term]) * weights[term]
    return unit


@routine
def least_of_each(model: Model, terms: Terms, weights: Floats) -> Any:
    """`least_unit` with one weight or exponent per pair, over states with a choice."""
    count, least = len(terms.argument), np.inf
    for i in range(max(len(weights), len(terms.exponent)) // count):
        unit = 0.0
        for term in range(count):
            if terms.argument[term] == at.PAIR:
                p = number_of(terms, terms.exponent, term, i)
                unit += bend_at_one(terms.function[term], p) * number_of(terms, weights, term, i)
        least = min(least, unit) if model.exists[at.REST, i] else least
    return least


@routine
def shape_finely(model: Model, loss: Floats, work: Work) -> None:
    """`shape_loss` with compensated sums.

    ROUNDING receives the remaining rounding errors of the gaps: what sums of low parts lose, added
    up. Values ahead are read relative to that of the likeliest successor of the best action, which
    cancels in the gaps. LIFT receives the constant of every layer, at its first state.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    exists = model.exists
    for k in range(len(start) - 2, -1, -1):
        here, behind = start[k], start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        lowest, highest = np.inf, -np.inf
        for s in range(here, behind):
            first, base, least, ref = s * num_actions, np.inf, np.inf, -1
            for i in range(first, first + num_actions):
                base = min(base, loss[i]) if exists[at.PAIR, i] else base
                total = loss[i] + ahead(model.next_state, i, states, at.PLAN, behind, after)
                if exists[at.PAIR, i] and model.conserved and total < least:
                    least, ref = total, main_successor(model.next_state, i, behind, after)
            states[BASE, s] = base
            lowest, highest = min(lowest, base), max(highest, base)
            best = -1
            for i in range(first, first + num_actions):
                pairs[at.GAPS, i], pairs[at.TRIAL, i], pairs[at.ROUNDING, i] = 0.0, 0.0, 0.0
                if exists[at.PAIR, i]:
                    high, low = two_sum(loss[i], -base)
                    expected, rest, error = expect(model, i, states, behind, after, ref)
                    high, lost = two_sum(high, expected)
                    low, error = gather(low, lost, error)
                    low, pairs[at.ROUNDING, i] = gather(low, rest, error)
                    pairs[at.GAPS, i], pairs[at.TRIAL, i] = two_sum(high, low)
                    order = before(pairs, i, best) if best >= 0 else -1.0
                    # Beside huge values, totals may be equal although the losses differ.
                    if order < 0.0 or (order == 0.0 and loss[i] < loss[best]):
                        best = i
            high, low, error = pairs[at.GAPS, best], pairs[at.TRIAL, best], pairs[at.ROUNDING, best]
            for i in range(first, first + num_actions):
                if exists[at.PAIR, i]:
                    gap = (pairs[at.GAPS, i] - high) + (pairs[at.TRIAL, i] - low)
                    # Where rows of P are equal, so are expected values and their rounding errors.
                    alike = are_equal(model.next_state, i, best, after)
                    pairs[at.GAPS, i] = max(loss[i] - loss[best], 0.0) if alike else gap
                    pairs[at.ROUNDING, i] = 0.0 if alike else pairs[at.ROUNDING, i] + error
            if ref >= 0:
                high, lost = two_sum(high, states[at.PLAN, ref])
                low, error = gather(low, lost, error + states[LOST, ref])
                low, error = gather(low, states[at.LOW, ref], error)
            states[at.PLAN, s], states[at.LOW, s], states[LOST, s] = high, low, error
        # The number closest to zero between the lowest and the highest base. Subtracting it makes
        # no base larger in absolute value.
        constant = max(lowest, 0.0) + min(highest, 0.0) if model.conserved else 0.0
        states[at.LIFT, here] = constant
        for s in range(here, behind):
            high, low = two_sum(states[BASE, s], -constant)
            high, lost = two_sum(high, states[at.PLAN, s])
            low, error = gather(low, lost, states[LOST, s])
            low, states[LOST, s] = gather(low, states[at.LOW, s], error)
            states[at.PLAN, s], states[at.LOW, s] = two_sum(high, low)
    total = 0.0
    for k in range(len(start) - 2, -1, -1):
        total += states[at.LIFT, start[k]]
        for s in range(start[k], start[k + 1]):
            states[at.PLAN, s] += total
            states[at.V, s] = 0.0  # the start of an iterative solver


@routine(inline=True)
def shape_rarely(model: Model, loss: Floats, fine: Any, work: Work) -> None:
    """`shape_finely` in the lanes that need it."""
    for n in range(lanes_of(work.notes)):
        if lane(fine, n):
            shape_finely(lane(model, n), lane(loss, n), lane(work, n))


@inlined
def before(pairs: Floats, i: int, j: int) -> float:
    """The difference of the totals of pairs i and j; negative if that of i is smaller."""
    return (pairs[at.GAPS, i] - pairs[at.GAPS, j]) + (pairs[at.TRIAL, i] - pairs[at.TRIAL, j])


@inlined
def two_sum(a: float, b: float) -> tuple[float, float]:
    """a + b and its rounding error (Knuth's two-sum)."""
    total = a + b
    piece = total - a
    return total, (a - (total - piece)) + (b - piece)


@inlined
def two_product(a: float, b: float) -> tuple[float, float]:
    """a * b and its rounding error (Dekker's product of Veltkamp's halves)."""
    x, y, product = 134217729.0 * a, 134217729.0 * b, a * b
    x, y = x - (x - a), y - (y - b)
    return product, ((x * y - product) + x * (b - y) + (a - x) * y) + (a - x) * (b - y)


@inlined
def gather(total: float, x: float, error: float) -> tuple[float, float]:
    """total + x, and the error with what this sum loses."""
    total, lost = two_sum(total, x)
    return total, error + abs(lost)


@inlined
def expect(
    model: Model, pair: int, states: Floats, first: int, width: int, ref: int
) -> tuple[float, float, float]:
    """E[PLAN + LOW | pair] as a sum of two numbers, and its error; relative to `ref` unless -1."""
    high, low, error, total, off, top, tail, slack = 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0
    if ref >= 0:
        top, tail, slack = states[at.PLAN, ref], states[at.LOW, ref], states[LOST, ref]
    shares, begin, count = likelihoods(model.next_state, pair, width)
    for j in range(count):
        p, s = shares[begin + j], unsigned(successor(model.next_state, pair, j, first))
        total, lost = two_sum(total, p)
        off += lost
        if s != ref:
            value, less = two_sum(states[at.PLAN, s], -top)
            more, own = gather(states[at.LOW, s], -tail, states[LOST, s] + slack)
            more, own = gather(more, less, own)
            product, less = two_product(p, value)
            small, lost = two_product(p, more)
            error += p * own + abs(lost)
            high, lost = two_sum(high, product)
            for part in (less, lost, small):
                low, error = gather(low, part, error)
    if model.conserved:
        off += total
        shift = (high + low) * off
        low, error = gather(low, -shift, error + (EPS + abs(off)) * abs(shift))
    return high, low, error


@inlined
def main_successor(next_state: Any, pair: int, first: int, width: int) -> int:
    """The likeliest successor, -1 if there is none."""
    shares, begin, count = likelihoods(next_state, pair, width)
    most, found = 0.0, -1
    for j in range(count):
        if shares[begin + j] > most:
            most, found = shares[begin + j], successor(next_state, pair, j, first)
    return found


@inlined
def are_equal(next_state: Any, pair: int, other: int, width: int) -> bool:
    """Whether two pairs have the same row of P."""
    shares, begin, count = likelihoods(next_state, pair, width)
    others, start, size = likelihoods(next_state, other, width)
    equal = count == size
    for j in range(min(count, size)):
        same = successor(next_state, pair, j, 0) == successor(next_state, other, j, 0)
        equal = equal and same and shares[begin + j] == others[start + j]
    return equal


@routine
def recenter(model: Model, loss: Floats, work: Work) -> None:
    """Add V to PLAN, and write loss - E'PLAN into GAPS; the form of `recenter` in torch."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for s in range(states.shape[1]):
        value, low = states[at.PLAN, s], states[at.LOW, s] + states[at.V, s]
        states[at.PLAN, s], states[at.LOW, s] = two_sum(value, low)
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            total, common = 0.0, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[at.PAIR, i]:
                    expected, rest, error = expect(model, i, states, behind, after, -1)
                    high, low = two_sum(loss[i], -states[at.PLAN, s])
                    low, error = gather(low, -states[at.LOW, s], error)
                    high, lost = two_sum(high, expected)
                    low, error = gather(low, lost, error)
                    low, error = gather(low, rest, error)
                    total += pairs[at.PAIR, i]
                    common += pairs[at.PAIR, i] * error
                    pairs[at.GAPS, i], pairs[at.ROUNDING, i] = gather(high, low, error)
            states[LOST, s] = common / total  # an error of v, which the layers before share
    for s in range(states.shape[1]):
        states[at.V, s] = 0.0


# -- The certificate of a step, compiled: residuals that measure how far q is from the solution ----
#
# torch_occ.step.solution.Solution defines the dual and the flow residual. The torch form is the end
# of torch_occ.step.newton.


TINY = float(np.finfo(np.float64).tiny)


@inlined
def unit_of(model: Model, i: int, complement: bool, pairs: Floats) -> Any:
    """The unit of the dual residual at pair i: q times the curvature of psi.

    A term of another argument contributes its curvature times the smaller of q and that argument.
    """
    q = pairs[at.PAIR, i]
    unit = q * pairs[at.PAIR + at.BEND, i] + min(q, pairs[at.REST, i]) * pairs[at.W, i]
    if complement and model.exists[at.COMPLEMENT, i]:
        unit += min(q, pairs[at.COMPLEMENT, i]) * pairs[at.COMPLEMENT + at.BEND, i]
    return unit


@routine(inline=True)
def certify(model: Model, complement: bool, fine: Any, work: Work) -> tuple[Any, Any]:
    """The dual and the flow residual at q, relative to q.

    AHEAD must hold E[v(next state)] for the multipliers in V, and U the inflow of every state.
    `fine` says that ROUNDING holds the estimated rounding errors of the gaps, or in which lanes.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    dual, flow, bad = 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        total, common = 0.0, 0.0
        for i in span(s * num_actions, (s + 1) * num_actions if anywhere(fine) else 0):
            common += pairs[at.INVERSE, i] * states[at.SHARE, s] * pairs[at.ROUNDING, i]
        for i in span(s * num_actions, (s + 1) * num_actions):
            if model.exists[at.PAIR, i]:
                total += pairs[at.PAIR, i]
                shaping = states[at.V, s] - pairs[at.AHEAD, i]  # E'v
                residual = abs(pairs[at.GRADIENT, i] + pairs[at.GAPS, i] - shaping)
                unit = unit_of(model, i, complement, pairs)
                if not model.exists[at.REST, i]:
                    # A state with one action has no choice; its equation only determines v.
                    # Its residual is relative to the terms of the equation.
                    size = abs(pairs[at.GRADIENT, i]) + abs(pairs[at.GAPS, i])
                    unit = max(unit, size + abs(shaping) + TINY)
                elif anywhere(fine):
                    # The form of `spread_errors` in torch_occ.step.newton.
                    own = pairs[at.INVERSE, i] * states[at.SHARE, s]
                    lost = EPS * (abs(pairs[at.AHEAD, i]) + abs(shaping)) + pairs[at.ROUNDING, i]
                    mean = abs(common - own * pairs[at.ROUNDING, i])
                    residual += where(fine, lost * (1.0 - own) + mean, 0.0)
                error = abs(residual / unit)
                bad += (error - error) + (unit - unit)  # 0 unless something is not finite
                dual = max(dual, error)
        flow = max(flow, abs(total - states[at.U, s]) / total)
    return dual + bad, flow


@routine(inline=True)
def is_convex(model: Model, terms: Terms, weights: Floats, work: Work) -> Any:
    """Whether psi is convex along the changes of q that keep E q, at the last factorization.

    It is if every term is convex. Otherwise every state is checked; the form of
    `torch_occ.step.system.is_convex`.
    """
    convex, curves = True, True
    # The numbers of a term follow one another: one, or one per pair.
    each = max(len(weights), len(terms.exponent)) // len(terms.argument)
    for term in range(len(terms.argument)):
        for i in range(each):
            p = number_of(terms, terms.exponent, term, i)
            bend = bend_at_one(terms.function[term], p) * number_of(terms, weights, term, i)
            convex = convex & (bend >= 0.0)
    if anywhere(not convex):
        for s in range(work.states.shape[1]):
            # The state occupancies of the first layer are fixed; their kappa may be negative.
            curves = curves & (work.states[at.CURVES, s] >= (0.0 if s < model.start[1] else 1.0))
    return convex | curves


@routine
def is_flat(model: Model, work: Work) -> Any:
    """Whether psi curves downwards, or not at all, in some pair."""
    flat = False
    for i in range(work.pairs.shape[1]):
        if model.exists[at.PAIR, i]:
            flat = flat | (work.pairs[at.D, i] + work.pairs[at.W, i] <= 0.0)
    return flat
