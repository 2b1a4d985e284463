"""Newton's method for one FTRL step, compiled, for regularizers made of elementary terms.

This is the compiled twin of torch_occ.step.newton, which explains the method; tests compare them.
The row PAIR of the scratch memory holds the starting point q on entry and the solution on return.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import (
    CONVERGED,
    MAX_STEPS,
    NOT_CONVEX,
    NOT_FINITE,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.kernels.layout import (
    COMPLEMENT,
    DQ,
    FORCE,
    GAPS,
    GRADIENT,
    LIFT,
    PAIR,
    PLAN,
    TRIAL,
    Floats,
    Model,
    Terms,
    U,
    V,
    Work,
    kernel,
    part,
    span,
)
from torch_occ.kernels.solver.certificate import certify, fit_multipliers, is_convex
from torch_occ.kernels.solver.psi import derive, uses
from torch_occ.kernels.solver.shaping import least_unit, shape_finely, shape_loss
from torch_occ.kernels.solver.transitions import arrive, factorize, solve

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
SMALLEST = TINY / EPS
#: Bounds on the error from stale factors, relative to q. LEFT bounds the error at the end.
#: Factors are reused if the predicted error is at most LIKELY.
LEFT, LIKELY = 1e-5 * EPS**0.5, 3e-14
#: Factors from an earlier solve are used if their relative error is at most this, and at most a
#: tenth of the relative change of q in recent first steps. Then a step with them is nearly as good
#: as a Newton step.
WORTH = 1e-3
#: Steps with no relative change of a pair above this stay on the manifold up to rounding. They are
#: not followed by a retraction, except for the last.
SHORT = 1e-2
#: Losses are shaped by `shape_finely` if rounding could exceed this fraction of the tolerance.
COARSE = 0.25


@kernel
def descend(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Minimize from q, reusing the factors in `work` while they are accurate enough.

    `loss` is flat, (S * A,), and `source` is empty. Returns status, steps, decrement, flow residual
    and dual residual; the row V receives the multipliers.

    `stale` is the relative error of the factors. Every term of the Hessian is a power of its
    argument with exponent -2 or more, and the relative change of an argument is at most that of
    the pairs. So a step with a relative change of m adds 2 m to `stale`. The error after the step
    is (stale + m) m: `stale` times m from the factors, and m squared from Newton's method.
    """
    pairs, num_pairs, stale = work.pairs, work.pairs.shape[1], work.stale[0]
    status, steps, patience, best, decrement, moved, done = (
        MAX_STEPS,
        0,
        STALL_AFTER,
        np.inf,
        np.inf,
        0.0,
        False,
    )
    refresh = not stale <= min(WORTH, 0.1 * work.stale[1])
    largest = shape_loss(model, loss, work)
    fine = not EPS * largest <= COARSE * tolerance * least_unit(terms, weights)
    if fine:
        shape_finely(model, loss, work)
    complement = uses(terms, COMPLEMENT)
    while True:
        derive(model, terms, weights, work)
        last = done or steps == max_steps
        if complement and model.conserved:
            lift(model, not last, work)
        if last:
            break
        if refresh:
            factorize(model, work)
            stale = 0.0
        for i in range(num_pairs):
            pairs[FORCE, i] = -(pairs[GRADIENT, i] + pairs[GAPS, i])
        solve(model, source, work)
        squared, fall, moved = measure(model, work)
        if not np.isfinite(moved):
            status = NOT_FINITE
            break
        patience = STALL_AFTER if moved < 0.5 * best or moved > 0.1 else patience - 1
        best = min(best, moved)
        done = (moved <= np.sqrt(EPS) and stale * moved <= LEFT) or patience == 0
        if fall <= 0.5:
            for i in range(num_pairs):
                pairs[TRIAL, i] = pairs[PAIR, i] + pairs[DQ, i]
        else:
            shorten(model, fall, work)
        if (done or moved > SHORT) and not retract(model, TRIAL, work):
            status = UNDERFLOW
            break
        for i in range(num_pairs):
            pairs[PAIR, i] = pairs[TRIAL, i]
        if done:
            status = STALLED  # until certified below
        if steps == 0:
            work.stale[1] = max(moved, 0.9 * work.stale[1])
        decrement = squared
        steps += 1
        following = (stale + moved) * moved
        stale += 2.0 * moved
        refresh = stale * following > LIKELY
    work.stale[0] = stale
    if status != STALLED:
        for k in range(len(model.start) - 1):
            arrive(model, PAIR, k, work)
    dual, flow = certify(model, complement, fine, work)
    if status == STALLED and not dual <= tolerance:
        dual = fit_multipliers(model, complement, fine, dual, work)
    if status == STALLED and dual <= tolerance and flow <= tolerance:
        status = CONVERGED if is_convex(model, terms, weights, work) else NOT_CONVEX
    for s in range(work.states.shape[1]):
        work.states[V, s] += work.states[PLAN, s]
    if complement and model.conserved:
        put_back(model, work)
    return status, steps, np.sqrt(max(decrement, 0.0)), flow, dual


@kernel
def shorten(model: Model, fall: float, work: Work) -> None:
    """Write q + dq / (1 + fall) into TRIAL.

    The sum is rearranged, because this formula rounds to zero if the fall is above 1/eps.
    """
    pairs, length = work.pairs, 1.0 / (1.0 + fall)
    for i in range(pairs.shape[1]):
        if model.exists[PAIR, i]:
            left = length * (1.0 + (fall + pairs[DQ, i] / pairs[PAIR, i]))
            pairs[TRIAL, i] = pairs[PAIR, i] * left
        else:
            pairs[TRIAL, i] = 0.0


@kernel
def lift(model: Model, anew: bool, work: Work) -> None:
    """Subtract from the gradient of every layer its entry at the layer's likeliest pair.

    `anew` says whether to take this constant from the present gradient or from the last call. The
    solution does not change, because every layer has mass one. The derivative of a term of 1 - q is
    huge if one pair has nearly all mass of a layer; then the constant would cause rounding errors.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for k in range(len(start) - 1):
        first, stop = start[k] * num_actions, start[k + 1] * num_actions
        if anew:
            likeliest = first
            for i in range(first, stop):
                likeliest = i if pairs[PAIR, i] > pairs[PAIR, likeliest] else likeliest
            states[LIFT, start[k]] = pairs[GRADIENT, likeliest]
        for i in range(first, stop):
            if model.exists[PAIR, i]:
                pairs[GRADIENT, i] -= states[LIFT, start[k]]


@kernel
def put_back(model: Model, work: Work) -> None:
    """Add the constants that `lift` subtracted to the multipliers."""
    total = 0.0
    for k in range(len(model.start) - 2, -1, -1):
        total += work.states[LIFT, model.start[k]]
        for s in range(model.start[k], model.start[k + 1]):
            work.states[V, s] += total


@part
def retract(model: Model, row: int, work: Work) -> bool:
    """Retract a row of the pairs in place, q -> policy -> q; False if a pair underflows."""
    start, num_actions, pairs, states, exists = (
        model.start,
        model.num_actions,
        work.pairs,
        work.states,
        model.exists,
    )
    alive = True
    for k in range(len(start) - 1):
        arrive(model, row, k, work)
        for s in span(start[k], start[k + 1]):
            total = 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                total += pairs[row, i]
            ratio = states[U, s] / total
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[row, i] *= ratio
                alive = alive and (pairs[row, i] > SMALLEST or not exists[PAIR, i])
    return alive


@part
def floor_pairs(model: Model, work: Work) -> None:
    """Raise q to at least SMALLEST, where the derivatives of psi are finite."""
    for i in range(work.pairs.shape[1]):
        if model.exists[PAIR, i]:
            work.pairs[PAIR, i] = max(work.pairs[PAIR, i], SMALLEST)


@part
def measure(model: Model, work: Work) -> tuple[float, float, float]:
    """The squared decrement, and the largest relative decrease and relative change of a pair.

    The other arguments are sums of pairs, so none has a larger relative decrease than its parts.
    """
    pairs, exists = work.pairs, model.exists
    squared, fall, moved, bad = 0.0, -np.inf, 0.0, 0.0
    for i in range(pairs.shape[1]):
        if exists[PAIR, i]:
            dq = pairs[DQ, i]
            squared -= (pairs[GRADIENT, i] + pairs[GAPS, i]) * dq
            relative = dq / pairs[PAIR, i]
            bad += relative - relative  # stays 0 unless something is not finite
            fall = max(fall, -relative)
            moved = max(moved, abs(relative))
    return squared, fall, moved + bad
