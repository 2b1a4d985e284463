"""The FTRL step, compiled: the algorithm of torch_occ.newton and torch_occ.kkt for one problem of elementary terms, in loops.

Every formula is explained there; here they are spelt out once more for Numba, with the layered (Kalman) factorization, and tests hold
the two together. States are numbered over all layers; `next_state[s, a, j]` is the probability of the j-th state of the next layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

PAIR, REST, STATE, COMPLEMENT = 0, 1, 2, 3
POWER, X_LOG_X, LOG = 0, 1, 2
CONVERGED, MAX_STEPS, STALLED, UNDERFLOW, NOT_FINITE = 0, 1, 2, 3, 4

EPS = float(np.finfo(np.float64).eps)
TINY = float(np.finfo(np.float64).tiny)
SMALLEST = TINY / EPS


class Model(NamedTuple):
    """A layered MDP as arrays."""

    start: Ints  # (L + 1,), the first state of every layer
    next_state: Floats  # (S, A, widest layer)
    actions: Bools  # (S, A)
    has_rest: Bools  # (S, A)
    has_complement: Bools  # (S, A)
    initial: Floats  # (S_0,)


class Terms(NamedTuple):
    """The elementary terms of a regularizer; their weights change with t and come apart."""

    argument: Ints  # (K,)
    function: Ints  # (K,)
    exponent: Floats  # (K,)


class Work(NamedTuple):
    """Scratch memory of one solve."""

    gaps: Floats  # (S, A), the shaped loss
    plan: Floats  # (S,), the value that shapes it
    rest: Floats  # (S, A)
    complement: Floats  # (S, A)
    state: Floats  # (S,)
    gradient: Floats  # (S, A)
    slope: Floats  # (S, A), of the rest terms
    d: Floats  # (S, A)
    w: Floats  # (S, A)
    c: Floats  # (S,)
    inverse: Floats  # (S, A)
    softest: Ints  # (S,), the action of least curvature
    total: Floats  # (S,)
    p: Floats  # (S, A)
    kappa: Floats  # (S,)
    moves: Floats  # (S, widest), P_p
    gain: Floats  # (S, widest), the rows of Yhat
    cholesky: Floats  # (widest, widest)
    half: Floats  # (widest, widest)
    product: Floats  # (widest, widest)
    deviation: Floats  # (widest,)
    response: Floats  # (S, A), R x
    pull: Floats  # (S,)
    m: Floats  # (S,)
    u: Floats  # (S,)
    v: Floats  # (S,)
    dq: Floats  # (S, A)
    trial: Floats  # (S, A)


@njit(cache=True)
def make_work(num_states: int, num_actions: int, widest: int) -> Work:
    """Scratch memory for an MDP of this size."""
    pairs, states, layer, square = (num_states, num_actions), num_states, (num_states, widest), (widest, widest)
    return Work(
        gaps=np.zeros(pairs),
        plan=np.zeros(states),
        rest=np.zeros(pairs),
        complement=np.zeros(pairs),
        state=np.zeros(states),
        gradient=np.zeros(pairs),
        slope=np.zeros(pairs),
        d=np.zeros(pairs),
        w=np.zeros(pairs),
        c=np.zeros(states),
        inverse=np.zeros(pairs),
        softest=np.zeros(states, np.int64),
        total=np.zeros(states),
        p=np.zeros(pairs),
        kappa=np.zeros(states),
        moves=np.zeros(layer),
        gain=np.zeros(layer),
        cholesky=np.zeros(square),
        half=np.zeros(square),
        product=np.zeros(square),
        deviation=np.zeros(widest),
        response=np.zeros(pairs),
        pull=np.zeros(states),
        m=np.zeros(states),
        u=np.zeros(states),
        v=np.zeros(states),
        dq=np.zeros(pairs),
        trial=np.zeros(pairs),
    )


@njit(cache=True)
def slope_and_bend(function: int, p: float, weight: float, x: float) -> tuple[float, float]:
    """First and second derivative of weight * function(x)."""
    if function == POWER:
        first = weight * p * (np.sqrt(x) if p == 0.5 else x**p) / x
        return first, first * (p - 1.0) / x
    if function == X_LOG_X:
        return weight * (np.log(x) + 1.0), weight / x
    return weight / x, -weight / (x * x)


@njit(cache=True)
def sums_of_others(x: Floats, out: Floats) -> None:
    """Along a vector, the sum of all entries but this one, without cancellation."""
    n = len(x)
    left = 0.0
    for i in range(n):
        out[i] = left
        left += x[i]
    right = 0.0
    for i in range(n - 1, -1, -1):
        out[i] += right
        right += x[i]


@njit(cache=True)
def shape_loss(model: Model, loss: Floats, work: Work) -> None:
    """Replace the loss by the gaps of its optimal policy."""
    start, num_actions = model.start, loss.shape[1]
    for k in range(len(start) - 2, -1, -1):
        for s in range(start[k], start[k + 1]):
            best = np.inf
            for a in range(num_actions):
                if model.actions[s, a]:
                    total = loss[s, a]
                    if k < len(start) - 2:
                        for j in range(start[k + 2] - start[k + 1]):
                            total += model.next_state[s, a, j] * work.plan[start[k + 1] + j]
                    work.gaps[s, a] = total
                    best = min(best, total)
            work.plan[s] = best
            for a in range(num_actions):
                work.gaps[s, a] = work.gaps[s, a] - best if model.actions[s, a] else 0.0


@njit(cache=True)
def derive(model: Model, terms: Terms, weights: Floats, q: Floats, work: Work) -> None:
    """Gradient, d, w and c at q."""
    start, (num_states, num_actions) = model.start, q.shape
    need_complement = False
    for i in range(len(terms.argument)):
        need_complement = need_complement or terms.argument[i] == COMPLEMENT
    for s in range(num_states):
        sums_of_others(q[s], work.rest[s])
        total = 0.0
        for a in range(num_actions):
            total += q[s, a]
        work.state[s] = total
    if need_complement:
        for k in range(len(start) - 1):
            sums_of_others(work.state[start[k] : start[k + 1]], work.u[start[k] : start[k + 1]])
        for s in range(num_states):
            for a in range(num_actions):
                work.complement[s, a] = work.rest[s, a] + work.u[s]
    for s in range(num_states):
        through_state = 0.0
        work.c[s] = 0.0
        for i in range(len(terms.argument)):
            if terms.argument[i] == STATE:
                first, second = slope_and_bend(terms.function[i], terms.exponent[i], weights[i], work.state[s])
                through_state += first
                work.c[s] += second
        for a in range(num_actions):
            gradient, d, w, through_rest = through_state, 0.0, 0.0, 0.0
            if model.actions[s, a]:
                for i in range(len(terms.argument)):
                    argument = terms.argument[i]
                    if argument == PAIR:
                        first, second = slope_and_bend(terms.function[i], terms.exponent[i], weights[i], q[s, a])
                        gradient += first
                        d += second
                    elif argument == REST and model.has_rest[s, a]:
                        first, second = slope_and_bend(terms.function[i], terms.exponent[i], weights[i], work.rest[s, a])
                        through_rest += first
                        w += second
                    elif argument == COMPLEMENT and model.has_complement[s, a]:
                        first, second = slope_and_bend(terms.function[i], terms.exponent[i], weights[i], work.complement[s, a])
                        gradient -= first
                        d += second
            work.gradient[s, a], work.d[s, a], work.w[s, a], work.slope[s, a] = gradient, d, w, through_rest
        sums_of_others(work.slope[s], work.response[s])
        for a in range(num_actions):
            work.gradient[s, a] = work.gradient[s, a] + work.response[s, a] if model.actions[s, a] else 0.0


@njit(cache=True)
def factorize(model: Model, work: Work) -> None:
    """(R, p, kappa) of every state, then Yhat layer by layer."""
    start, (num_states, num_actions) = model.start, work.d.shape
    for s in range(num_states):
        total, dominant, largest = 0.0, 0, -1.0
        work.softest[s] = 0
        for a in range(num_actions):
            if model.actions[s, a]:
                inverse = 1.0 / (work.d[s, a] + work.w[s, a])
                work.inverse[s, a] = inverse
                total += inverse
                if inverse > work.inverse[s, work.softest[s]] or not model.actions[s, work.softest[s]]:
                    work.softest[s] = a
                if work.w[s, a] * inverse > largest:
                    dominant, largest = a, work.w[s, a] * inverse
            else:
                work.inverse[s, a] = 0.0
        e = work.d[s, dominant] * work.inverse[s, dominant]
        for a in range(num_actions):
            if a != dominant:
                e -= work.w[s, a] * work.inverse[s, a]
        kappa = work.c[s] + e * e / total
        for a in range(num_actions):
            share = work.w[s, a] * work.inverse[s, a]
            work.p[s, a] = e / total * work.inverse[s, a] + share
            kappa += share * work.d[s, a]
        work.total[s] = total
        work.kappa[s] = max(kappa, 0.0)
    for s in range(start[1]):
        for j in range(start[1]):
            work.gain[s, j] = 0.0  # the first layer's occupancy is given
    for k in range(1, len(start) - 1):
        _filter_layer(model, k, work)


@njit(cache=True)
def _filter_layer(model: Model, k: int, work: Work) -> None:
    """Y_k = Q_k + P_p' Yhat_{k-1} P_p, then Yhat_k = (Y_k^-1 + K_k)^-1, stored in the rows of `gain`."""
    before, here, behind = model.start[k - 1], model.start[k], model.start[k + 1]
    n, width, num_actions = here - before, behind - here, work.d.shape[1]
    Y, half, L = work.product, work.half, work.cholesky
    for i in range(width):
        for j in range(i + 1):
            Y[i, j] = 0.0
    for s in range(before, here):
        softest = work.softest[s]
        for j in range(width):
            mean, move = 0.0, 0.0
            for a in range(num_actions):
                mean += work.inverse[s, a] * (model.next_state[s, a, j] - model.next_state[s, softest, j])
                move += work.p[s, a] * model.next_state[s, a, j]
            work.deviation[j] = mean / work.total[s]
            work.moves[s, j] = move
        for a in range(num_actions):
            inverse = work.inverse[s, a]
            for i in range(width):
                scaled = inverse * (model.next_state[s, a, i] - model.next_state[s, softest, i] - work.deviation[i])
                for j in range(i + 1):
                    Y[i, j] += scaled * (model.next_state[s, a, j] - model.next_state[s, softest, j] - work.deviation[j])
    if k > 1:  # the first layer passes nothing on
        for i in range(n):
            for j in range(width):
                total = 0.0
                for m in range(n):
                    total += work.gain[before + i, m] * work.moves[before + m, j]
                half[i, j] = total
        for s in range(n):
            for i in range(width):
                for j in range(i + 1):
                    Y[i, j] += work.moves[before + s, i] * half[s, j]
    for i in range(width):
        for j in range(i):
            Y[j, i] = Y[i, j]
    for i in range(width):
        root = np.sqrt(work.kappa[here + i])
        for j in range(width):
            half[i, j] = root * Y[i, j]
    for i in range(width):
        for j in range(i + 1):
            total = half[i, j] * np.sqrt(work.kappa[here + j]) + (1.0 if i == j else 0.0)
            for m in range(j):
                total -= L[i, m] * L[j, m]
            L[i, j] = np.sqrt(total) if i == j else total / L[j, j]
    for j in range(width):
        for i in range(width):
            total = half[i, j]
            for m in range(i):
                total -= L[i, m] * half[m, j]
            half[i, j] = total / L[i, i]
    for i in range(width):
        for j in range(i + 1):
            total = Y[i, j]
            for m in range(width):
                total -= half[m, i] * half[m, j]
            work.gain[here + i, j] = total
            work.gain[here + j, i] = total


@njit(cache=True)
def respond(model: Model, x: Floats, work: Work) -> None:
    """R x into `response`."""
    for s in range(x.shape[0]):
        origin = x[s, work.softest[s]]
        mean = 0.0
        for a in range(x.shape[1]):
            mean += work.inverse[s, a] * (x[s, a] - origin)
        mean /= work.total[s]
        for a in range(x.shape[1]):
            work.response[s, a] = ((x[s, a] - origin) - mean) * work.inverse[s, a]


@njit(cache=True)
def inflow(model: Model, x: Floats, out: Floats) -> None:
    """P' x."""
    start = model.start
    out[: start[1]] = 0.0
    for k in range(len(start) - 2):
        width = start[k + 2] - start[k + 1]
        for j in range(width):
            out[start[k + 1] + j] = 0.0
        for s in range(start[k], start[k + 1]):
            for a in range(x.shape[1]):
                for j in range(width):
                    out[start[k + 1] + j] += x[s, a] * model.next_state[s, a, j]


@njit(cache=True)
def lookahead(model: Model, s: int, a: int, k: int, v: Floats) -> float:
    """E[v(next state) | s, a] for s in layer k."""
    total = 0.0
    if k < len(model.start) - 2:
        first = model.start[k + 1]
        for j in range(model.start[k + 2] - first):
            total += model.next_state[s, a, j] * v[first + j]
    return total


@njit(cache=True)
def solve(model: Model, x: Floats, r: Floats, work: Work) -> None:
    """H dq = x + E'v, E dq = r with the factors at hand; the results are `dq` and `v`. x is overwritten."""
    start, num_actions = model.start, x.shape[1]
    layers = len(start) - 1
    respond(model, x, work)
    inflow(model, work.response, work.m)
    for s in range(len(r)):
        work.m[s] += r[s]
    for k in range(layers):
        for s in range(start[k], start[k + 1]):
            mean = 0.0
            for a in range(num_actions):
                mean += work.p[s, a] * x[s, a]
            work.pull[s] = work.kappa[s] * work.m[s] - mean
        if k + 1 < layers:
            for s in range(start[k], start[k + 1]):
                passed = work.m[s]
                for j in range(start[k + 1] - start[k]):
                    passed -= work.gain[s, j] * work.pull[start[k] + j]
                for j in range(start[k + 2] - start[k + 1]):
                    work.m[start[k + 1] + j] += work.moves[s, j] * passed
    for k in range(layers - 1, -1, -1):
        for s in range(start[k], start[k + 1]):
            if k + 1 < layers:
                for j in range(start[k + 2] - start[k + 1]):
                    work.pull[s] += work.moves[s, j] * work.v[start[k + 1] + j]
        for s in range(start[k], start[k + 1]):
            held = 0.0
            for j in range(start[k + 1] - start[k]):
                held += work.gain[s, j] * work.pull[start[k] + j]
            work.v[s] = work.pull[s] - work.kappa[s] * held
    for k in range(layers):
        for s in range(start[k], start[k + 1]):
            for a in range(num_actions):
                if model.actions[s, a]:
                    x[s, a] -= lookahead(model, s, a, k, work.v)
    respond(model, x, work)
    inflow(model, work.response, work.u)
    for s in range(len(r)):
        work.u[s] += r[s]
    for k in range(layers):
        for s in range(start[k], start[k + 1]):
            if k + 1 < layers:
                for j in range(start[k + 2] - start[k + 1]):
                    work.u[start[k + 1] + j] += work.moves[s, j] * work.u[s]
            for a in range(num_actions):
                work.dq[s, a] = work.p[s, a] * work.u[s] + work.response[s, a]


@njit(cache=True)
def retract(model: Model, q: Floats) -> bool:
    """q -> policy -> q in place; False if a pair underflowed."""
    start, num_actions = model.start, q.shape[1]
    layers = len(start) - 1
    alive = True
    for k in range(layers):
        for s in range(start[k], start[k + 1]):
            arrived = 0.0
            if k == 0:
                arrived = model.initial[s]
            else:
                for before in range(start[k - 1], start[k]):
                    for a in range(num_actions):
                        arrived += q[before, a] * model.next_state[before, a, s - start[k]]
            total = 0.0
            for a in range(num_actions):
                total += q[s, a]
            for a in range(num_actions):
                if model.actions[s, a]:
                    q[s, a] = arrived * (q[s, a] / total)
                    alive = alive and q[s, a] > SMALLEST
    return alive


@njit(cache=True)
def newton(
    model: Model, terms: Terms, weights: Floats, loss: Floats, q: Floats, nothing: Floats, tolerance: float, max_steps: int, work: Work
) -> tuple[int, int, float, float, float]:
    """Minimize from q, which is overwritten. Returns status, steps, decrement, flow residual, dual residual; `v` holds the multipliers."""
    num_states, num_actions = q.shape
    shape_loss(model, loss, work)
    retract(model, q)
    status, steps, patience, best, decrement = MAX_STEPS, 0, 6, np.inf, np.inf
    derive(model, terms, weights, q, work)
    for _ in range(max_steps):
        factorize(model, work)
        for s in range(num_states):
            for a in range(num_actions):
                work.trial[s, a] = -(work.gradient[s, a] + work.gaps[s, a])
        solve(model, work.trial, nothing, work)
        squared, fall, moved = _measure(model, terms, q, work)
        if not np.isfinite(moved):
            status = NOT_FINITE
            break
        length = 1.0 if fall <= 0.5 else 1.0 / (1.0 + fall)
        for s in range(num_states):
            for a in range(num_actions):
                work.trial[s, a] = q[s, a] + length * work.dq[s, a]
        if not retract(model, work.trial):
            status = UNDERFLOW
            break
        q[:] = work.trial
        derive(model, terms, weights, q, work)
        decrement = squared
        steps += 1
        patience = 6 if moved < 0.5 * best or moved > 0.1 else patience - 1
        best = min(best, moved)
        if moved <= np.sqrt(EPS) or patience == 0:
            status = STALLED  # until certified below
            break
    dual, flow = _certify(model, q, work)
    if status == STALLED and dual <= tolerance and flow <= tolerance:
        status = CONVERGED
    for s in range(num_states):
        work.v[s] += work.plan[s]
    return status, steps, np.sqrt(max(decrement, 0.0)), flow, dual


@njit(cache=True)
def _measure(model: Model, terms: Terms, q: Floats, work: Work) -> tuple[float, float, float]:
    """The squared decrement, the largest relative fall of an argument, and the largest relative change of a pair."""
    num_states, num_actions = q.shape
    squared, fall, moved = 0.0, -np.inf, 0.0
    use_rest, use_state, use_complement = False, False, False
    for i in range(len(terms.argument)):
        use_rest = use_rest or terms.argument[i] == REST
        use_state = use_state or terms.argument[i] == STATE
        use_complement = use_complement or terms.argument[i] == COMPLEMENT
    for s in range(num_states):
        change = 0.0
        for a in range(num_actions):
            change += work.dq[s, a]
        if use_state:
            fall = max(fall, -change / work.state[s])
        for a in range(num_actions):
            if model.actions[s, a]:
                dq = work.dq[s, a]
                squared -= (work.gradient[s, a] + work.gaps[s, a]) * dq
                relative = dq / q[s, a]
                if not np.isfinite(relative):
                    return squared, np.inf, np.nan
                fall = max(fall, -relative)
                moved = max(moved, abs(relative))
                if use_rest and model.has_rest[s, a]:
                    others = 0.0
                    for b in range(num_actions):
                        if b != a:
                            others += work.dq[s, b]
                    fall = max(fall, -others / work.rest[s, a])
                if use_complement and model.has_complement[s, a]:
                    fall = max(fall, dq / work.complement[s, a])
    return squared, fall, moved


@njit(cache=True)
def _certify(model: Model, q: Floats, work: Work) -> tuple[float, float]:
    """Dual and flow residual at q, relative to q as in torch_occ.newton.Solution."""
    start, num_actions = model.start, q.shape[1]
    dual, flow = 0.0, 0.0
    inflow(model, q, work.u)
    for k in range(len(start) - 1):
        for s in range(start[k], start[k + 1]):
            total = 0.0
            for a in range(num_actions):
                if model.actions[s, a]:
                    total += q[s, a]
                    shaping = work.v[s] - lookahead(model, s, a, k, work.v)
                    residual = work.gradient[s, a] + work.gaps[s, a] - shaping
                    unit = q[s, a] * (work.d[s, a] + work.w[s, a])
                    if not model.has_rest[s, a]:
                        unit = max(unit, abs(work.gradient[s, a]) + abs(work.gaps[s, a]) + abs(shaping) + TINY)
                    dual = max(dual, abs(residual / unit))
            arrived = work.u[s] + (model.initial[s] if k == 0 else 0.0)
            flow = max(flow, abs(total - arrived) / total)
    return dual, flow
