"""The factors of the linear system of a Newton step with dense transitions.

This is the compiled form of `LayeredFactorization` in torch_occ.step.system, which explains the
formulas. `factorize_dense` reduces every state to (R, p, kappa) and filters through the layers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ._support.constants import NOISE
from torch_occ.engine.lanes import where
from torch_occ.engine.layout import (
    AHEAD,
    BEND,
    CURVES,
    DQ,
    FORCE,
    INVERSE,
    KAPPA,
    PULL,
    RESPONSE,
    SHARE,
    SOFT,
    TOTAL,
    TRIAL,
    D,
    Floats,
    M,
    Model,
    P,
    U,
    V,
    W,
    Work,
    ahead,
    dot,
    inlined,
    routine,
    span,
    unsigned,
)


@routine(any_order=True)
def factorize_dense(model: Model, refresh: Any, work: Work) -> None:
    """Compute (R, p, kappa) of every state from d, w and c, then the gains layer by layer.

    `refresh` says in which lanes; the others keep their factors. Overwrites TRIAL.
    """
    start = model.start
    reduce_states(model, 0, start[1], refresh, work)
    for s in range(start[1]):
        for j in range(start[1]):
            work.gain[s, j] = 0.0  # q(s) is fixed in the first layer
    for k in range(1, len(start) - 1):
        here, width = start[k], start[k + 1] - start[k]
        reduce_states(model, here, here + width, refresh, work)
        center_layer(model.num_actions, model.arrivals, start[k - 1], here, width, refresh, work)
        if width == 1 and model.conserved:
            # All mass goes to this state, whatever the policy. A sum would leave rounding errors.
            work.gain[here, 0] = 0.0
        else:
            reach_layer(start[k - 1], here, width, model.num_actions, work)
            observe_layer(here, width, refresh, work)


@routine(inline=True)
def reduce_states(model: Model, here: int, behind: int, refresh: Any, work: Work) -> None:
    """Compute INVERSE, TOTAL, SHARE, P, KAPPA, CURVES and SOFT of states here, ..., behind - 1.

    The form of torch_occ.step.system.SeparableStates.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    exists = model.exists
    for s in span(here, behind):
        first = s * num_actions
        total, e, stiffness, least, most, largest = 0.0, 0.0, 0.0, 0.0, -np.inf, -1.0
        softest, dominant = float(first), float(first)
        for i in span(first, first + num_actions):
            inverse = 1.0 / (pairs[D, i] + pairs[W, i]) if exists[0, i] else 0.0
            share = pairs[W, i] * inverse
            pairs[INVERSE, i] = where(refresh, inverse, pairs[INVERSE, i])
            pairs[TRIAL, i] = share
            total += inverse
            least = min(least, inverse)
            stiffness += share * pairs[D, i]
            softest = where(inverse > most, float(i), softest)
            most = max(inverse, most)
            if exists[0, i]:
                dominant = where(share > largest, float(i), dominant)
                largest = max(share, largest)
        # e = 1 - sum w/D cancels if one action dominates its state. For that action, 1 - w/D = d/D.
        for i in span(first, first + num_actions):
            e += where(dominant == i, pairs[D, i] * pairs[INVERSE, i], -pairs[TRIAL, i])
        share = 1.0 / total
        ratio = e * share
        for i in span(first, first + num_actions):
            p = pairs[TRIAL, i] + ratio * pairs[INVERSE, i]
            pairs[P, i] = where(refresh, p, pairs[P, i])
            pairs[SOFT, i] = where(refresh, where(softest == i, 1.0, 0.0), pairs[SOFT, i])
        kappa = states[BEND, s] + stiffness + e * ratio
        size = abs(states[BEND, s]) + abs(stiffness) + abs(e * ratio)
        curves = where(least < 0.0, -1.0, where(kappa >= -NOISE * size, 1.0, 0.0))
        states[TOTAL, s] = where(refresh, total, states[TOTAL, s])
        states[SHARE, s] = where(refresh, share, states[SHARE, s])
        states[KAPPA, s] = where(refresh, max(kappa, 0.0), states[KAPPA, s])
        states[CURVES, s] = where(refresh, curves, states[CURVES, s])


@routine(inline=True)
def center_layer(
    num_actions: int,
    arrivals: Floats,
    before: int,
    here: int,
    width: int,
    refresh: Any,
    work: Work,
) -> None:
    """Compute P_p of the previous layer, and its centred transitions.

    The transitions are centred at their mean with weights 1/D. The first half of `centred` holds
    the deviations, the second half their products with 1/D.
    """
    pairs, widest = work.pairs, len(work.moves)
    for s in span(before, here):
        first, shift, share = s * num_actions, before * num_actions, work.states[SHARE, s]
        for j in range(width):
            moved, origin, mean = 0.0, 0.0, 0.0
            for i in span(first, first + num_actions):
                moved += pairs[P, i] * arrivals[j, i]
                origin += pairs[SOFT, i] * arrivals[j, i]
            work.moves[j, s] = where(refresh, moved, work.moves[j, s])
            for i in span(first, first + num_actions):
                mean += pairs[INVERSE, i] * (arrivals[j, i] - origin)
            mean *= share
            for i in span(first, first + num_actions):
                deviation = (arrivals[j, i] - origin) - mean
                work.centred[j, unsigned(i - shift)] = deviation
                work.centred[unsigned(widest + j), unsigned(i - shift)] = (
                    pairs[INVERSE, i] * deviation
                )


@inlined
def reach_layer(before: int, here: int, width: int, num_actions: int, work: Work) -> None:
    """Write Y = Q + P_p' Yhat P_p, the covariance that reaches a layer, to the top of `squares`."""
    n, Y, half = here - before, work.squares, len(work.moves)
    if before > 0:  # Yhat is zero in the first layer
        for j in range(0, width, 2):
            for s in range(0, n, 2):
                more_j, more_s = min(j + 1, width - 1), min(s + 1, n - 1)
                a, b, c, d = four_dots(
                    work.moves, (j, more_j, before), work.gain, (before + s, before + more_s, 0), n
                )
                Y[half + j, s], Y[half + j, more_s] = a, b
                Y[half + more_j, s], Y[half + more_j, more_s] = c, d
    for i in range(0, width, 2):
        for j in range(0, i + 1, 2):
            more_i, more_j = min(i + 1, width - 1), min(j + 1, width - 1)
            rows, columns = (i, more_i, 0), (half + j, half + more_j, 0)
            a, b, c, d = four_dots(work.centred, rows, work.centred, columns, n * num_actions)
            if before > 0:
                rows = (i, more_i, before)
                e, f, g, h = four_dots(work.moves, rows, Y, columns, n)
                a, b, c, d = a + e, b + f, c + g, d + h
            write_four(Y, 0, (i, more_i, j, more_j), (a, b, c, d))


@inlined
def observe_layer(here: int, width: int, refresh: Any, work: Work) -> None:
    """Write Yhat = (Y^-1 + K)^-1 into `gain`.

    K is diagonal, so this is done for one state m after the other: Y becomes
    Y - kappa y y' / (1 + kappa y_m), where y is column m of Y. That is y / (1 + kappa y_m) in
    column m itself. Only the lower half of Y is kept.
    """
    Y, column = work.squares, len(work.moves)  # the row of `squares` with a copy of y
    for m in range(width):
        kappa = work.states[KAPPA, unsigned(here + m)]
        left = 1.0 / (1.0 + kappa * Y[m, m])
        for i in range(width):
            Y[column, i] = Y[i, m] if i > m else Y[m, i]
        for i in range(width):
            change = kappa * left * Y[column, i]
            for j in range(i + 1):
                Y[i, j] -= change * Y[column, j]
        for i in range(width):
            value = left * Y[column, i]
            if i > m:
                Y[i, m] = value
            else:
                Y[m, i] = value
    for i in range(width):
        for j in range(i + 1):
            value = where(refresh, Y[i, j], work.gain[here + i, j])
            work.gain[here + i, j], work.gain[here + j, i] = value, value


@inlined
def four_dots(
    x: Floats, rows: tuple[int, int, int], y: Floats, columns: tuple[int, int, int], n: int
) -> tuple[Any, Any, Any, Any]:
    """The products of two rows of x with two rows of y, over n entries.

    `rows` and `columns` are the two rows, and where their entries begin. Four sums at once need
    half of the loads, and none waits for another.
    """
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    i, more_i, shift = unsigned(rows[0]), unsigned(rows[1]), rows[2]
    j, more_j, other = unsigned(columns[0]), unsigned(columns[1]), columns[2]
    for m in range(n):
        left, right = x[i, unsigned(shift + m)], x[more_i, unsigned(shift + m)]
        upper, lower = y[j, unsigned(other + m)], y[more_j, unsigned(other + m)]
        a += left * upper
        b += left * lower
        c += right * upper
        d += right * lower
    return a, b, c, d


@inlined
def write_four(
    x: Floats, shift: int, place: tuple[int, int, int, int], values: tuple[Any, Any, Any, Any]
) -> None:
    """Write four entries of a symmetric matrix that begins at row `shift`."""
    i, more_i, j, more_j = place
    x[shift + i, j], x[shift + j, i] = values[0], values[0]
    x[shift + i, more_j], x[shift + more_j, i] = values[1], values[1]
    x[shift + more_i, j], x[shift + j, more_i] = values[2], values[2]
    x[shift + more_i, more_j], x[shift + more_j, more_i] = values[3], values[3]


# -- The linear system of a Newton step with dense transitions, solved layer by layer --------------
#
# `solve_dense` sweeps forward, backward and forward again, with the factors of
# torch_occ.engine.dense. One pass over the pairs of a state multiplies both p and R by
# the transitions: sum_a p_a P_a u + sum_a (R x)_a P_a = sum_a dq_a P_a.


@routine(any_order=True)
def solve_dense(model: Model, source: Floats, work: Work) -> None:
    """Solve H dq = x + E'v, E dq = r.

    x is the row FORCE, which is overwritten. r is `source`, (S,), or zero if `source` is empty. The
    rows DQ, V and AHEAD receive dq, v and E[v(next state)].
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    layers = len(start) - 1
    load(states, M, source)
    for k in range(layers):
        here, behind = start[k], start[k + 1]
        respond_in_layer(num_actions, here, behind, work)
        for s in span(here, behind):
            states[PULL, s] = states[KAPPA, s] * states[M, s] - dot(
                pairs, P, pairs, FORCE, s * num_actions, (s + 1) * num_actions
            )
        if k + 1 < layers:
            for s in span(here, behind):
                passed = states[M, s]
                for j in range(behind - here):
                    passed -= work.gain[s, j] * states[PULL, unsigned(here + j)]
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[RESPONSE, i] += pairs[P, i] * passed
            if start[k + 2] - behind == 1 and model.conserved:
                states[M, behind] = mass(source, behind)
            else:
                flow_on(model, k, RESPONSE, M, True, work)
    for k in range(layers - 1, -1, -1):
        here, behind = start[k], start[k + 1]
        after = start[k + 2] - behind if k + 1 < layers else 0
        for j in range(after):
            for s in span(here, behind):
                states[PULL, s] += work.moves[j, s] * states[V, unsigned(behind + j)]
        for s in span(here, behind):
            held = 0.0
            for j in range(behind - here):
                held += work.gain[s, j] * states[PULL, unsigned(here + j)]
            states[V, s] = states[PULL, s] - states[KAPPA, s] * held
        for i in span(here * num_actions, behind * num_actions):
            pairs[AHEAD, i] = ahead(model.next_state, i, states, V, behind, after)
            pairs[FORCE, i] -= pairs[AHEAD, i]
    load(states, U, source)
    for k in range(layers):
        here, behind = start[k], start[k + 1]
        respond_in_layer(num_actions, here, behind, work)
        for s in span(here, behind):
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[DQ, i] = pairs[P, i] * states[U, s] + pairs[RESPONSE, i]
        if k + 1 < layers:
            if start[k + 2] - behind == 1 and model.conserved:
                states[U, behind] = mass(source, behind)
            else:
                flow_on(model, k, DQ, U, True, work)


@inlined
def mass(source: Floats, last: int) -> float:
    """The sum of the sources of all states up to `last`; `source` is (S,) or empty."""
    total = 0.0
    for s in range(last + 1 if len(source) else 0):
        total += source[s]
    return total


@routine(inline=True)
def load(states: Floats, row: int, source: Floats) -> None:
    """Fill a row of the states from an array (S,), or with zeros if the array is empty."""
    for s in range(states.shape[1]):
        states[row, s] = source[s] if len(source) else 0.0


@routine(inline=True)
def respond_in_layer(num_actions: int, here: int, behind: int, work: Work) -> None:
    """Write R x of states here, ..., behind - 1 into RESPONSE, for x in FORCE."""
    pairs, states = work.pairs, work.states
    for s in span(here, behind):
        first, mean = s * num_actions, 0.0
        origin = dot(pairs, SOFT, pairs, FORCE, first, first + num_actions)
        for i in span(first, first + num_actions):
            mean += pairs[INVERSE, i] * (pairs[FORCE, i] - origin)
        mean *= states[SHARE, s]
        for i in span(first, first + num_actions):
            pairs[RESPONSE, i] = ((pairs[FORCE, i] - origin) - mean) * pairs[INVERSE, i]


@inlined
def arrive_dense(model: Model, row: int, k: int, work: Work) -> None:
    """Write the inflow of layer k into U: from a row of the pairs, or the initial distribution."""
    if k > 0:
        flow_on(model, k - 1, row, U, False, work)
    else:
        for s in span(0, model.start[1]):
            work.states[U, s] = model.initial[s]


@routine(inline=True)
def flow_on(model: Model, k: int, row: int, out: int, add: bool, work: Work) -> None:
    """Write the inflow of layer k + 1 from a row of the pairs, or add it if `add` is true."""
    start, arrivals, pairs, states = model.start, model.arrivals, work.pairs, work.states
    first, stop, there = (
        start[k] * model.num_actions,
        start[k + 1] * model.num_actions,
        start[k + 1],
    )
    last = start[k + 2] - there - 1
    for j in range(0, last + 1, 4):  # four sums at once, none of which waits for another
        second, third, fourth = min(j + 1, last), min(j + 2, last), min(j + 3, last)
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for i in span(first, stop):
            x = pairs[row, i]
            a += x * arrivals[j, i]
            b += x * arrivals[second, i]
            c += x * arrivals[third, i]
            d += x * arrivals[fourth, i]
        if add:
            a, b, c, d = (
                a + states[out, there + j],
                b + states[out, there + second],
                c + states[out, there + third],
                d + states[out, there + fourth],
            )
        states[out, there + j], states[out, there + second] = a, b
        states[out, there + third], states[out, there + fourth] = c, d
