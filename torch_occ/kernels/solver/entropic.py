"""The FTRL step of an entropy in logarithms, compiled, for one problem.

This is the compiled twin of torch_occ.step.entropic, which derives the formulas; tests compare the
two. The unknown of the iteration is log u, the logarithm of the state occupancy, so q may underflow
to zero.

The Newton direction is found in one of two ways:

- While no state occupancy is below `DEAD`, by the linear system that all regularizers share
  (torch_occ.kernels.solver.transitions). Its factors are kept from one episode to the next.
- Otherwise by the Jacobian for relative changes of u, a dense matrix, for up to `SQUARE` states.

Other kernels call `follow` for any psi. Regularizers that are not entropies are passed on to
`torch_occ.kernels.solver.newton.descend`. If no entropy is possible, nothing of this is compiled.
"""

from __future__ import annotations

from typing import Any

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
from torch_occ.kernels.lanes.vectors import anywhere, log, sqrt, where
from torch_occ.kernels.layout import (
    AHEAD,
    BEND,
    FORCE,
    KEPT,
    PAIR,
    PLAN,
    SHARE,
    STATE,
    D,
    Floats,
    M,
    Model,
    Terms,
    U,
    V,
    W,
    Work,
    choose,
    finite,
    in_logs,
    inlined,
    part,
    routine,
    span,
)
from torch_occ.kernels.solver.log_passes import (
    FOUND,
    GUESS,
    certify_logs,
    look_ahead,
    look_back,
    turn_rarely,
    unit,
)
from torch_occ.kernels.solver.newton import (
    COARSE,
    EPS,
    LEFT,
    LIKELY,
    ROOT_EPS,
    SMALLEST,
    TINY,
    descend,
    usable,
)
from torch_occ.kernels.solver.psi import X_LOG_X, varies
from torch_occ.kernels.solver.shaping import shape_loss, shape_rarely
from torch_occ.kernels.solver.transitions import factorize, solve


@routine
def _settle_or_descend(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    running: Any,
    work: Work,
) -> tuple[Any, Any, Any, Any, Any]:
    """Minimize from q where `running`; psi is an entropy in all these lanes, or in none."""
    weight, price = entropy_of(terms, weights)
    if anywhere(running & (weight > 0.0)):
        return settle(model, weight, price, loss, tolerance, max_steps, source, running, work)
    return descend(model, terms, weights, loss, tolerance, max_steps, source, running, work)


#: Minimize from q, for any psi; the arguments are those of `newton.descend`.
follow = choose(in_logs, _settle_or_descend, descend)


@inlined
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
) -> tuple[Any, Any, Any, Any, Any]:
    """`follow` from q, and from the middle if that fails; the compiled twin of `FTRLStep.solve`.

    A warm start may lie too close to the boundary; the middle is a safe start. If both attempts
    fail, the result is that of the first.
    """
    pairs, stale = work.pairs, work.stale
    used = stale[3] > 0.0
    found = follow(model, terms, weights, loss, tolerance, max_steps, source, used, work)
    failed = used & (found[0] != CONVERGED)
    if anywhere(failed):
        for i in range(len(middle)):
            pairs[KEPT, i] = pairs[PAIR, i]
            pairs[PAIR, i] = where(failed, middle[i], pairs[PAIR, i])
        stale[0], stale[2] = where(failed, np.inf, stale[0]), where(failed, 0.0, stale[2])
        again = follow(model, terms, weights, loss, tolerance, max_steps, source, failed, work)
        lost = failed & (again[0] != CONVERGED)
        for i in range(len(middle)):
            pairs[PAIR, i] = where(lost, pairs[KEPT, i], pairs[PAIR, i])
        stale[0], stale[2] = where(lost, np.inf, stale[0]), where(lost, 0.0, stale[2])
        found = select(failed & (not lost), again, found)
    return found


@inlined
def select(condition: Any, x: Any, y: Any) -> tuple[Any, Any, Any, Any, Any]:
    """x where the condition holds, y elsewhere, for the results of two solves."""
    return (
        where(condition, x[0], y[0]),
        where(condition, x[1], y[1]),
        where(condition, x[2], y[2]),
        where(condition, x[3], y[3]),
        where(condition, x[4], y[4]),
    )


@part
def _entropy_of(terms: Terms, weights: Floats) -> tuple[Any, Any]:
    """(w, kappa) as in torch_occ.step.entropic; (0, 0) if psi is not an entropy of that form."""
    weight, price, others = 0.0, 0.0, varies(terms, weights)
    for i in range(len(terms.argument)):
        others = others or terms.function[i] != X_LOG_X
        if terms.argument[i] == PAIR:
            weight += weights[i]
        elif terms.argument[i] != STATE:
            others = True
        price += weights[i]
    good = (price >= 0.0) & (price <= weight) & (weight < np.inf) & (not others)
    return where(good, weight, 0.0), where(good, price, 0.0)


@part
def _no_entropy(terms: Terms, weights: Floats) -> tuple[Any, Any]:
    return 0.0, 0.0


entropy_of = choose(in_logs, _entropy_of, _no_entropy)


@routine
def settle(
    model: Model,
    weight: Any,
    price: Any,
    loss: Floats,
    tolerance: float,
    max_steps: int,
    source: Floats,
    running: Any,
    work: Work,
) -> tuple[Any, Any, Any, Any, Any]:
    """Solve log u(guess) = guess by Newton's method; returns the same as `descend`."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    stale, status, steps, patience = work.stale[0], MAX_STEPS + 0.0, 0.0, STALL_AFTER + 0.0
    best, decrement, first = np.inf, 0.0, True
    solved = running
    refresh = not (stale <= usable(work.stale[1]))
    fine = not (EPS * shape_loss(model, loss, work) <= COARSE * tolerance * weight)
    if anywhere(fine):
        shape_rarely(model, loss, fine, work)
    anew = work.stale[2] == 0.0  # otherwise the guess of the last step is used
    if anywhere(anew):
        for s in range(states.shape[1]):
            total = 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                total += pairs[PAIR, i]
            states[GUESS, s] = where(anew, log(max(total, TINY)), states[GUESS, s])
    # With price = 0, the step has a closed form that does not depend on the guess.
    closed = running & (price == 0.0)
    status, steps = where(closed, STALLED, status), where(closed, 1.0, steps)
    running = running & (not closed) & (steps < max_steps)
    while True:
        look_ahead(model, weight, price, work)
        alive = look_back(model, work)
        if len(work.jacobian) == 0:
            status = where(running & (not alive), UNDERFLOW, status)
            running = running & alive
        if not anywhere(running):
            break
        if anywhere(running & alive):
            refresh = (refresh | (stale == np.inf)) & running & alive
            if anywhere(refresh):
                for s in range(states.shape[1]):
                    states[0, s] = states[U, s]
                    states[BEND, s] = (price - weight) / states[U, s]
                    for i in span(s * num_actions, (s + 1) * num_actions):
                        pairs[D, i] = weight / max(pairs[PAIR, i], SMALLEST)
                        pairs[W, i] = 0.0
                factorize(model, refresh, work)
                stale = where(refresh, 0.0, stale)
            for s in range(states.shape[1]):
                states[V, s] = 0.0  # the start of an iterative solver
                force = -price * (states[FOUND, s] - states[GUESS, s])
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[FORCE, i] = force
                    pairs[AHEAD, i] = 0.0
            solve(model, source, work)
            for s in range(states.shape[1]):
                states[M, s] = states[U, s] * states[SHARE, s] / weight
        dead = running & (not alive)
        if anywhere(dead):
            turn_rarely(model, weight, price, dead, work)
            stale = where(dead, np.inf, stale)
        squared, moved = 0.0, 0.0
        for s in range(states.shape[1]):
            off = states[FOUND, s] - states[GUESS, s]
            step = off + states[M, s]
            squared -= price * off * states[U, s]
            moved = max(moved, abs(step) / unit(states[FOUND, s])) + (step - step)
        status = where(running & (not finite(moved)), NOT_FINITE, status)
        running = running & finite(moved)
        decrement = where(running, squared, decrement)
        length = where((steps < FULL_STEPS) | (moved < 0.1), 1.0, 0.5)
        for s in range(states.shape[1]):
            step = length * (states[FOUND, s] - states[GUESS, s] + states[M, s])
            states[GUESS, s] = where(running, states[GUESS, s] + step, states[GUESS, s])
        progress = (moved < 0.5 * best) | (moved > 0.1)
        patience = where(progress, STALL_AFTER, patience - 1.0)
        best = min(best, moved)
        done = (patience == 0.0) | ((moved <= ROOT_EPS) & ((not alive) | (stale * moved <= LEFT)))
        if first:
            recent = max(moved, 0.9 * work.stale[1])
            work.stale[1] = where(running, recent, work.stale[1])
            first = False
        status = where(running & done, STALLED, status)  # until certified below
        steps = where(running, steps + 1.0, steps)
        following = (stale + moved) * moved
        stale = where(running, stale + 2.0 * moved, stale)
        refresh = not (stale * following <= LIKELY)
        running = running & (not done) & (steps < max_steps)
    work.stale[0] = where(solved, stale, work.stale[0])
    work.stale[2] = where(solved, 1.0, work.stale[2])
    work.stale[4] = where(solved, 0.0, work.stale[4])
    dual, flow = certify_logs(model, weight, price, fine, work)
    good = (status == STALLED) & (dual <= tolerance) & (flow <= tolerance)
    for s in range(states.shape[1]):
        states[V, s] += states[PLAN, s]
    return where(good, CONVERGED, status), steps, sqrt(max(decrement, 0.0)), flow, dual
