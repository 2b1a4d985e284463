"""The quadratic model of the dual of a step with budgets, and its best multipliers.

The compiled twin of `_best_multipliers` in torch_occ.step.budgets.search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.constants import GROWTH
from torch_occ.kernels.layout import (
    DQ,
    FORCE,
    Bools,
    Floats,
    Model,
    Terms,
    V,
    Work,
    part,
    routine,
)
from torch_occ.kernels.solver.newton import EPS
from torch_occ.kernels.solver.psi import derive
from torch_occ.kernels.solver.transitions import factorize, solve

# Rows of `Room.pairs`.
PRICED, BEFORE, LAST = 0, 1, 2
# Rows of `Room.budgets`; the matrix of curvatures and its factors follow.
EXCESS, SIZE, STEP, TARGET, Z, SCALE, AFTER = 0, 1, 2, 3, 4, 5, 6
EARLIER, LATEST, NATURAL, MATRIX = 7, 8, 9, 10


class Room(NamedTuple):
    """Scratch memory for a search with m budgets."""

    pairs: Floats  # (3, S * A): the loss with prices, q before a step, q at the last share
    budgets: Floats  # (MATRIX + 2 m, m)
    positive: Bools  # (m,)


def make_room(num_pairs: int, count: int) -> Room:
    """Allocate scratch memory for `count` budgets."""
    return Room(
        np.zeros((3, num_pairs)), np.zeros((MATRIX + 2 * count, count)), np.zeros(count, np.bool_)
    )


@routine
def respond(
    model: Model, terms: Terms, weights: Floats, costs: Floats, room: Room, work: Work
) -> None:
    """Write the curvatures G Pi G' at q into the rows from MATRIX on."""
    pairs, num_pairs = work.pairs, costs.shape[1]
    derive(model, terms, weights, np.inf, work)
    factorize(model, True, work)
    for i in range(len(costs)):
        for p in range(num_pairs):
            pairs[FORCE, p] = costs[i, p]
        for s in range(work.states.shape[1]):
            work.states[V, s] = 0.0  # the start of an iterative solver
        solve(model, pairs[0, :0], work)
        for j in range(len(costs)):
            total = 0.0
            for p in range(num_pairs):
                total += costs[j, p] * pairs[DQ, p]
            room.budgets[MATRIX + i, j] = total


@routine
def choose(y: Floats, room: Room) -> None:
    """Write into STEP the step to the best multipliers of the quadratic model.

    The compiled twin of `_best_multipliers` in torch_occ.step.budgets.search.
    """
    rows, positive, count = room.budgets, room.positive, len(y)
    for i in range(count):
        for j in range(count):
            if not np.isfinite(rows[MATRIX + i, j]):
                rows[MATRIX + i, j] = 0.0
        # Where the curvature alone would ask for a larger step, it is raised.
        least = abs(rows[EXCESS, i]) / (GROWTH * (y[i] + rows[NATURAL, i]))
        curvature = max(rows[MATRIX + i, i], least)
        rows[MATRIX + i, i] = curvature
        rows[SCALE, i] = 1.0 / np.sqrt(curvature) if curvature > 0.0 else 1.0
        positive[i] = y[i] > 0.0 or rows[EXCESS, i] > 0.0
    for i in range(count):
        for j in range(count):
            rows[MATRIX + i, j] *= rows[SCALE, i] * rows[SCALE, j]
        rows[MATRIX + i, i] += 16.0 * count * EPS
    for i in range(count):
        rows[TARGET, i] = rows[EXCESS, i] * rows[SCALE, i]
        for j in range(count):
            rows[TARGET, i] += rows[MATRIX + i, j] * y[j] / rows[SCALE, j]
    fewest, tries = count + 1, 3
    for _ in range(20 * count + 20):
        solve_positive(room)
        wrong, last = 0, -1
        for i in range(count):
            slope, noise = rows[TARGET, i], abs(rows[TARGET, i])
            for j in range(count):
                slope -= rows[MATRIX + i, j] * rows[Z, j]
                noise += abs(rows[MATRIX + i, j] * rows[Z, j])
            rows[AFTER, i] = 0.0
            if (positive[i] and rows[Z, i] < 0.0) or (
                not positive[i] and slope > 64.0 * EPS * noise
            ):
                rows[AFTER, i] = 1.0
                wrong += 1
                last = i
        if wrong == 0:
            break
        tries = 3 if wrong < fewest else tries - 1
        fewest = min(fewest, wrong)
        for i in range(count):
            if rows[AFTER, i] == 1.0 and (tries > 0 or i == last):
                positive[i] = not positive[i]
    for i in range(count):
        rows[STEP, i] = max(rows[Z, i], 0.0) * rows[SCALE, i] - y[i]


@part
def solve_positive(room: Room) -> None:
    """Solve C z = target for the entries that are positive, the others zero, into Z.

    By Gaussian elimination; C is positive definite, so that no pivots are needed.
    """
    rows, positive, count = room.budgets, room.positive, room.budgets.shape[1]
    factor = MATRIX + count
    for i in range(count):
        rows[Z, i] = rows[TARGET, i] if positive[i] else 0.0
        for j in range(count):
            both = positive[i] and positive[j]
            rows[factor + i, j] = rows[MATRIX + i, j] if both else (1.0 if i == j else 0.0)
    for k in range(count):
        for i in range(k + 1, count):
            ratio = rows[factor + i, k] / rows[factor + k, k]
            if ratio != 0.0:
                for j in range(k, count):
                    rows[factor + i, j] -= ratio * rows[factor + k, j]
                rows[Z, i] -= ratio * rows[Z, k]
    for i in range(count - 1, -1, -1):
        for j in range(i + 1, count):
            rows[Z, i] -= rows[factor + i, j] * rows[Z, j]
        rows[Z, i] /= rows[factor + i, i]
