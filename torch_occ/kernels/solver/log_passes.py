"""Backward and forward passes in logarithms, for the step of an entropy.

The backward pass computes multipliers and policy, the forward pass the logarithms of the state
occupancies. If a state is dead (its occupancy is below `DEAD`), the Jacobian is formed by another
pair of passes for every state. The torch twin is torch_occ.step.entropic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ.kernels.constants import DEAD, LOG_DEAD
from torch_occ.kernels.lanes.arrays import lane, lanes_of
from torch_occ.kernels.lanes.vectors import anywhere, exp, log, where
from torch_occ.kernels.layout import (
    FORCE,
    GAPS,
    GRADIENT,
    OTHERS,
    PAIR,
    PULL,
    ROUNDING,
    SLOPE,
    M,
    Model,
    U,
    V,
    Work,
    ahead,
    part,
    routine,
    span,
)
from torch_occ.kernels.solver.newton import SMALLEST
from torch_occ.kernels.solver.transitions import arrive, likelihoods, successor

# Rows of the scratch memory that have another meaning in the steps of other regularizers.
LOG_POLICY = GRADIENT  # of pairs: log pi
GUESS = SLOPE  # of states: the guess of log u
FOUND = OTHERS  # of states: log u from the forward pass


@part
def look_ahead(model: Model, weight: Any, price: Any, work: Work) -> None:
    """Soft value iteration: writes V, log pi, and pi into the row PAIR."""
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
                pairs[PAIR, i] = exp(excess)
                total += pairs[PAIR, i]
            shift, share = log(total), 1.0 / total
            for i in span(first, stop):
                pairs[LOG_POLICY, i] -= shift
                pairs[PAIR, i] *= share
            states[V, s] = price * (1.0 + states[GUESS, s]) + least - weight * shift


@part
def look_back(model: Model, work: Work) -> Any:
    """Write the occupancies of the policy: q, u in row U, and log u.

    The row PAIR must hold the policy on entry. Returns whether no state is dead, or in which lanes.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    alive = True
    for k in range(len(start) - 1):
        arrive(model, PAIR, k, work)
        rare = False
        for s in span(start[k], start[k + 1]):
            rare = rare | (not (states[U, s] > DEAD))
            states[FOUND, s] = log(states[U, s])
        alive = alive & (not rare)
        for n in range(lanes_of(work.stale) if anywhere(rare) else 0):
            if lane(rare, n):
                gather_logs(lane(model, n), k, lane(work, n))
        for s in span(start[k], start[k + 1]):
            u = states[U, s]
            if anywhere(not (u > DEAD)):
                for i in span(s * num_actions, (s + 1) * num_actions):
                    small = exp(states[FOUND, s] + pairs[LOG_POLICY, i])
                    pairs[PAIR, i] = where(u > DEAD, pairs[PAIR, i] * u, small)
            else:
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[PAIR, i] *= u
    return alive


@routine
def gather_logs(model: Model, k: int, work: Work) -> None:
    """Compute log u of the dead states of layer k, as a sum relative to its largest term."""
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


@part
def turn_rarely(model: Model, weight: Any, price: Any, dead: Any, work: Work) -> None:
    """`turn_dead` in the lanes that have dead states; U receives the change of u."""
    for n in range(lanes_of(work.stale)):
        if lane(dead, n):
            own, states = lane(work, n), lane(work.states, n)
            turn_dead(lane(model, n), lane(weight, n), lane(price, n), own)
            for s in range(states.shape[1]):
                states[U, s] = states[M, s] * np.exp(states[FOUND, s])


@routine
def turn_dead(model: Model, weight: float, price: float, work: Work) -> None:
    """Write the Newton direction minus (log u - guess) into M.

    The Jacobian of guess - log u by the guess is formed column by column, and the system is solved
    by Gaussian elimination.
    """
    states, jacobian, n = work.states, work.jacobian, work.states.shape[1]
    for column in range(n):
        push(model, weight, price, column, work)
        for s in range(n):
            jacobian[s, column] = (1.0 if s == column else 0.0) - states[U, s]
    for s in range(n):
        jacobian[s, n] = states[FOUND, s] - states[GUESS, s]
    for column in range(n):  # Gaussian elimination with partial pivoting
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


@routine
def push(model: Model, weight: float, price: float, moving: int, work: Work) -> None:
    """Write the derivative of log u by the guess of one state into U, and that of v into PULL."""
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
def unit(log_u: Any) -> Any:
    """The unit of errors of log u: 1, or log u / LOG_DEAD in dead states."""
    return max(log_u * (1.0 / LOG_DEAD), 1.0)


@part
def certify_logs(
    model: Model,
    weight: Any,
    price: Any,
    fine: Any,
    work: Work,
) -> tuple[Any, Any]:
    """The dual and the flow residual, as in torch_occ.step.entropic; `fine` as in `certify`."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    dual, flow, rounding = 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        log_u, total = states[FOUND, s], 0.0
        error = where(price > 0.0, abs(log_u - states[GUESS, s]) / unit(log_u), 0.0)
        dual = max(dual, price / weight * error) + (error - error)
        for i in span(s * num_actions, (s + 1) * num_actions):
            total += pairs[PAIR, i]
            if anywhere(fine):
                # An error common to all actions of a state does not change q.
                error = pairs[ROUNDING, i] * (1.0 - exp(pairs[LOG_POLICY, i])) / weight
                counts = fine & (pairs[PAIR, i] > SMALLEST)
                rounding = max(rounding, where(counts, error, 0.0))
        error = abs(total - states[U, s]) / states[U, s]
        flow = max(flow, where(log_u > LOG_DEAD, error, 0.0))
    return max(dual, rounding), flow
