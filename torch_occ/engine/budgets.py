"""Budgets ⟨G_i, q⟩ <= h_i inside Newton's method, compiled; `BudgetArrays` in a `Solver` asks for it.

A Newton step of torch_occ.engine.newton solves a quadratic model of the objective. With budgets, the
model is solved within them: dq = dq0 - U z, where dq0 is the step without a change z of the
multipliers y, and U = Pi G' is the response of q. So every step meets the budgets that are used up,
and costs a few sums more. U and G U belong to the factors of the linear system and are kept as long
as these. `torch_occ.engine.entropic.search` finds the multipliers from here.

The change z solves the model's dual problem, C = G U,

    max over z >= -y of ⟨e, z⟩ - z'C z / 2,    e = G (q + dq0) - h,

by pivoting; the form of `_best_multipliers` in torch_occ.step.budgets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, sqrt, where
from torch_occ.engine.layout import Floats, Model, Work, either, inlined, routine
from torch_occ.engine.linear import solve

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)

#: In one step, a multiplier becomes at most about this factor larger.
GROWTH = 10.0

# Rows of `BudgetArrays.rows`.
EXCESS = 0  # G q - h, or e
SIZE = 1  # the sum of the sizes of the terms of G q - h
STEP = 2  # z
BASE, DIRECTION = 3, 9  # a step of the search: the multipliers where it begins, and its change
NATURAL = 4  # the price at which a budget matters as much as the loss
LARGEST = 5  # the largest cost
SCALE = 6  # of z, so that C has the diagonal one
POSITIVE = 7  # 1 if the multiplier is expected to be positive, else 0
WRONG = 8  # 1 if that turned out to be wrong
BUDGET_ROWS = 10

# Rows of `BudgetArrays.pairs`, and those of `BudgetArrays.values` after the first m.
PRICED, ORIGIN, HELD = 0, 1, 2  # the loss with its prices, the q of BASE, and q for a moment
NOTHING, FOUND_V, HELD_V, HELD_SLOPE = 0, 1, 2, 3  # zeros, v of ORIGIN, and rows for a moment

# Entries of `BudgetArrays.notes`.
JOINT = 0  # 1 if q and y are found together
SWUNG = 1  # how far the prices have moved since the loss was shaped


class BudgetArrays(NamedTuple):
    """m budgets of one problem, or of one in every lane, and scratch memory."""

    costs: Floats  # (m, S * A), zero on masked pairs
    limits: Floats  # (m,)
    multipliers: Floats  # (m,), y: where to start, and what was found
    response: Floats  # (m, S * A), U
    values: Floats  # (m + 4, S), the multipliers of the flow constraints that belong to U
    matrix: Floats  # (3 m, m): C, its scaled form, and what elimination leaves of it
    rows: Floats  # (BUDGET_ROWS, m)
    pairs: Floats  # (3, S * A)
    notes: Floats  # (2,)


def make_budgets(m: int, model: Model, new: Callable[..., Any]) -> BudgetArrays:
    """Allocate memory for m budgets."""
    n, s = model.exists.shape[1], model.exists.shape[1] // model.num_actions
    shapes = ((m, n), (m,), (m,), (m, n), (m + 4, s), (3 * m, m), (BUDGET_ROWS, m), (3, n), (2,))
    return BudgetArrays(*(new(*shape) for shape in shapes))


@inlined
def _no_source(model: Model, budgets: Any) -> Any:
    return None


@inlined
def _zero_source(model: Model, budgets: Any) -> Any:
    return budgets.values[len(budgets.limits) + NOTHING]


#: A right-hand side of zeros. Iterative solvers are accurate only if they are given one.
source_of = either(_no_source, _zero_source)


@routine(inline=True)
def respond(model: Model, budgets: Any, refresh: Any, work: Work) -> None:
    """Compute U and C where the factors are new. Nothing is compiled without budgets."""
    if budgets is not None:
        count, states = len(budgets.limits), work.states
        for s in range(states.shape[1]):
            budgets.values[count + HELD_V, s] = states[at.V, s]
        for j in range(count):
            for i in range(work.pairs.shape[1]):
                work.pairs[at.FORCE, i] = budgets.costs[j, i]
            solve(model, source_of(model, budgets), work)
            keep_response(budgets, j, refresh, work)
        for s in range(states.shape[1]):
            states[at.V, s] = budgets.values[count + HELD_V, s]


@routine
def keep_response(budgets: Any, j: int, wanted: Any, work: Work) -> None:
    """Copy the response to budget j from DQ and V, and compute its row of C."""
    response, values, matrix = budgets.response, budgets.values, budgets.matrix
    for s in range(work.states.shape[1]):
        values[j, s] = where(wanted, work.states[at.V, s], values[j, s])
    for i in range(work.pairs.shape[1]):
        response[j, i] = where(wanted, work.pairs[at.DQ, i], response[j, i])
    for k in range(j + 1):
        total = 0.0
        for i in range(work.pairs.shape[1]):
            total += budgets.costs[k, i] * response[j, i]
        total = where(total - total == 0.0, total, 0.0)
        matrix[j, k], matrix[k, j] = total, total


@routine(inline=True)
def steer(budgets: Any, running: Any, work: Work) -> None:
    """Correct a Newton step in DQ so that it meets the budgets where q and y are found together.

    GAPS, V and y move along. Nothing is compiled without budgets.
    """
    if budgets is not None:
        joint = running & (budgets.notes[JOINT] > 0.0)
        if anywhere(joint):
            correct(budgets, joint, work)


@routine
def correct(budgets: Any, joint: Any, work: Work) -> None:
    """`steer` where `joint`."""
    pairs, states, costs, rows = work.pairs, work.states, budgets.costs, budgets.rows
    swing = 0.0
    for j in range(len(budgets.limits)):
        spent = 0.0
        for i in range(pairs.shape[1]):
            spent += costs[j, i] * (pairs[at.PAIR, i] + pairs[at.DQ, i])
        rows[EXCESS, j] = spent - budgets.limits[j]
    best_step(budgets)
    for j in range(len(budgets.limits)):
        z = where(joint, rows[STEP, j], 0.0)
        budgets.multipliers[j] = max(budgets.multipliers[j] + z, 0.0)
        swing = max(swing, abs(z) * rows[LARGEST, j])
        for i in range(pairs.shape[1]):
            pairs[at.DQ, i] -= z * budgets.response[j, i]
            pairs[at.GAPS, i] += z * costs[j, i]
        for s in range(states.shape[1]):
            states[at.V, s] -= z * budgets.values[j, s]
    budgets.notes[SWUNG] += swing


@routine
def best_step(budgets: Any) -> None:
    """Write the best z of the model into STEP, for e in EXCESS.

    Block principal pivoting: guess which multipliers are positive, solve for them, and exchange
    those that violate a sign. If that cycles, only the last one is exchanged, which ends for
    certain.
    """
    rows, y, m = budgets.rows, budgets.multipliers, len(budgets.limits)
    scale_matrix(budgets)
    for j in range(m):
        guess = (y[j] > 0.0) | (rows[EXCESS, j] > 0.0)
        rows[POSITIVE, j] = where(guess, 1.0, 0.0)
    fewest, tries = m + 1.0, 3.0
    for _ in range(20 * m + 20):
        for j in range(m):
            rows[STEP, j] = rows[EXCESS, j] * rows[SCALE, j]
        solve_positive(budgets, True)
        count = 0.0
        for j in range(m):
            target = rows[EXCESS, j] * rows[SCALE, j]
            slope, size = target, abs(target)
            for k in range(m):
                part = budgets.matrix[m + j, k] * rows[STEP, k]
                slope, size = slope - part, size + abs(part)
            below = rows[STEP, j] * rows[SCALE, j] < -y[j]
            wrong = where(rows[POSITIVE, j] > 0.0, below, slope > 64.0 * EPS * size)
            rows[WRONG, j] = where(wrong, 1.0, 0.0)
            count += rows[WRONG, j]
        if not anywhere(count > 0.0):
            break
        tries = where(count < fewest, 3.0, tries - 1.0)
        fewest, after = min(fewest, count), 0.0
        for j in range(m - 1, -1, -1):
            flip = (rows[WRONG, j] > 0.0) & ((tries > 0.0) | (after == 0.0))
            after += rows[WRONG, j]
            rows[POSITIVE, j] = where(flip, 1.0 - rows[POSITIVE, j], rows[POSITIVE, j])
    for j in range(m):
        rows[STEP, j] = max(rows[STEP, j] * rows[SCALE, j], -y[j])


@routine
def scale_matrix(budgets: Any) -> None:
    """Scale C to the diagonal one, so that budgets in any unit are treated alike.

    Where C alone would ask for a very large step, its diagonal is raised first. A small ridge makes
    budgets that say the same twice share their multiplier.
    """
    rows, matrix, m = budgets.rows, budgets.matrix, len(budgets.limits)
    for j in range(m):
        most = GROWTH * (budgets.multipliers[j] + rows[NATURAL, j])
        raised = max(matrix[j, j], abs(rows[EXCESS, j]) / most)
        rows[SCALE, j] = where(raised > 0.0, 1.0 / sqrt(max(raised, TINY)), 1.0)
    for j in range(m):
        for k in range(m):
            matrix[m + j, k] = matrix[j, k] * rows[SCALE, j] * rows[SCALE, k]
        matrix[m + j, j] = 1.0 + 16.0 * m * EPS


@routine
def solve_positive(budgets: Any, released: bool) -> None:
    """Solve C z = right for the multipliers that are positive, in place, in the units of SCALE.

    The row STEP has the right-hand side. If `released`, the others go to zero, z = -y.
    """
    rows, y, matrix, m = budgets.rows, budgets.multipliers, budgets.matrix, len(budgets.limits)
    for j in range(m):
        own = rows[POSITIVE, j] > 0.0
        for k in range(m):
            both = own & (rows[POSITIVE, k] > 0.0)
            matrix[2 * m + j, k] = where(both, matrix[m + j, k], 1.0 if j == k else 0.0)
            if released:
                gone = where(rows[POSITIVE, k] > 0.0, 0.0, y[k] / rows[SCALE, k])
                rows[STEP, j] += matrix[m + j, k] * gone
        away = -y[j] / rows[SCALE, j] if released else 0.0
        rows[STEP, j] = where(own, rows[STEP, j], away)
    for column in range(m):
        pivot = 1.0 / matrix[2 * m + column, column]
        for row in range(column + 1, m):
            factor = matrix[2 * m + row, column] * pivot
            for k in range(column + 1, m):
                matrix[2 * m + row, k] -= factor * matrix[2 * m + column, k]
            rows[STEP, row] -= factor * rows[STEP, column]
    for row in range(m - 1, -1, -1):
        for k in range(row + 1, m):
            rows[STEP, row] -= matrix[2 * m + row, k] * rows[STEP, k]
        rows[STEP, row] /= matrix[2 * m + row, row]


@routine
def spend(budgets: Any, work: Work) -> Any:
    """Write G q - h into EXCESS and its size into SIZE; return the largest relative violation."""
    rows, costs, error, bad = budgets.rows, budgets.costs, 0.0, 0.0
    for j in range(len(budgets.limits)):
        spent, size = 0.0, abs(budgets.limits[j])
        for i in range(work.pairs.shape[1]):
            part = costs[j, i] * work.pairs[at.PAIR, i]
            spent += part
            size += abs(part)
        excess = spent - budgets.limits[j]
        rows[EXCESS, j], rows[SIZE, j] = excess, size
        violation = where(budgets.multipliers[j] > 0.0, abs(excess), max(excess, 0.0))
        error = max(error, violation / max(size, TINY))
        bad += excess - excess  # 0 unless something is not finite
    return error + bad


@routine
def error_of(model: Model, budgets: Any, work: Work) -> Any:
    """The relative error of q that remains since budgets are met only up to rounding.

    The form of `_MultiplierSearch.error_of` in torch_occ.step.budgets. Overwrites STEP.
    """
    rows, m, worst = budgets.rows, len(budgets.limits), 0.0
    scale_matrix(budgets)
    for j in range(m):
        noise = max(abs(rows[EXCESS, j]), 4.0 * EPS * rows[SIZE, j])
        noise = where(rows[EXCESS, j] < 0.0, -noise, noise)
        rows[POSITIVE, j] = where(budgets.multipliers[j] > 0.0, 1.0, 0.0)
        rows[STEP, j] = noise * rows[SCALE, j]
    solve_positive(budgets, False)
    for i in range(work.pairs.shape[1]):
        if model.exists[at.PAIR, i]:
            change = 0.0
            for j in range(m):
                change += budgets.response[j, i] * (rows[STEP, j] * rows[SCALE, j])
            worst = max(worst, abs(change) / max(work.pairs[at.PAIR, i], TINY / EPS))
    return worst


@routine
def size_up(budgets: Any, loss: Floats) -> None:
    """Write the largest costs, and the prices at which budgets matter as much as the loss."""
    rows, most = budgets.rows, 0.0
    for i in range(len(loss)):
        most = max(most, abs(loss[i]))
    for j in range(len(budgets.limits)):
        largest = 0.0
        for i in range(len(loss)):
            largest = max(largest, abs(budgets.costs[j, i]))
        rows[LARGEST, j] = largest
        rows[NATURAL, j] = where(largest > 0.0, (most + 1.0) / max(largest, TINY), 1.0)


def has_budgets(model: Any, solver: Any, *_: Any) -> bool:
    """Whether a solver has budgets, by its Numba type."""
    return hasattr(solver.types[-1], "instance_class")
