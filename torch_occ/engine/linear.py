"""The linear system of a Newton step: H dq = x + E'v, E dq = r.

Every state is reduced to (R, p, kappa). Dense transitions are filtered through the layers, the form
of `LayeredFactorization` in torch_occ.step.system, which explains the formulas. Sparse transitions
are applied in conjugate gradients: all quantities are rows of the states and pairs, so memory is
proportional to the number of pairs. Numba compiles what the type of the model asks for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ._support.constants import FORCING, MAX_ITERATIONS, NOISE, RESTARTS
from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, sqrt, where
from torch_occ.engine.layout import (
    Floats,
    Model,
    Rows,
    Work,
    ahead,
    dot,
    either,
    inlined,
    kernel,
    routine,
    span,
    unsigned,
)

#: If kappa Y is larger somewhere, a dense solve starts from a guess, and uses g in `observe_layer`.
LARGE = 1e4


@routine(any_order=True)
def factorize_dense(model: Model, refresh: Any, work: Work) -> None:
    """Compute (R, p, kappa) of every state from d, w and c, then the gains layer by layer.

    `refresh` says in which lanes; the others keep their factors. Overwrites TRIAL.
    """
    start = model.start
    work.notes[at.STEEP] = where(refresh, 0.0, work.notes[at.STEEP])
    reduce_states(model, 0, start[1], refresh, work)
    for s in range(start[1]):
        for j in range(start[1]):
            work.gain[s, j] = 0.0  # q(s) is fixed in the first layer
            work.gain[s, unsigned(len(work.moves) + j)] = 1.0 if s == j else 0.0
    for k in range(1, len(start) - 1):
        here, width = start[k], start[k + 1] - start[k]
        reduce_states(model, here, here + width, refresh, work)
        center_layer(model.num_actions, model.arrivals, start[k - 1], here, width, refresh, work)
        if width == 1 and model.conserved:
            # All mass goes to this state, whatever the policy. A sum would leave rounding errors.
            work.gain[here, 0], work.gain[here, len(work.moves)] = 0.0, 1.0
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
            inverse = 1.0 / (pairs[at.D, i] + pairs[at.W, i]) if exists[0, i] else 0.0
            share = pairs[at.W, i] * inverse
            pairs[at.INVERSE, i] = where(refresh, inverse, pairs[at.INVERSE, i])
            pairs[at.TRIAL, i] = share
            total += inverse
            least = min(least, inverse)
            stiffness += share * pairs[at.D, i]
            softest = where(inverse > most, float(i), softest)
            most = max(inverse, most)
            if exists[0, i]:
                dominant = where(share > largest, float(i), dominant)
                largest = max(share, largest)
        # e = 1 - sum w/D cancels if one action dominates its state. For that action, 1 - w/D = d/D.
        for i in span(first, first + num_actions):
            e += where(dominant == i, pairs[at.D, i] * pairs[at.INVERSE, i], -pairs[at.TRIAL, i])
        share = 1.0 / total
        ratio = e * share
        for i in span(first, first + num_actions):
            p = pairs[at.TRIAL, i] + ratio * pairs[at.INVERSE, i]
            pairs[at.P, i] = where(refresh, p, pairs[at.P, i])
            pairs[at.SOFT, i] = where(refresh, where(softest == i, 1.0, 0.0), pairs[at.SOFT, i])
        kappa = states[at.BEND, s] + stiffness + e * ratio
        size = abs(states[at.BEND, s]) + abs(stiffness) + abs(e * ratio)
        curves = where(least < 0.0, -1.0, where(kappa >= -NOISE * size, 1.0, 0.0))
        states[at.TOTAL, s] = where(refresh, total, states[at.TOTAL, s])
        states[at.SHARE, s] = where(refresh, share, states[at.SHARE, s])
        states[at.KAPPA, s] = where(refresh, max(kappa, 0.0), states[at.KAPPA, s])
        states[at.CURVES, s] = where(refresh, curves, states[at.CURVES, s])


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
        first, shift, share = s * num_actions, before * num_actions, work.states[at.SHARE, s]
        for j in range(width):
            moved, origin, mean = 0.0, 0.0, 0.0
            for i in span(first, first + num_actions):
                moved += pairs[at.P, i] * arrivals[j, i]
                origin += pairs[at.SOFT, i] * arrivals[j, i]
            work.moves[j, s] = where(refresh, moved, work.moves[j, s])
            for i in span(first, first + num_actions):
                mean += pairs[at.INVERSE, i] * (arrivals[j, i] - origin)
            mean *= share
            for i in span(first, first + num_actions):
                deviation = (arrivals[j, i] - origin) - mean
                work.centred[j, unsigned(i - shift)] = deviation
                work.centred[unsigned(widest + j), unsigned(i - shift)] = (
                    pairs[at.INVERSE, i] * deviation
                )


@routine(inline=True, any_order=True)
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
            Y[i, j], Y[j, i] = a, a
            Y[i, more_j], Y[more_j, i] = b, b
            Y[more_i, j], Y[j, more_i] = c, c
            Y[more_i, more_j], Y[more_j, more_i] = d, d


@routine(inline=True, any_order=True)
def observe_layer(here: int, width: int, refresh: Any, work: Work) -> None:
    """Write Yhat = (Y^-1 + K)^-1 into `gain`.

    K is diagonal, so this is done for one state m after the other: Y becomes
    Y - kappa y y' / (1 + kappa y_m), where y is column m of Y. That is y / (1 + kappa y_m) in
    column m itself. Only the lower half of Y is kept.

    This is Y - g y' with g = kappa y / (1 + kappa y_m). So (I + Y K)^-1 is a product of I - g e_m',
    which has all digits where I - Yhat K has none. `gain` keeps g, with 1 - g_m in place of g_m.
    """
    Y, column = work.squares, len(work.moves)  # the row of `squares` with a copy of y
    for m in range(width):
        kappa = work.states[at.KAPPA, unsigned(here + m)]
        steepest = max(work.notes[at.STEEP], kappa * Y[m, m])
        work.notes[at.STEEP] = where(refresh, steepest, work.notes[at.STEEP])
        left = 1.0 / (1.0 + kappa * Y[m, m])
        for i in range(width):
            Y[column, i] = Y[i, m] if i > m else Y[m, i]
            g, kept = kappa * left * Y[column, i], work.gain[here + m, unsigned(column + i)]
            work.gain[here + m, unsigned(column + i)] = where(refresh, left if i == m else g, kept)
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


@routine(inline=True, any_order=True)
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


@routine(any_order=True)
def solve_dense(model: Model, source: Any, work: Work, start: Any = None) -> None:
    """Solve H dq = x + E'v, E dq = r.

    x is the row FORCE, which is overwritten. r is `source`, (S,), or None for zero. The rows DQ, V
    and AHEAD receive dq, v and E[v(next state)]. Only conjugate gradients read `start`.

    It sweeps forward, backward and forward again. One pass over the pairs of a state multiplies
    both p and R by the transitions: sum_a p_a P_a u + sum_a (R x)_a P_a = sum_a dq_a P_a.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    layers, steep = len(start) - 1, work.notes[at.STEEP] > LARGE
    guided = source is None and anywhere(steep)
    if guided:
        follow_guess(model, steep, work)
    load(states, at.M, source)
    for k in range(layers):
        here, behind = start[k], start[k + 1]
        respond_in_layer(num_actions, here, behind, work)
        for s in span(here, behind):
            states[at.PULL, s] = states[at.KAPPA, s] * states[at.M, s] - dot(
                pairs, at.P, pairs, at.FORCE, s * num_actions, (s + 1) * num_actions
            )
        if k + 1 < layers:
            for s in span(here, behind):
                passed = states[at.M, s]
                for j in range(behind - here):
                    passed -= work.gain[s, j] * states[at.PULL, unsigned(here + j)]
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[at.RESPONSE, i] += pairs[at.P, i] * passed
            if start[k + 2] - behind == 1 and model.conserved:
                states[at.M, behind] = mass(source, behind)
            else:
                flow_on(model, k, at.RESPONSE, at.M, True, work)
    for k in range(layers - 1, -1, -1):
        here, behind = start[k], start[k + 1]
        after = start[k + 2] - behind if k + 1 < layers else 0
        for j in range(after):
            for s in span(here, behind):
                states[at.PULL, s] += work.moves[j, s] * states[at.V, unsigned(behind + j)]
        for s in span(here, behind):
            held = 0.0
            for j in range(behind - here):
                held += work.gain[s, j] * states[at.PULL, unsigned(here + j)]
            states[at.V, s] = states[at.PULL, s] - states[at.KAPPA, s] * held
        if anywhere(steep):
            hold_back(here, behind, steep, work)
        for i in span(here * num_actions, behind * num_actions):
            pairs[at.AHEAD, i] = ahead(model.next_state, i, states, at.V, behind, after)
            pairs[at.FORCE, i] -= pairs[at.AHEAD, i]
    load(states, at.U, source)
    for k in range(layers):
        here, behind = start[k], start[k + 1]
        respond_in_layer(num_actions, here, behind, work)
        for s in span(here, behind):
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[at.DQ, i] = pairs[at.P, i] * states[at.U, s] + pairs[at.RESPONSE, i]
        if k + 1 < layers:
            if start[k + 2] - behind == 1 and model.conserved:
                states[at.U, behind] = mass(source, behind)
            else:
                flow_on(model, k, at.DQ, at.U, True, work)
    if guided:
        for s in range(states.shape[1]):
            states[at.V, s] += states[at.GUESS, s]


@routine(any_order=True)
def hold_back(here: int, behind: int, wanted: Any, work: Work) -> None:
    """Write (I + K Y)^-1 PULL of a layer into V where `wanted`; see `observe_layer`."""
    states, width, widest = work.states, behind - here, len(work.moves)
    for m in range(width - 1, -1, -1):
        pull = 2.0 * work.gain[here + m, widest + m] * states[at.PULL, here + m]
        for i in range(width):
            pull -= work.gain[here + m, widest + i] * states[at.PULL, here + i]
        states[at.PULL, here + m] = pull
        states[at.V, here + m] = where(wanted, pull, states[at.V, here + m])


@routine(inline=True)
def mass(source: Any, last: int) -> Any:
    """The sum of the sources of all states up to `last`."""
    total = 0.0
    if source is not None:
        for s in range(last + 1):
            total += source[s]
    return total


@routine(inline=True)
def load(states: Floats, row: int, source: Any) -> None:
    """Fill a row of the states from an array (S,), or with zeros."""
    for s in range(states.shape[1]):
        states[row, s] = 0.0 if source is None else source[s]


@routine(inline=True)
def respond_in_layer(num_actions: int, here: int, behind: int, work: Work) -> None:
    """Write R x of states here, ..., behind - 1 into RESPONSE, for x in FORCE."""
    pairs, states = work.pairs, work.states
    for s in span(here, behind):
        first, mean = s * num_actions, 0.0
        origin = dot(pairs, at.SOFT, pairs, at.FORCE, first, first + num_actions)
        for i in span(first, first + num_actions):
            mean += pairs[at.INVERSE, i] * (pairs[at.FORCE, i] - origin)
        mean *= states[at.SHARE, s]
        for i in span(first, first + num_actions):
            pairs[at.RESPONSE, i] = ((pairs[at.FORCE, i] - origin) - mean) * pairs[at.INVERSE, i]


@inlined
def arrive_dense(model: Model, row: int, k: int, work: Work) -> None:
    """Write the inflow of layer k into U: from a row of the pairs, or the initial distribution."""
    if k > 0:
        flow_on(model, k - 1, row, at.U, False, work)
    else:
        for s in span(0, model.start[1]):
            work.states[at.U, s] = model.initial[s]


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


# -- conjugate gradients, with sparse transitions --------------------------------------------------
#
# Each iteration sweeps backward and forward through the layers, and each sweep reads every
# probability once. Lanes share the probabilities and their places. They iterate together until the
# last has finished; a lane that has finished keeps its solution.

# Rows of `work.states`, in addition to those of torch_occ.engine.layout.
ROOT = at.STATE_ROWS  # the square root of kappa
SCALE = at.STATE_ROWS + 1  # errors are measured as |RESIDUAL * SCALE|
MEAN = at.STATE_ROWS + 2  # p'x
Y = at.STATE_ROWS + 3  # the unknown of M y = b
RESIDUAL = at.STATE_ROWS + 4  # b - M y
DIRECTION = at.STATE_ROWS + 5  # the search direction
Z = at.STATE_ROWS + 6  # the input of the sweeps; in `iterate` also M times the direction
SOURCE = at.STATE_ROWS + 7  # r
SOFTEST = at.STATE_ROWS + 8  # the number of the action of least curvature
START = at.M  # where an inexact solve starts du

EPS = float(np.finfo(np.float64).eps)
GOAL = EPS ** (5 / 6)


@routine
def factorize_sparse(model: Model, refresh: Any, work: Work) -> None:
    """Compute (R, p, kappa) of every state, the square root of kappa, and the softest action."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    reduce_states(model, 0, states.shape[1], refresh, work)
    for s in range(states.shape[1]):
        states[ROOT, s] = sqrt(states[at.KAPPA, s])
        softest = 0.0
        for action in range(num_actions):
            softest += action * pairs[at.SOFT, s * num_actions + action]
        states[SOFTEST, s] = softest


@routine
def solve_sparse(model: Model, source: Any, work: Work, start: Any = None) -> None:
    """Solve H dq = x + E'v, E dq = r, with the same arguments as `solve_dense`.

    Without a source, the solve starts from the multipliers in V and is only as accurate as
    Newton's method needs: beside the difference of du from its start, (S,), or None for zero. With
    one, it is accurate to rounding; dq and v are NaN if that fails.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    inexact = source is None
    load(states, SOURCE, source)
    load(states, START, start)
    if inexact:
        follow_guess(model, True, work)
    for s in range(states.shape[1]):
        states[MEAN, s] = dot(pairs, at.P, pairs, at.FORCE, s * num_actions, (s + 1) * num_actions)
        states[Y, s] = states[ROOT, s] * states[START, s]
        states[Z, s] = states[ROOT, s] * states[Y, s] - states[MEAN, s]
    sweep_work(model, True, work)
    if inexact:
        for s in range(states.shape[1]):
            # Errors are relative to q(s), which is row 0. States with kappa = 0 have no error.
            curved = states[at.KAPPA, s] > 0.0
            states[SCALE, s] = where(curved, 1.0 / (states[ROOT, s] * states[0, s]), 0.0)
    else:
        take_own_size(num_actions, work)
    error, _ = take_residual(work)
    goal = max(FORCING * min(error, 1.0) * min(error, 1.0), GOAL) if inexact else GOAL
    going = work.notes[at.USED] > 0.0
    for _ in range(RESTARTS):
        iterate(model, goal, going, work)
        for s in range(states.shape[1]):
            states[Z, s] = states[ROOT, s] * states[Y, s] - states[MEAN, s]
        sweep_work(model, True, work)
        # The true residual, free of the rounding errors of the recurrence.
        before, (error, change) = error, take_residual(work)
        if inexact:
            finer = min(goal, max(FORCING * change * change, GOAL))
            goal = where(10.0 * error > change, finer, goal)
        going = going & (error > 2.0 * goal) & (error < 0.1 * before)
        if not anywhere(going):
            break
    failed = False if inexact else has_failed(num_actions, work)
    for s in range(states.shape[1]):
        for i in range(s * num_actions, (s + 1) * num_actions):
            change = pairs[at.P, i] * states[at.U, s] + pairs[at.RESPONSE, i]
            pairs[at.DQ, i] = where(failed, np.nan, change)
        found = states[at.V, s] + (states[at.GUESS, s] if inexact else 0.0)
        states[at.V, s] = where(failed, np.nan, found)


@routine
def iterate(model: Model, goal: Any, wanted: Any, work: Work) -> None:
    """Solve M dy = residual by conjugate gradients from dy = 0, and add dy to y where `wanted`.

    The iteration stops when no state's error is above the goal.
    """
    states, n = work.states, work.states.shape[1]
    square, error = 0.0, 0.0
    for s in range(n):
        residual = states[RESIDUAL, s]
        states[DIRECTION, s] = residual
        states[Z, s] = states[ROOT, s] * residual
        square += residual * residual
        error = max(error, abs(residual * states[SCALE, s]))
    running = wanted & (error > goal) & (square > 0.0)
    for _ in range(MAX_ITERATIONS):
        if not anywhere(running):
            break
        sweep_work(model, False, work)
        along = 0.0
        for s in range(n):
            # M times the direction.
            states[Z, s] = states[DIRECTION, s] - states[ROOT, s] * states[at.U, s]
            along += states[DIRECTION, s] * states[Z, s]
        length, before, square, error = square / along, square, 0.0, 0.0
        for s in range(n):
            found = states[Y, s] + length * states[DIRECTION, s]
            states[Y, s] = where(running, found, states[Y, s])
            residual = states[RESIDUAL, s] - length * states[Z, s]
            states[RESIDUAL, s] = residual
            square += residual * residual
            error = max(error, abs(residual * states[SCALE, s]))
        ratio = square / before
        for s in range(n):
            states[DIRECTION, s] = states[RESIDUAL, s] + ratio * states[DIRECTION, s]
            states[Z, s] = states[ROOT, s] * states[DIRECTION, s]
        running = running & (error > goal) & (square > 0.0)


@routine
def follow_guess(model: Model, wanted: Any, work: Work) -> None:
    """Add E'v to x for the guess v in V, and move v to GUESS; zero where not `wanted`.

    The solve then finds only the difference from the guess, which is small.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            states[at.GUESS, s] = where(wanted, states[at.V, s], 0.0)
            for i in range(s * num_actions, (s + 1) * num_actions):
                expected = ahead(model.next_state, i, states, at.GUESS, behind, after)
                pairs[at.FORCE, i] += states[at.GUESS, s] - expected


@routine
def take_residual(work: Work) -> tuple[Any, Any]:
    """Compute the residual K^(1/2) du - y; return the largest error and change of du by q(s)."""
    states, error, change = work.states, 0.0, 0.0
    for s in range(states.shape[1]):
        residual = states[ROOT, s] * states[at.U, s] - states[Y, s]
        states[RESIDUAL, s] = residual
        error = max(error, abs(residual * states[SCALE, s]))
        change = max(change, abs((states[at.U, s] - states[START, s]) / states[0, s]))
    return error, change


@routine
def take_own_size(num_actions: int, work: Work) -> None:
    """Set SCALE for a right-hand side of unknown size.

    The unit of a state's error is the size of its own change after the first sweeps; the form of
    `_own_size` in torch_occ.step.system.
    """
    states, largest, steepest = work.states, 0.0, 0.0
    for s in range(states.shape[1]):
        own = size(s, num_actions, work)
        states[SCALE, s] = own
        largest, steepest = max(largest, own), max(steepest, own / states[0, s])
    for s in range(states.shape[1]):
        unit = states[ROOT, s] * max(states[SCALE, s], EPS * min(largest, states[0, s] * steepest))
        states[SCALE, s] = where(states[ROOT, s] > 0.0, 1.0 / unit, 0.0)


@routine
def has_failed(num_actions: int, work: Work) -> Any:
    """Whether the residual is larger than rounding errors explain."""
    states, left, scale, noise = work.states, 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        root, residual = states[ROOT, s], states[RESIDUAL, s]
        own = root * size(s, num_actions, work)
        error = EPS * (abs(states[MEAN, s]) + abs(states[at.V, s])) / root
        left += residual * residual
        scale += own * own
        noise += where(root > 0.0, error * error, 0.0)
    return not (sqrt(left) <= sqrt(EPS * scale) + 1e3 * sqrt(noise))


@inlined
def size(s: int, num_actions: int, work: Work) -> Any:
    """The size of the change of a state: |du| plus the absolute responses of its actions."""
    total = abs(work.states[at.U, s])
    for i in range(s * num_actions, (s + 1) * num_actions):
        total += abs(work.pairs[at.RESPONSE, i])
    return total


@inlined
def sweep_work(model: Model, forced: bool, work: Work) -> None:
    """Run both sweeps from Z; the results are V, RESPONSE and U.

    FORCE and SOURCE are used if `forced` is true, and are taken as zero otherwise.
    """
    pairs, states = work.pairs, work.states
    for s in range(states.shape[1]):
        states[at.U, s] = states[SOURCE, s] if forced else 0.0
    parts = pairs[at.P], pairs[at.INVERSE], states[at.TOTAL], states[SOFTEST]
    out, force = (states[at.V], pairs[at.RESPONSE], states[at.U]), pairs[at.FORCE]
    sweep_layers(model.num_actions, model.next_state, parts, states[Z], force, forced, out)


@routine
def sweep_layers(
    num_actions: int,
    rows: Rows,
    # p and 1/D, (S * A,); sum 1/D and the number of the softest action, (S,)
    parts: tuple[Floats, Floats, Floats, Floats],
    z: Floats,  # (S,)
    x: Floats,  # (S * A,), read if `forced` is true
    forced: bool,
    # v (S,), within (S * A,) and du (S,), which holds r on entry
    out: tuple[Floats, Floats, Floats],
) -> None:
    """The backward and the forward sweep of torch_occ.step.system.

    Indices are unsigned: testing their signs would take half of the time.
    """
    p, inverse, total, softest = parts
    v, within, du = out
    starts, state, probability = rows.starts, rows.state, rows.probability
    width, one, num_states = np.uint64(num_actions), np.uint64(1), np.uint64(len(z))
    for n in range(num_states):
        s = num_states - one - np.uint64(n)
        value, entry, reference, action, mean = z[s], starts[s * width], 0.0, 0.0, 0.0
        for i in range(s * width, (s + one) * width):
            expected, stop = 0.0, starts[i + one]
            while entry < stop:
                expected += probability[entry] * v[state[entry]]
                entry += one
            value += p[i] * expected
            force = x[i] - expected if forced else -expected
            within[i] = force
            reference = where(softest[s] == action, force, reference)
            action += 1.0
        v[s] = value
        # R times these forces, taken relative to the softest action; see torch_occ.step.system.
        for i in range(s * width, (s + one) * width):
            mean += inverse[i] * (within[i] - reference)
        mean /= total[s]
        for i in range(s * width, (s + one) * width):
            within[i] = ((within[i] - reference) - mean) * inverse[i]
    entry = starts[0]
    for s in range(num_states):  # type: ignore[assignment]
        change = du[s]
        for i in range(s * width, (s + one) * width):
            flow, stop = within[i] + p[i] * change, starts[i + one]
            while entry < stop:
                du[state[entry]] += probability[entry] * flow
                entry += one


@inlined
def arrive_sparse(model: Model, row: int, k: int, work: Work) -> None:
    """Write the inflow of layer k into U: from a row of the pairs, or the initial distribution."""
    start, num_actions, states, rows = model.start, model.num_actions, work.states, model.next_state
    for s in range(start[k], start[k + 1]):
        states[at.U, s] = model.initial[s] if k == 0 else 0.0
    if k > 0:
        for i in range(start[k - 1] * num_actions, start[k] * num_actions):
            for entry in range(rows.starts[i], rows.starts[i + 1]):
                states[at.U, rows.state[entry]] += rows.probability[entry] * work.pairs[row, i]


@kernel
def sweep_all(
    num_actions: int,
    rows: Rows,
    parts: tuple[Floats, Floats, Floats, Floats],
    z: Floats,
    x: Floats,
    forced: bool,
    out: tuple[Floats, Floats, Floats],
) -> None:
    """Run `sweep_layers` for a batch: one row per element, or one for all."""
    p, inverse, total, softest = parts
    for b in range(len(out[0])):
        i, found = b % len(p), (out[0][b], out[1][b], out[2][b])
        states = p[i], inverse[i], total[i], softest[i]
        sweep_layers(num_actions, rows, states, z[b % len(z)], x[b % len(x)], forced, found)


# -- either ----------------------------------------------------------------------------------------

factorize = either(factorize_dense, factorize_sparse)
solve = either(solve_dense, solve_sparse)
arrive = either(arrive_dense, arrive_sparse)
