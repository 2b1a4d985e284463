"""The derivatives of psi at q; psi is a weighted sum of elementary functions of its arguments.

The names follow torch_occ.engine.layout: a slope is a first derivative, a bend a second one. A new
elementary function needs a number here, a loop in `accumulate` and its curvature in `bend_at_one`.
Its torch form in torch_occ.regularizers.terms has the same number.
"""

from __future__ import annotations

from typing import Any

from torch_occ._support.constants import FLAT
from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, log, power, sqrt, where
from torch_occ.engine.layout import Floats, Model, Terms, Work, inlined, routine, span, unsigned

# Elementary functions, by the attribute `code` in torch_occ.regularizers.terms.
POWER, X_LOG_X, LOG = 0, 1, 2

#: The last roots are refined if no argument has changed more than this, relatively: once up to
#: CLOSE, and twice up to NEAR. Both leave a relative error below 1e-16.
CLOSE, NEAR = 2e-6, 1e-2


@inlined
def of_root(weight: Any, x: Any) -> tuple[Any, Any]:
    """Slope and bend of weight * sqrt(x)."""
    inverse = 1.0 / x
    first = 0.5 * weight * sqrt(x) * inverse
    return first, -0.5 * first * inverse


@inlined
def of_power(p: Any, weight: Any, x: Any) -> tuple[Any, Any]:
    """Slope and bend of weight * x^p; for p = 1/2 exactly those of `of_root`."""
    inverse = 1.0 / x
    first = p * weight * where(p == 0.5, sqrt(x), power(x, p)) * inverse
    return first, (p - 1.0) * first * inverse


@inlined
def of_x_log_x(weight: Any, x: Any) -> tuple[Any, Any]:
    """Slope and bend of weight * x log x."""
    return weight * (log(x) + 1.0), weight / x


@inlined
def of_log(weight: Any, x: Any) -> tuple[Any, Any]:
    """Slope and bend of weight * log x."""
    inverse = 1.0 / x
    return weight * inverse, -weight * inverse * inverse


@routine(inline=True)
def accumulate(function: int, p: Any, weight: Any, table: Floats, row: int) -> None:
    """Add slope and bend of weight * function(x) for every entry x of a row.

    Each function has its own loop, so that the loops vectorize.
    """
    if function == POWER and not anywhere(p != 0.5):
        for i in range(table.shape[1]):
            slope, bend = of_root(weight, table[row, i])
            table[row + at.SLOPE, i] += slope
            table[row + at.BEND, i] += bend
    elif function == POWER:
        for i in range(table.shape[1]):
            slope, bend = of_power(p, weight, table[row, i])
            table[row + at.SLOPE, i] += slope
            table[row + at.BEND, i] += bend
    elif function == X_LOG_X:
        for i in range(table.shape[1]):
            slope, bend = of_x_log_x(weight, table[row, i])
            table[row + at.SLOPE, i] += slope
            table[row + at.BEND, i] += bend
    elif function == LOG:
        for i in range(table.shape[1]):
            slope, bend = of_log(weight, table[row, i])
            table[row + at.SLOPE, i] += slope
            table[row + at.BEND, i] += bend


@routine
def accumulate_each(
    terms: Terms, term: int, weights: Floats, step: int, table: Floats, row: int
) -> None:
    """`accumulate` with one weight or exponent per entry; entry i belongs to pair step * i."""
    function, p = terms.function[term], number_of(terms, terms.exponent, term, 0)
    if function == POWER and not anywhere(p != 0.5) and len(terms.exponent) == len(terms.argument):
        for i in range(table.shape[1]):
            weight = number_of(terms, weights, term, step * i)
            slope, bend = of_root(weight, table[row, i])
            table[row + at.SLOPE, i] += where(weight != 0.0, slope, 0.0)
            table[row + at.BEND, i] += where(weight != 0.0, bend, 0.0)
    elif function == LOG:
        for i in range(table.shape[1]):
            weight = number_of(terms, weights, term, step * i)
            slope, bend = of_log(weight, table[row, i])
            table[row + at.SLOPE, i] += where(weight != 0.0, slope, 0.0)
            table[row + at.BEND, i] += where(weight != 0.0, bend, 0.0)
    else:
        for i in range(table.shape[1]):
            weight = number_of(terms, weights, term, step * i)
            if anywhere(weight != 0.0):
                if function == POWER:
                    p = number_of(terms, terms.exponent, term, step * i)
                    slope, bend = of_power(p, weight, table[row, i])
                else:
                    slope, bend = of_x_log_x(weight, table[row, i])
                table[row + at.SLOPE, i] += where(weight != 0.0, slope, 0.0)
                table[row + at.BEND, i] += where(weight != 0.0, bend, 0.0)


@inlined
def number_of(terms: Terms, x: Floats, term: int, pair: int) -> Any:
    """The weight or exponent of a term at a pair; x is (K,) or (K * S * A,)."""
    count = len(terms.argument)
    return x[term] if len(x) == count else x[unsigned(term * (len(x) // count) + pair)]


@inlined
def varies(terms: Terms, weights: Floats) -> bool:
    """Whether there is one weight or exponent per pair."""
    return max(len(weights), len(terms.exponent)) > len(terms.argument)


@inlined
def bend_at_one(function: int, p: Any) -> Any:
    """f''(1)."""
    bend = p * (p - 1.0) if function == POWER else 1.0 if function == X_LOG_X else 0.0
    return -1.0 if function == LOG else bend


@routine(inline=True)
def derive(model: Model, terms: Terms, weights: Floats, moved: Any, work: Work) -> None:
    """Compute the gradient of psi, and d, w and c of its Hessian, at q.

    `moved` bounds the relative change of q since the last call; infinity if there was none.
    """
    pairs, states, exists, num_actions = work.pairs, work.states, model.exists, model.num_actions
    rest, complement = uses(terms, at.REST), uses(terms, at.COMPLEMENT)
    if anywhere(not (moved <= 0.0)):
        read_arguments(model, rest, complement, work)
    for argument in range(4):
        rows, row, step = pairs, argument, 1
        if argument == at.STATE:
            rows, row, step = states, 0, num_actions
        if argument == at.PAIR or uses(terms, argument):
            differentiate(terms, weights, argument, step, moved, rows, row)
        elif argument == at.STATE:
            for s in range(states.shape[1]):
                states[at.SLOPE, s], states[at.BEND, s] = 0.0, 0.0
    for s in range(states.shape[1]):
        begin, left, right = s * num_actions, 0.0, 0.0
        if rest:
            for i in span(begin, begin + num_actions):
                pairs[at.GRADIENT, i] = left
                left += pairs[at.REST + at.SLOPE, i] if exists[at.REST, i] else 0.0
        for i in range(begin + num_actions - 1, begin - 1, -1):
            gradient = states[at.SLOPE, s] + pairs[at.PAIR + at.SLOPE, i]
            d = pairs[at.PAIR + at.BEND, i]
            if rest:
                gradient += pairs[at.GRADIENT, i] + right
                if not exists[at.REST, i]:
                    pairs[at.W, i] = 0.0
                right += pairs[at.REST + at.SLOPE, i] if exists[at.REST, i] else 0.0
            if complement and exists[at.COMPLEMENT, i]:
                gradient -= pairs[at.COMPLEMENT + at.SLOPE, i]
                d += pairs[at.COMPLEMENT + at.BEND, i]
            if not exists[at.REST, i]:
                flat = where(d == 0.0, FLAT, 0.0)
                d, pairs[at.PAIR + at.BEND, i] = d + flat, pairs[at.PAIR + at.BEND, i] + flat
            pairs[at.GRADIENT, i] = gradient if exists[at.PAIR, i] else 0.0
            pairs[at.D, i] = d if exists[at.PAIR, i] else 0.0


@routine
def differentiate(
    terms: Terms,
    weights: Floats,
    argument: int,
    step: int,
    moved: Any,
    table: Floats,
    row: int,
) -> None:
    """Write slope and bend of all terms of an argument, whose values are a row of the table.

    Square roots and logarithms need only 1 / sqrt(x); entry i belongs to pair step * i.
    """
    each, half, barrier = varies(terms, weights), 0.0, 0.0
    for term in range(len(terms.argument)):
        if terms.argument[term] == argument and not each:
            p, function = terms.exponent[term], terms.function[term]
            half += where((function == POWER) & (p == 0.5), 0.5 * weights[term], 0.0)
            barrier += weights[term] if function == LOG else 0.0
    update_roots(moved, table, row)
    for i in range(table.shape[1]):
        root = table[row + at.ROOT, i]
        slope = barrier * root
        table[row + at.SLOPE, i] = root * (half + slope)
        table[row + at.BEND, i] = -(root * root) * (root * (0.5 * half + slope))
    for term in range(len(terms.argument)):
        if terms.argument[term] == argument:
            p, function = terms.exponent[term], terms.function[term]
            if each:
                accumulate_each(terms, term, weights, step, table, row)
            elif function == X_LOG_X:
                accumulate(function, p, weights[term], table, row)
            elif function == POWER and anywhere((p != 0.5) & (weights[term] != 0.0)):
                accumulate(function, p, where(p == 0.5, 0.0, weights[term]), table, row)


@routine(inline=True)
def update_roots(moved: Any, table: Floats, row: int) -> None:
    """Write 1 / sqrt(x) for every x that has changed relatively by up to `moved`.

    Refining the last roots takes less time than a root and a division.
    """
    far = not (moved <= NEAR)
    near = (moved > 0.0) & (not far)
    if anywhere(far):
        for i in range(table.shape[1]):
            root = 1.0 / sqrt(table[row, i])
            table[row + at.ROOT, i] = where(far, root, table[row + at.ROOT, i])
    if anywhere(near):
        refine_roots(near, table, row)
        if anywhere(near & (moved > CLOSE)):
            refine_roots(near & (moved > CLOSE), table, row)


@routine(inline=True)
def refine_roots(wanted: Any, table: Floats, row: int) -> None:
    """One iteration for 1 / sqrt(x); it makes h = 1 - x root^2 smaller than h^3."""
    for i in range(table.shape[1]):
        root = table[row + at.ROOT, i]
        h = 1.0 - table[row, i] * root * root
        better = root + root * (h * (0.5 + 0.375 * h))
        table[row + at.ROOT, i] = where(wanted, better, root)


@routine(inline=True)
def uses(terms: Terms, argument: int) -> bool:
    """Whether any term has this argument."""
    found = False
    for i in range(len(terms.argument)):
        found = found or terms.argument[i] == argument
    return found


@routine(inline=True)
def read_arguments(model: Model, rest: bool, complement: bool, work: Work) -> None:
    """Compute the arguments q(s), and, if they are used, q(s) - q(s,a) and 1 - q(s,a).

    They are sums of positive numbers, so nothing cancels. Arguments that do not exist are set to 1.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    for k in range(len(model.start) - 1):
        here, there, before = model.start[k], model.start[k + 1], 0.0
        for s in span(here, there):
            begin, left, right = s * num_actions, 0.0, 0.0
            for i in span(begin, begin + num_actions):
                if rest or complement:
                    pairs[at.REST, i] = left
                left += pairs[at.PAIR, i]
            if rest or complement:
                for i in range(begin + num_actions - 1, begin - 1, -1):
                    others = pairs[at.REST, i] + right
                    pairs[at.REST, i] = others if model.exists[at.REST, i] else 1.0
                    right += pairs[at.PAIR, i]
            states[0, s] = left
            if complement:
                states[at.OTHERS, s] = before
                before += left
        if complement:
            after = 0.0
            for s in range(there - 1, here - 1, -1):
                others = states[at.OTHERS, s] + after
                after += states[0, s]
                for i in span(s * num_actions, (s + 1) * num_actions):
                    same = pairs[at.REST, i] if model.exists[at.REST, i] else 0.0
                    apart = model.exists[at.COMPLEMENT, i]
                    pairs[at.COMPLEMENT, i] = same + others if apart else 1.0


# -- Derivatives of the gradient of psi by the weights and exponents of its terms ------------------
#
# The derivative of a step by its parameters is made of them. The names are those of
# torch_occ.engine.psi.


@inlined
def by_exponent(function: int, p: Any, x: Any) -> Any:
    """d log f'(x) / dp: 1/p + log x for f(x) = x^p, and 0 for functions without exponent."""
    return 1.0 / p + log(x) if function == POWER else 0.0


@routine(inline=True)
def slope_alone(terms: Terms, term: int, step: int, table: Floats, row: int) -> None:
    """Overwrite the slopes with those of one function of weight 1; the bends become invalid.

    Entry i belongs to pair step * i.
    """
    for i in range(table.shape[1]):
        table[row + at.SLOPE, i] = 0.0
    if terms.function[term] == POWER and len(terms.exponent) > len(terms.argument):
        for i in range(table.shape[1]):
            p = number_of(terms, terms.exponent, term, step * i)
            table[row + at.SLOPE, i] = of_power(p, 1.0, table[row, i])[0]
    else:
        accumulate(terms.function[term], terms.exponent[term], 1.0, table, row)


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
            own = -pairs[at.DQ, i] if argument == at.COMPLEMENT else pairs[at.DQ, i]
            pairs[at.TRIAL, i] = left if argument == at.REST else own
            left += pairs[at.DQ, i]
        for i in range((s + 1) * num_actions - 1, s * num_actions - 1, -1):
            pairs[at.TRIAL, i] += right if argument == at.REST else 0.0
            right += pairs[at.DQ, i]
        states[at.U, s] = left
    rows, row, moved, change, step = pairs, argument, pairs, at.TRIAL, 1
    if argument == at.STATE:
        rows, row, moved, change, step = states, 0, states, at.U, num_actions
    slope_alone(terms, term, step, rows, row)
    first, value, in_exponent = term * pairs.shape[1], 0.0, 0.0
    if each:
        for i in range(first, first + pairs.shape[1]):
            by_weights[i], by_exponents[i] = 0.0, 0.0
    for i in range(rows.shape[1]):
        if argument == at.STATE or model.exists[argument, i]:
            p = number_of(terms, terms.exponent, term, step * i)
            slope = rows[row + at.SLOPE, i] * moved[change, i]
            turned = slope * by_exponent(function, p, rows[row, i]) if bent else 0.0
            value += slope
            in_exponent += turned
            if each:
                weight = number_of(terms, weights, term, step * i)
                by_weights[first + step * i] = slope
                by_exponents[first + step * i] = weight * turned
    if not each:
        by_weights[term], by_exponents[term] = value, weights[term] * in_exponent
