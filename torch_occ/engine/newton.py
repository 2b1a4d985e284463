"""Newton's method for one FTRL step, compiled, for regularizers made of elementary terms.

This is the compiled form of torch_occ.step.newton, which explains the method; tests compare them.
The row PAIR of the scratch memory holds the starting point q on entry and the solution on return.
"""

from __future__ import annotations

from typing import Any

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
from torch_occ.engine.psi import derive, uses
from torch_occ.engine.shaping import (
    certify,
    fit_multipliers,
    is_convex,
    is_flat,
    judge_fit,
    least_unit,
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
#: How often q is corrected after the iteration, with multipliers of more digits.
REFINEMENTS = 4


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
    terms, weights, tolerance, max_steps, _ = solver
    pairs, states, num_pairs = work.pairs, work.states, work.pairs.shape[1]
    stale, first = work.notes[at.ERROR], True
    status, steps, patience = MAX_STEPS + 0.0, 0.0, STALL_AFTER + 0.0
    best, decrement = np.inf, np.inf
    refresh = not (stale <= usable(work.notes[at.RECENT]))
    largest = shape_loss(model, loss, work)
    fine = not (EPS * largest <= COARSE * tolerance * least_unit(model, terms, weights))
    if anywhere(fine):
        shape_rarely(model, loss, fine, work)
    complement = uses(terms, at.COMPLEMENT)
    # How far q has moved since its derivatives were computed.
    moved = where((stale < np.inf) & (work.notes[at.ROOTED] > 0.0), 0.0, np.inf)
    running = running & (steps < max_steps)
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
        for i in range(num_pairs):
            pairs[at.FORCE, i] = -(pairs[at.GRADIENT, i] + pairs[at.GAPS, i])
        solve(model, None, work)
        for s in range(states.shape[1]):
            states[at.FITTED, s] = where(running, states[at.V, s], states[at.FITTED, s])
        squared, fall, moved = measure(model, work)
        status = where(running & (not finite(moved)), NOT_FINITE, status)
        running = running & finite(moved)
        progress = (moved < 0.5 * best) | (moved > 0.1)
        patience = where(progress, STALL_AFTER, patience - 1.0)
        best = min(best, moved)
        done = ((moved <= ROOT_EPS) & (stale * moved <= LEFT)) | (patience == 0.0)
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
        following = (stale + moved) * moved
        stale = where(running, stale + 2.0 * moved, stale)
        refresh = stale * following > LIKELY
        moved = where(running, moved, 0.0)
        running = running & (not done) & (steps < max_steps)
    work.notes[at.ERROR], work.notes[at.ROOTED] = stale, 1.0
    follow_multipliers(model, work)
    dual, flow = certify(model, complement, fine, work)
    status = where((status == STALLED) & (not finite(dual)), NOT_FINITE, status)
    unsure = (status == STALLED) & (not (dual <= tolerance))
    if anywhere(unsure):
        dual, flow = refine(model, solver, unsure, fine, dual, flow, work)
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
def refine(
    model: Model, solver: Solver, wanted: Any, fine: Any, dual: Any, flow: Any, work: Work
) -> tuple[Any, Any]:
    """Improve multipliers, and then q, where the dual residual is above the tolerance.

    Multipliers with more digits may fit q better. If not, what is left of the equation is accurate
    enough for another step. Returns the dual and the flow residual; the row V receives the
    multipliers.
    """
    pairs, states, complement = work.pairs, work.states, uses(solver.terms, at.COMPLEMENT)
    moved = wanted & (dual < 0.0)  # nowhere
    for left in range(REFINEMENTS - 1, -1, -1):
        for s in range(states.shape[1]):
            states[at.OTHERS, s] = states[at.V, s]
        for n in range(lanes_of(work.notes)):
            if lane(wanted, n):
                fit_multipliers(lane(model, n), complement, lane(work, n))
        found = judge_fit(model, complement, fine, work)
        better = wanted & (moved | (found < dual))
        dual = where(better, found, dual)
        wanted = wanted & (not (dual <= solver.tolerance))
        for s in range(states.shape[1]):
            states[at.OTHERS, s] = where(better, states[at.V, s], states[at.OTHERS, s])
            states[at.V, s] = 0.0  # the start of an iterative solver
        if left > 0 and anywhere(wanted):
            solve(model, None, work)
            change = measure(model, work)[2]
            wanted = wanted & (change < 0.1)
            retract(model, at.TRIAL, wanted, work)
            for i in range(pairs.shape[1]):
                pairs[at.PAIR, i] = where(wanted, pairs[at.TRIAL, i], pairs[at.PAIR, i])
            work.notes[at.ERROR] += where(wanted, 2.0 * change, 0.0)
        for s in range(states.shape[1]):
            states[at.V, s] = states[at.OTHERS, s]
        if left == 0 or not anywhere(wanted):
            break
        moved = wanted
        derive(model, solver.terms, solver.weights, where(moved, np.inf, 0.0), work)
        if complement and model.conserved:
            lift(model, moved, work)
        flow = where(moved, flow_error(model, work), flow)
    return dual, flow


@routine
def state_rounding(model: Model, complement: bool, work: Work) -> Any:
    """The relative error of q from rounding slopes of states that are added to those of pairs."""
    error = 0.0
    for i in range(work.pairs.shape[1]):
        if model.exists[at.REST, i]:
            slope = work.states[at.SLOPE, i // model.num_actions]
            error = max(error, EPS * abs(slope / unit_of(model, i, complement, work.pairs)))
    return error


@routine
def flow_error(model: Model, work: Work) -> Any:
    """The largest difference between q(s) and its inflow, relative to q(s)."""
    worst, num_actions = 0.0, model.num_actions
    for k in range(len(model.start) - 1):
        arrive(model, at.PAIR, k, work)
        for s in range(model.start[k], model.start[k + 1]):
            total = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                total += work.pairs[at.PAIR, i]
            worst = max(worst, abs(total - work.states[at.U, s]) / total)
    return worst


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
