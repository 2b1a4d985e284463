"""The Kullback-Leibler projection of UOB-REPS, compiled: one problem in every lane.

    argmin over q in Delta of rate ⟨q, loss⟩ + KL(q || reference)

Delta holds the occupancy measures q(s,a,s') = w(s,a) p(s'|s,a) with lower <= p <= upper, and the
reference is w̃ p̃. Only the flow constraints couple the rows of transitions. With their multipliers
v(s), and v = 0 at the end, every row is solved in closed form:

    G(s,a; v) = min of sum_s' p(s') (log(p(s') / p̃(s')) + v(s'))   over lower <= p <= upper,

with p = clip(c exp(log p̃ - v), lower, upper), where c makes the sum one. Then

    w(s,a) = w̃(s,a) exp(v(s) - rate * loss(s,a) - G(s,a; v)),
    D(v)   = sum_s initial(s) v(s) - sum w(s,a),     dD/dv(s) = inflow of w - w(s).

D is concave. Instead of v, the iteration moves g(s) = log w(s). A pass backward through the layers
gives v, the policy and p; a pass forward gives the occupancy u of that policy under p, so every
iterate satisfies all constraints. It is solved when log u = g.

**Newton's method.** With P the transitions of the policy, dv = dg + P dv, and dD = ⟨u - w, dg⟩. The
direction maximizes ⟨u - w, dg⟩ - 1/2 ⟨dg, Lambda dg⟩ - 1/2 ⟨dv, N dv⟩, where N is what the changes
of policies and of p contribute to the Hessian, block-diagonal over layers:

    ((I - P)' Lambda (I - P) + N) dv = (I - P)' (u - w),     dg = dv - P dv,

with a matrix that couples neighbouring layers only. Lambda is the logarithmic mean of u and w. At
the solution it is w, which is Newton's method; if N = 0, the direction is log u - g, which solves
the equation at once, however large it is. Lambda and N are positive, so it is an ascent direction;
steps are halved until D has grown enough.

Tables over transitions are flat, `(M,)`, layer after layer: the successors of pair i are the
entries `entry[i]`, ..., `entry[i + 1] - 1`. Scratch memory has one row per quantity.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ._support import constants
from torch_occ.engine.lanes import anywhere, exp, log, sqrt, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, finite, routine

# Rows of `Scratch.pairs`.
LOG_WEIGHT = 0  # log w̃ - rate * loss
POLICY = 1
FOUND = 2  # q(s,a) of the projection

# Rows of `Scratch.states`.
GUESS = 0  # g, the guess of log w(s)
TRIAL = 1  # g after a step
VALUE = 2  # v
OCCUPANCY = 3  # u
OFF = 4  # log u - g
MEAN = 5  # Lambda, the logarithmic mean of u and w
STEP = 6  # dg
MOVE = 7  # dv; at first (I - P)'(u - w)
FALL = 8  # exp(least v of the layer - v)
STATE_ROWS = 9

# Rows of `Scratch.rows`.
P = 0  # the transitions
FREE = 1  # the same where no bound is active, else zero

_EPS = np.finfo(np.float64).eps
_SMALLEST = np.finfo(np.float64).tiny
_SMALLEST_STEP = _SMALLEST / _EPS

#: The smallest share of the growth that the slope promises with which a step is accepted, and how
#: often a step is halved; after that, the iteration goes on from its end.
ENOUGH, BACKTRACKS = 1e-4, 40


class Scratch(NamedTuple):
    """Scratch memory of one projection, or of one in every lane."""

    pairs: Floats  # (3, S * A)
    states: Floats  # (STATE_ROWS, S)
    rows: Floats  # (2, M)
    #: (S, 2 * widest), the matrix of the Newton step, then its Cholesky factor. Row s has the
    #: columns of the layer before and of the layer of s, up to s.
    matrix: Floats


def make_scratch(start: Ints, entry: Ints) -> Scratch:
    """Allocate scratch memory; `start` `(L + 1,)` has the first state of every layer."""
    num_states, widest = int(start[-1]), int(np.diff(start).max())
    shapes = [(3, len(entry) - 1), (STATE_ROWS, num_states), (2, int(entry[-1]))]
    return Scratch(*map(np.zeros, [*shapes, (num_states, 2 * widest)]))


# -- One row of transitions: clip(c z, lower, upper) with z = p̃ exp(least v - v) ------------------


@routine
def fit_row(reference: Any, i: int, after: int, least: Any, scratch: Scratch) -> None:
    """Write p and its free part of pair i, and G into row POLICY.

    `after` is the first state of the next layer, and `least` the smallest v there.
    """
    p, states, lower, upper = scratch.rows, scratch.states, reference.lower, reference.upper
    first, stop = reference.entry[i], reference.entry[i + 1]
    total, inside = 0.0, True
    for e in range(first, stop):
        z = where(upper[e] > 0.0, reference.rows[e] * states[FALL, after + e - first], 0.0)
        p[FREE, e] = z  # until c is known
        total += z
    for e in range(first, stop):
        share = p[FREE, e] / total
        p[P, e] = share
        inside = inside & (lower[e] <= share) & (share <= upper[e])
    scratch.pairs[POLICY, i] = least - log(total)
    if anywhere(not inside):
        clip_row(reference, i, after, least, inside, scratch)
    else:
        for e in range(first, stop):
            p[FREE, e] = p[P, e]


@routine
def clip_row(reference: Any, i: int, after: int, least: Any, inside: Any, scratch: Scratch) -> None:
    """`fit_row` where a bound is active; lanes that are inside keep their p and G."""
    p, rows, lower, upper = scratch.rows, reference.rows, reference.lower, reference.upper
    first, stop = reference.entry[i], reference.entry[i + 1]
    low, high = narrow(reference, first, stop, scratch)
    rest, total, cost = 1.0, 0.0, 0.0
    for e in range(first, stop):
        z = p[FREE, e]
        down = (z == 0.0) | (lower[e] / z >= high)
        up = (not down) & (upper[e] / z <= low)
        bound = where(down, lower[e], where(up, upper[e], 0.0))
        total += where(down | up, 0.0, z)
        rest -= bound
        if anywhere(bound > 0.0):
            ratio = log(where(bound > 0.0, bound / rows[e], 1.0))
            cost += bound * (ratio + scratch.states[VALUE, after + e - first])
    rest = max(rest, _SMALLEST)
    for e in range(first, stop):
        z = p[FREE, e]
        down = (z == 0.0) | (lower[e] / z >= high)
        up = (not down) & (upper[e] / z <= low)
        share = min(max(rest * (z / total), lower[e]), upper[e])
        free = where(down | up, 0.0, share)
        fixed = where(down, lower[e], where(up, upper[e], share))
        p[P, e] = where(inside, p[P, e], fixed)
        p[FREE, e] = where(inside, p[P, e], free)
    cost += where(total > 0.0, rest * (log(rest / total) + least), 0.0)
    scratch.pairs[POLICY, i] = where(inside, scratch.pairs[POLICY, i], cost)


@routine
def narrow(reference: Any, first: int, stop: int, scratch: Scratch) -> tuple[Any, Any]:
    """The neighbouring breakpoints of the sum of clip(c z, lower, upper) around one."""
    least, z, lower, upper = 0.0, scratch.rows, reference.lower, reference.upper
    for e in range(first, stop):
        least += lower[e]
    low, high = 0.0, where(least >= 1.0, 0.0, np.inf)  # all at their lower bounds
    for twice in range(2 * first, 2 * stop):
        e = twice // 2
        middle = (lower[e] if twice % 2 == 0 else upper[e]) / z[FREE, e]
        between = (low < middle) & (middle < high)
        if anywhere(between):
            total = 0.0
            for other in range(first, stop):
                total += min(max(middle * z[FREE, other], lower[other]), upper[other])
            low = where(between & (total < 1.0), middle, low)
            high = where(between & (not (total < 1.0)), middle, high)
    return low, high


# -- The pass backward and the pass forward through the layers -------------------------------------


@routine
def solve_rows(model: Model, reference: Any, scratch: Scratch) -> Any:
    """Solve the rows backward and follow the policy forward, for the guess in TRIAL; return D."""
    start, num_actions = model.start, model.num_actions
    pairs, states, depth = scratch.pairs, scratch.states, len(model.start) - 1
    for k in range(depth - 1, -1, -1):
        least = np.inf
        if k + 1 < depth:
            for s in range(start[k + 1], start[k + 2]):
                least = min(least, states[VALUE, s])
            for s in range(start[k + 1], start[k + 2]):
                states[FALL, s] = exp(least - states[VALUE, s])
        for s in range(start[k], start[k + 1]):
            most, total = -np.inf, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    if k + 1 < depth:
                        fit_row(reference, i, start[k + 1], least, scratch)
                    else:  # the terminal state is certain
                        scratch.rows[P, reference.entry[i]] = 1.0
                        pairs[POLICY, i] = -log(reference.rows[reference.entry[i]])
                    pairs[POLICY, i] = pairs[LOG_WEIGHT, i] - pairs[POLICY, i]
                    most = max(most, pairs[POLICY, i])
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    pairs[POLICY, i] = exp(pairs[POLICY, i] - most)
                    total += pairs[POLICY, i]
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[POLICY, i] = pairs[POLICY, i] / total
            states[VALUE, s] = states[TRIAL, s] - most - log(total)
    return pass_forward(model, reference, scratch)


@routine(inline=True)
def pass_forward(model: Model, reference: Any, scratch: Scratch) -> Any:
    """The occupancy of the policy and log u - g; return D."""
    start, num_actions, entry = model.start, model.num_actions, reference.entry
    pairs, states, depth, dual = scratch.pairs, scratch.states, len(model.start) - 1, 0.0
    for s in range(start[depth]):
        states[OCCUPANCY, s] = 0.0
    for s in range(start[1]):
        states[OCCUPANCY, s] = model.initial[s]
        dual += model.initial[s] * states[VALUE, s]
    for k in range(depth - 1):
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if model.exists[PAIR, i]:
                mass = states[OCCUPANCY, i // num_actions] * pairs[POLICY, i]
                for e in range(entry[i], entry[i + 1]):
                    states[OCCUPANCY, start[k + 1] + e - entry[i]] += mass * scratch.rows[P, e]
    for s in range(start[depth]):
        states[OFF, s] = log(states[OCCUPANCY, s]) - states[TRIAL, s]
        dual -= exp(states[TRIAL, s])
    return dual


@routine(inline=True)
def greatest(most: Any, x: Any) -> Any:
    """max(most, |x|), and NaN if x is."""
    return where(abs(x) <= most, most, abs(x))


# -- The Newton direction --------------------------------------------------------------------------


@routine
def find_direction(model: Model, reference: Any, scratch: Scratch) -> tuple[Any, Any]:
    """Write dg into STEP; return the slope of D along it and the largest |dg|."""
    start, states, entry = model.start, scratch.states, reference.entry
    num_actions, depth, slope, moved = model.num_actions, len(start) - 1, 0.0, 0.0
    for s in range(start[depth]):
        off = states[OFF, s]
        series = 1.0 + off * (0.5 + off * (1.0 / 6.0 + off * (1.0 / 24.0 + off / 120.0)))
        growth = where(abs(off) < 1e-2, series, (exp(off) - 1.0) / off)
        states[MEAN, s] = exp(states[GUESS, s]) * growth
        states[MOVE, s] = states[MEAN, s] * off
    for k in range(depth):
        assemble(model, reference, k, scratch)
        eliminate(model, k, scratch)
    for k in range(depth - 1, -1, -1):
        low = start[max(k - 1, 0)]
        for s in range(start[k + 1] - 1, start[k] - 1, -1):
            states[MOVE, s] /= scratch.matrix[s, s - low]
            for j in range(low, s):
                states[MOVE, j] -= scratch.matrix[s, j - low] * states[MOVE, s]
    for k in range(depth):
        for s in range(start[k], start[k + 1]):
            step = states[MOVE, s]
            for i in range(s * num_actions, (s + 1) * num_actions):
                for e in range(entry[i], entry[i + 1] if k + 1 < depth else entry[i]):
                    after = start[k + 1] + e - entry[i]
                    step -= scratch.pairs[POLICY, i] * scratch.rows[P, e] * states[MOVE, after]
            states[STEP, s] = step
            slope += states[MEAN, s] * states[OFF, s] * step
            moved = greatest(moved, step)
    return slope, moved


@routine(inline=True)
def assemble(model: Model, reference: Any, k: int, scratch: Scratch) -> None:
    """Write the rows of layer k of the matrix, and its part of the right-hand side into MOVE."""
    start, states, rows, matrix = model.start, scratch.states, scratch.rows, scratch.matrix
    low, here, num_actions = start[max(k - 1, 0)], start[k], model.num_actions
    for s in range(here, start[k + 1]):
        for j in range(low, s):
            matrix[s, j - low] = 0.0
        matrix[s, s - low] = states[MEAN, s]
    for i in range(low * num_actions, here * num_actions):
        if model.exists[PAIR, i]:
            before, first, free = i // num_actions, reference.entry[i], 0.0
            weight = states[MEAN, before] * scratch.pairs[POLICY, i]
            for e in range(first, reference.entry[i + 1]):
                free += rows[FREE, e]
            share = where(free > 0.0, weight / free, 0.0)
            for s in range(here, start[k + 1]):
                x, y = weight * rows[P, first + s - here], share * rows[FREE, first + s - here]
                states[MOVE, s] -= x * states[OFF, before]
                matrix[s, before - low] -= x
                matrix[s, s - low] += y * free
                for j in range(here, s + 1):
                    e = first + j - here
                    matrix[s, j - low] += x * rows[P, e] - y * rows[FREE, e]


@routine(inline=True)
def eliminate(model: Model, k: int, scratch: Scratch) -> None:
    """The Cholesky factor of the rows of layer k, and the substitution forward in MOVE."""
    start, move, matrix = model.start, scratch.states, scratch.matrix
    low = start[max(k - 1, 0)]
    for s in range(start[k], start[k + 1]):
        for j in range(low, s + 1):
            first = low if j >= start[k] else start[max(k - 2, 0)]
            total = matrix[s, j - low]
            for c in range(low, j):
                total -= matrix[s, c - low] * matrix[j, c - first]
            matrix[s, j - low] = sqrt(total) if j == s else total / matrix[j, j - first]
            if j < s:
                move[MOVE, s] -= matrix[s, j - low] * move[MOVE, j]
        move[MOVE, s] /= matrix[s, s - low]


# -- The projection; nothing is allocated ----------------------------------------------------------


@routine
def project(model: Model, learner: Any) -> tuple[Any, Any, Any, Any]:
    """Write the projection into rows FOUND and P; return status, steps, flow and dual residual.

    The flow residual is the largest |sum of q - 1| of a layer: q follows its own rows forward, so
    all that can be wrong is that a row does not sum to one.
    """
    start, scratch, tolerance = model.start, learner.scratch, learner.tolerance
    states, pairs, flow, dual = scratch.states, scratch.pairs, 0.0, 0.0
    for s in range(start[-1]):  # the weights, and the guess: the occupancies of the reference
        mass = 0.0
        for i in range(s * model.num_actions, (s + 1) * model.num_actions):
            if model.exists[PAIR, i]:
                pairs[LOG_WEIGHT, i] = (
                    log(learner.q[i]) - learner.learning_rate * learner.estimate[i]
                )
                mass += learner.q[i]
        states[TRIAL, s] = log(mass)
    status, steps = maximize(model, learner, tolerance, learner.max_steps, scratch)
    for k in range(len(start) - 1):
        total = 0.0
        for s in range(start[k], start[k + 1]):
            dual = greatest(dual, states[OFF, s])
            for i in range(s * model.num_actions, (s + 1) * model.num_actions):
                pairs[FOUND, i] = 0.0
                if model.exists[PAIR, i]:
                    pairs[FOUND, i] = states[OCCUPANCY, s] * pairs[POLICY, i]
                    total += pairs[FOUND, i]
        flow = greatest(flow, total - 1.0)
    certified = (status == float(constants.STALLED)) & (dual <= tolerance) & (flow <= tolerance)
    return where(certified, float(constants.CONVERGED), status), steps, flow, dual


@routine(inline=True)
def maximize(
    model: Model, reference: Any, tolerance: float, max_steps: int, scratch: Scratch
) -> tuple[Any, Any]:
    """Maximize D from the guess in TRIAL; return the status, STALLED at the end, and the steps."""
    states, num_states = scratch.states, model.start[-1]
    dual = solve_rows(model, reference, scratch)
    status, steps, running = constants.MAX_STEPS + 0.0, 0.0, True
    best, patience = np.inf, float(constants.STALL_AFTER)
    for _ in range(max_steps):
        smallest, off = np.inf, 0.0
        for s in range(num_states):
            states[GUESS, s] = states[TRIAL, s]
            smallest = min(smallest, states[OCCUPANCY, s])
        tiny = running & (smallest < _SMALLEST_STEP)
        status, running = where(tiny, float(constants.UNDERFLOW), status), running & (not tiny)
        slope, moved = find_direction(model, reference, scratch)
        wild = running & (not finite(moved))
        status, running = where(wild, float(constants.NOT_FINITE), status), running & (not wild)
        if not anywhere(running):
            break
        length, found = 1.0, dual
        for _ in range(BACKTRACKS):
            for s in range(num_states):
                move = where(running, length * states[STEP, s], 0.0)
                states[TRIAL, s] = states[GUESS, s] + move
            found = solve_rows(model, reference, scratch)
            # Close to the solution, D changes less than its rounding errors.
            grown = (moved <= 1e-3) | (found >= dual + ENOUGH * length * slope)
            if not anywhere(running & (not grown)):
                break
            length = where(running & (not grown), 0.5 * length, length)
        dual = found
        steps += where(running, 1.0, 0.0)
        faster = (moved < 0.5 * best) | (moved > 0.1)
        patience = where(faster, float(constants.STALL_AFTER), patience - 1.0)
        best = min(best, moved)
        # A short step leaves only rounding errors, unless a bound became active on its way.
        for s in range(num_states):
            off = greatest(off, states[OFF, s])
        done = ((moved <= np.sqrt(_EPS)) & (off <= tolerance)) | (patience <= 0.0)
        status = where(running & done, float(constants.STALLED), status)
        running = running & (not done)
        if not anywhere(running):
            break
    return status, steps
