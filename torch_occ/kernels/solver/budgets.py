"""The FTRL step with budgets ⟨G_i, q⟩ <= h_i, compiled.

This is the compiled twin of torch_occ.step.budgets.search, which explains the method; tests compare
them. The step without budgets is solved by torch_occ.kernels.solver.entropic for every trial.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.constants import (
    CONVERGED,
    INFEASIBLE,
    MAX_STEPS,
    SHORTENINGS,
    STALLED,
    STEPS,
)
from torch_occ.kernels.layout import (
    DQ,
    FORCE,
    PAIR,
    PLAN,
    Bools,
    Floats,
    Model,
    Terms,
    V,
    Work,
    kernel,
    part,
)
from torch_occ.kernels.solver.entropic import entropy_of, follow_or_restart
from torch_occ.kernels.solver.newton import EPS, retract
from torch_occ.kernels.solver.psi import derive
from torch_occ.kernels.solver.shaping import shape_loss
from torch_occ.kernels.solver.transitions import factorize, solve

# Rows of `Room.pairs`.
PRICED, BEFORE = 0, 1
# Rows of `Room.budgets`; the matrix of curvatures and its factors follow.
EXCESS, SIZE, STEP, TARGET, Z, SCALE, AFTER, MATRIX = 0, 1, 2, 3, 4, 5, 6, 7


class Room(NamedTuple):
    """Scratch memory for a search with m budgets."""

    pairs: Floats  # (2, S * A): the loss with prices, and q before a step
    budgets: Floats  # (MATRIX + 2 m, m)
    positive: Bools  # (m,)


def make_room(num_pairs: int, count: int) -> Room:
    """Allocate scratch memory for `count` budgets."""
    return Room(
        np.zeros((2, num_pairs)), np.zeros((MATRIX + 2 * count, count)), np.zeros(count, np.bool_)
    )


@kernel
def find_multipliers(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,  # (S * A,)
    costs: Floats,  # (m, S * A), zero on masked pairs
    limits: Floats,  # (m,)
    y: Floats,  # (m,), the multipliers to start from; receives those found
    proof: Floats,  # (m,), out: weights that prove that no policy meets the budgets
    tolerance: float,
    max_steps: int,
    nowhere: Floats,  # (0,)
    middle: Floats,  # (S * A,), an interior point
    room: Room,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Minimize from q under the budgets; returns the same as `newton.descend`."""
    rows, count, num_pairs = room.budgets, len(limits), len(loss)
    best, patience, total, status = np.inf, 3, 0, MAX_STEPS
    work.stale[0], work.stale[2] = np.inf, 0.0
    if not entropy_of(terms, weights)[0] > 0.0:
        retract(model, PAIR, work)
    found = price(
        model, terms, weights, loss, costs, y, tolerance, max_steps, nowhere, middle, room, work
    )
    total += found[1]
    spend(costs, limits, EXCESS, room, work)
    for _ in range(STEPS):
        error = 0.0
        for i in range(count):
            excess = rows[EXCESS, i]
            violation = abs(excess) if y[i] > 0.0 else max(excess, 0.0)
            error = max(error, violation / rows[SIZE, i]) + (excess - excess)
        patience = 3 if error < 0.5 * best else patience - 1
        best = min(best, error)
        solved = found[0] == CONVERGED and error <= tolerance
        if solved and (error <= 8.0 * EPS or patience <= 0):
            status = CONVERGED
            break
        if not solved and (patience < -(STEPS // 2) or not np.isfinite(error)):
            status = STALLED if found[0] == CONVERGED else found[0]
            break
        if is_infeasible(model, costs, limits, y, proof, tolerance, room, work):
            status = INFEASIBLE
            break
        respond(model, terms, weights, costs, room, work)
        choose(y, room)
        climb = 0.0
        for i in range(count):
            climb += rows[EXCESS, i] * rows[STEP, i]
        for p in range(num_pairs):
            room.pairs[BEFORE, p] = work.pairs[PAIR, p]
        length = 1.0
        for _ in range(SHORTENINGS):
            for i in range(count):
                rows[Z, i] = max(y[i] + length * rows[STEP, i], 0.0)
            for p in range(num_pairs):
                work.pairs[PAIR, p] = room.pairs[BEFORE, p]
            work.stale[0], work.stale[2] = np.inf, 0.0
            found = price(
                model,
                terms,
                weights,
                loss,
                costs,
                rows[Z],
                tolerance,
                max_steps,
                nowhere,
                middle,
                room,
                work,
            )
            total += found[1]
            spend(costs, limits, AFTER, room, work)
            slope = 0.0
            for i in range(count):
                slope += rows[AFTER, i] * rows[STEP, i]
            far = error > tolerance and not slope >= -0.5 * climb
            if not (far or (found[0] != CONVERGED and length > 1e-12)):
                break
            ratio = climb / (climb - slope)
            length *= min(max(ratio, 0.1), 0.5) if np.isfinite(ratio) else 0.1
        for i in range(count):
            y[i] = rows[Z, i]
            rows[EXCESS, i] = rows[AFTER, i]
    return status, total, found[2], found[3], found[4]


@kernel
def price(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    costs: Floats,
    y: Floats,
    tolerance: float,
    max_steps: int,
    nowhere: Floats,
    middle: Floats,
    room: Room,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Solve the step without budgets for the loss L + G'y."""
    priced = room.pairs[PRICED]
    for p in range(len(loss)):
        priced[p] = loss[p]
    for i in range(len(y)):
        if y[i] > 0.0:
            for p in range(len(loss)):
                priced[p] += y[i] * costs[i, p]
    return follow_or_restart(
        model, terms, weights, priced, tolerance, max_steps, nowhere, middle, work
    )


@part
def spend(costs: Floats, limits: Floats, row: int, room: Room, work: Work) -> None:
    """Write G q - h into a row of the budgets, and the size of its terms into SIZE."""
    for i in range(len(limits)):
        spent, size = 0.0, abs(limits[i])
        for p in range(costs.shape[1]):
            spent += costs[i, p] * work.pairs[PAIR, p]
            size += abs(costs[i, p]) * work.pairs[PAIR, p]
        room.budgets[row, i] = spent - limits[i]
        room.budgets[SIZE, i] = size


@kernel
def is_infeasible(
    model: Model,
    costs: Floats,
    limits: Floats,
    y: Floats,
    proof: Floats,
    tolerance: float,
    room: Room,
    work: Work,
) -> bool:
    """Whether y or the present violations prove that no policy meets the budgets.

    The proof, with largest weight one, is written into `proof`. Overwrites the multipliers v.
    """
    rows, weighted = room.budgets, room.pairs[PRICED]
    for attempt in range(2):
        largest = 0.0
        for i in range(len(y)):
            proof[i] = y[i] if attempt == 0 else max(rows[EXCESS, i], 0.0)
            largest = max(largest, proof[i])
        if largest > 0.0:
            for p in range(len(weighted)):
                weighted[p] = 0.0
            allowed = 0.0
            for i in range(len(y)):
                proof[i] /= largest
                allowed += proof[i] * limits[i]
                for p in range(len(weighted)):
                    weighted[p] += proof[i] * costs[i, p]
            shape_loss(model, weighted, work)
            least = 0.0
            for s in range(model.start[1]):
                least += model.initial[s] * work.states[PLAN, s]
            if least - allowed > tolerance * (abs(least) + abs(allowed)):
                return True
    return False


@kernel
def respond(
    model: Model, terms: Terms, weights: Floats, costs: Floats, room: Room, work: Work
) -> None:
    """Write the curvatures G Pi G' at q into the rows from MATRIX on."""
    pairs, num_pairs = work.pairs, costs.shape[1]
    derive(model, terms, weights, work)
    factorize(model, work)
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


@kernel
def choose(y: Floats, room: Room) -> None:
    """Write into STEP the step to the best multipliers of the quadratic model.

    The compiled twin of `_best_multipliers` in torch_occ.step.budgets.search.
    """
    rows, positive, count = room.budgets, room.positive, len(y)
    for i in range(count):
        curvature = rows[MATRIX + i, i]
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
