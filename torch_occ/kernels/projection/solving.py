"""The Kullback-Leibler projection for one problem, and for a batch; nothing is allocated.

The compiled twin of `settle` in torch_occ.step.projection.dual.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import (
    CONVERGED,
    MAX_STEPS,
    NOT_FINITE,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.kernels.layout import Floats, kernel
from torch_occ.kernels.projection.arrays import (
    GUESS,
    LOG_WEIGHT,
    OCCUPANCY,
    OFF,
    POLICY,
    STEP,
    TRIAL,
    VALUE,
    Layers,
    P,
    Reference,
    Scratch,
)
from torch_occ.kernels.projection.directions import find_direction
from torch_occ.kernels.projection.passes import flow_residual, unfold

_EPS = np.finfo(np.float64).eps
_SMALLEST = np.finfo(np.float64).tiny / _EPS

#: As in torch_occ.step.projection.dual.
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
        if smallest < _SMALLEST:
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
