"""The Kullback-Leibler projection, compiled: one problem in plain arrays, or one in every lane.

torch_occ.step.projection has the formulas. Tables over transitions are flat, `(M,)`, layer after
layer: the successors of pair i are the entries `entry[i]`, ..., `entry[i + 1] - 1`. Scratch memory
has one row per quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import (
    CONVERGED,
    MAX_STEPS,
    NOT_FINITE,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.engine.lanes import Shared, anywhere, exp, lane, lanes_of, log, sqrt, where
from torch_occ.engine.layout import Bools, Floats, Ints, finite, kernel, routine

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
INFLOW = 12
STATE_ROWS = 13

# Rows of `Scratch.rows`.
P = 0  # the transitions
FREE = 1  # the same where no bound is active, else zero

_EPS = np.finfo(np.float64).eps
_SMALLEST = np.finfo(np.float64).tiny
_SMALLEST_STEP = _SMALLEST / _EPS

#: The smallest share of the growth that the slope promises with which a step is accepted, and how
#: often a step is halved; after that, the iteration goes on from its end.
ENOUGH, BACKTRACKS = 1e-4, 40


class Layout(NamedTuple):
    """The layers of an MDP, without transitions."""

    num_actions: int
    start: Ints  # (L + 1,), the first state of every layer
    exists: Bools  # (S * A,)
    entry: Ints  # (S * A + 1,), the first entry of each pair in a flat table, and M


class Reference(NamedTuple):
    """A reference q(s,a) p(s'|s,a), the bounds of its transitions, and the first states."""

    q: Floats  # (S * A,)
    rows: Floats  # (M,)
    lower: Floats  # (M,)
    upper: Floats  # (M,)
    initial: Shared  # (S_0,)


class Scratch(NamedTuple):
    """Scratch memory of one projection, or of one in every lane."""

    pairs: Floats  # (3, S * A)
    states: Floats  # (STATE_ROWS, S)
    rows: Floats  # (2, M)
    onward: Floats  # (S, widest), the transitions of the policy
    scaled: Floats  # (S, widest), Y of every layer
    inverse: Floats  # (S, widest), (I + Y)^-1 of every layer
    squares: Floats  # (3 * widest, widest), matrices of a layer


def layout_of(layer_sizes: Sequence[int], actions: Bools) -> Layout:
    """The layout of layers with these actions `(S, A)`."""
    sizes, num_actions = np.array([*layer_sizes, 1]), actions.shape[1]  # one terminal state
    after = np.repeat(sizes[1:], sizes[:-1] * num_actions)
    start, entry = (np.concatenate([[0], np.cumsum(x)]) for x in (sizes[:-1], after))
    return Layout(num_actions, start, actions.ravel().copy(), entry)


def make_scratch(
    layout: Layout, new: Callable[..., Any] = lambda *shape: np.zeros(shape)
) -> Scratch:
    """Allocate scratch memory, by default for one projection."""
    num_pairs, num_states = len(layout.exists), int(layout.start[-1])
    widest = int(np.diff(layout.start).max())
    return Scratch(
        new(3, num_pairs),
        new(STATE_ROWS, num_states),
        new(2, int(layout.entry[-1])),
        new(num_states, widest),
        new(num_states, widest),
        new(num_states, widest),
        new(3 * widest, widest),
    )


# -- One row of transitions: the distribution closest to a reference between its bounds ------------
#
# With z = p̃ exp(least v - v), the minimizer is clip(c z, lower, upper). The bracket of c is
# narrowed at one breakpoint of the sum after the other.


@routine
def fit_row(
    layout: Layout,
    reference: Reference,
    i: int,  # the pair
    after: int,  # the first state of the next layer
    least: Any,  # the smallest v there
    scratch: Scratch,
) -> None:
    """Write p and its free part, and G of the pair into row POLICY."""
    p, states, lower, upper = scratch.rows, scratch.states, reference.lower, reference.upper
    first, stop = layout.entry[i], layout.entry[i + 1]
    total, inside, lost = 0.0, True, False
    for e in range(first, stop):
        possible = upper[e] > 0.0
        z = where(possible, reference.rows[e] * states[FALL, after + e - first], 0.0)
        lost = lost | (possible & (z < _SMALLEST))
        p[FREE, e] = z  # until c is known
        total += z
    for e in range(first, stop):
        share = p[FREE, e] / total
        p[P, e] = share
        inside = inside & (lower[e] <= share) & (share <= upper[e])
    scratch.pairs[POLICY, i] = least - log(total)
    if anywhere(not inside):
        clip_row(layout, reference, i, after, least, inside, scratch)
    else:
        for e in range(first, stop):
            p[FREE, e] = p[P, e]
    if anywhere(lost):
        for n in range(lanes_of(p)):
            if lane(lost, n):
                fit_in_logs(layout, lane(reference, n), i, after, lane(scratch, n))


@routine
def clip_row(
    layout: Layout,
    reference: Reference,
    i: int,
    after: int,
    least: Any,
    inside: Any,
    scratch: Scratch,
) -> None:
    """`fit_row` where a bound is active; lanes that are inside keep their p and G."""
    p, rows, lower, upper = scratch.rows, reference.rows, reference.lower, reference.upper
    first, stop = layout.entry[i], layout.entry[i + 1]
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


@routine
def fit_in_logs(layout: Layout, reference: Reference, i: int, after: int, scratch: Scratch) -> None:
    """`fit_row` of one lane in which some z underflows: breakpoints are those of log c."""
    p, lower, upper = scratch.rows, reference.lower, reference.upper
    first, stop = layout.entry[i], layout.entry[i + 1]
    low, high, least = -np.inf, np.inf, 0.0
    for e in range(first, stop):
        score = np.log(reference.rows[e]) - scratch.states[VALUE, after + e - first]
        p[FREE, e] = score if upper[e] > 0.0 else -np.inf
        least += lower[e]
    if least >= 1.0:
        high = -np.inf
    for twice in range(2 * first, 2 * stop):
        bound = lower[twice // 2] if twice % 2 == 0 else upper[twice // 2]
        middle, total = np.log(bound) - p[FREE, twice // 2], 0.0
        if low < middle < high:
            for e in range(first, stop):
                total += min(max(np.exp(middle + p[FREE, e]), lower[e]), upper[e])
            low, high = (middle, high) if total < 1.0 else (low, middle)
    rest, most, total, cost = 1.0, -np.inf, 0.0, 0.0
    for e in range(first, stop):
        score, bound = p[FREE, e], -1.0  # free
        if upper[e] <= 0.0 or np.log(lower[e]) - score >= high:
            bound = lower[e]
        elif np.log(upper[e]) - score <= low:
            bound = upper[e]
        else:
            most = max(most, score)
        p[P, e] = bound
        if bound > 0.0:
            cost += bound * (np.log(bound) - score)
        rest -= max(bound, 0.0)
    rest = max(rest, _SMALLEST)
    for e in range(first, stop):
        total += np.exp(p[FREE, e] - most) if p[P, e] < 0.0 else 0.0
    for e in range(first, stop):
        free = p[P, e] < 0.0
        share = rest * np.exp(p[FREE, e] - most) / total
        p[FREE, e] = min(max(share, lower[e]), upper[e]) if free else 0.0
        p[P, e] = p[FREE, e] if free else p[P, e]
    if total > 0.0:
        cost += rest * (np.log(rest / total) - most)
    scratch.pairs[POLICY, i] = cost


# -- The pass backward and the pass forward through the layers -------------------------------------


@routine
def solve_rows(layout: Layout, reference: Reference, scratch: Scratch) -> Any:
    """Solve the rows backward and follow the policy forward, for the guess in TRIAL; return D."""
    start, num_actions, exists = layout.start, layout.num_actions, layout.exists
    pairs, states, depth = scratch.pairs, scratch.states, len(layout.start) - 1
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
                if exists[i]:
                    if k + 1 < depth:
                        fit_row(layout, reference, i, start[k + 1], least, scratch)
                    else:  # the terminal state is certain
                        scratch.rows[P, layout.entry[i]] = 1.0
                        pairs[POLICY, i] = -log(reference.rows[layout.entry[i]])
                    pairs[POLICY, i] = pairs[LOG_WEIGHT, i] - pairs[POLICY, i]
                    most = max(most, pairs[POLICY, i])
            for i in range(s * num_actions, (s + 1) * num_actions):
                if exists[i]:
                    pairs[POLICY, i] = exp(pairs[POLICY, i] - most)
                    total += pairs[POLICY, i]
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[POLICY, i] = pairs[POLICY, i] / total
            states[VALUE, s] = states[TRIAL, s] - most - log(total)
    return pass_forward(layout, reference, scratch)


@routine(inline=True)
def pass_forward(layout: Layout, reference: Reference, scratch: Scratch) -> Any:
    """The occupancy of the policy and log u - g; return D."""
    start, num_actions, entry = layout.start, layout.num_actions, layout.entry
    pairs, states, depth, dual = scratch.pairs, scratch.states, len(layout.start) - 1, 0.0
    for s in range(start[depth]):
        states[OCCUPANCY, s] = 0.0
    for s in range(start[1]):
        states[OCCUPANCY, s] = reference.initial[s]
        dual += reference.initial[s] * states[VALUE, s]
    for k in range(depth - 1):
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if layout.exists[i]:
                mass = states[OCCUPANCY, i // num_actions] * pairs[POLICY, i]
                for e in range(entry[i], entry[i + 1]):
                    states[OCCUPANCY, start[k + 1] + e - entry[i]] += mass * scratch.rows[P, e]
    for s in range(start[depth]):
        states[OFF, s] = log(states[OCCUPANCY, s]) - states[TRIAL, s]
        dual -= exp(states[TRIAL, s])
    return dual


@routine
def flow_error(layout: Layout, reference: Reference, scratch: Scratch) -> Any:
    """The largest |q(s) - inflow(s)| / q(s) of q and the rows in the scratch memory."""
    start, num_actions, entry = layout.start, layout.num_actions, layout.entry
    states, q, depth, worst = scratch.states, scratch.pairs, len(layout.start) - 1, 0.0
    for s in range(start[depth]):
        states[INFLOW, s] = reference.initial[s] if s < start[1] else 0.0
    for k in range(depth):
        for s in range(start[k], start[k + 1]):
            mass = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                mass += q[FOUND, i]
                if k + 1 < depth and layout.exists[i]:
                    for e in range(entry[i], entry[i + 1]):
                        there = start[k + 1] + e - entry[i]
                        states[INFLOW, there] += q[FOUND, i] * scratch.rows[P, e]
            worst = greatest(worst, (mass - states[INFLOW, s]) / mass)
    return worst


@routine(inline=True)
def greatest(most: Any, x: Any) -> Any:
    """max(most, |x|), and NaN if x is."""
    return where(abs(x) <= most, most, abs(x))


# -- The Newton direction, layer by layer ----------------------------------------------------------


@routine
def find_direction(layout: Layout, reference: Reference, scratch: Scratch) -> tuple[Any, Any]:
    """Write dg into STEP; return the slope of D along it and the largest |dg|."""
    start, states, squares = layout.start, scratch.states, scratch.squares
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
            average_rows(layout, reference, k, scratch)
            curve(layout, reference, k, scratch)
            carry_on(layout, k, scratch)
        for s in range(first, first + size):
            states[FORCE, s] += states[MOVE, s]
    return go_back(layout, scratch)


@routine(inline=True)
def go_back(layout: Layout, scratch: Scratch) -> tuple[Any, Any]:
    """Go back through the layers for dg; return the slope of D and the largest |dg|."""
    start, states, depth = layout.start, scratch.states, len(layout.start) - 1
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
def average_rows(layout: Layout, reference: Reference, k: int, scratch: Scratch) -> None:
    """Write the transitions of the policy of layer k."""
    start, num_actions, entry = layout.start, layout.num_actions, layout.entry
    after = start[k + 2] - start[k + 1]
    for s in range(start[k], start[k + 1]):
        for j in range(after):
            scratch.onward[s, j] = 0.0
        for i in range(s * num_actions, (s + 1) * num_actions):
            if layout.exists[i]:
                for j in range(after):
                    scratch.onward[s, j] += scratch.pairs[POLICY, i] * scratch.rows[P, entry[i] + j]


@routine(inline=True)
def curve(layout: Layout, reference: Reference, k: int, scratch: Scratch) -> None:
    """Write N of layer k + 1 into the first square."""
    start, num_actions = layout.start, layout.num_actions
    after, squares, rows = start[k + 2] - start[k + 1], scratch.squares, scratch.rows
    for a in range(after):
        for b in range(after):
            squares[a, b] = 0.0
    for i in range(start[k] * num_actions, start[k + 1] * num_actions):
        if layout.exists[i]:
            s, first, free = i // num_actions, layout.entry[i], 0.0
            weight = scratch.states[MEAN, s] * scratch.pairs[POLICY, i]
            for e in range(first, first + after):
                free += rows[FREE, e]
            share = where(free > 0.0, weight / free, 0.0)
            for a in range(after):
                x = weight * (rows[P, first + a] - scratch.onward[s, a])
                y = share * rows[FREE, first + a]
                squares[a, a] += weight * rows[FREE, first + a]
                for b in range(after):
                    squares[a, b] += x * (rows[P, first + b] - scratch.onward[s, b])
                    squares[a, b] -= y * rows[FREE, first + b]


@routine(inline=True)
def carry_on(layout: Layout, k: int, scratch: Scratch) -> None:
    """Add what the layers up to k contribute to X and y of layer k + 1."""
    start, states, squares = layout.start, scratch.states, scratch.squares
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
def project(
    layout: Layout,
    reference: Reference,
    loss: Floats,  # (S * A,)
    rate: Any,
    tolerance: float,
    max_steps: int,
    scratch: Scratch,
) -> tuple[Any, Any, Any, Any]:
    """Write the projection of the reference into rows FOUND and P of the scratch memory.

    Returns the status, the number of Newton steps, the flow residual and the dual residual.
    """
    start_from(layout, reference.q, loss, rate, scratch)
    status, steps = maximize(layout, reference, tolerance, max_steps, scratch)
    states, pairs, dual = scratch.states, scratch.pairs, 0.0
    for i in range(len(reference.q)):
        pairs[FOUND, i] = 0.0
        if layout.exists[i]:
            pairs[FOUND, i] = states[OCCUPANCY, i // layout.num_actions] * pairs[POLICY, i]
    for s in range(layout.start[-1]):
        dual = greatest(dual, states[OFF, s])
    flow = flow_error(layout, reference, scratch)
    certified = (status == float(STALLED)) & (dual <= tolerance) & (flow <= tolerance)
    return where(certified, float(CONVERGED), status), steps, flow, dual


@routine(inline=True)
def start_from(layout: Layout, q: Floats, loss: Floats, rate: Any, scratch: Scratch) -> None:
    """Set the weights, and the guess: the reference's shares of the states of each layer."""
    start, num_actions, states = layout.start, layout.num_actions, scratch.states
    for i in range(len(q)):
        if layout.exists[i]:
            scratch.pairs[LOG_WEIGHT, i] = log(q[i]) - rate * loss[i]
    for k in range(len(start) - 1):
        total = 0.0
        for s in range(start[k], start[k + 1]):
            mass = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if layout.exists[i]:
                    mass += q[i]
            states[TRIAL, s] = mass
            total += mass
        for s in range(start[k], start[k + 1]):
            states[TRIAL, s] = log(states[TRIAL, s] / total)


@routine(inline=True)
def maximize(
    layout: Layout, reference: Reference, tolerance: float, max_steps: int, scratch: Scratch
) -> tuple[Any, Any]:
    """Maximize D from the guess in TRIAL; return the status and the number of steps.

    The status is STALLED where the steps have become small; the caller certifies the result. Lanes
    that are done stay where they are.
    """
    states, num_states = scratch.states, layout.start[-1]
    dual = solve_rows(layout, reference, scratch)
    status, steps, running = where(dual > 0.0, float(MAX_STEPS), float(MAX_STEPS)), 0.0, True
    best, patience = np.inf, float(STALL_AFTER)
    for _ in range(max_steps):
        smallest, off = np.inf, 0.0
        for s in range(num_states):
            states[GUESS, s] = states[TRIAL, s]
            smallest = min(smallest, states[OCCUPANCY, s])
        tiny = running & (smallest < _SMALLEST_STEP)
        status, running = where(tiny, float(UNDERFLOW), status), running & (not tiny)
        slope, moved = find_direction(layout, reference, scratch)
        wild = running & (not finite(moved))
        status, running = where(wild, float(NOT_FINITE), status), running & (not wild)
        if not anywhere(running):
            break
        length, found = 1.0, dual
        for _ in range(BACKTRACKS):
            for s in range(num_states):
                move = where(running, length * states[STEP, s], 0.0)
                states[TRIAL, s] = states[GUESS, s] + move
            found = solve_rows(layout, reference, scratch)
            # Close to the solution, D changes less than its rounding errors.
            grown = (moved <= 1e-3) | (found >= dual + ENOUGH * length * slope)
            if not anywhere(running & (not grown)):
                break
            length = where(running & (not grown), 0.5 * length, length)
        dual = found
        steps += where(running, 1.0, 0.0)
        faster = (moved < 0.5 * best) | (moved > 0.1)
        patience = where(faster, float(STALL_AFTER), patience - 1.0)
        best = min(best, moved)
        # A short step leaves only rounding errors, unless a bound became active on its way.
        for s in range(num_states):
            off = greatest(off, states[OFF, s])
        done = ((moved <= np.sqrt(_EPS)) & (off <= tolerance)) | (patience <= 0.0)
        status = where(running & done, float(STALLED), status)
        running = running & (not done)
        if not anywhere(running):
            break
    return status, steps


@kernel
def project_batch(
    layout: Layout,
    references: Reference,  # each array with a first axis of N; q and rows are in and out
    loss: Floats,  # (N, S * A)
    rates: Floats,  # (N,)
    limits: tuple[float, int],  # the tolerance and the largest number of steps
    values: Floats,  # (N, 2, S), out: v and log q(s)
    certificate: Floats,  # (N, 4), out: status, steps, flow residual, dual residual
    scratch: Scratch,
) -> None:
    """Project a batch of N."""
    q, rows, entry = references.q, references.rows, layout.entry
    for n in range(len(q)):
        reference = Reference(
            q[n], rows[n], references.lower[n], references.upper[n], references.initial[n]
        )
        status, steps, flow, dual = project(
            layout, reference, loss[n], rates[n], limits[0], limits[1], scratch
        )
        certificate[n, 0], certificate[n, 1] = status, steps
        certificate[n, 2], certificate[n, 3] = flow, dual
        for i in range(q.shape[1]):
            if layout.exists[i]:
                q[n, i] = scratch.pairs[FOUND, i]
                for e in range(entry[i], entry[i + 1]):
                    rows[n, e] = scratch.rows[P, e]
        for s in range(values.shape[2]):
            values[n, 0, s] = scratch.states[VALUE, s]
            values[n, 1, s] = scratch.states[TRIAL, s]
