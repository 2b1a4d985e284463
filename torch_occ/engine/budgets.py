"""The quadratic model of the dual of a step with budgets, and its best multipliers.

The compiled form of `_best_multipliers` in torch_occ.step.budgets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ._support.constants import (
    CONVERGED,
    GROWTH,
    INFEASIBLE,
    LEAST_RATIO,
    LEAST_SHARE,
    MAX_STEPS,
    SHARES,
    SHORTENINGS,
    STALLED,
    STEPS,
)
from torch_occ.engine.entropic import entropy_of, follow_or_restart
from torch_occ.engine.layout import (
    DQ,
    ERROR,
    FORCE,
    GUESSED,
    PAIR,
    PLAN,
    Bools,
    Floats,
    Model,
    Solver,
    Terms,
    V,
    Work,
    kernel,
    routine,
)
from torch_occ.engine.linear import factorize, solve
from torch_occ.engine.newton import EPS, floor_pairs, retract
from torch_occ.engine.psi import derive
from torch_occ.engine.shaping import shape_loss

# Rows of `BudgetRoom.pairs`.
PRICED, BEFORE, LAST = 0, 1, 2
# Rows of `BudgetRoom.budgets`; the matrix of curvatures and its factors follow.
EXCESS, SIZE, STEP, TARGET, Z, SCALE, AFTER = 0, 1, 2, 3, 4, 5, 6
EARLIER, LATEST, NATURAL, MATRIX = 7, 8, 9, 10


class BudgetRoom(NamedTuple):
    """Scratch memory for a search with m budgets."""

    pairs: Floats  # (3, S * A): the loss with prices, q before a step, q at the last share
    budgets: Floats  # (MATRIX + 2 m, m)
    positive: Bools  # (m,)


def make_budget_room(num_pairs: int, count: int) -> BudgetRoom:
    """Allocate scratch memory for `count` budgets."""
    return BudgetRoom(
        np.zeros((3, num_pairs)), np.zeros((MATRIX + 2 * count, count)), np.zeros(count, np.bool_)
    )


@routine
def respond(
    model: Model, terms: Terms, weights: Floats, costs: Floats, room: BudgetRoom, work: Work
) -> None:
    """Write the curvatures G Pi G' at q into the rows from MATRIX on."""
    pairs, num_pairs = work.pairs, costs.shape[1]
    floor_pairs(model, work)  # an entropy may underflow, and its curvature be infinite
    derive(model, terms, weights, np.inf, work)
    factorize(model, True, work)
    for i in range(len(costs)):
        for p in range(num_pairs):
            pairs[FORCE, p] = costs[i, p]
        for s in range(work.states.shape[1]):
            work.states[V, s] = 0.0  # the start of an iterative solver
        solve(model, None, work)
        for j in range(len(costs)):
            total = 0.0
            for p in range(num_pairs):
                total += costs[j, p] * pairs[DQ, p]
            room.budgets[MATRIX + i, j] = total


@routine
def scale_model(y: Floats, room: BudgetRoom) -> None:
    """Raise the curvatures where they alone would ask for too large a step; unit diagonal."""
    rows, count = room.budgets, len(y)
    for i in range(count):
        for j in range(count):
            if not np.isfinite(rows[MATRIX + i, j]):
                rows[MATRIX + i, j] = 0.0
        least = abs(rows[EXCESS, i]) / (GROWTH * (y[i] + rows[NATURAL, i]))
        curvature = max(rows[MATRIX + i, i], least)
        rows[MATRIX + i, i] = curvature
        rows[SCALE, i] = 1.0 / np.sqrt(curvature) if curvature > 0.0 else 1.0
    for i in range(count):
        for j in range(count):
            rows[MATRIX + i, j] *= rows[SCALE, i] * rows[SCALE, j]
        rows[MATRIX + i, i] += 16.0 * count * EPS


@routine
def choose(y: Floats, room: BudgetRoom) -> None:
    """Write into STEP the step to the best multipliers of the quadratic model.

    The compiled form of `_best_multipliers` in torch_occ.step.budgets.
    """
    rows, positive, count = room.budgets, room.positive, len(y)
    scale_model(y, room)
    for i in range(count):
        positive[i] = y[i] > 0.0 or rows[EXCESS, i] > 0.0
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


@routine(inline=True)
def solve_positive(room: BudgetRoom) -> None:
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


# -- The FTRL step with budgets ⟨G_i, q⟩ <= h_i, compiled ------------------------------------------
#
# This is the compiled form of torch_occ.step.budgets, which explains the method; tests
# compare them. The step without budgets is solved by torch_occ.engine.entropic for every
# trial.


class Budget(NamedTuple):
    """A step with m budgets: its loss, its limits, and where to search."""

    loss: Floats  # (S * A,)
    costs: Floats  # (m, S * A), zero on masked pairs
    limits: Floats  # (m,)
    y: Floats  # (m,), the multipliers to start from; receives those found
    proof: Floats  # (m,), out: weights that prove that no policy meets the budgets
    middle: Floats  # (S * A,), an interior point
    tolerance: float
    max_steps: int


@kernel
def find_multipliers(
    model: Model, terms: Terms, weights: Floats, budget: Budget, room: BudgetRoom, work: Work
) -> tuple[int, int, float, float, float]:
    """Minimize from q under the budgets; returns the same as `newton.descend`."""
    found = climb(model, terms, weights, budget, 1.0, room, work)
    if found[0] == CONVERGED or found[0] == INFEASIBLE:
        return found
    return follow_shares(model, terms, weights, budget, found[1], room, work)


@routine
def follow_shares(
    model: Model,
    terms: Terms,
    weights: Floats,
    budget: Budget,
    total: int,
    room: BudgetRoom,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Solve for a growing share of the loss, from 0 to 1; `total` counts Newton steps."""
    rows, y, count, num_pairs = room.budgets, budget.y, len(budget.y), len(budget.loss)
    share, ratio, tried, share_before = 0.0, 10.0, 1.0, -1.0
    for i in range(count):
        y[i], rows[EARLIER, i] = 0.0, 0.0
    for p in range(num_pairs):
        work.pairs[PAIR, p] = budget.middle[p]
    found = climb(model, terms, weights, budget, 0.0, room, work)
    total += found[1]
    if found[0] != CONVERGED:
        return found[0], total, found[2], found[3], found[4]
    for _ in range(SHARES):
        for i in range(count):
            rows[LATEST, i] = y[i]
            slope = (y[i] - rows[EARLIER, i]) / (share - share_before) if share > 0.0 else 0.0
            y[i] = max(y[i] + (tried - share) * slope, 0.0)
        for p in range(num_pairs):
            room.pairs[LAST, p] = work.pairs[PAIR, p]
        found = climb(model, terms, weights, budget, tried, room, work)
        total += found[1]
        if found[0] == CONVERGED:
            for i in range(count):
                rows[EARLIER, i] = rows[LATEST, i]
            share_before, share = share, tried
            if share == 1.0:
                break
            ratio = min(ratio * ratio, 10.0)
            tried = min(1.0, share * ratio)
        else:
            if share == 0.0:
                tried /= 10.0
            else:
                ratio = np.sqrt(ratio)
                tried = min(1.0, share * ratio)
            if tried < LEAST_SHARE or ratio < LEAST_RATIO:
                break
            for i in range(count):
                y[i] = rows[LATEST, i]
            for p in range(num_pairs):
                work.pairs[PAIR, p] = room.pairs[LAST, p]
    return found[0], total, found[2], found[3], found[4]


@routine
def climb(
    model: Model,
    terms: Terms,
    weights: Floats,
    budget: Budget,
    share: float,
    room: BudgetRoom,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Newton's method on the multipliers, for a share of the loss."""
    costs, limits, y, tolerance = budget.costs, budget.limits, budget.y, budget.tolerance
    rows, count = room.budgets, len(limits)
    best, patience, total, status = np.inf, 3, 0, MAX_STEPS
    if not entropy_of(terms, weights)[0] > 0.0:
        retract(model, PAIR, True, work)
    found = price(model, terms, weights, budget, share, y, room, work)
    total += found[1]
    spend(costs, limits, EXCESS, room, work)
    most = 0.0
    for p in range(len(budget.loss)):
        most = max(most, abs(budget.loss[p]))
    for i in range(count):
        largest = 0.0
        for p in range(len(budget.loss)):
            largest = max(largest, abs(costs[i, p]))
        rows[NATURAL, i] = (most + 1.0) / largest if largest > 0.0 else 1.0
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
        if found[0] != CONVERGED or not np.isfinite(error):
            status = STALLED if found[0] == CONVERGED else found[0]
            break
        if is_infeasible(model, budget, room, work):
            status = INFEASIBLE
            break
        respond(model, terms, weights, costs, room, work)
        choose(y, room)
        found = move(model, terms, weights, budget, share, error, room, work)
        total += found[1]
    dual = found[4]
    if status == CONVERGED:
        dual = max(dual, error_of_q(model, terms, weights, budget, room, work))
        status = CONVERGED if dual <= tolerance else STALLED
    return status, total, found[2], found[3], dual


@routine
def error_of_q(
    model: Model, terms: Terms, weights: Floats, budget: Budget, room: BudgetRoom, work: Work
) -> float:
    """The relative error of q that remains, since a budget is met only up to rounding.

    It is the change of q that would remove the violation, or the rounding error of its sum. Where
    budgets leave little room, q answers strongly.
    """
    rows, pairs, v = room.budgets, work.pairs, room.pairs[PRICED]
    for s in range(work.states.shape[1]):
        v[s] = work.states[V, s]
    for p in range(pairs.shape[1]):
        room.pairs[BEFORE, p] = pairs[PAIR, p]  # `respond` raises what underflows
    respond(model, terms, weights, budget.costs, room, work)
    scale_model(budget.y, room)
    for i in range(len(budget.y)):
        room.positive[i] = budget.y[i] > 0.0
        noise = max(abs(rows[EXCESS, i]), 4.0 * EPS * rows[SIZE, i])
        rows[TARGET, i] = (noise if rows[EXCESS, i] >= 0.0 else -noise) * rows[SCALE, i]
    solve_positive(room)
    for p in range(pairs.shape[1]):
        pairs[FORCE, p] = 0.0
        for i in range(len(budget.y)):
            pairs[FORCE, p] += rows[Z, i] * rows[SCALE, i] * budget.costs[i, p]
    for s in range(work.states.shape[1]):
        work.states[V, s] = 0.0
    solve(model, None, work)
    error = 0.0
    for p in range(pairs.shape[1]):
        if model.exists[PAIR, p]:
            error = max(error, abs(pairs[DQ, p]) / pairs[PAIR, p])
    for p in range(pairs.shape[1]):
        pairs[PAIR, p] = room.pairs[BEFORE, p]
    for s in range(work.states.shape[1]):
        work.states[V, s] = v[s]
    return error


@routine
def move(
    model: Model,
    terms: Terms,
    weights: Floats,
    budget: Budget,
    share: float,
    error: float,
    room: BudgetRoom,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Take the step STEP, shortened until the slope of D at its end is nearly positive.

    Returns the result of the last solve, with the steps of all solves.
    """
    rows, y, count, num_pairs = room.budgets, budget.y, len(budget.y), len(budget.loss)
    uphill, total = 0.0, 0
    for i in range(count):
        uphill += rows[EXCESS, i] * rows[STEP, i]
    for p in range(num_pairs):
        room.pairs[BEFORE, p] = work.pairs[PAIR, p]
    low, high, at_low, at_high, length = 0.0, np.inf, uphill, uphill, 1.0
    found = (MAX_STEPS, 0, 0.0, 0.0, 0.0)
    for _ in range(SHORTENINGS):
        for i in range(count):
            rows[Z, i] = max(y[i] + length * rows[STEP, i], 0.0)
        for p in range(num_pairs):
            work.pairs[PAIR, p] = room.pairs[BEFORE, p]
        found = price(model, terms, weights, budget, share, rows[Z], room, work)
        total += found[1]
        spend(budget.costs, budget.limits, AFTER, room, work)
        slope = 0.0
        for i in range(count):
            slope += rows[AFTER, i] * rows[STEP, i]
        if found[0] != CONVERGED:
            slope = -np.inf
        far = error > budget.tolerance and slope < -0.1 * uphill
        far = far or (high < np.inf and slope > 0.5 * uphill)
        if not (far and high - low > 1e-14 * low):
            break
        if slope < 0.0:
            high, at_high = length, slope
        else:
            low, at_low = length, slope
        ratio = at_low / (at_low - at_high)
        ratio = min(max(ratio, 0.1), 0.9) if np.isfinite(ratio) else 0.1
        length = low + ratio * (high - low)
    for i in range(count):
        y[i] = rows[Z, i]
        rows[EXCESS, i] = rows[AFTER, i]
    return found[0], total, found[2], found[3], found[4]


@routine
def price(
    model: Model,
    terms: Terms,
    weights: Floats,
    budget: Budget,
    share: float,
    y: Floats,
    room: BudgetRoom,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Solve the step without budgets for a share of the loss and the prices G'y."""
    priced = room.pairs[PRICED]
    for p in range(len(priced)):
        priced[p] = share * budget.loss[p]
    for i in range(len(y)):
        if y[i] > 0.0:
            for p in range(len(priced)):
                priced[p] += y[i] * budget.costs[i, p]
    work.notes[ERROR], work.notes[GUESSED] = np.inf, 0.0
    solver = Solver(terms, weights, budget.tolerance, budget.max_steps, budget.middle)
    return follow_or_restart(model, solver, priced, work)


@routine(inline=True)
def spend(costs: Floats, limits: Floats, row: int, room: BudgetRoom, work: Work) -> None:
    """Write G q - h into a row of the budgets, and the size of its terms into SIZE."""
    for i in range(len(limits)):
        spent, size = 0.0, abs(limits[i])
        for p in range(costs.shape[1]):
            spent += costs[i, p] * work.pairs[PAIR, p]
            size += abs(costs[i, p]) * work.pairs[PAIR, p]
        room.budgets[row, i] = spent - limits[i]
        room.budgets[SIZE, i] = size


@routine
def is_infeasible(model: Model, budget: Budget, room: BudgetRoom, work: Work) -> bool:
    """Whether y or the present violations prove that no policy meets the budgets.

    The proof, with largest weight one, is written into `proof`. Overwrites the multipliers v.
    """
    rows, weighted, proof = room.budgets, room.pairs[PRICED], budget.proof
    costs, limits, y = budget.costs, budget.limits, budget.y
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
            if least - allowed > budget.tolerance * (abs(least) + abs(allowed)):
                return True
    return False
