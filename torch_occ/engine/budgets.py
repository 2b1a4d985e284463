"""Newton steps within budgets ⟨G_i, q⟩ <= h_i, compiled.

torch_occ.engine.newton calls this for a `Solver` with budgets. A Newton step minimizes a quadratic
model of the objective, here within the budgets: it is dq0 - U z, where dq0 is the step at the present
multipliers y, z their change, and U = Pi G' the response of q. With e = G (q + dq0) - h and C = G U,

    z = argmax over z >= -y of ⟨e, z⟩ - z'C z / 2.

So q and y are found together, and a step takes a few sums more than without budgets. U and C belong
to the factors of the linear system, and are kept as long as these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, where
from torch_occ.engine.layout import Floats, Model, Work, either, inlined, routine
from torch_occ.engine.linear import solve

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)

# Rows of `BudgetArrays.rows`.
EXCESS, SIZE = 0, 1  # G q - h, or e; and the sum of the sizes of its terms
CHANGE = 2  # z
POSITIVE = 3  # 1 if the multiplier is expected to be positive, else 0
WRONG = 4  # 1 if that turned out to be wrong
SWUNG = 5  # how far the multiplier has moved since the loss was shaped
BUDGET_ROWS = 6

# Rows of `BudgetArrays.values` after the first m.
ZEROS, HELD_V, FOUND_V = 0, 1, 2  # zeros, v for a moment, and that of the solution


class BudgetArrays(NamedTuple):
    """m budgets of one problem, or of one in every lane, and scratch memory."""

    costs: Floats  # (m, S * A), G, zero on masked pairs
    limits: Floats  # (m,), h
    y: Floats  # (m,), multipliers: where to start, and what was found
    priced: Floats  # (S * A,), the loss with its prices, L + G'y
    response: Floats  # (m, S * A), U
    values: Floats  # (m + 3, S), the multipliers v of the flow constraints that belong to U
    matrix: Floats  # (2 m, m), C, and what elimination leaves of it
    rows: Floats  # (BUDGET_ROWS, m)


def make_budgets(m: int, model: Model, new: Callable[..., Any]) -> BudgetArrays:
    """Allocate memory for m budgets."""
    n, s = model.exists.shape[1], model.exists.shape[1] // model.num_actions
    shapes = ((m, n), (m,), (m,), (n,), (m, n), (m + 3, s), (2 * m, m), (BUDGET_ROWS, m))
    return BudgetArrays(*(new(*shape) for shape in shapes))


def has_budgets(model: Any, solver: Any, *_: Any) -> bool:
    """Whether a solver has budgets, by its Numba type."""
    return hasattr(solver.types[-1], "instance_class")


@inlined
def _no_source(model: Model, budgets: Any) -> Any:
    return None


@inlined
def _zero_source(model: Model, budgets: Any) -> Any:
    return budgets.values[len(budgets.limits) + ZEROS]


#: A right-hand side of zeros; iterative solvers are accurate only if they are given one.
source_of = either(_no_source, _zero_source)


@routine(inline=True)
def respond(model: Model, budgets: Any, refresh: Any, work: Work) -> None:
    """Compute U and C where the factors are new. Nothing is compiled without budgets."""
    if budgets is not None:
        pairs, states, response, values = work.pairs, work.states, budgets.response, budgets.values
        m = len(budgets.limits)
        for s in range(states.shape[1]):
            values[m + HELD_V, s] = states[at.V, s]
        for j in range(m):
            for i in range(pairs.shape[1]):
                pairs[at.FORCE, i] = budgets.costs[j, i]
            solve(model, source_of(model, budgets), work)
            for i in range(pairs.shape[1]):
                response[j, i] = where(refresh, pairs[at.DQ, i], response[j, i])
            for s in range(states.shape[1]):
                values[j, s] = where(refresh, states[at.V, s], values[j, s])
            for k in range(j + 1):
                total = 0.0
                for i in range(pairs.shape[1]):
                    total += budgets.costs[k, i] * response[j, i]
                budgets.matrix[j, k], budgets.matrix[k, j] = total, total
        for s in range(states.shape[1]):
            states[at.V, s] = values[m + HELD_V, s]


@routine(inline=True)
def steer(budgets: Any, running: Any, work: Work) -> None:
    """Correct the Newton step in DQ so that it meets the budgets; V, GAPS and y move along.

    Nothing is compiled without budgets.
    """
    if budgets is not None:
        pairs, states, rows = work.pairs, work.states, budgets.rows
        for j in range(len(budgets.limits)):
            spent = 0.0
            for i in range(pairs.shape[1]):
                spent += budgets.costs[j, i] * (pairs[at.PAIR, i] + pairs[at.DQ, i])
            rows[EXCESS, j] = spent - budgets.limits[j]
        find_change(budgets)
        for j in range(len(budgets.limits)):
            z = where(running, rows[CHANGE, j], 0.0)
            budgets.y[j] = max(budgets.y[j] + z, 0.0)
            rows[SWUNG, j] += abs(z)
            for i in range(pairs.shape[1]):
                pairs[at.DQ, i] -= z * budgets.response[j, i]
                pairs[at.GAPS, i] += z * budgets.costs[j, i]
            for s in range(states.shape[1]):
                states[at.V, s] -= z * budgets.values[j, s]


@routine
def find_change(budgets: Any) -> None:
    """Write z into CHANGE, for e in EXCESS.

    Block principal pivoting: guess which multipliers are positive, solve for them, and exchange
    those that violate a sign. If that cycles, only the last one is exchanged, which ends for
    certain.
    """
    rows, y, C, m = budgets.rows, budgets.y, budgets.matrix, len(budgets.limits)
    for j in range(m):
        rows[POSITIVE, j] = where((y[j] > 0.0) | (rows[EXCESS, j] > 0.0), 1.0, 0.0)
    for attempt in range(20 * m + 20):
        for j in range(m):
            rows[CHANGE, j] = rows[EXCESS, j]
            for k in range(m):
                rows[CHANGE, j] += C[j, k] * where(rows[POSITIVE, k] > 0.0, 0.0, y[k])
        solve_positive(budgets)
        count = 0.0
        for j in range(m):
            rows[CHANGE, j] = where(rows[POSITIVE, j] > 0.0, rows[CHANGE, j], -y[j])
        for j in range(m):
            slope, size = rows[EXCESS, j], abs(rows[EXCESS, j])
            for k in range(m):
                part = C[j, k] * rows[CHANGE, k]
                slope, size = slope - part, size + abs(part)
            below = y[j] + rows[CHANGE, j] < 0.0
            wrong = where(rows[POSITIVE, j] > 0.0, below, slope > 64.0 * EPS * size)
            rows[WRONG, j] = where(wrong, 1.0, 0.0)
        for j in range(m - 1, -1, -1):
            flip = (rows[WRONG, j] > 0.0) & ((count == 0.0) | (attempt < 10))
            count += rows[WRONG, j]
            rows[POSITIVE, j] = where(flip, 1.0 - rows[POSITIVE, j], rows[POSITIVE, j])
        if not anywhere(count > 0.0):
            break


@routine
def solve_positive(budgets: Any) -> None:
    """Solve C z = CHANGE for the multipliers that are positive, in place; the others are zero.

    A small ridge makes budgets that say the same twice share their multiplier.
    """
    rows, C, m = budgets.rows, budgets.matrix, len(budgets.limits)
    for j in range(m):
        own = rows[POSITIVE, j] > 0.0
        for k in range(m):
            both = own & (rows[POSITIVE, k] > 0.0)
            C[m + j, k] = where(both, C[j, k], 0.0)
        C[m + j, j] = where(own, max(C[j, j], TINY) * (1.0 + 16.0 * m * EPS), 1.0)
        rows[CHANGE, j] = where(own, rows[CHANGE, j], 0.0)
    for column in range(m):
        for row in range(column + 1, m):
            factor = C[m + row, column] / C[m + column, column]
            for k in range(column + 1, m):
                C[m + row, k] -= factor * C[m + column, k]
            rows[CHANGE, row] -= factor * rows[CHANGE, column]
    for row in range(m - 1, -1, -1):
        for k in range(row + 1, m):
            rows[CHANGE, row] -= C[m + row, k] * rows[CHANGE, k]
        rows[CHANGE, row] /= C[m + row, row]


@routine
def put_prices(budgets: Any, loss: Floats) -> None:
    """Write L + G'y."""
    for i in range(len(loss)):
        budgets.priced[i] = loss[i]
    for j in range(len(budgets.limits)):
        budgets.rows[SWUNG, j] = 0.0
        for i in range(len(loss)):
            budgets.priced[i] += budgets.y[j] * budgets.costs[j, i]


@routine
def swing_of(budgets: Any) -> Any:
    """How far the prices of `put_prices` have moved since."""
    most = 0.0
    for i in range(len(budgets.priced)):
        moved = 0.0
        for j in range(len(budgets.limits)):
            moved += budgets.rows[SWUNG, j] * abs(budgets.costs[j, i])
        most = max(most, moved)
    return most


@routine
def spend(budgets: Any, work: Work) -> Any:
    """Write G q - h into EXCESS and its size into SIZE; return the largest relative violation."""
    rows, error, bad = budgets.rows, 0.0, 0.0
    for j in range(len(budgets.limits)):
        spent, size = 0.0, abs(budgets.limits[j])
        for i in range(work.pairs.shape[1]):
            part = budgets.costs[j, i] * work.pairs[at.PAIR, i]
            spent, size = spent + part, size + abs(part)
        excess = spent - budgets.limits[j]
        rows[EXCESS, j], rows[SIZE, j] = excess, size
        violation = where(budgets.y[j] > 0.0, abs(excess), max(excess, 0.0))
        error = max(error, violation / max(size, TINY))
        bad += excess - excess  # 0 unless something is not finite
    return error + bad


@routine
def error_of(model: Model, budgets: Any, work: Work) -> Any:
    """The relative error of q that remains since budgets are met only up to rounding.

    The form of `_MultiplierSearch.error_of` in torch_occ.step.budgets.
    """
    rows, worst = budgets.rows, 0.0
    for j in range(len(budgets.limits)):
        noise = max(abs(rows[EXCESS, j]), 4.0 * EPS * rows[SIZE, j])
        rows[CHANGE, j] = where(rows[EXCESS, j] < 0.0, -noise, noise)
        rows[POSITIVE, j] = where(budgets.y[j] > 0.0, 1.0, 0.0)
    solve_positive(budgets)
    for i in range(work.pairs.shape[1]):
        if model.exists[at.PAIR, i]:
            change = 0.0
            for j in range(len(budgets.limits)):
                change += budgets.response[j, i] * rows[CHANGE, j]
            worst = max(worst, abs(change) / max(work.pairs[at.PAIR, i], TINY / EPS))
    return worst
