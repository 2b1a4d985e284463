"""Derivatives of the gradient of psi by the weights and exponents of its terms.

The derivative of a step by its parameters is made of them. The names are those of
torch_occ.kernels.solver.psi.
"""

from __future__ import annotations

from typing import Any

from torch_occ.kernels.lanes.vectors import log
from torch_occ.kernels.layout import (
    COMPLEMENT,
    DQ,
    PAIR,
    REST,
    SLOPE,
    STATE,
    TRIAL,
    Floats,
    Model,
    Terms,
    U,
    Work,
    inlined,
    part,
    routine,
)
from torch_occ.kernels.solver.psi import POWER, accumulate, number_of, of_power, varies


@inlined
def by_exponent(function: int, p: Any, x: Any) -> Any:
    """d log f'(x) / dp: 1/p + log x for f(x) = x^p, and 0 for functions without exponent."""
    return 1.0 / p + log(x) if function == POWER else 0.0


@part
def slope_alone(terms: Terms, term: int, step: int, table: Floats, row: int) -> None:
    """Overwrite the slopes with those of one function of weight 1; the bends become invalid.

    Entry i belongs to pair step * i.
    """
    for i in range(table.shape[1]):
        table[row + SLOPE, i] = 0.0
    if terms.function[term] == POWER and len(terms.exponent) > len(terms.argument):
        for i in range(table.shape[1]):
            p = number_of(terms, terms.exponent, term, step * i)
            table[row + SLOPE, i] = of_power(p, 1.0, table[row, i])[0]
    else:
        accumulate(terms.function[term], terms.exponent[term], 1.0, table, row)


@routine
def term_gradient(model: Model, terms: Terms, term: int, bent: bool, out: int, work: Work) -> None:
    """Write the gradient by q of one term of weight 1 into row `out`.

    Weights and exponents must be (K,). If `bent` is true, write the derivative of this gradient by
    the exponent instead.
    """
    pairs, states, exists, num_actions = work.pairs, work.states, model.exists, model.num_actions
    argument, p = terms.argument[term], terms.exponent[term]
    rows, row = (states, 0) if argument == STATE else (pairs, argument)
    slope_alone(terms, term, num_actions if argument == STATE else 1, rows, row)
    if bent:
        for i in range(rows.shape[1]):
            rows[row + SLOPE, i] *= by_exponent(terms.function[term], p, rows[row, i])
    for s in range(states.shape[1]):
        first, left, right = s * num_actions, 0.0, 0.0
        for i in range(first, first + num_actions):
            if argument == REST:
                pairs[out, i] = left
                left += pairs[REST + SLOPE, i] if exists[REST, i] else 0.0
            elif argument == COMPLEMENT:
                pairs[out, i] = -pairs[COMPLEMENT + SLOPE, i] if exists[COMPLEMENT, i] else 0.0
            else:
                pairs[out, i] = states[SLOPE, s] if argument == STATE else pairs[PAIR + SLOPE, i]
        if argument == REST:
            for i in range(first + num_actions - 1, first - 1, -1):
                pairs[out, i] += right
                right += pairs[REST + SLOPE, i] if exists[REST, i] else 0.0
        for i in range(first, first + num_actions):
            pairs[out, i] = pairs[out, i] if exists[PAIR, i] else 0.0


@routine
def pair_with(
    model: Model,
    terms: Terms,
    term: int,
    weights: Floats,
    by_weights: Floats,
    by_exponents: Floats,
    bent: bool,
    work: Work,
) -> None:
    """Write the derivatives of ⟨u, grad psi⟩ by the weights and exponents of one term.

    u is the row DQ. Derivatives by the exponents are zero unless `bent`. If weights or exponents
    have one number per pair, so have the derivatives.
    Overwrites the slopes and bends of the argument, TRIAL and U.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    argument, function, each = terms.argument[term], terms.function[term], varies(terms, weights)
    for s in range(states.shape[1]):  # how the arguments change along u
        left, right = 0.0, 0.0
        for i in range(s * num_actions, (s + 1) * num_actions):
            own = -pairs[DQ, i] if argument == COMPLEMENT else pairs[DQ, i]
            pairs[TRIAL, i] = left if argument == REST else own
            left += pairs[DQ, i]
        for i in range((s + 1) * num_actions - 1, s * num_actions - 1, -1):
            pairs[TRIAL, i] += right if argument == REST else 0.0
            right += pairs[DQ, i]
        states[U, s] = left
    rows, row, moved, change, step = pairs, argument, pairs, TRIAL, 1
    if argument == STATE:
        rows, row, moved, change, step = states, 0, states, U, num_actions
    slope_alone(terms, term, step, rows, row)
    first, value, in_exponent = term * pairs.shape[1], 0.0, 0.0
    if each:
        for i in range(first, first + pairs.shape[1]):
            by_weights[i], by_exponents[i] = 0.0, 0.0
    for i in range(rows.shape[1]):
        if argument == STATE or model.exists[argument, i]:
            p = number_of(terms, terms.exponent, term, step * i)
            slope = rows[row + SLOPE, i] * moved[change, i]
            turned = slope * by_exponent(function, p, rows[row, i]) if bent else 0.0
            value += slope
            in_exponent += turned
            if each:
                weight = number_of(terms, weights, term, step * i)
                by_weights[first + step * i] = slope
                by_exponents[first + step * i] = weight * turned
    if not each:
        by_weights[term], by_exponents[term] = value, weights[term] * in_exponent
