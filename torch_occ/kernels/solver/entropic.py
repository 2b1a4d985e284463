"""The FTRL step of an entropy in logarithms, compiled, for one problem.

This is the compiled twin of torch_occ.step.entropic, which derives the formulas; tests compare the
two. The unknown of the iteration is log u, the logarithm of the state occupancy, so q may underflow
to zero.

The Newton direction is found in one of two ways:

- While no state occupancy is below `DEAD`, by the linear system that all regularizers share
  (torch_occ.kernels.solver.transitions). Its factors are kept from one episode to the next.
- Otherwise by the Jacobian for relative changes of u, a dense matrix, for up to `SQUARE` states.

Other kernels call `minimize` or `follow` for any psi. Regularizers that are not entropies are
passed on to `torch_occ.kernels.solver.newton.descend`.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import (
    CONVERGED,
    FULL_STEPS,
    MAX_STEPS,
    NOT_FINITE,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.kernels.layout import (
    AHEAD,
    BEND,
    FORCE,
    KEPT,
    PAIR,
    PLAN,
    STATE,
    TOTAL,
    D,
    Floats,
    M,
    Model,
    Terms,
    U,
    V,
    W,
    Work,
    kernel,
    part,
    span,
)
from torch_occ.kernels.solver.log_passes import (
    FOUND,
    GUESS,
    certify_logs,
    look_ahead,
    look_back,
    turn_dead,
    unit,
)
from torch_occ.kernels.solver.newton import (
    COARSE,
    EPS,
    LEFT,
    LIKELY,
    SMALLEST,
    TINY,
    WORTH,
    descend,
)
from torch_occ.kernels.solver.psi import X_LOG_X, varies
from torch_occ.kernels.solver.shaping import shape_finely, shape_loss
from torch_occ.kernels.solver.transitions import factorize, solve


@kernel
def minimize(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Minimize from q, for any psi; the arguments are those of `newton.descend`."""
    work.stale[0], work.stale[2] = np.inf, 0.0
    return follow(model, terms, weights, loss, tolerance, max_steps, source, work)


@kernel
def follow(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """`minimize`, reusing the factors in `work` while they are accurate enough."""
    weight, price = entropy_of(terms, weights)
    if weight > 0.0:
        return settle(model, weight, price, loss, tolerance, max_steps, source, work)
    return descend(model, terms, weights, loss, tolerance, max_steps, source, work)


@kernel
def follow_or_restart(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    middle: Floats,  # (S * A,), an interior point
    work: Work,
) -> tuple[int, int, float, float, float]:
    """`follow` from q, and from the middle if that fails; the compiled twin of `FTRLStep.solve`.

    A warm start may lie too close to the boundary; the middle is a safe start. If both attempts
    fail, the result is that of the first.
    """
    pairs = work.pairs
    first = follow(model, terms, weights, loss, tolerance, max_steps, source, work)
    if first[0] == CONVERGED:
        return first
    for i in range(len(middle)):
        pairs[KEPT, i] = pairs[PAIR, i]
        pairs[PAIR, i] = middle[i]
    second = minimize(model, terms, weights, loss, tolerance, max_steps, source, work)
    if second[0] == CONVERGED:
        return second
    for i in range(len(middle)):
        pairs[PAIR, i] = pairs[KEPT, i]
    work.stale[0], work.stale[2] = np.inf, 0.0
    return first


@part
def entropy_of(terms: Terms, weights: Floats) -> tuple[float, float]:
    """(w, kappa) as in torch_occ.step.entropic; (0, 0) if psi is not an entropy of that form."""
    weight, price, others = 0.0, 0.0, varies(terms, weights)
    for i in range(len(terms.argument)):
        others = others or terms.function[i] != X_LOG_X
        if terms.argument[i] == PAIR:
            weight += weights[i]
        elif terms.argument[i] != STATE:
            others = True
        price += weights[i]
    if others or not (0.0 <= price <= weight < np.inf):
        return 0.0, 0.0
    return weight, price


@kernel
def settle(
    model: Model,
    weight: float,
    price: float,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    work: Work,
) -> tuple[int, int, float, float, float]:
    """Solve log u(guess) = guess by Newton's method; returns the same as `descend`."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    stale, status, steps, patience = work.stale[0], MAX_STEPS, 0, STALL_AFTER
    # With price = 0, the step has a closed form that does not depend on the guess.
    best, decrement, done = np.inf, 0.0, price == 0.0
    refresh = not stale <= min(WORTH, 0.1 * work.stale[1])
    fine = not EPS * shape_loss(model, loss, work) <= COARSE * tolerance * weight
    if fine:
        shape_finely(model, loss, work)
    if work.stale[2] == 0.0:  # otherwise the guess of the last step is used
        for s in range(states.shape[1]):
            total = 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                total += pairs[PAIR, i]
            states[GUESS, s] = np.log(max(total, TINY))
    while True:
        look_ahead(model, weight, price, work)
        alive = look_back(model, work)
        if done:
            status, steps = STALLED, max(steps, 1)  # until certified below
            break
        if steps == max_steps:
            break
        if not alive:
            if len(work.jacobian) == 0:
                status = UNDERFLOW
                break
            turn_dead(model, weight, price, work)
            stale = np.inf
            for s in range(states.shape[1]):
                states[U, s] = states[M, s] * np.exp(states[FOUND, s])
        else:
            if refresh or stale == np.inf:
                for s in range(states.shape[1]):
                    states[0, s] = states[U, s]
                    states[BEND, s] = (price - weight) / states[U, s]
                    for i in span(s * num_actions, (s + 1) * num_actions):
                        pairs[D, i] = weight / max(pairs[PAIR, i], SMALLEST)
                        pairs[W, i] = 0.0
                factorize(model, work)
                stale = 0.0
            for s in range(states.shape[1]):
                states[V, s] = 0.0  # the start of an iterative solver
                force = -price * (states[FOUND, s] - states[GUESS, s])
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[FORCE, i] = force
                    pairs[AHEAD, i] = 0.0
            solve(model, source, work)
            for s in range(states.shape[1]):
                states[M, s] = states[U, s] / (weight * states[TOTAL, s])
        decrement, moved = 0.0, 0.0
        for s in range(states.shape[1]):
            off = states[FOUND, s] - states[GUESS, s]
            step = off + states[M, s]
            decrement -= price * off * states[U, s]
            moved = max(moved, abs(step) / unit(states[FOUND, s])) + (step - step)
        if not np.isfinite(moved):
            status = NOT_FINITE
            break
        length = 1.0 if steps < FULL_STEPS or moved < 0.1 else 0.5
        for s in range(states.shape[1]):
            states[GUESS, s] += length * (states[FOUND, s] - states[GUESS, s] + states[M, s])
        patience = STALL_AFTER if moved < 0.5 * best or moved > 0.1 else patience - 1
        best = min(best, moved)
        done = patience == 0 or (moved <= np.sqrt(EPS) and (not alive or stale * moved <= LEFT))
        if steps == 0:
            work.stale[1] = max(moved, 0.9 * work.stale[1])
        steps += 1
        following = (stale + moved) * moved
        stale += 2.0 * moved
        refresh = not stale * following <= LIKELY
    work.stale[0], work.stale[2] = stale, 1.0
    dual, flow = certify_logs(model, weight, price, fine, work)
    if status == STALLED and dual <= tolerance and flow <= tolerance:
        status = CONVERGED
    for s in range(states.shape[1]):
        states[V, s] += states[PLAN, s]
    return status, steps, np.sqrt(max(decrement, 0.0)), flow, dual
