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
of policies and of p contribute to the Hessian, block-diagonal over layers. Lambda is the
logarithmic mean of u and w. At the solution it is w, which is Newton's method; if N = 0, the
direction is log u - g, which solves the equation at once, however large it is. Lambda and N are
positive, so it is an ascent direction; steps are halved until D has grown enough.

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
FORCE = 6  # u - w, then with the pull of the layers before
STEP = 7  # dg
MOVE = 8  # dv; the pull y on the way forward
FALL = 9  # exp(least v of the layer - v)
ROOT = 10  # the root of Lambda
REST = 11  # what is left of the force
STATE_ROWS = 12

# Rows of `Scratch.rows`.
P = 0  # the transitions
FREE = 1  # the same where no bound is active, else zero

_EPS = np.finfo(np.float64).eps
_SMALLEST = np.finfo(np.float64).tiny
_SMALLEST_STEP = _SMALLEST / _EPS

#: The smallest share of the growth that the slope promises with which a step is accepted, and how
#: often a step is halved; after that, the iteration goes on from its end.
ENOUGH, BACKTRACKS = 1e-4, 40


class Reference(NamedTuple):
    """A reference q(s,a) p(s'|s,a), and the bounds of its transitions."""

    q: Floats  # (S * A,)
    rows: Floats  # (M,)
    lower: Floats  # (M,)
    upper: Floats  # (M,)
    entry: Ints  # (S * A + 1,), the first entry of each pair in a flat table, and M


class Scratch(NamedTuple):
    """Scratch memory of one projection, or of one in every lane."""

    pairs: Floats  # (3, S * A)
    states: Floats  # (STATE_ROWS, S)
    rows: Floats  # (2, M)
    squares: Floats  # (3 * widest, widest), matrices of a layer
    onward: Floats  # (S, widest), the transitions of the policy
    scaled: Floats  # (S, widest), Y of every layer
    inverse: Floats  # (S, widest), (I + Y)^-1 of every layer


def make_scratch(start: Ints, entry: Ints) -> Scratch:
    """Allocate scratch memory; `start` `(L + 1,)` has the first state of every layer."""
    num_pairs, num_states, widest = len(entry) - 1, int(start[-1]), int(np.diff(start).max())
    shapes = [(3, num_pairs), (STATE_ROWS, num_states), (2, int(entry[-1])), (3 * widest, widest)]
    return Scratch(*map(np.zeros, shapes + 3 * [(num_states, widest)]))


# -- One row of transitions: clip(c z, lower, upper) with z = p̃ exp(least v - v) ------------------


@routine
def fit_row(reference: Reference, i: int, after: int, least: Any, scratch: Scratch) -> None:
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
def clip_row(
    reference: Reference, i: int, after: int, least: Any, inside: Any, scratch: Scratch
) -> None:
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
def narrow(reference: Reference, first: int, stop: int, scratch: Scratch) -> tuple[Any, Any]:
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
def solve_rows(model: Model, reference: Reference, scratch: Scratch) -> Any:
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
def pass_forward(model: Model, reference: Reference, scratch: Scratch) -> Any:
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


# -- The Newton direction, layer by layer ----------------------------------------------------------


@routine
def find_direction(model: Model, reference: Reference, scratch: Scratch) -> tuple[Any, Any]:
    """Write dg into STEP; return the slope of D along it and the largest |dg|."""
    start, states, squares = model.start, scratch.states, scratch.squares
    depth = len(start) - 1
    for s in range(start[depth]):
        off = states[OFF, s]
        series = 1.0 + off * (0.5 + off * (1.0 / 6.0 + off * (1.0 / 24.0 + off / 120.0)))
        growth = where(abs(off) < 1e-2, series, (exp(off) - 1.0) / off)
        states[MEAN, s] = exp(states[GUESS, s]) * growth
        states[ROOT, s] = sqrt(states[MEAN, s])
        states[FORCE, s] = states[MEAN, s] * off
        states[MOVE, s] = 0.0
    for k in range(depth):
        first, size = start[k], start[k + 1] - start[k]
        for a in range(size):
            for b in range(size):
                value = 0.0
                if k > 0:
                    value = squares[a, b] / (states[ROOT, first + a] * states[ROOT, first + b])
                scratch.scaled[first + a, b] = value
                scratch.inverse[first + a, b] = value + (1.0 if a == b else 0.0)
        if k > 0:
            invert_block(scratch.inverse, first, size)
        if k + 1 < depth:
            curve(model, reference, k, scratch)
            carry_on(model, k, scratch)
        for s in range(first, first + size):
            states[FORCE, s] += states[MOVE, s]
    return go_back(model, scratch)


@routine(inline=True)
def go_back(model: Model, scratch: Scratch) -> tuple[Any, Any]:
    """Go back through the layers for dg; return the slope of D and the largest |dg|."""
    start, states, depth = model.start, scratch.states, len(model.start) - 1
    slope, moved = 0.0, 0.0
    for k in range(depth - 1, -1, -1):
        first, size = start[k], start[k + 1] - start[k]
        after = start[k + 2] - start[k + 1] if k + 1 < depth else 0
        for s in range(first, first + size):
            total = 0.0
            for j in range(after):
                total += scratch.onward[s, j] * states[MOVE, start[k + 1] + j]
            states[MOVE, s] = total
        for s in range(first, first + size):
            value = states[FORCE, s] / states[ROOT, s]
            for b in range(size):
                there = first + b
                value -= scratch.scaled[s, b] * states[MOVE, there] * states[ROOT, there]
            states[REST, s] = value
        for s in range(first, first + size):
            value = 0.0
            for b in range(size):
                value += scratch.inverse[s, b] * states[REST, first + b]
            value /= states[ROOT, s]
            states[STEP, s] = value
            slope += states[MEAN, s] * states[OFF, s] * value
            moved = greatest(moved, value)
        for s in range(first, first + size):
            states[MOVE, s] += states[STEP, s]
    return slope, moved


@routine(inline=True)
def curve(model: Model, reference: Reference, k: int, scratch: Scratch) -> None:
    """Write the transitions of the policy of layer k, and N of the next into the first square."""
    start, num_actions = model.start, model.num_actions
    after, squares, rows = start[k + 2] - start[k + 1], scratch.squares, scratch.rows
    pairs, onward = scratch.pairs, scratch.onward
    for a in range(after):
        for b in range(after):
            squares[a, b] = 0.0
        for s in range(start[k], start[k + 1]):
            onward[s, a] = 0.0
    for i in range(start[k] * num_actions, start[k + 1] * num_actions):
        if model.exists[PAIR, i]:
            for a in range(after):
                onward[i // num_actions, a] += pairs[POLICY, i] * rows[P, reference.entry[i] + a]
    for i in range(start[k] * num_actions, start[k + 1] * num_actions):
        if model.exists[PAIR, i]:
            s, first, free = i // num_actions, reference.entry[i], 0.0
            weight = scratch.states[MEAN, s] * pairs[POLICY, i]
            for e in range(first, first + after):
                free += rows[FREE, e]
            share = where(free > 0.0, weight / free, 0.0)
            for a in range(after):
                x = weight * (rows[P, first + a] - onward[s, a])
                y = share * rows[FREE, first + a]
                squares[a, a] += weight * rows[FREE, first + a]
                for b in range(after):
                    squares[a, b] += x * (rows[P, first + b] - onward[s, b])
                    squares[a, b] -= y * rows[FREE, first + b]


@routine(inline=True)
def carry_on(model: Model, k: int, scratch: Scratch) -> None:
    """Add what the layers up to k contribute to X and y of layer k + 1."""
    start, states, squares = model.start, scratch.states, scratch.squares
    first, size, after = start[k], start[k + 1] - start[k], start[k + 2] - start[k + 1]
    widest = scratch.onward.shape[1]
    lost, half = widest, 2 * widest  # Y B in the second square, Y B s^-1 P in the third
    if k > 0:  # Y = 0 in the first layer
        for a in range(size):
            for b in range(size):
                value = 0.0
                for c in range(size):
                    value += scratch.scaled[first + a, c] * scratch.inverse[first + c, b]
                squares[lost + a, b] = value
        for a in range(size):
            for j in range(after):
                value = 0.0
                for b in range(size):
                    onward = states[ROOT, first + b] * scratch.onward[first + b, j]
                    value += squares[lost + a, b] * onward
                squares[half + a, j] = value
        for i in range(after):
            for j in range(after):
                for a in range(size):
                    onward = scratch.onward[first + a, i] * states[ROOT, first + a]
                    squares[i, j] += onward * squares[half + a, j]
    for a in range(size):
        value = 0.0
        if k > 0:
            for b in range(size):
                root = states[ROOT, first + b]
                value += scratch.inverse[first + a, b] * states[MOVE, first + b] / root
                value -= squares[lost + a, b] * states[FORCE, first + b] / root
        value *= states[ROOT, first + a]
        for j in range(after):
            states[MOVE, start[k + 1] + j] += scratch.onward[first + a, j] * value


@routine(inline=True)
def invert_block(matrix: Floats, first: int, size: int) -> None:
    """Invert a positive definite block in place, rows first, ..., first + size - 1."""
    for c in range(size):
        pivot = 1.0 / matrix[first + c, c]
        matrix[first + c, c] = 1.0
        for b in range(size):
            matrix[first + c, b] *= pivot
        for a in range(size):
            if a != c:
                factor = matrix[first + a, c]
                matrix[first + a, c] = 0.0
                for b in range(size):
                    matrix[first + a, b] -= factor * matrix[first + c, b]


# -- The projection; nothing is allocated ----------------------------------------------------------


@routine
def project(model: Model, learner: Any) -> tuple[Any, Any, Any, Any]:
    """Write the projection into rows FOUND and P; return status, steps, flow and dual residual.

    The flow residual is the largest |sum of q - 1| of a layer: q follows its own rows forward, so
    all that can be wrong is that a row does not sum to one.
    """
    start, scratch, tolerance = model.start, learner.scratch, learner.tolerance
    q, rows, lower, upper = learner.q, learner.rows, learner.lower, learner.upper
    reference = Reference(q, rows, lower, upper, learner.entry)
    start_from(model, q, learner.estimate, learner.learning_rate, scratch)
    status, steps = maximize(model, reference, tolerance, learner.max_steps, scratch)
    states, pairs, flow, dual = scratch.states, scratch.pairs, 0.0, 0.0
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
def start_from(model: Model, q: Floats, loss: Floats, rate: Any, scratch: Scratch) -> None:
    """Set the weights, and the guess: the state occupancies of the reference."""
    for s in range(model.start[-1]):
        mass = 0.0
        for i in range(s * model.num_actions, (s + 1) * model.num_actions):
            if model.exists[PAIR, i]:
                scratch.pairs[LOG_WEIGHT, i] = log(q[i]) - rate * loss[i]
                mass += q[i]
        scratch.states[TRIAL, s] = log(mass)


@routine(inline=True)
def maximize(
    model: Model, reference: Reference, tolerance: float, max_steps: int, scratch: Scratch
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
