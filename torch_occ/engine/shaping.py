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
#: The leading parts of values have DIGITS binary digits. Adding and subtracting CUTTER rounds a
#: probability to 26 binary digits.
DIGITS, CUTTER = 24, 1.5 * 2.0**26
FINE = EPS * 2.0 ** (2 - DIGITS)  # the rounding error of `shape_finely`, relative to the values

# Rows of the states that are free while the loss is shaped.
LOW, LEADING, SECOND, LEFT, BASE = at.PULL, at.U, at.FITTED, at.M, at.OTHERS


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
            states[at.PLAN, s] = best
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

    ROUNDING receives an estimate of the remaining rounding errors of the gaps. LIFT receives the
    constant of every layer, at its first state.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    exists = model.exists
    for k in range(len(start) - 2, -1, -1):
        here, behind = start[k], start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        cut_values(behind, behind + after, at.PLAN, states)
        for j in range(after):
            states[at.V, behind + j] = np.sqrt(1.0 + j)  # to tell rows of P apart
        lowest, highest = np.inf, -np.inf
        for s in range(here, behind):
            first, base = s * num_actions, np.inf
            for i in range(first, first + num_actions):
                base = min(base, loss[i]) if exists[at.PAIR, i] else base
            states[BASE, s] = base
            lowest, highest = min(lowest, base), max(highest, base)
            best = -1
            for i in range(first, first + num_actions):
                pairs[at.GAPS, i], pairs[at.TRIAL, i], pairs[at.ROUNDING, i] = 0.0, 0.0, 0.0
                if exists[at.PAIR, i]:
                    high, low = two_sum(loss[i], -base)
                    expected, rest, off, size = expect(model.next_state, i, states, behind, after)
                    rest -= (expected + rest) * off if model.conserved else 0.0
                    high, lost = two_sum(high, expected)
                    pairs[at.GAPS, i], pairs[at.TRIAL, i] = two_sum(high, low + lost + rest)
                    pairs[at.RESPONSE, i], pairs[at.DQ, i] = expected, rest
                    pairs[at.ROUNDING, i] = size
                    pairs[at.FORCE, i] = ahead(model.next_state, i, states, at.V, behind, after)
                    order = before(pairs, i, best) if best >= 0 else -1.0
                    # Beside huge values, totals may be equal although the losses differ.
                    if order < 0.0 or (order == 0.0 and loss[i] < loss[best]):
                        best = i
            high, low, size = pairs[at.GAPS, best], pairs[at.TRIAL, best], pairs[at.ROUNDING, best]
            expected, rest = pairs[at.RESPONSE, best], pairs[at.DQ, best]
            for i in range(first, first + num_actions):
                if exists[at.PAIR, i]:
                    # Where the expected values are equal, so are their rounding errors.
                    apart = pairs[at.RESPONSE, i] != expected or pairs[at.DQ, i] != rest
                    gap = (pairs[at.GAPS, i] - high) + (pairs[at.TRIAL, i] - low)
                    pairs[at.GAPS, i] = gap if apart else max(loss[i] - loss[best], 0.0)
                    # Where rows of P differ, they may have lost what sets them apart.
                    unlike = pairs[at.FORCE, i] != pairs[at.FORCE, best]
                    hidden = EPS * (abs(pairs[at.DQ, i]) + abs(rest)) if unlike else 0.0
                    rounding = FINE * (pairs[at.ROUNDING, i] + size)
                    pairs[at.ROUNDING, i] = rounding if apart else hidden
            states[at.PLAN, s], states[LOW, s] = high, low
            states[at.V, s] = 0.0  # the start of an iterative solver
        for j in range(after):
            states[at.V, behind + j] = 0.0
        # The number closest to zero between the lowest and the highest base. Subtracting it makes
        # no base larger in absolute value.
        constant = max(lowest, 0.0) + min(highest, 0.0) if model.conserved else 0.0
        states[at.LIFT, here] = constant
        for s in range(here, behind):
            high, low = two_sum(states[BASE, s], -constant)
            high, lost = two_sum(high, states[at.PLAN, s])
            states[at.PLAN, s], states[LOW, s] = two_sum(high, low + lost + states[LOW, s])
    total = 0.0
    for k in range(len(start) - 2, -1, -1):
        total += states[at.LIFT, start[k]]
        for s in range(start[k], start[k + 1]):
            states[at.PLAN, s] += total


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


@routine(inline=True)
def cut_values(first: int, stop: int, row: int, states: Floats) -> None:
    """Split the values row + LOW into LEADING and SECOND, with few digits, and the remainder LEFT.

    LEADING is zero where a value is small beside the largest; then SECOND has its digits.
    """
    size = 0.0
    for s in range(first, stop):
        size = max(size, abs(states[row, s]))
    cutter, size = cutter_for(size), 0.0
    for s in range(first, stop):
        states[LEADING, s] = (states[row, s] + cutter) - cutter
        states[LEFT, s] = states[row, s] - states[LEADING, s]
        size = max(size, abs(states[LEFT, s]))
    cutter = cutter_for(size)
    for s in range(first, stop):
        states[SECOND, s] = (states[LEFT, s] + cutter) - cutter
        states[LEFT, s] = (states[LEFT, s] - states[SECOND, s]) + states[LOW, s]


@inlined
def cutter_for(size: float) -> float:
    """Adding and subtracting it leaves DIGITS binary digits of numbers up to this size."""
    grid = 2.0 ** (np.ceil(np.log2(size)) - DIGITS) if size > 0.0 else 1.0
    return 1.5 * grid / EPS


@inlined
def share_of(p: float, s: Any, states: Floats) -> tuple[float, float, float, float, float, float]:
    """What a successor adds to `expect`: two exact products, a small rest, p, and the size."""
    high = (p + CUTTER) - CUTTER
    leading, second, left = states[LEADING, s], states[SECOND, s], states[LEFT, s]
    rest = (p - high) * leading + ((p - high) * second + p * left)
    size = p * (abs(leading) + abs(second) + 2.0**DIGITS * abs(left))
    return high * leading, high * second, rest, high, p - high, size


@inlined
def expect(
    next_state: Any, pair: int, states: Floats, first: int, width: int
) -> tuple[float, float, float, float]:
    """E[value | pair] as a sum of two numbers, the row sum of P minus one, and E|value|."""
    exact, second, rest, total, more, size = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    shares, begin, count = likelihoods(next_state, pair, width)
    for j in range(count):
        s = unsigned(successor(next_state, pair, j, first))
        a, b, c, d, e, f = share_of(shares[begin + j], s, states)
        exact, second, rest = exact + a, second + b, rest + c
        total, more, size = total + d, more + e, size + f
    exact, lost = two_sum(exact, second)
    return exact, lost + rest, (total - 1.0) + more, size


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
        total = 0.0
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
                    # An error common to all actions of a state does not change q.
                    own = 1.0 - pairs[at.INVERSE, i] * states[at.SHARE, s]
                    residual += where(fine, pairs[at.ROUNDING, i] * own, 0.0)
                error = abs(residual / unit)
                bad += (error - error) + (unit - unit)  # 0 unless something is not finite
                dual = max(dual, error)
        flow = max(flow, abs(total - states[at.U, s]) / total)
    return dual + bad, flow


@routine
def fit_multipliers(model: Model, complement: bool, work: Work) -> None:
    """Fit the multipliers to q by least squares, with more digits than a number has; in one lane.

    One state after the other, from the last layer to the first, in units of q times the curvature.
    Where the units of a state differ much, a number V would be too coarse for the smallest one.
    FORCE receives E'v minus the gradient of the objective, and RESPONSE an estimate of the rounding
    errors of FORCE.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        cut_values(behind, behind + after, at.V, states)
        for s in range(start[k], behind):
            least, softest, total, weights = np.inf, -1, 0.0, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[at.FORCE, i] = 0.0
                if model.exists[at.PAIR, i]:
                    expected, rest, off, size = expect(model.next_state, i, states, behind, after)
                    rest -= (expected + rest) * off if model.conserved else 0.0
                    high, low = two_sum(pairs[at.GRADIENT, i], pairs[at.GAPS, i])
                    high, lost = two_sum(high, expected)
                    pairs[at.FORCE, i], pairs[at.TRIAL, i] = two_sum(high, low + lost + rest)
                    pairs[at.RESPONSE, i] = size
                    unit = abs(unit_of(model, i, complement, pairs))
                    if softest < 0 or unit < least:
                        least, softest = unit, i
            high, low = pairs[at.FORCE, softest], pairs[at.TRIAL, softest]
            size = pairs[at.RESPONSE, softest]
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[at.PAIR, i]:
                    ratio = least / unit_of(model, i, complement, pairs)
                    pairs[at.FORCE, i] = (pairs[at.FORCE, i] - high) + (pairs[at.TRIAL, i] - low)
                    pairs[at.RESPONSE, i] = FINE * (pairs[at.RESPONSE, i] + size)
                    total += ratio * ratio * pairs[at.FORCE, i]
                    weights += ratio * ratio
            mean = total / weights
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[at.FORCE, i] = mean - pairs[at.FORCE, i] if model.exists[at.PAIR, i] else 0.0
            states[at.V, s], states[LOW, s] = two_sum(high, low + mean)


@routine
def judge_fit(model: Model, complement: bool, fine: Any, work: Work) -> Any:
    """The dual residual after `fit_multipliers`."""
    pairs, num_actions, dual, bad = work.pairs, model.num_actions, 0.0, 0.0
    for i in range(pairs.shape[1]):
        if model.exists[at.PAIR, i]:
            residual = abs(pairs[at.FORCE, i])
            if model.exists[at.REST, i]:
                own = 1.0 - pairs[at.INVERSE, i] * work.states[at.SHARE, i // num_actions]
                residual += own * (pairs[at.RESPONSE, i] + where(fine, pairs[at.ROUNDING, i], 0.0))
            unit = unit_of(model, i, complement, pairs)
            error = abs(residual / unit)
            bad += (error - error) + (unit - unit)  # 0 unless something is not finite
            dual = max(dual, error)
    return dual + bad


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
