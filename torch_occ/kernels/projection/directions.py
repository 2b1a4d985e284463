"""The Newton direction of the projection, layer by layer.

The compiled twin of `direction` in torch_occ.step.projection.dual, which has the formulas.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.layout import Floats, kernel
from torch_occ.kernels.projection.arrays import (
    FORCE,
    FREE,
    GUESS,
    MEAN,
    MOVE,
    OFF,
    POLICY,
    ROOT,
    SPARE,
    STEP,
    Layers,
    P,
    Scratch,
)


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
