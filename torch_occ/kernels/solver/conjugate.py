"""Conjugate gradients for the linear system of a Newton step with sparse transitions.

This is the compiled twin of torch_occ.step.iterative, which explains the formulas. All quantities
are rows of the states and pairs, so memory is proportional to the number of pairs. Each iteration
sweeps backward and forward through the layers, and each sweep reads every probability once.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import FORCING, MAX_ITERATIONS, RESTARTS
from torch_occ.kernels.layout import (
    AHEAD,
    DQ,
    FORCE,
    INVERSE,
    KAPPA,
    RESPONSE,
    SOFT,
    STATE_ROWS,
    TOTAL,
    Floats,
    Ints,
    Model,
    P,
    Rows,
    U,
    V,
    Work,
    adder,
    ahead,
    dot,
    inlined,
    kernel,
)
from torch_occ.kernels.solver.factors import reduce_states
from torch_occ.kernels.solver.sweeps import load

# Rows of `work.states`, in addition to those of torch_occ.kernels.layout.
ROOT = STATE_ROWS  # the square root of kappa
SCALE = STATE_ROWS + 1  # errors are measured as |RESIDUAL * SCALE|
MEAN = STATE_ROWS + 2  # p'x
GUESS = STATE_ROWS + 3  # the multipliers that an inexact solve starts from
Y = STATE_ROWS + 4  # the unknown of M y = b
RESIDUAL = STATE_ROWS + 5  # b - M y
DIRECTION = STATE_ROWS + 6  # the search direction
Z = STATE_ROWS + 7  # the input of the sweeps; in `descend` also M times the direction
SOURCE = STATE_ROWS + 8  # r

EPS = float(np.finfo(np.float64).eps)
GOAL = EPS ** (5 / 6)


@adder
def factorize(model: Model, refresh: bool, work: Work) -> None:
    """Compute (R, p, kappa) of every state, the square root of kappa, and the softest pair."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    reduce_states(model, 0, states.shape[1], refresh, work)
    for s in range(states.shape[1]):
        states[ROOT, s] = np.sqrt(states[KAPPA, s])
        for i in range(s * num_actions, (s + 1) * num_actions):
            if pairs[SOFT, i] == 1.0:
                work.softest[s] = i


@adder
def solve(model: Model, source: Floats, work: Work) -> None:
    """Solve H dq = x + E'v, E dq = r, with the same arguments as `sweeps.solve`.

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
            states[SCALE, s] = (
                1.0 / (states[ROOT, s] * states[0, s]) if states[KAPPA, s] > 0.0 else 0.0
            )
    else:
        take_own_size(num_actions, work)
    error = take_residual(work)
    goal = max(FORCING * min(error, 1.0) ** 2, GOAL) if inexact else GOAL
    for _ in range(RESTARTS):
        descend(model, goal, work)
        for s in range(states.shape[1]):
            states[Z, s] = states[ROOT, s] * states[Y, s] - states[MEAN, s]
        sweep_work(model, True, work)
        # The true residual, free of the rounding errors of the recurrence.
        before, error = error, take_residual(work)
        if not (error > 2.0 * goal and error < 0.1 * before):
            break
    failed = not inexact and has_failed(num_actions, work)
    for s in range(states.shape[1]):
        for i in range(s * num_actions, (s + 1) * num_actions):
            pairs[DQ, i] = np.nan if failed else pairs[P, i] * states[U, s] + pairs[RESPONSE, i]
        states[V, s] = np.nan if failed else states[V, s] + (states[GUESS, s] if inexact else 0.0)
    for i in range(pairs.shape[1]):
        pairs[AHEAD, i] = ahead(model.next_state, i, states, V, 0, 0)


@kernel
def descend(model: Model, goal: float, work: Work) -> None:
    """Solve M dy = residual by conjugate gradients from dy = 0, and add dy to y.

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
    for _ in range(MAX_ITERATIONS):
        if not (error > goal and square > 0.0):
            break
        sweep_work(model, False, work)
        along = 0.0
        for s in range(n):
            # M times the direction.
            states[Z, s] = states[DIRECTION, s] - states[ROOT, s] * states[U, s]
            along += states[DIRECTION, s] * states[Z, s]
        length, before, square, error = square / along, square, 0.0, 0.0
        for s in range(n):
            states[Y, s] += length * states[DIRECTION, s]
            residual = states[RESIDUAL, s] - length * states[Z, s]
            states[RESIDUAL, s] = residual
            square += residual * residual
            error = max(error, abs(residual * states[SCALE, s]))
        ratio = square / before
        for s in range(n):
            states[DIRECTION, s] = states[RESIDUAL, s] + ratio * states[DIRECTION, s]
            states[Z, s] = states[ROOT, s] * states[DIRECTION, s]


@kernel
def follow_guess(model: Model, work: Work) -> None:
    """Add E'v to x for the guess v in V, and move v to GUESS.

    The solve then finds only the difference from the guess, which is small.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    for s in range(states.shape[1]):
        states[GUESS, s] = states[V, s]
        for i in range(s * num_actions, (s + 1) * num_actions):
            pairs[FORCE, i] += states[V, s] - ahead(model.next_state, i, states, V, 0, 0)


@kernel
def take_residual(work: Work) -> float:
    """Compute the residual K^(1/2) du - y, and return the largest error."""
    states, error = work.states, 0.0
    for s in range(states.shape[1]):
        states[RESIDUAL, s] = states[ROOT, s] * states[U, s] - states[Y, s]
        error = max(error, abs(states[RESIDUAL, s] * states[SCALE, s]))
    return error


@kernel
def take_own_size(num_actions: int, work: Work) -> None:
    """Set SCALE for a right-hand side of unknown size.

    The unit of a state's error is the size of its own change after the first sweeps; the twin of
    `_own_size` in torch_occ.step.iterative.
    """
    states, largest, steepest = work.states, 0.0, 0.0
    for s in range(states.shape[1]):
        states[SCALE, s] = size(s, num_actions, work)
        largest, steepest = (
            max(largest, states[SCALE, s]),
            max(steepest, states[SCALE, s] / states[0, s]),
        )
    for s in range(states.shape[1]):
        unit = states[ROOT, s] * max(states[SCALE, s], EPS * min(largest, states[0, s] * steepest))
        states[SCALE, s] = 1.0 / unit if states[ROOT, s] > 0.0 else 0.0


@kernel
def has_failed(num_actions: int, work: Work) -> bool:
    """Whether the residual is larger than rounding errors explain."""
    states, left, scale, noise = work.states, 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        left += states[RESIDUAL, s] ** 2
        scale += (states[ROOT, s] * size(s, num_actions, work)) ** 2
        if states[ROOT, s] > 0.0:
            noise += (EPS * (abs(states[MEAN, s]) + abs(states[V, s])) / states[ROOT, s]) ** 2
    return not np.sqrt(left) <= np.sqrt(EPS * scale) + 1e3 * np.sqrt(noise)


@inlined
def size(s: int, num_actions: int, work: Work) -> float:
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
    load(states, U, states[SOURCE] if forced else states[SOURCE, :0])
    parts = pairs[P], pairs[INVERSE], states[TOTAL], work.softest
    sweep(
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


@kernel
def sweep(
    num_actions: int,
    rows: Rows,
    # p and 1/D, (S * A,); sum 1/D and the softest pair, (S,)
    parts: tuple[Floats, Floats, Floats, Ints],
    z: Floats,  # (S,)
    x: Floats,  # (S * A,), read if `forced` is true
    forced: bool,
    v: Floats,  # (S,), out
    within: Floats,  # (S * A,), out
    du: Floats,  # (S,), holds r on entry and du on return
) -> None:
    """The backward and the forward sweep of torch_occ.step.iterative.

    Indices are unsigned: testing their signs would take half of the time.
    """
    p, inverse, total, softest = parts
    starts, state, probability = rows.starts, rows.state, rows.probability
    width, one, num_states = np.uint64(num_actions), np.uint64(1), np.uint64(len(z))
    for n in range(num_states):
        s = num_states - one - np.uint64(n)
        value, entry = z[s], starts[s * width]
        for i in range(s * width, (s + one) * width):
            expected, stop = 0.0, starts[i + one]
            while entry < stop:
                expected += probability[entry] * v[state[entry]]
                entry += one
            value += p[i] * expected
            within[i] = x[i] - expected if forced else -expected
        v[s] = value
    entry = starts[0]
    for s in range(num_states):  # type: ignore[assignment]
        # R times these forces, taken relative to the softest action; see torch_occ.step.states.
        reference, mean, change = within[softest[s]], 0.0, du[s]
        for i in range(s * width, (s + one) * width):
            mean += inverse[i] * (within[i] - reference)
        mean /= total[s]
        for i in range(s * width, (s + one) * width):
            within[i] = ((within[i] - reference) - mean) * inverse[i]
            flow, stop = within[i] + p[i] * change, starts[i + one]
            while entry < stop:
                du[state[entry]] += probability[entry] * flow
                entry += one


@inlined
def arrive(model: Model, row: int, k: int, work: Work) -> None:
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
    parts: tuple[Floats, Floats, Floats, Ints],
    z: Floats,
    x: Floats,
    forced: bool,
    v: Floats,
    within: Floats,
    du: Floats,
) -> None:
    """Run `sweep` for a batch: every argument has one row per element, or one row for all."""
    p, inverse, total, softest = parts
    for b in range(len(v)):
        i = b % len(p)
        states = p[i], inverse[i], total[i], softest[i]
        sweep(
            num_actions, rows, states, z[b % len(z)], x[b % len(x)], forced, v[b], within[b], du[b]
        )
