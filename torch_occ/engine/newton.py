"""Newton's method for one FTRL step, compiled, for regularizers made of elementary terms.

This is the compiled form of torch_occ.step.newton, which explains the method; tests compare them.
The row PAIR of the scratch memory holds the starting point q on entry and the solution on return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import (
    CONVERGED,
    MAX_STEPS,
    NOT_CONVEX,
    NOT_FINITE,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, lane, lanes_of, sqrt, where
from torch_occ.engine.layout import (
    Floats,
    Model,
    Solver,
    Work,
    ahead,
    finite,
    inlined,
    routine,
    span,
)
from torch_occ.engine.linear import arrive, factorize, solve
from torch_occ.engine.psi import derive, uses, varies
from torch_occ.engine.shaping import (
    certify,
    is_convex,
    is_flat,
    least_unit,
    recenter,
    shape_loss,
    shape_rarely,
    unit_of,
)

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
SMALLEST, ROOT_EPS = TINY / EPS, EPS**0.5
#: Bounds on the error from stale factors, relative to q. LEFT bounds the error at the end.
#: Factors are reused if the predicted error is at most LIKELY.
LEFT, LIKELY = 1e-5 * EPS**0.5, 3e-14
#: Factors from an earlier solve are used if their relative error is small beside the relative
#: change m of q in recent first steps: at most a tenth of it, and WORTH. While m is below CALM,
#: three times m is small enough: then two more steps with new factors reach the accuracy that ends
#: a solve, as after a Newton step.
WORTH, CALM = 1e-3, 5e-3
#: Steps with no relative change of a pair above this stay on the manifold up to rounding. They are
#: not followed by a retraction, except for the last.
SHORT = 1e-2
#: Losses are shaped by `shape_finely` if rounding could exceed this fraction of the tolerance.
COARSE = 0.25
#: The factor of the residual where parameters depend on the pair.
MARGIN = 1e2
#: How often the loss is shaped again by the multipliers found: after FIRST steps at the latest, and
#: then after NEXT steps.
REFINEMENTS, FIRST, NEXT = 20, 40.0, 5.0
#: How often a step with budgets is repeated, and the violation of a budget, in rounding errors,
#: that is not reduced further.
TRIALS, NOISE = 4, 8.0


@routine
def descend(
    model: Model, solver: Solver, loss: Floats, running: Any, work: Work
) -> tuple[Any, Any, Any, Any, Any]:
    """Minimize from q, reusing the factors in `work` while they are accurate enough.

    `loss` is flat, (S * A,). `running` says which lanes to solve; the others keep their q. Returns
    status, steps, decrement, flow residual and dual residual; the row V receives the multipliers.

    `stale` is the relative error of the factors. Every term of the Hessian is a power of its
    argument with exponent -2 or more, and the relative change of an argument is at most that of
    the pairs. So a step with a relative change of m adds 2 m to `stale`. The error after the step
    is (stale + m) m: `stale` times m from the factors, and m squared from Newton's method.

    Lanes iterate together until the last one has finished. A lane that has finished keeps q, its
    factors and its multipliers, so its certificate does not depend on the others.
    """
    terms, weights, tolerance, max_steps, _, budgets = solver
    margin, last = MARGIN if varies(terms, weights) else 1.0, 0.0
    pairs, states, num_pairs = work.pairs, work.states, work.pairs.shape[1]
    stale, first = work.notes[at.ERROR], True
    status, steps, patience = MAX_STEPS + 0.0, 0.0, STALL_AFTER + 0.0
    best, decrement = np.inf, np.inf
    refresh = not (stale <= usable(work.notes[at.RECENT]))
    largest = shape_loss(model, loss, work)
    fine = not (margin * EPS * largest <= COARSE * tolerance * least_unit(model, terms, weights))
    if anywhere(fine):
        shape_rarely(model, loss, fine, work)
    # As `steady` in torch_occ.step.solution.Options, where digits are scarce.
    steady = fine & (margin > 1.0)
    enough = where(steady, tolerance, ROOT_EPS)
    complement = uses(terms, at.COMPLEMENT)
    # How far q has moved since its derivatives were computed.
    moved = where((stale < np.inf) & (work.notes[at.ROOTED] > 0.0), 0.0, np.inf)
    running = running & (steps < max_steps)
    # With budgets, prices move along with the gaps; `descend_within` shapes the loss again.
    limit = FIRST + steps if budgets is None else max_steps + steps
    wanted, dual, flow = running, 0.0, 0.0
    for left in range(REFINEMENTS, -1, -1):
        while True:
            derive(model, terms, weights, moved, work)
            if complement and model.conserved:
                lift(model, running, work)
            if not anywhere(running):
                break
            refresh = refresh & running
            if anywhere(refresh):
                factorize(model, refresh, work)
                stale = where(refresh, 0.0, stale)
                respond(model, budgets, refresh, work)
            for i in range(num_pairs):
                pairs[at.FORCE, i] = -(pairs[at.GRADIENT, i] + pairs[at.GAPS, i])
            solve(model, None, work)
            steer(budgets, running, work)
            for s in range(states.shape[1]):
                states[at.FITTED, s] = where(running, states[at.V, s], states[at.FITTED, s])
            squared, fall, moved = measure(model, work)
            status = where(running & (not finite(moved)), NOT_FINITE, status)
            running = running & finite(moved)
            progress = (moved < 0.5 * best) | (moved > 0.1)
            patience = where(progress, STALL_AFTER, patience - 1.0)
            best = min(best, moved)
            done = ((moved <= enough) & (stale * moved <= LEFT)) | (patience == 0.0)
            back = running & (done | (moved > SHORT))
            if anywhere(running & (fall > 0.5)):
                shorten(model, fall > 0.5, work)
            if anywhere(back):
                alive = retract(model, at.TRIAL, back, work)
                status = where(back & (not alive), UNDERFLOW, status)
                running = running & (alive | (not back))
            for i in range(num_pairs):
                pairs[at.PAIR, i] = where(running, pairs[at.TRIAL, i], pairs[at.PAIR, i])
            if first:
                recent = max(moved, 0.9 * work.notes[at.RECENT])
                work.notes[at.RECENT] = where(running, recent, work.notes[at.RECENT])
                first = False
            status = where(running & done, STALLED, status)  # until certified below
            decrement = where(running, squared, decrement)
            steps = where(running, steps + 1.0, steps)
            last = where(running, moved, last)
            following = (stale + moved) * moved
            stale = where(running, stale + 2.0 * moved, stale)
            refresh = stale * following > LIKELY
            moved = where(running, moved, 0.0)
            running = running & (not done) & (steps < min(max_steps, limit))
        work.notes[at.ERROR], work.notes[at.ROOTED] = stale, 1.0
        follow_multipliers(model, work)
        found = certify(model, complement, fine, work)
        error = where(steady, max(margin * found[0], last), margin * found[0])
        dual, flow = where(wanted, error, dual), where(wanted, found[1], flow)
        paused = (status == MAX_STEPS) & (steps < max_steps)
        wanted = wanted & (paused | ((status == STALLED) & (not (dual <= tolerance))))
        if left == 0 or budgets is not None or not anywhere(wanted):
            break
        # Rounding errors of the multipliers count. Shaped by them, the loss has none.
        for n in range(lanes_of(work.notes)):
            if lane(wanted, n):
                recenter(lane(model, n), lane(loss, n), lane(work, n))
        fine, running, limit = fine | wanted, wanted, steps + NEXT
        moved, refresh = where(wanted, np.inf, 0.0), wanted
        best, patience = where(wanted, np.inf, best), where(wanted, STALL_AFTER + 0.0, patience)
        status = where(wanted, MAX_STEPS + 0.0, status)
    status = where((status == MAX_STEPS) & (steps < max_steps), STALLED, status)
    status = where((status == STALLED) & (not finite(dual)), NOT_FINITE, status)
    if uses(terms, at.STATE):
        dual += state_rounding(model, complement, work)
    good = (status == STALLED) & (dual <= tolerance) & (flow <= tolerance)
    convex = is_convex(model, terms, weights, work)
    status = where(good, where(convex, CONVERGED, NOT_CONVEX), status)
    failed = status > CONVERGED
    if anywhere(failed):
        status = where(failed & is_flat(model, work), NOT_CONVEX, status)
    for s in range(states.shape[1]):
        states[at.V, s] += states[at.PLAN, s]
    if complement and model.conserved:
        put_back(model, work)
    return status, steps, sqrt(max(decrement, 0.0)), flow, dual


@routine
def state_rounding(model: Model, complement: bool, work: Work) -> Any:
    """The relative error of q from rounding slopes of states that are added to those of pairs."""
    error = 0.0
    for i in range(work.pairs.shape[1]):
        if model.exists[at.REST, i]:
            slope = work.states[at.SLOPE, i // model.num_actions]
            error = max(error, EPS * abs(slope / unit_of(model, i, complement, work.pairs)))
    return error


@inlined
def usable(recent: Any) -> Any:
    """The largest error of factors from an earlier solve, by the change in recent first steps."""
    return where(recent < CALM, 3.0 * recent, min(WORTH, 0.1 * recent))


@routine(inline=True)
def follow_multipliers(model: Model, work: Work) -> None:
    """Copy the multipliers of the last Newton step to V, and compute what a certificate reads."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for s in range(states.shape[1]):
        states[at.V, s] = states[at.FITTED, s]
    for k in range(len(start) - 1):
        arrive(model, at.PAIR, k, work)
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for i in span(start[k] * num_actions, behind * num_actions):
            pairs[at.AHEAD, i] = ahead(model.next_state, i, states, at.V, behind, after)


@routine
def shorten(model: Model, wanted: Any, work: Work) -> None:
    """Write q + dq / (1 + fall) into TRIAL where `wanted`; fall is the largest relative decrease.

    The sum is rearranged, because this formula rounds to zero if the fall is above 1/eps. The fall
    is a quotient, so that it cancels exactly at its own pair.
    """
    pairs, exists, fall = work.pairs, model.exists, 0.0
    for i in range(pairs.shape[1]):
        if exists[at.PAIR, i]:
            fall = max(fall, -(pairs[at.DQ, i] / pairs[at.PAIR, i]))
    length = 1.0 / (1.0 + fall)
    for i in range(pairs.shape[1]):
        if exists[at.PAIR, i]:
            left = length * (1.0 + (fall + pairs[at.DQ, i] / pairs[at.PAIR, i]))
            pairs[at.TRIAL, i] = where(wanted, pairs[at.PAIR, i] * left, pairs[at.TRIAL, i])


@routine
def lift(model: Model, anew: Any, work: Work) -> None:
    """Subtract from the gradient of every layer its entry at the layer's likeliest pair.

    `anew` says whether to take this constant from the present gradient or from the last call. The
    solution does not change, because every layer has mass one. The derivative of a term of 1 - q is
    huge if one pair has nearly all mass of a layer; then the constant would cause rounding errors.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for k in range(len(start) - 1):
        most, constant = -1.0, 0.0
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            constant = where(pairs[at.PAIR, i] > most, pairs[at.GRADIENT, i], constant)
            most = max(pairs[at.PAIR, i], most)
        constant = where(anew, constant, states[at.LIFT, start[k]])
        states[at.LIFT, start[k]] = constant
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if model.exists[at.PAIR, i]:
                pairs[at.GRADIENT, i] -= constant


@routine
def put_back(model: Model, work: Work) -> None:
    """Add the constants that `lift` subtracted to the multipliers."""
    total = 0.0
    for k in range(len(model.start) - 2, -1, -1):
        total += work.states[at.LIFT, model.start[k]]
        for s in range(model.start[k], model.start[k + 1]):
            work.states[at.V, s] += total


@routine(inline=True)
def retract(model: Model, row: int, wanted: Any, work: Work) -> Any:
    """Retract a row of the pairs in place where `wanted`, q -> policy -> q.

    False where a pair underflows.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    alive = True
    for k in range(len(start) - 1):
        arrive(model, row, k, work)
        for s in span(start[k], start[k + 1]):
            total = 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                total += pairs[row, i]
            ratio = where(wanted, states[at.U, s] / total, 1.0)
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[row, i] *= ratio
                if model.exists[at.PAIR, i]:
                    alive = alive & (pairs[row, i] > SMALLEST)
    return alive


@routine(inline=True)
def floor_pairs(model: Model, work: Work) -> None:
    """Raise q to at least SMALLEST, where the derivatives of psi are finite."""
    for i in range(work.pairs.shape[1]):
        if model.exists[at.PAIR, i]:
            work.pairs[at.PAIR, i] = max(work.pairs[at.PAIR, i], SMALLEST)


@routine(inline=True)
def measure(model: Model, work: Work) -> tuple[Any, Any, Any]:
    """The squared decrement, and the largest relative decrease and relative change of a pair.

    TRIAL receives q + dq.
    The other arguments are sums of pairs, so none has a larger relative decrease than its parts.
    """
    pairs, exists = work.pairs, model.exists
    squared, fall, moved, bad = 0.0, -np.inf, 0.0, 0.0
    for i in range(pairs.shape[1]):
        dq = pairs[at.DQ, i]
        pairs[at.TRIAL, i] = pairs[at.PAIR, i] + dq
        if exists[at.PAIR, i]:
            squared -= (pairs[at.GRADIENT, i] + pairs[at.GAPS, i]) * dq
            relative = dq * (pairs[at.PAIR + at.ROOT, i] * pairs[at.PAIR + at.ROOT, i])
            bad += relative - relative  # stays 0 unless something is not finite
            fall = max(fall, -relative)
            moved = max(moved, abs(relative))
    return squared, fall, moved + bad


# -- Budgets ⟨G_i, q⟩ <= h_i: Newton steps within them ---------------------------------------------
#
# A Newton step minimizes a quadratic model of the objective. Within budgets, it is dq0 - U z, where
# dq0 is the step at the present multipliers y, z their change, and U = Pi G' the response of q to
# prices. With e = G (q + dq0) - h and C = G U,
#
#     z = argmax over z >= -y of ⟨e, z⟩ - z'C z / 2.
#
# So q and y are found together, and a step takes a few sums more. U and C belong to the factors of
# the linear system, and are kept as long as these.

# Rows of `BudgetArrays.rows`.
EXCESS, SIZE = 0, 1  # G q - h, or e; and the sum of the sizes of its terms
CHANGE = 2  # z
POSITIVE = 3  # 1 if the multiplier is expected to be positive, else 0
SWUNG = 4  # how far prices have moved since the loss was shaped, at most; in the first entry
BUDGET_ROWS = 5

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


@routine
def descend_within(
    model: Model, solver: Solver, loss: Floats, running: Any, work: Work
) -> tuple[Any, Any, Any, Any, Any]:
    """`descend` within the budgets of the solver, from their multipliers.

    It is repeated for the prices that it found if these have moved so far that the rounding errors
    of the gaps matter, or if budgets are violated by more than rounding errors. The dual residual
    includes what the budgets leave open. Where it fails, multipliers become zero.
    """
    budgets, tolerance, wanted, m = solver.budgets, solver.tolerance, running, len(solver.budgets.y)
    status, steps, decrement, flow, dual = MAX_STEPS + 0.0, 0.0, 0.0, 0.0, 0.0
    most = COARSE * tolerance * least_unit(model, solver.terms, solver.weights) / EPS
    for _ in range(TRIALS):
        put_prices(budgets, loss)
        found = descend(model, solver, budgets.priced, running, work)
        error = spend(budgets, work)
        residual = max(found[4], error_of(budgets, 2.0 * EPS + found[3], work))
        solved = (found[0] == CONVERGED) & (error <= tolerance)
        good = solved & (residual <= tolerance) & (budgets.rows[SWUNG, 0] <= most)
        outcome = where(good, CONVERGED, where(found[0] == CONVERGED, STALLED, found[0]))
        status, steps = where(running, outcome, status), steps + where(running, found[1], 0.0)
        decrement, flow = where(running, found[2], decrement), where(running, found[3], flow)
        dual = where(running, residual, dual)
        for s in range(work.states.shape[1]):
            kept = budgets.values[m + FOUND_V, s]
            budgets.values[m + FOUND_V, s] = where(running, work.states[at.V, s], kept)
        running = running & solved & (not (good & (error <= NOISE * EPS)))
        if not anywhere(running):
            break
    for s in range(work.states.shape[1]):
        work.states[at.V, s] = budgets.values[m + FOUND_V, s]
    for j in range(m):
        budgets.y[j] = where(wanted & (status != CONVERGED), 0.0, budgets.y[j])
    return status, steps, decrement, flow, dual


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
            solve(model, budgets.values[m + ZEROS], work)
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
            z = where(running, max(rows[CHANGE, j], -budgets.y[j]), 0.0)
            budgets.y[j] = max(budgets.y[j] + z, 0.0)
            most = 0.0
            for i in range(pairs.shape[1]):
                pairs[at.DQ, i] -= z * budgets.response[j, i]
                pairs[at.GAPS, i] += z * budgets.costs[j, i]
                most = max(most, abs(z * budgets.costs[j, i]))
            rows[SWUNG, 0] += most
            for s in range(states.shape[1]):
                states[at.V, s] -= z * budgets.values[j, s]


@routine
def find_change(budgets: Any) -> None:
    """Write z into CHANGE, for e in EXCESS.

    Block principal pivoting: guess which multipliers are positive, solve for them, and exchange
    those that violate a sign. If that cycles, only the last one, which ends for certain.
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
        wrong = 0.0
        for j in range(m):
            rows[CHANGE, j] = where(rows[POSITIVE, j] > 0.0, rows[CHANGE, j], -y[j])
        for j in range(m - 1, -1, -1):
            slope, size, own = rows[EXCESS, j], abs(rows[EXCESS, j]), rows[POSITIVE, j]
            for k in range(m):
                part = C[j, k] * rows[CHANGE, k]
                slope, size = slope - part, size + abs(part)
            flip = where(own > 0.0, y[j] + rows[CHANGE, j] < 0.0, slope > 64.0 * EPS * size)
            flip = flip & ((attempt < 10) | (wrong == 0.0))
            rows[POSITIVE, j] = where(flip, 1.0 - own, own)
            wrong += where(flip, 1.0, 0.0)
        if not anywhere(wrong > 0.0):
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
    """Write the loss with its prices."""
    budgets.rows[SWUNG, 0] = 0.0
    for i in range(len(loss)):
        budgets.priced[i] = loss[i]
        for j in range(len(budgets.limits)):
            budgets.priced[i] += budgets.y[j] * budgets.costs[j, i]


@routine
def spend(budgets: Any, work: Work) -> Any:
    """Write G q - h into EXCESS and its size into SIZE; return the largest relative violation."""
    rows, error = budgets.rows, 0.0
    for j in range(len(budgets.limits)):
        spent, size = 0.0, abs(budgets.limits[j])
        for i in range(work.pairs.shape[1]):
            part = budgets.costs[j, i] * work.pairs[at.PAIR, i]
            spent, size = spent + part, size + abs(part)
        excess = spent - budgets.limits[j]
        rows[EXCESS, j], rows[SIZE, j] = excess, size
        violation = where(budgets.y[j] > 0.0, abs(excess), max(excess, 0.0))
        # The difference is 0 unless something is not finite.
        error = max(error, violation / max(size, TINY)) + (excess - excess)
    return error


@routine
def error_of(budgets: Any, rounding: Any, work: Work) -> Any:
    """The relative error of q that remains since budgets are met only up to rounding.

    The form of `_MultiplierSearch.error_of` in torch_occ.step.budgets.
    """
    pairs, rows, m, worst = work.pairs, budgets.rows, len(budgets.limits), 0.0
    for j in range(m + 1):
        for k in range(m):
            noise = (1.0 if k == j else 0.0) * rounding * rows[SIZE, k]
            rows[CHANGE, k] = noise if j < m else rows[EXCESS, k]
            rows[POSITIVE, k] = where(budgets.y[k] > 0.0, 1.0, 0.0)
        solve_positive(budgets)
        for i in range(pairs.shape[1]):
            change = 0.0
            for k in range(m):
                change += budgets.response[k, i] * rows[CHANGE, k]
            pairs[at.TRIAL, i] = abs(change) + (pairs[at.TRIAL, i] if j > 0 else 0.0)
    for i in range(pairs.shape[1]):
        worst = max(worst, pairs[at.TRIAL, i] / max(pairs[at.PAIR, i], TINY / EPS))
    return worst
