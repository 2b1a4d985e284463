"""The FTRL step, compiled: torch_occ.newton for one problem whose psi_t is a table of elementary terms.

The reasons stand there; tests hold the two together. q lives in the row PAIR of the scratch memory, before and after.
"""

from __future__ import annotations

import numpy as np

from torch_occ.engine.layout import (
    AHEAD,
    BEND,
    COMPLEMENT,
    DQ,
    FORCE,
    GAPS,
    GRADIENT,
    LOG,
    OTHERS,
    PAIR,
    PLAN,
    POWER,
    REST,
    SLOPE,
    STATE,
    TRIAL,
    X_LOG_X,
    D,
    Floats,
    Model,
    Terms,
    U,
    V,
    W,
    Work,
    ahead,
    kernel,
    part,
    span,
)
from torch_occ.engine.transitions import arrive, factorize, solve

CONVERGED, MAX_STEPS, STALLED, UNDERFLOW, NOT_FINITE = 0, 1, 2, 3, 4

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
SMALLEST = TINY / EPS
PATIENCE = 6
#: Relative to q: what stale factors may leave of an error at the end, and what they may be expected to leave if they are to be used again.
LEFT, LIKELY = 1e-5 * EPS**0.5, 3e-14
#: Factors from an earlier solve are used if they are off by less than this, and by less than a tenth of what first steps change lately:
#: then a step with them is nearly as good as Newton's.
WORTH = 1e-3
#: Steps that change no pair by more than this, relative to itself, stay on the manifold but for rounding; only the last is put back on it.
SHORT = 1e-2


@kernel
def newton(
    model: Model, terms: Terms, weights: Floats, loss: Floats, tolerance: float, max_steps: int, source: Floats, work: Work
) -> tuple[int, int, float, float, float]:
    """Minimize from q, an occupancy measure. Returns status, steps, decrement, flow residual, dual residual; V holds the multipliers.

    `loss` is flat, (S * A,); `source` is empty.
    """
    work.stale[0] = np.inf
    return descend(model, terms, weights, loss, tolerance, max_steps, source, work)


@kernel
def descend(
    model: Model, terms: Terms, weights: Floats, loss: Floats, tolerance: float, max_steps: int, source: Floats, work: Work
) -> tuple[int, int, float, float, float]:
    """`newton`, with the factors that are in `work` as long as they are good enough.

    Every term of the Hessian is a power of its argument, down to the inverse square, and no argument changes by more than the pairs do,
    relative to itself. So a step that changes no pair by more than m leaves factors that are off by 2 m; factors that are off by
    `stale` leave an error of `stale` times the step, and Newton's method itself one of the step squared.
    """
    pairs, num_pairs, stale = work.pairs, work.pairs.shape[1], work.stale[0]
    status, steps, patience, best, decrement, moved, done = MAX_STEPS, 0, PATIENCE, np.inf, np.inf, 0.0, False
    refresh = not stale <= min(WORTH, 0.1 * work.stale[1])
    shape_loss(model, loss, work)
    while True:
        derive(model, terms, weights, work)
        if done or steps == max_steps:
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
        patience = PATIENCE if moved < 0.5 * best or moved > 0.1 else patience - 1
        best = min(best, moved)
        done = (moved <= np.sqrt(EPS) and stale * moved <= LEFT) or patience == 0
        length = 1.0 if fall <= 0.5 else 1.0 / (1.0 + fall)
        for i in range(num_pairs):
            pairs[TRIAL, i] = pairs[PAIR, i] + length * pairs[DQ, i]
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
    dual, flow = certify(model, work)
    if status == STALLED and dual <= tolerance and flow <= tolerance:
        status = CONVERGED
    for s in range(work.states.shape[1]):
        work.states[V, s] += work.states[PLAN, s]
    return status, steps, np.sqrt(max(decrement, 0.0)), flow, dual


@part
def shape_loss(model: Model, loss: Floats, work: Work) -> None:
    """Replace the loss by the gaps of its optimal policy."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in span(start[k], behind):
            best = np.inf
            for i in span(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    total = loss[i] + ahead(model.next_state, i, states, PLAN, behind, after)
                    pairs[GAPS, i] = total
                    best = min(best, total)
            states[PLAN, s] = best
            states[V, s] = 0.0  # where an iterative solver begins
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[GAPS, i] = pairs[GAPS, i] - best if model.exists[PAIR, i] else 0.0


@part
def derive(model: Model, terms: Terms, weights: Floats, work: Work) -> None:
    """Gradient, d, w and c at q."""
    pairs, states, exists, num_actions = work.pairs, work.states, model.exists, model.num_actions
    read_arguments(model, uses(terms, REST), uses(terms, COMPLEMENT), work)
    for argument in range(3):
        for i in range(pairs.shape[1]):
            pairs[argument + SLOPE, i] = 0.0
            pairs[argument + BEND, i] = 0.0
    for s in range(states.shape[1]):
        states[SLOPE, s] = 0.0
        states[BEND, s] = 0.0
    for term in range(len(weights)):
        if weights[term] != 0.0:
            argument = terms.argument[term]
            if argument == STATE:
                accumulate(terms.function[term], terms.exponent[term], weights[term], states, 0)
            else:
                accumulate(terms.function[term], terms.exponent[term], weights[term], pairs, argument)
    for s in range(states.shape[1]):
        first, left, right = s * num_actions, 0.0, 0.0
        for i in span(first, first + num_actions):
            pairs[GRADIENT, i] = left
            left += pairs[REST + SLOPE, i] if exists[REST, i] else 0.0
        for i in range(first + num_actions - 1, first - 1, -1):
            gradient, d = pairs[GRADIENT, i] + right + states[SLOPE, s] + pairs[PAIR + SLOPE, i], pairs[PAIR + BEND, i]
            if exists[COMPLEMENT, i]:
                gradient -= pairs[COMPLEMENT + SLOPE, i]
                d += pairs[COMPLEMENT + BEND, i]
            pairs[GRADIENT, i] = gradient if exists[PAIR, i] else 0.0
            pairs[D, i] = d if exists[PAIR, i] else 0.0
            pairs[W, i] = pairs[REST + BEND, i] if exists[REST, i] else 0.0
            right += pairs[REST + SLOPE, i] if exists[REST, i] else 0.0


@part
def uses(terms: Terms, argument: int) -> bool:
    """Whether some term reads an argument."""
    found = False
    for i in range(len(terms.argument)):
        found = found or terms.argument[i] == argument
    return found


@part
def read_arguments(model: Model, rest: bool, complement: bool, work: Work) -> None:
    """q(s), and where they are used q(s) - q(s,a) and 1 - q(s,a), without cancellation; 1 for what does not exist."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    for s in range(states.shape[1]):
        first, left, right = s * num_actions, 0.0, 0.0
        if rest or complement:
            for i in span(first, first + num_actions):
                pairs[REST, i] = left
                left += pairs[PAIR, i]
            for i in range(first + num_actions - 1, first - 1, -1):
                pairs[REST, i] += right
                right += pairs[PAIR, i]
        else:
            for i in span(first, first + num_actions):
                left += pairs[PAIR, i]
        states[0, s] = left
    if complement:
        for k in range(len(model.start) - 1):
            left, right = 0.0, 0.0
            for s in span(model.start[k], model.start[k + 1]):
                states[OTHERS, s] = left
                left += states[0, s]
            for s in range(model.start[k + 1] - 1, model.start[k] - 1, -1):
                states[OTHERS, s] += right
                right += states[0, s]
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[COMPLEMENT, i] = pairs[REST, i] + states[OTHERS, s] if model.exists[COMPLEMENT, i] else 1.0
    if rest:
        for i in range(pairs.shape[1]):
            pairs[REST, i] = pairs[REST, i] if model.exists[REST, i] else 1.0


@part
def accumulate(function: int, p: float, weight: float, table: Floats, row: int) -> None:
    """Add slope and bend of weight * function(x), entry by entry: one loop a function, which vectorizes."""
    n = table.shape[1]
    if function == POWER and p == 0.5:
        for i in range(n):
            inverse = 1.0 / table[row, i]
            first = 0.5 * weight * np.sqrt(table[row, i]) * inverse
            table[row + SLOPE, i] += first
            table[row + BEND, i] -= 0.5 * first * inverse
    elif function == POWER:
        for i in range(n):
            inverse = 1.0 / table[row, i]
            first = p * weight * table[row, i] ** p * inverse
            table[row + SLOPE, i] += first
            table[row + BEND, i] += (p - 1.0) * first * inverse
    elif function == X_LOG_X:
        for i in range(n):
            table[row + SLOPE, i] += weight * (np.log(table[row, i]) + 1.0)
            table[row + BEND, i] += weight / table[row, i]
    elif function == LOG:
        for i in range(n):
            inverse = 1.0 / table[row, i]
            table[row + SLOPE, i] += weight * inverse
            table[row + BEND, i] -= weight * inverse * inverse


@part
def retract(model: Model, row: int, work: Work) -> bool:
    """q -> policy -> q of a row of the pairs, in place; False if a pair underflowed."""
    start, num_actions, pairs, states, exists = model.start, model.num_actions, work.pairs, work.states, model.exists
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


@part
def certify(model: Model, work: Work) -> tuple[float, float]:
    """Dual and flow residual at q, relative to q as in torch_occ.newton.Solution; AHEAD belongs to V, and U holds the inflows."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    dual, flow, bad = 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        total = 0.0
        for i in span(s * num_actions, (s + 1) * num_actions):
            if model.exists[PAIR, i]:
                total += pairs[PAIR, i]
                shaping = states[V, s] - pairs[AHEAD, i]  # E'v
                residual = pairs[GRADIENT, i] + pairs[GAPS, i] - shaping
                unit = pairs[PAIR, i] * (pairs[D, i] + pairs[W, i])
                if not model.exists[REST, i]:
                    # A state with one action decides nothing, and its equation only says what v is: measured by its terms.
                    unit = max(unit, abs(pairs[GRADIENT, i]) + abs(pairs[GAPS, i]) + abs(shaping) + TINY)
                error = abs(residual / unit)
                bad += error - error  # stays 0 unless something is not finite
                dual = max(dual, error)
        flow = max(flow, abs(total - states[U, s]) / total)
    return dual + bad, flow
