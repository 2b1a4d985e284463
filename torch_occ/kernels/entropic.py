"""The FTRL step of an entropy in logarithms, compiled: torch_occ.step.entropic for one problem.

The formulas and the reasons stand there; tests hold the two together. Here, too, q may fall to
zero, and log u is what the iteration works on. As long as no state's occupancy falls below `DEAD`,
the Newton direction comes from the linear system of all regularizers
(torch_occ.kernels.transitions), with factors that are kept from one episode to the next. Otherwise
it comes from the Jacobian in relative terms, a dense matrix, for up to `SQUARE` states.

`minimize` and `follow` are what other kernels call for any psi; see `newton` and `descend`.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import (
    CONVERGED,
    DEAD,
    FULL_STEPS,
    LOG_DEAD,
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
    GAPS,
    GRADIENT,
    OTHERS,
    PAIR,
    PLAN,
    PULL,
    ROUNDING,
    SLOPE,
    STATE,
    TOTAL,
    X_LOG_X,
    D,
    Floats,
    M,
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
from torch_occ.kernels.newton import (
    COARSE,
    EPS,
    LEFT,
    LIKELY,
    SMALLEST,
    TINY,
    WORTH,
    descend,
)
from torch_occ.kernels.shaping import shape_finely, shape_loss
from torch_occ.kernels.transitions import arrive, factorize, likelihoods, solve, successor

# Rows of the scratch memory that have another meaning in other steps.
LOG_POLICY = GRADIENT  # log pi, of pairs
GUESS = SLOPE  # of log u, of states
FOUND = OTHERS  # log u as the forward pass finds it


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
    """Minimize from q, whatever psi is; see `torch_occ.kernels.newton.newton`."""
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
    """`minimize`, with the factors that are in `work` as long as they are good enough."""
    weight, price = entropy_of(terms, weights)
    if weight > 0.0:
        return settle(model, weight, price, loss, tolerance, max_steps, source, work)
    return descend(model, terms, weights, loss, tolerance, max_steps, source, work)


@part
def entropy_of(terms: Terms, weights: Floats) -> tuple[float, float]:
    """(w, kappa) as in torch_occ.step.entropic; (0, 0) if psi is not such an entropy."""
    weight, price, others = 0.0, 0.0, False
    for i in range(len(weights)):
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
    """Solve log u(guess) = guess by Newton's method; returns what `descend` does."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    stale, status, steps, patience = work.stale[0], MAX_STEPS, 0, STALL_AFTER
    best, decrement, done = np.inf, 0.0, price == 0.0  # then there is nothing to guess
    refresh = not stale <= min(WORTH, 0.1 * work.stale[1])
    fine = not EPS * shape_loss(model, loss, work) <= COARSE * weight
    if fine:
        shape_finely(model, loss, work)
    if work.stale[2] == 0.0:  # else there is a guess from the last step
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
                states[V, s] = 0.0  # where an iterative solver begins
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


@part
def look_ahead(model: Model, weight: float, price: float, work: Work) -> None:
    """Soft value iteration: V, log pi, and pi itself in the row of the pairs."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    exists, inverse = model.exists, 1.0 / weight
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in span(start[k], behind):
            first, stop, least, total = s * num_actions, (s + 1) * num_actions, np.inf, 0.0
            for i in span(first, stop):
                if exists[PAIR, i]:
                    cost = pairs[GAPS, i] + ahead(model.next_state, i, states, V, behind, after)
                    pairs[LOG_POLICY, i] = cost
                    least = min(least, cost)
            for i in span(first, stop):
                excess = (least - pairs[LOG_POLICY, i]) * inverse if exists[PAIR, i] else -np.inf
                pairs[LOG_POLICY, i] = excess
                pairs[PAIR, i] = np.exp(excess)
                total += pairs[PAIR, i]
            shift, share = np.log(total), 1.0 / total
            for i in span(first, stop):
                pairs[LOG_POLICY, i] -= shift
                pairs[PAIR, i] *= share
            states[V, s] = price * (1.0 + states[GUESS, s]) + least - weight * shift


@part
def look_back(model: Model, work: Work) -> bool:
    """The occupancies of the policy: q, u in the row U and log u; whether all states are alive."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    alive = True
    for k in range(len(start) - 1):
        arrive(model, PAIR, k, work)
        rare = False
        for s in span(start[k], start[k + 1]):
            rare = rare or not states[U, s] > DEAD
            states[FOUND, s] = np.log(states[U, s])
        if rare:
            alive = False
            gather_logs(model, k, work)
        for s in span(start[k], start[k + 1]):
            u = states[U, s]
            if u > DEAD:
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[PAIR, i] *= u
            else:
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[PAIR, i] = np.exp(states[FOUND, s] + pairs[LOG_POLICY, i])
    return alive


@kernel
def gather_logs(model: Model, k: int, work: Work) -> None:
    """log u of the dead states of layer k: a sum that is taken relative to its largest term."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[k], start[k + 1]):
        states[M, s], states[PULL, s] = -np.inf, 0.0
        if k == 0:
            states[M, s], states[PULL, s] = np.log(model.initial[s]), 1.0
    width = start[k + 1] - start[k]
    for summing in range(2 if k > 0 else 0):
        for i in range(start[k - 1] * num_actions, start[k] * num_actions):
            if not model.exists[PAIR, i]:
                continue
            own = states[FOUND, i // num_actions] + work.pairs[LOG_POLICY, i]
            shares, begin, size = likelihoods(model.next_state, i, width)
            for j in range(size):
                if shares[begin + j] > 0.0:
                    s = successor(model.next_state, i, j, start[k])
                    log = own + np.log(shares[begin + j])
                    if summing:
                        states[PULL, s] += np.exp(log - states[M, s])
                    else:
                        states[M, s] = max(states[M, s], log)
    for s in range(start[k], start[k + 1]):
        if not states[U, s] > DEAD:
            states[FOUND, s] = states[M, s] + np.log(states[PULL, s])
            states[U, s] = np.exp(states[FOUND, s])


@kernel
def turn_dead(model: Model, weight: float, price: float, work: Work) -> None:
    """The Newton direction less the mismatch into M, from the Jacobian in relative terms."""
    states, jacobian, n = work.states, work.jacobian, work.states.shape[1]
    for column in range(n):
        push(model, weight, price, column, work)
        for s in range(n):
            jacobian[s, column] = (1.0 if s == column else 0.0) - states[U, s]
    for s in range(n):
        jacobian[s, n] = states[FOUND, s] - states[GUESS, s]
    for column in range(n):  # elimination with row exchanges
        pivot = column
        for row in range(column + 1, n):
            if abs(jacobian[row, column]) > abs(jacobian[pivot, column]):
                pivot = row
        for j in range(column, n + 1):
            jacobian[column, j], jacobian[pivot, j] = jacobian[pivot, j], jacobian[column, j]
        for row in range(column + 1, n):
            factor = jacobian[row, column] / jacobian[column, column]
            if factor != 0.0:
                for j in range(column + 1, n + 1):
                    jacobian[row, j] -= factor * jacobian[column, j]
    for s in range(n - 1, -1, -1):
        for j in range(s + 1, n):
            jacobian[s, n] -= jacobian[s, j] * jacobian[j, n]
        jacobian[s, n] /= jacobian[s, s]
    for s in range(n):
        states[M, s] = jacobian[s, n] - (states[FOUND, s] - states[GUESS, s])


@kernel
def push(model: Model, weight: float, price: float, moving: int, work: Work) -> None:
    """How log u responds to the guess of one state, into U; PULL is the response of v."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    layers = len(start) - 1
    for k in range(layers - 1, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            mean = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    seen = ahead(model.next_state, i, states, PULL, behind, after)
                    pairs[FORCE, i] = -seen / weight
                    mean += np.exp(pairs[LOG_POLICY, i]) * seen
            states[PULL, s] = mean + (price if s == moving else 0.0)
            states[U, s] = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[FORCE, i] += mean / weight
    for k in range(layers - 1):
        width = start[k + 2] - start[k + 1]
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if not model.exists[PAIR, i]:
                continue
            s = i // num_actions
            own = states[FOUND, s] + pairs[LOG_POLICY, i]
            shares, begin, size = likelihoods(model.next_state, i, width)
            for j in range(size):
                if shares[begin + j] > 0.0:
                    there = successor(model.next_state, i, j, start[k + 1])
                    share = shares[begin + j] * np.exp(own - states[FOUND, there])
                    states[U, there] += share * (states[U, s] + pairs[FORCE, i])


@part
def unit(log: float) -> float:
    """What an error of log u is measured by: 1, and in dead states log u itself."""
    return max(log * (1.0 / LOG_DEAD), 1.0)


@part
def certify_logs(
    model: Model,
    weight: float,
    price: float,
    fine: bool,
    work: Work,
) -> tuple[float, float]:
    """Dual and flow residual, see torch_occ.step.entropic; `fine` as in `certify`."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    dual, flow, rounding = 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        log, total = states[FOUND, s], 0.0
        error = abs(log - states[GUESS, s]) / unit(log) if price > 0.0 else 0.0
        dual = max(dual, price / weight * error) + (error - error)
        for i in span(s * num_actions, (s + 1) * num_actions):
            total += pairs[PAIR, i]
            if fine and pairs[PAIR, i] > SMALLEST:
                # What is added to all actions of a state moves none of them.
                others = 1.0 - np.exp(pairs[LOG_POLICY, i])
                rounding = max(rounding, pairs[ROUNDING, i] * others / weight)
        if log > LOG_DEAD:
            flow = max(flow, abs(total - states[U, s]) / states[U, s])
    return max(dual, rounding), flow
