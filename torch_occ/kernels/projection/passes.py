"""The pass backward and the pass forward through the layers.

The compiled twin of `unfold` in torch_occ.step.projection.dual, which has the formulas.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.layout import Floats, kernel
from torch_occ.kernels.projection.arrays import (
    FALL,
    LOG_WEIGHT,
    OCCUPANCY,
    OFF,
    POLICY,
    TRIAL,
    VALUE,
    Layers,
    P,
    Reference,
    Scratch,
)
from torch_occ.kernels.projection.rows import fit_row


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
