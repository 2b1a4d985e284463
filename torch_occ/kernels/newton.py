"""The FTRL step, compiled: torch_occ.step.newton for one problem whose psi_t is a table of elementary terms.

The reasons stand there; tests hold the two together. q lives in the row PAIR of the scratch memory, before and after.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.certificate import certify, fit_multipliers, is_convex
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
from torch_occ.kernels.psi import derive, uses
from torch_occ.kernels.shaping import least_unit, shape_finely, shape_loss
from torch_occ.kernels.transitions import arrive, factorize, solve

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
SMALLEST = TINY / EPS
#: Relative to q: what stale factors may leave of an error at the end, and what they may be expected to leave if they are to be used again.
LEFT, LIKELY = 1e-5 * EPS**0.5, 3e-14
#: Factors from an earlier solve are used if they are off by less than this, and by less than a tenth of what first steps change lately:
#: then a step with them is nearly as good as Newton's.
WORTH = 1e-3
#: Steps that change no pair by more than this, relative to itself, stay on the manifold but for rounding; only the last is put back on it.
SHORT = 1e-2
#: The part of the tolerance that rounding may take before losses are added up finely.
COARSE = 0.25


@kernel
def newton(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Minimize from q, an occupancy measure. Returns status, steps, decrement, flow residual, dual residual; V holds the multipliers.

    `loss` is flat, (S * A,); `source` is empty.
    """
    work.stale[0] = np.inf
    return descend(model, terms, weights, loss, tolerance, max_steps, source, work)


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
    """`newton`, with the factors that are in `work` as long as they are good enough.

    Every term of the Hessian is a power of its argument, down to the inverse square, and no argument changes by more than the pairs do,
    relative to itself. So a step that changes no pair by more than m leaves factors that are off by 2 m; factors that are off by
    `stale` leave an error of `stale` times the step, and Newton's method itself one of the step squared.
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
    """q + dq / (1 + fall) into TRIAL. As it stands, that rounds to zero if the fall is above 1/eps."""
    pairs, length = work.pairs, 1.0 / (1.0 + fall)
    for i in range(pairs.shape[1]):
        if model.exists[PAIR, i]:
            left = length * (1.0 + (fall + pairs[DQ, i] / pairs[PAIR, i]))
            pairs[TRIAL, i] = pairs[PAIR, i] * left
        else:
            pairs[TRIAL, i] = 0.0


@kernel
def lift(model: Model, anew: bool, work: Work) -> None:
    """Leave out of the gradient what it is at the likeliest pair of every layer, as it is or as it last was.

    Every layer carries mass one, so nothing moves. The slope of 1 - q is huge where one pair takes nearly all of a layer.
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
    """What `lift` left out, into the multipliers."""
    total = 0.0
    for k in range(len(model.start) - 2, -1, -1):
        total += work.states[LIFT, model.start[k]]
        for s in range(model.start[k], model.start[k + 1]):
            work.states[V, s] += total


@part
def retract(model: Model, row: int, work: Work) -> bool:
    """q -> policy -> q of a row of the pairs, in place; False if a pair underflowed."""
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
    """Where q fell to zero, the smallest number instead: psi has derivatives there."""
    for i in range(work.pairs.shape[1]):
        if model.exists[PAIR, i]:
            work.pairs[PAIR, i] = max(work.pairs[PAIR, i], SMALLEST)


@part
def measure(model: Model, work: Work) -> tuple[float, float, float]:
    """The squared decrement, the largest relative fall of a pair, and its largest relative change.

    The other arguments are sums of pairs: none of them falls by more, relative to itself, than one of its parts.
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
