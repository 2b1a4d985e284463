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
    LEAST_RATIO,
    LEAST_SHARE,
    MAX_STEPS,
    SHARES,
    SHORTENINGS,
    STALLED,
    STEPS,
)
from torch_occ.kernels.layout import (
    PAIR,
    PLAN,
    Floats,
    Model,
    Terms,
    Work,
    kernel,
    part,
    routine,
)
from torch_occ.kernels.solver.entropic import entropy_of, follow_or_restart
from torch_occ.kernels.solver.multipliers import (
    AFTER,
    BEFORE,
    EARLIER,
    EXCESS,
    LAST,
    LATEST,
    NATURAL,
    PRICED,
    SIZE,
    STEP,
    Room,
    Z,
    choose,
    respond,
)
from torch_occ.kernels.solver.newton import EPS, retract
from torch_occ.kernels.solver.shaping import shape_loss


class Budget(NamedTuple):
    """A step with m budgets: its loss, its limits, and where to search."""

    loss: Floats  # (S * A,)
    costs: Floats  # (m, S * A), zero on masked pairs
    limits: Floats  # (m,)
    y: Floats  # (m,), the multipliers to start from; receives those found
    proof: Floats  # (m,), out: weights that prove that no policy meets the budgets
    middle: Floats  # (S * A,), an interior point
    nowhere: Floats  # (0,)
    tolerance: float
    max_steps: int


@kernel
def find_multipliers(
    model: Model, terms: Terms, weights: Floats, budget: Budget, room: Room, work: Work
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
    room: Room,
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
    room: Room,
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
    return status, total, found[2], found[3], found[4]


@routine
def move(
    model: Model,
    terms: Terms,
    weights: Floats,
    budget: Budget,
    share: float,
    error: float,
    room: Room,
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
    room: Room,
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
    work.stale[0], work.stale[2] = np.inf, 0.0
    return follow_or_restart(
        model,
        terms,
        weights,
        priced,
        budget.tolerance,
        budget.max_steps,
        budget.nowhere,
        budget.middle,
        work,
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


@routine
def is_infeasible(model: Model, budget: Budget, room: Room, work: Work) -> bool:
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
