"""The linear algebra of torch_occ.step.iterative in loops: sparse transitions, swept back and forth by conjugate gradients.

The formulas are explained there. Everything lives in rows of the states and pairs, so memory is in proportion to the pairs, and every
probability is read once on the way back and once on the way forth.
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
from torch_occ.kernels.sweeps import load, reduce_states

# Rows of `work.states`, in addition to those of torch_occ.kernels.layout.
ROOT = STATE_ROWS  # of kappa
SCALE = STATE_ROWS + 1  # one over the residual that stands for the unit of errors
MEAN = STATE_ROWS + 2  # p'x
GUESS = STATE_ROWS + 3
Y = STATE_ROWS + 4
RESIDUAL = STATE_ROWS + 5  # b - M y
DIRECTION = STATE_ROWS + 6
Z = STATE_ROWS + 7  # what the sweeps start from
SOURCE = STATE_ROWS + 8  # r

EPS = float(np.finfo(np.float64).eps)
GOAL = EPS ** (5 / 6)


@adder
def factorize(model: Model, work: Work) -> None:
    """(R, p, kappa) of every state, and the root of the last."""
    states = work.states
    reduce_states(model, work)
    for s in range(states.shape[1]):
        states[ROOT, s] = np.sqrt(states[KAPPA, s])


@adder
def solve(model: Model, source: Floats, work: Work) -> None:
    """What sweeps.solve does. With an empty source, from the multipliers in V and only as far as Newton's method has use for; else to
    rounding, and dq and v are NaN if that fails.
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
            # In units of q(s), which is row 0; where changes cost nothing, there is no error.
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
        before, error = (
            error,
            take_residual(work),
        )  # the true one, free of the rounding of the recurrence
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
    """Conjugate gradients on M dy = residual from zero; adds dy to y, until no state's error is above the goal."""
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
            states[Z, s] = (
                states[DIRECTION, s] - states[ROOT, s] * states[U, s]
            )  # the image of the direction
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
    """x + E'v for the guess in V, which moves to GUESS: what is left to find is small."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    for s in range(states.shape[1]):
        states[GUESS, s] = states[V, s]
        for i in range(s * num_actions, (s + 1) * num_actions):
            pairs[FORCE, i] += states[V, s] - ahead(model.next_state, i, states, V, 0, 0)


@kernel
def take_residual(work: Work) -> float:
    """K^(1/2) du - y, and the largest error that it stands for."""
    states, error = work.states, 0.0
    for s in range(states.shape[1]):
        states[RESIDUAL, s] = states[ROOT, s] * states[U, s] - states[Y, s]
        error = max(error, abs(states[RESIDUAL, s] * states[SCALE, s]))
    return error


@kernel
def take_own_size(num_actions: int, work: Work) -> None:
    """The unit of errors where nothing is known about the right-hand side, as in torch_occ.step.iterative."""
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
    """Whether the residual is more than rounding makes of these forces."""
    states, left, scale, noise = work.states, 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        left += states[RESIDUAL, s] ** 2
        scale += (states[ROOT, s] * size(s, num_actions, work)) ** 2
        if states[ROOT, s] > 0.0:
            noise += (EPS * (abs(states[MEAN, s]) + abs(states[V, s])) / states[ROOT, s]) ** 2
    return not np.sqrt(left) <= np.sqrt(EPS * scale) + 1e3 * np.sqrt(noise)


@inlined
def size(s: int, num_actions: int, work: Work) -> float:
    """How much a state changes."""
    total = abs(work.states[U, s])
    for i in range(s * num_actions, (s + 1) * num_actions):
        total += abs(work.pairs[RESPONSE, i])
    return total


@inlined
def sweep_work(model: Model, forced: bool, work: Work) -> None:
    """The two sweeps from Z, with FORCE and SOURCE or without; V, RESPONSE and U are what they make."""
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
    parts: tuple[
        Floats, Floats, Floats, Ints
    ],  # of the states: p and 1/D, sum 1/D, and the softest pair
    z: Floats,  # (S,)
    x: Floats,  # (S * A,), read if it is forced
    forced: bool,
    v: Floats,  # (S,), out
    within: Floats,  # (S * A,), out
    du: Floats,  # (S,), r before and du after
) -> None:
    """Back and forth, as in torch_occ.step.iterative. Indices have no sign, because looking at it would take half of the time."""
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
        # R of these forces, relative to the one at the softest action; see torch_occ.step.states.
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
    """q(s) of layer k into U: what flows in from the row of pairs, or the initial distribution."""
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
    """The arguments of `sweep`, a row for every element of a batch."""
    p, inverse, total, softest = parts
    for b in range(len(v)):
        i = b % len(p)
        states = p[i], inverse[i], total[i], softest[i]
        sweep(
            num_actions, rows, states, z[b % len(z)], x[b % len(x)], forced, v[b], within[b], du[b]
        )
