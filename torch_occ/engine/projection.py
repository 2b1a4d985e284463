"""The arrays of a projection.

Tables over transitions are flat, `(M,)`, layer after layer, as in torch_occ.rivals.beliefs:
the successors of pair i are the entries `entry[i]`, ..., `entry[i + 1] - 1`. Scratch memory has one
row per quantity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ._support.constants import (
    CONVERGED,
    MAX_STEPS,
    NOT_FINITE,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.engine.layout import Bools, Floats, Ints, Model, kernel

# Rows of `Scratch.pairs`.
LOG_WEIGHT = 0  # log w̃ - rate * loss
POLICY = 1
PAIR_ROWS = 2

# Rows of `Scratch.states`.
GUESS = 0  # g, the guess of log w(s)
TRIAL = 1  # g after a step
VALUE = 2  # v
OCCUPANCY = 3  # u
OFF = 4  # log u - g
MEAN = 5  # Lambda, the logarithmic mean of u and w
FORCE = 6  # u - w, then with the pull of the layers before
STEP = 7  # dg
MOVE = 8  # dv
FALL = 9  # exp(least v of the layer - v)
ROOT = 10  # the root of Lambda
SPARE = 11
STATE_ROWS = 12

# Rows of `Scratch.rows`.
P = 0  # the transitions
FREE = 1  # the same where no bound is active, else zero
ROW_ROWS = 2


class Layers(NamedTuple):
    """The layout of the layers; no transitions."""

    num_actions: int
    start: Ints  # (L + 1,), the first state of every layer
    exists: Bools  # (S * A,)
    initial: Floats  # (S_0,)
    entry: Ints  # (S * A + 1,), the first entry of each pair in a flat table, and M


class Reference(NamedTuple):
    """A reference q(s,a) p(s'|s,a), which the projection replaces, and the bounds."""

    q: Floats  # (S * A,)
    rows: Floats  # (M,)
    lower: Floats  # (M,)
    upper: Floats  # (M,)


class Scratch(NamedTuple):
    """Scratch memory of one projection."""

    pairs: Floats  # (PAIR_ROWS, S * A)
    states: Floats  # (STATE_ROWS, S)
    rows: Floats  # (ROW_ROWS, M)
    onward: Floats  # (S, widest), the transitions of the policy
    scaled: Floats  # (S, widest), Y of every layer
    inverse: Floats  # (S, widest), (I + Y)^-1 of every layer
    squares: Floats  # (3 * widest, widest), matrices of a layer


def layers_of(model: Model) -> Layers:
    """The layers of a model; its transitions are left out."""
    sizes = np.append(np.diff(model.start), 1)  # the last layer leads to one terminal state
    after = np.repeat(sizes[1:], sizes[:-1] * model.num_actions)
    entry = np.concatenate([[0], np.cumsum(after)])
    return Layers(model.num_actions, model.start, model.exists[0].copy(), model.initial, entry)


def make_scratch(layers: Layers) -> Scratch:
    """Allocate scratch memory."""
    num_pairs, num_states = len(layers.exists), int(layers.start[-1])
    widest = int(np.diff(layers.start).max())
    return Scratch(
        np.zeros((PAIR_ROWS, num_pairs)),
        np.zeros((STATE_ROWS, num_states)),
        np.zeros((ROW_ROWS, int(layers.entry[-1]))),
        np.zeros((num_states, widest)),
        np.zeros((num_states, widest)),
        np.zeros((num_states, widest)),
        np.zeros((3 * widest, widest)),
    )


# -- One row of transitions: the distribution closest to a reference between its bounds ------------
#
# This is the compiled twin of torch_occ.step.projection, which has the formulas. With z = p̃
# exp(least v - v), the minimizer is clip(c z, lower, upper). Instead of sorting the breakpoints of
# the sum in c, the bracket of c is narrowed at one breakpoint after the other.


_SMALLEST = np.finfo(np.float64).tiny


@kernel
def fit_row(
    reference: Reference,
    first: int,  # the first entry of the row
    size: int,
    after: int,  # the first state of the next layer
    least: float,  # the smallest v there
    scratch: Scratch,
) -> float:
    """Write p and its free part, and return G; NaN if a number underflows."""
    p, states = scratch.rows, scratch.states
    total, inside = 0.0, True
    for j in range(size):
        z = 0.0
        if reference.upper[first + j] > 0.0:
            z = reference.rows[first + j] * states[FALL, after + j]
            if z < _SMALLEST:  # the torch twin compares logarithms
                return np.nan
        p[FREE, first + j] = z  # until c is known
        total += z
    for j in range(size):
        share = p[FREE, first + j] / total
        p[P, first + j] = share
        inside = inside and reference.lower[first + j] <= share <= reference.upper[first + j]
    if inside:
        for j in range(size):
            p[FREE, first + j] = p[P, first + j]
        return least - np.log(total)
    low, high = narrow(reference, first, size, scratch)
    rest, total, cost = 1.0, 0.0, 0.0
    for j in range(size):
        z, lower, upper = (
            p[FREE, first + j],
            reference.lower[first + j],
            reference.upper[first + j],
        )
        bound = -1.0
        if z == 0.0:
            bound = 0.0
        elif lower / z >= high:
            bound = lower
        elif upper / z <= low:
            bound = upper
        p[P, first + j] = bound
        if bound < 0.0:
            total += z
        else:
            rest -= bound
            if bound > 0.0:
                ratio = np.log(bound / reference.rows[first + j])
                cost += bound * (ratio + states[VALUE, after + j])
    rest = max(rest, _SMALLEST)
    for j in range(size):
        if p[P, first + j] < 0.0:
            share = rest * (p[FREE, first + j] / total)
            share = min(max(share, reference.lower[first + j]), reference.upper[first + j])
            p[P, first + j] = p[FREE, first + j] = share
        else:
            p[FREE, first + j] = 0.0
    if total > 0.0:
        cost += rest * (np.log(rest / total) + least)
    return cost


@kernel
def narrow(reference: Reference, first: int, size: int, scratch: Scratch) -> tuple[float, float]:
    """The neighbouring breakpoints of the sum of clip(c z, lower, upper) around one."""
    low, high = 0.0, np.inf
    least = 0.0
    for j in range(size):
        least += reference.lower[first + j]
    if least >= 1.0:
        return 0.0, 0.0  # all at their lower bounds
    for j in range(2 * size):
        z = scratch.rows[FREE, first + j // 2]
        if z > 0.0:
            bound = reference.lower if j % 2 == 0 else reference.upper
            middle = bound[first + j // 2] / z
            if low < middle < high:
                total = 0.0
                for i in range(first, first + size):
                    share = middle * scratch.rows[FREE, i]
                    total += min(max(share, reference.lower[i]), reference.upper[i])
                if total < 1.0:
                    low = middle
                else:
                    high = middle
    return low, high


# -- The pass backward and the pass forward through the layers -------------------------------------
#
# The compiled twin of `unfold` in torch_occ.step.projection, which has the formulas.


@kernel
def unfold(layers: Layers, reference: Reference, scratch: Scratch) -> float:
    """Solve the rows backward and follow the policy forward, for the guess in TRIAL.

    Returns D.
    """
    start, num_actions, entry = layers.start, layers.num_actions, layers.entry
    pairs, states, depth = scratch.pairs, scratch.states, len(layers.start) - 1
    for k in range(depth - 1, -1, -1):
        least = 0.0
        if k + 1 < depth:
            least = np.inf
            for s in range(start[k + 1], start[k + 2]):
                least = min(least, states[VALUE, s])
            for s in range(start[k + 1], start[k + 2]):
                states[FALL, s] = np.exp(least - states[VALUE, s])
        for s in range(start[k], start[k + 1]):
            most = -np.inf
            for i in range(s * num_actions, (s + 1) * num_actions):
                if layers.exists[i]:
                    size = entry[i + 1] - entry[i]
                    if k + 1 < depth:
                        cost = fit_row(reference, entry[i], size, start[k + 1], least, scratch)
                    else:  # the terminal state is certain
                        scratch.rows[P, entry[i]] = 1.0
                        cost = -np.log(reference.rows[entry[i]])
                    pairs[POLICY, i] = pairs[LOG_WEIGHT, i] - cost
                    most = max(most, pairs[POLICY, i])
            total = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[POLICY, i] = np.exp(pairs[POLICY, i] - most) if layers.exists[i] else 0.0
                total += pairs[POLICY, i]
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[POLICY, i] /= total
            states[VALUE, s] = states[TRIAL, s] - most - np.log(total)
    return follow(layers, scratch)


@kernel
def follow(layers: Layers, scratch: Scratch) -> float:
    """The occupancy of the policy and log u - g; returns D."""
    start, num_actions, entry = layers.start, layers.num_actions, layers.entry
    pairs, states, depth = scratch.pairs, scratch.states, len(layers.start) - 1
    for s in range(start[depth]):
        states[OCCUPANCY, s] = 0.0
    dual = 0.0
    for s in range(start[1]):
        states[OCCUPANCY, s] = layers.initial[s]
        dual += layers.initial[s] * states[VALUE, s]
    for k in range(depth - 1):
        for s in range(start[k], start[k + 1]):
            for i in range(s * num_actions, (s + 1) * num_actions):
                if layers.exists[i]:
                    mass = states[OCCUPANCY, s] * pairs[POLICY, i]
                    for j in range(entry[i + 1] - entry[i]):
                        states[OCCUPANCY, start[k + 1] + j] += mass * scratch.rows[P, entry[i] + j]
    for s in range(start[depth]):
        states[OFF, s] = np.log(states[OCCUPANCY, s]) - states[TRIAL, s]
        dual -= np.exp(states[TRIAL, s])
    return dual


@kernel
def flow_residual(layers: Layers, q: Floats, scratch: Scratch) -> float:
    """The largest |q(s) - inflow(s)| / q(s) of q and the rows in the scratch memory."""
    start, num_actions, entry = layers.start, layers.num_actions, layers.entry
    states, depth, worst = scratch.states, len(layers.start) - 1, 0.0
    for s in range(start[depth]):
        states[FALL, s] = layers.initial[s] if s < start[1] else 0.0
    for k in range(depth):
        for s in range(start[k], start[k + 1]):
            mass = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                mass += q[i]
                if k + 1 < depth and layers.exists[i]:
                    for j in range(entry[i + 1] - entry[i]):
                        states[FALL, start[k + 1] + j] += q[i] * scratch.rows[P, entry[i] + j]
            worst = max(worst, abs(mass - states[FALL, s]) / mass)
    return worst


# -- The Newton direction of the projection, layer by layer ----------------------------------------
#
# The compiled twin of `direction` in torch_occ.step.projection, which has the formulas.


@kernel
def find_direction(layers: Layers, scratch: Scratch) -> tuple[float, float]:
    """Write dg into STEP; return the slope of D along it and the largest |dg|."""
    start, states, squares = layers.start, scratch.states, scratch.squares
    depth, widest = len(start) - 1, scratch.onward.shape[1]
    for s in range(start[depth]):
        off = states[OFF, s]
        growth = 1 + off / 2 + off * off / 6 if abs(off) < 1e-4 else np.expm1(off) / off
        states[MEAN, s] = np.exp(states[GUESS, s]) * growth
        states[ROOT, s] = np.sqrt(states[MEAN, s])
        states[FORCE, s] = states[MEAN, s] * off
        states[MOVE, s] = 0.0  # holds the pull y on the way forward
    for k in range(depth):
        first, size = start[k], start[k + 1] - start[k]
        for a in range(size):
            for b in range(size):
                scale = states[ROOT, first + a] * states[ROOT, first + b]
                value = squares[a, b] / scale if k > 0 else 0.0
                scratch.scaled[first + a, b] = value
                scratch.inverse[first + a, b] = value + (1.0 if a == b else 0.0)
        if k > 0:
            invert(scratch.inverse, first, size)
        if k + 1 < depth:
            average(layers, k, scratch)
            spread(layers, k, scratch)
            carry(layers, k, widest, scratch)
        for s in range(first, first + size):
            states[FORCE, s] += states[MOVE, s]
    return back(layers, scratch)


@kernel
def back(layers: Layers, scratch: Scratch) -> tuple[float, float]:
    """Go back through the layers for dg; return the slope of D and the largest |dg|."""
    start, states, depth = layers.start, scratch.states, len(layers.start) - 1
    slope, moved = 0.0, 0.0
    for k in range(depth - 1, -1, -1):
        first, size = start[k], start[k + 1] - start[k]
        after = start[k + 2] - start[k + 1] if k + 1 < depth else 0
        for s in range(first, first + size):
            states[MOVE, s] = 0.0
            for j in range(after):
                states[MOVE, s] += scratch.onward[s, j] * states[MOVE, start[k + 1] + j]
        for a in range(size):
            value = states[FORCE, first + a] / states[ROOT, first + a]
            for b in range(size):
                value -= (
                    scratch.scaled[first + a, b] * states[MOVE, first + b] * states[ROOT, first + b]
                )
            states[SPARE, first + a] = value
        for a in range(size):
            value = 0.0
            for b in range(size):
                value += scratch.inverse[first + a, b] * states[SPARE, first + b]
            value /= states[ROOT, first + a]
            states[STEP, first + a] = value
            slope += states[MEAN, first + a] * states[OFF, first + a] * value
            if not abs(value) <= moved:  # also for NaN
                moved = abs(value)
        for s in range(first, first + size):
            states[MOVE, s] += states[STEP, s]
    return slope, moved


@kernel
def average(layers: Layers, k: int, scratch: Scratch) -> None:
    """Write the transitions of the policy of layer k."""
    start, num_actions, entry = layers.start, layers.num_actions, layers.entry
    after = start[k + 2] - start[k + 1]
    for s in range(start[k], start[k + 1]):
        for j in range(after):
            scratch.onward[s, j] = 0.0
        for i in range(s * num_actions, (s + 1) * num_actions):
            if layers.exists[i]:
                for j in range(after):
                    scratch.onward[s, j] += scratch.pairs[POLICY, i] * scratch.rows[P, entry[i] + j]


@kernel
def spread(layers: Layers, k: int, scratch: Scratch) -> None:
    """Write N of layer k + 1 into the first square."""
    start, num_actions, entry = layers.start, layers.num_actions, layers.entry
    after, squares, rows = start[k + 2] - start[k + 1], scratch.squares, scratch.rows
    for a in range(after):
        for b in range(after):
            squares[a, b] = 0.0
    for s in range(start[k], start[k + 1]):
        for i in range(s * num_actions, (s + 1) * num_actions):
            if layers.exists[i]:
                weight = scratch.states[MEAN, s] * scratch.pairs[POLICY, i]
                free = 0.0
                for j in range(after):
                    free += rows[FREE, entry[i] + j]
                share = weight / free if free > 0.0 else 0.0
                for a in range(after):
                    x = weight * (rows[P, entry[i] + a] - scratch.onward[s, a])
                    y = share * rows[FREE, entry[i] + a]
                    squares[a, a] += weight * rows[FREE, entry[i] + a]
                    for b in range(after):
                        squares[a, b] += x * (rows[P, entry[i] + b] - scratch.onward[s, b])
                        squares[a, b] -= y * rows[FREE, entry[i] + b]


@kernel
def carry(layers: Layers, k: int, widest: int, scratch: Scratch) -> None:
    """Add what the layers up to k contribute to X and y of layer k + 1."""
    start, states, squares = layers.start, scratch.states, scratch.squares
    first, size, after = start[k], start[k + 1] - start[k], start[k + 2] - start[k + 1]
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
                    value += (
                        squares[lost + a, b]
                        * states[ROOT, first + b]
                        * scratch.onward[first + b, j]
                    )
                squares[half + a, j] = value
        for i in range(after):
            for j in range(after):
                for a in range(size):
                    squares[i, j] += (
                        scratch.onward[first + a, i]
                        * states[ROOT, first + a]
                        * squares[half + a, j]
                    )
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


@kernel
def invert(matrix: Floats, first: int, size: int) -> None:
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


# -- The Kullback-Leibler projection for one problem, and for a batch; nothing is allocated --------
#
# The compiled twin of `settle` in torch_occ.step.projection.


_EPS = np.finfo(np.float64).eps
_SMALLEST_STEP = np.finfo(np.float64).tiny / _EPS

#: As in torch_occ.step.projection.
ENOUGH, BACKTRACKS = 1e-4, 40


@kernel
def project(
    layers: Layers,
    reference: Reference,
    loss: Floats,  # (S * A,)
    rate: float,
    tolerance: float,
    max_steps: int,
    scratch: Scratch,
) -> tuple[int, int, float, float]:
    """Replace the reference by its projection; if that fails, leave it as it is.

    Returns the status, the number of Newton steps, the flow residual and the dual residual.
    """
    start_from(layers, reference.q, loss, rate, scratch)
    status, steps = settle(layers, reference, tolerance, max_steps, scratch)
    states, q, dual = scratch.states, scratch.pairs[LOG_WEIGHT], 0.0
    for s in range(layers.start[-1]):
        for i in range(s * layers.num_actions, (s + 1) * layers.num_actions):
            q[i] = states[OCCUPANCY, s] * scratch.pairs[POLICY, i]
        if not abs(states[OFF, s]) <= dual:  # also for NaN
            dual = abs(states[OFF, s])
    flow = flow_residual(layers, q, scratch)
    if status == STALLED and dual <= tolerance and flow <= tolerance:
        status = CONVERGED
        for i in range(len(layers.exists)):
            reference.q[i] = q[i]
            if layers.exists[i]:
                for entry in range(layers.entry[i], layers.entry[i + 1]):
                    reference.rows[entry] = scratch.rows[P, entry]
    return status, steps, flow, dual


@kernel
def start_from(layers: Layers, q: Floats, loss: Floats, rate: float, scratch: Scratch) -> None:
    """Set the weights, and the guess: the reference's shares of the states of each layer."""
    start, num_actions, states = layers.start, layers.num_actions, scratch.states
    for i in range(len(q)):
        if layers.exists[i]:
            scratch.pairs[LOG_WEIGHT, i] = np.log(q[i]) - rate * loss[i]
    for k in range(len(start) - 1):
        total = 0.0
        for s in range(start[k], start[k + 1]):
            mass = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if layers.exists[i]:
                    mass += q[i]
            states[TRIAL, s] = mass
            total += mass
        for s in range(start[k], start[k + 1]):
            states[TRIAL, s] = np.log(states[TRIAL, s] / total)


@kernel
def settle(
    layers: Layers, reference: Reference, tolerance: float, max_steps: int, scratch: Scratch
) -> tuple[int, int]:
    """Maximize D from the guess in TRIAL; return the status and the number of steps."""
    states, num_states = scratch.states, layers.start[-1]
    dual = unfold(layers, reference, scratch)
    best, patience, steps = np.inf, STALL_AFTER, 0
    while steps < max_steps:
        smallest = np.inf
        for s in range(num_states):
            states[GUESS, s] = states[TRIAL, s]
            smallest = min(smallest, states[OCCUPANCY, s])
        if smallest < _SMALLEST_STEP:
            return UNDERFLOW, steps
        slope, moved = find_direction(layers, scratch)
        if not np.isfinite(moved):
            return NOT_FINITE, steps
        length, found = 1.0, dual
        for _ in range(BACKTRACKS):
            for s in range(num_states):
                states[TRIAL, s] = states[GUESS, s] + length * states[STEP, s]
            found = unfold(layers, reference, scratch)
            # Close to the solution, D changes less than its rounding errors.
            if moved <= 1e-3 or found >= dual + ENOUGH * length * slope:
                break
            length /= 2
        dual = found
        steps += 1
        patience = STALL_AFTER if moved < 0.5 * best or moved > 0.1 else patience - 1
        best = min(best, moved)
        # A short step leaves only rounding errors, unless a bound became active on its way.
        solved = moved <= np.sqrt(_EPS)
        for s in range(num_states):
            solved = solved and abs(states[OFF, s]) <= tolerance
        if solved or patience == 0:
            return STALLED, steps
    return MAX_STEPS, steps


@kernel
def project_batch(
    layers: Layers,
    q: Floats,  # (N, S * A), in and out
    rows: Floats,  # (N, M), in and out
    lower: Floats,  # (N, M)
    upper: Floats,  # (N, M)
    loss: Floats,  # (N, S * A)
    rates: Floats,  # (N,)
    tolerance: float,
    max_steps: int,
    values: Floats,  # (N, S), out
    guesses: Floats,  # (N, S), out
    certificate: Floats,  # (N, 4), out: status, steps, flow residual, dual residual
    first: int,
    stop: int,
    scratch: Scratch,
) -> None:
    """Project elements first, ..., stop - 1 of a batch."""
    for n in range(first, stop):
        reference = Reference(q[n], rows[n], lower[n], upper[n])
        status, steps, flow, dual = project(
            layers, reference, loss[n], rates[n], tolerance, max_steps, scratch
        )
        certificate[n, 0], certificate[n, 1] = status, steps
        certificate[n, 2], certificate[n, 3] = flow, dual
        for s in range(values.shape[1]):
            values[n, s] = scratch.states[VALUE, s]
            guesses[n, s] = scratch.states[TRIAL, s]
