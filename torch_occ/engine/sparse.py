"""Conjugate gradients for the linear system of a Newton step with sparse transitions.

This is the compiled form of torch_occ.step.system, which explains the formulas. All quantities
are rows of the states and pairs, so memory is proportional to the number of pairs. Each iteration
sweeps backward and forward through the layers, and each sweep reads every probability once.

Lanes share the probabilities and their places. They iterate together until the last has finished;
a lane that has finished keeps its solution.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ._support.constants import FORCING, MAX_ITERATIONS, RESTARTS
from torch_occ.engine.dense import load, reduce_states
from torch_occ.engine.lanes import anywhere, sqrt, where
from torch_occ.engine.layout import (
    DQ,
    FORCE,
    INVERSE,
    KAPPA,
    RESPONSE,
    SOFT,
    STATE_ROWS,
    TOTAL,
    USED,
    Floats,
    Model,
    P,
    Rows,
    U,
    V,
    Work,
    ahead,
    dot,
    inlined,
    kernel,
    routine,
)

# Rows of `work.states`, in addition to those of torch_occ.engine.layout.
ROOT = STATE_ROWS  # the square root of kappa
SCALE = STATE_ROWS + 1  # errors are measured as |RESIDUAL * SCALE|
MEAN = STATE_ROWS + 2  # p'x
GUESS = STATE_ROWS + 3  # the multipliers that an inexact solve starts from
Y = STATE_ROWS + 4  # the unknown of M y = b
RESIDUAL = STATE_ROWS + 5  # b - M y
DIRECTION = STATE_ROWS + 6  # the search direction
Z = STATE_ROWS + 7  # the input of the sweeps; in `iterate` also M times the direction
SOURCE = STATE_ROWS + 8  # r
SOFTEST = STATE_ROWS + 9  # the number of the action of least curvature

EPS = float(np.finfo(np.float64).eps)
GOAL = EPS ** (5 / 6)


@routine
def factorize_sparse(model: Model, refresh: Any, work: Work) -> None:
    """Compute (R, p, kappa) of every state, the square root of kappa, and the softest action."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    reduce_states(model, 0, states.shape[1], refresh, work)
    for s in range(states.shape[1]):
        states[ROOT, s] = sqrt(states[KAPPA, s])
        softest = 0.0
        for action in range(num_actions):
            softest += action * pairs[SOFT, s * num_actions + action]
        states[SOFTEST, s] = softest


@routine
def solve_sparse(model: Model, source: Floats, work: Work) -> None:
    """Solve H dq = x + E'v, E dq = r, with the same arguments as `dense.solve_dense`.

    With an empty source, the solve starts from the multipliers in V and is only as accurate as
    Newton's method needs. Otherwise it is accurate to rounding; dq and v are NaN if that fails.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    inexact = len(source) == 0
    load(states, SOURCE, source)
    if inexact:
        follow_guess(model, work)
    for s in range(states.shape[1]):
        states[MEAN, s] = dot(pairs, P, pairs, FORCE, s * num_actions, (s + 1) * num_actions)
        states[Z, s] = -states[MEAN, s]
        states[Y, s] = 0.0
    sweep_work(model, True, work)
    if inexact:
        for s in range(states.shape[1]):
            # Errors are relative to q(s), which is row 0. States with kappa = 0 have no error.
            curved = states[KAPPA, s] > 0.0
            states[SCALE, s] = where(curved, 1.0 / (states[ROOT, s] * states[0, s]), 0.0)
    else:
        take_own_size(num_actions, work)
    error = take_residual(work)
    goal = max(FORCING * min(error, 1.0) * min(error, 1.0), GOAL) if inexact else GOAL
    going = work.notes[USED] > 0.0
    for _ in range(RESTARTS):
        iterate(model, goal, going, work)
        for s in range(states.shape[1]):
            states[Z, s] = states[ROOT, s] * states[Y, s] - states[MEAN, s]
        sweep_work(model, True, work)
        # The true residual, free of the rounding errors of the recurrence.
        before, error = error, take_residual(work)
        going = going & (error > 2.0 * goal) & (error < 0.1 * before)
        if not anywhere(going):
            break
    failed = False if inexact else has_failed(num_actions, work)
    for s in range(states.shape[1]):
        for i in range(s * num_actions, (s + 1) * num_actions):
            change = pairs[P, i] * states[U, s] + pairs[RESPONSE, i]
            pairs[DQ, i] = where(failed, np.nan, change)
        found = states[V, s] + (states[GUESS, s] if inexact else 0.0)
        states[V, s] = where(failed, np.nan, found)


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
            states[Z, s] = states[DIRECTION, s] - states[ROOT, s] * states[U, s]
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
def follow_guess(model: Model, work: Work) -> None:
    """Add E'v to x for the guess v in V, and move v to GUESS.

    The solve then finds only the difference from the guess, which is small.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    for s in range(states.shape[1]):
        states[GUESS, s] = states[V, s]
        for i in range(s * num_actions, (s + 1) * num_actions):
            pairs[FORCE, i] += states[V, s] - ahead(model.next_state, i, states, V, 0, 0)


@routine
def take_residual(work: Work) -> Any:
    """Compute the residual K^(1/2) du - y, and return the largest error."""
    states, error = work.states, 0.0
    for s in range(states.shape[1]):
        residual = states[ROOT, s] * states[U, s] - states[Y, s]
        states[RESIDUAL, s] = residual
        error = max(error, abs(residual * states[SCALE, s]))
    return error


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
        error = EPS * (abs(states[MEAN, s]) + abs(states[V, s])) / root
        left += residual * residual
        scale += own * own
        noise += where(root > 0.0, error * error, 0.0)
    return not (sqrt(left) <= sqrt(EPS * scale) + 1e3 * sqrt(noise))


@inlined
def size(s: int, num_actions: int, work: Work) -> Any:
    """The size of the change of a state: |du| plus the absolute responses of its actions."""
    total = abs(work.states[U, s])
    for i in range(s * num_actions, (s + 1) * num_actions):
        total += abs(work.pairs[RESPONSE, i])
    return total


@inlined
def sweep_work(model: Model, forced: bool, work: Work) -> None:
    """Run both sweeps from Z; the results are V, RESPONSE and U.

    FORCE and SOURCE are used if `forced` is true, and are taken as zero otherwise.
    """
    pairs, states = work.pairs, work.states
    for s in range(states.shape[1]):
        states[U, s] = states[SOURCE, s] if forced else 0.0
    parts = pairs[P], pairs[INVERSE], states[TOTAL], states[SOFTEST]
    sweep_layers(
        model.num_actions,
        model.next_state,
        parts,
        states[Z],
        pairs[FORCE],
        forced,
        states[V],
        pairs[RESPONSE],
        states[U],
    )


@routine
def sweep_layers(
    num_actions: int,
    rows: Rows,
    # p and 1/D, (S * A,); sum 1/D and the number of the softest action, (S,)
    parts: tuple[Floats, Floats, Floats, Floats],
    z: Floats,  # (S,)
    x: Floats,  # (S * A,), read if `forced` is true
    forced: bool,
    v: Floats,  # (S,), out
    within: Floats,  # (S * A,), out
    du: Floats,  # (S,), holds r on entry and du on return
) -> None:
    """The backward and the forward sweep of torch_occ.step.system.

    Indices are unsigned: testing their signs would take half of the time.
    """
    p, inverse, total, softest = parts
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
        states[U, s] = model.initial[s] if k == 0 else 0.0
    if k > 0:
        for i in range(start[k - 1] * num_actions, start[k] * num_actions):
            for entry in range(rows.starts[i], rows.starts[i + 1]):
                states[U, rows.state[entry]] += rows.probability[entry] * work.pairs[row, i]


@kernel
def sweep_all(
    num_actions: int,
    rows: Rows,
    parts: tuple[Floats, Floats, Floats, Floats],
    z: Floats,
    x: Floats,
    forced: bool,
    v: Floats,
    within: Floats,
    du: Floats,
) -> None:
    """Run `sweep_layers` for a batch: one row per element, or one for all."""
    p, inverse, total, softest = parts
    for b in range(len(v)):
        i = b % len(p)
        states = p[i], inverse[i], total[i], softest[i]
        sweep_layers(
            num_actions, rows, states, z[b % len(z)], x[b % len(x)], forced, v[b], within[b], du[b]
        )
