"""Many steps in one call, and their derivatives: what `FTRLStep` asks of the engine. Pairs are flat; N is the batch."""

from __future__ import annotations

import numpy as np

from torch_occ.engine.layout import (
    COMPLEMENT,
    DQ,
    FORCE,
    LOG,
    PAIR,
    POWER,
    REST,
    STATE,
    TRIAL,
    X_LOG_X,
    Floats,
    Ints,
    Model,
    Terms,
    U,
    V,
    Work,
    kernel,
)
from torch_occ.engine.newton import derive, newton, retract
from torch_occ.engine.transitions import factorize, solve

#: Reported instead of a status when an input is not what it should be.
BAD_INPUT = -1


@kernel
def solve_steps(
    model: Model,
    kinds: tuple[Ints, Ints],  # arguments and functions, (K,) each
    table: Floats,  # (2, N or 1, K), weights and exponents
    loss: Floats,  # (N or 1, S * A)
    start: Floats,  # (N or 1, S * A), positive
    q: Floats,  # (N, S * A), out
    v: Floats,  # (N, S), out
    counts: Ints,  # (2, N), out: status, steps
    sizes: Floats,  # (3, N), out: decrement, flow residual, dual residual
    tolerance: float,
    max_steps: int,
    first: int,
    stop: int,
    work: Work,
) -> None:
    """Elements first, ..., stop - 1 of a batch."""
    pairs, num_pairs = work.pairs, q.shape[1]
    for n in range(first, stop):
        own_loss, own_start = loss[min(n, len(loss) - 1)], start[min(n, len(start) - 1)]
        good = True
        for i in range(num_pairs):
            if model.exists[PAIR, i]:
                pairs[PAIR, i] = own_start[i]
                good = good and np.isfinite(own_loss[i]) and 0.0 < own_start[i] < np.inf
            else:
                pairs[PAIR, i] = 0.0
        if not good:
            counts[0, n] = BAD_INPUT
            continue
        retract(model, PAIR, work)
        row = min(n, table.shape[1] - 1)
        own_weights, terms = table[0, row], Terms(kinds[0], kinds[1], table[1, row])
        counts[0, n], counts[1, n], sizes[0, n], sizes[1, n], sizes[2, n] = newton(
            model, terms, own_weights, own_loss, tolerance, max_steps, q[0, :0], work
        )
        for i in range(num_pairs):
            q[n, i] = pairs[PAIR, i]
        for s in range(v.shape[1]):
            v[n, s] = work.states[V, s]


@kernel
def solve_linear(
    model: Model,
    kinds: tuple[Ints, Ints],
    table: Floats,  # (2, N or 1, K), weights and exponents
    q: Floats,  # (N or 1, S * A)
    x: Floats,  # (N or 1, S * A)
    r: Floats,  # (N or 1, S)
    u: Floats,  # (N, S * A), out
    m: Floats,  # (N, S), out
    bars: Floats,  # (2, N, K), out: the derivatives of <u, grad psi> in weights and exponents
    first: int,
    stop: int,
    work: Work,
) -> None:
    """H(q) u - E'm = x, E u = r for elements first, ..., stop - 1 of a batch."""
    pairs, num_pairs = work.pairs, u.shape[1]
    for n in range(first, stop):
        at, right, source = q[min(n, len(q) - 1)], x[min(n, len(x) - 1)], r[min(n, len(r) - 1)]
        row = min(n, table.shape[1] - 1)
        own_weights, terms = table[0, row], Terms(kinds[0], kinds[1], table[1, row])
        for i in range(num_pairs):
            pairs[PAIR, i] = at[i]
            pairs[FORCE, i] = right[i] if model.exists[PAIR, i] else 0.0
        derive(model, terms, own_weights, work)
        factorize(model, work)
        solve(model, source, work)
        for i in range(num_pairs):
            u[n, i] = pairs[DQ, i]
        for s in range(m.shape[1]):
            m[n, s] = work.states[V, s]
        for term in range(len(own_weights)):
            bars[0, n, term], slope = pair_with(model, terms, term, work)
            bars[1, n, term] = own_weights[term] * slope


@kernel
def pair_with(model: Model, terms: Terms, term: int, work: Work) -> tuple[float, float]:
    """<u, grad f(argument)> for the function f of one term and u in DQ, and its derivative in the exponent."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    argument, function, p = terms.argument[term], terms.function[term], terms.exponent[term]
    for s in range(states.shape[1]):  # how the arguments change along u
        left, right = 0.0, 0.0
        for i in range(s * num_actions, (s + 1) * num_actions):
            pairs[TRIAL, i] = left if argument == REST else -pairs[DQ, i] if argument == COMPLEMENT else pairs[DQ, i]
            left += pairs[DQ, i]
        for i in range((s + 1) * num_actions - 1, s * num_actions - 1, -1):
            pairs[TRIAL, i] += right if argument == REST else 0.0
            right += pairs[DQ, i]
        states[U, s] = left
    value, slope = 0.0, 0.0
    count = states.shape[1] if argument == STATE else pairs.shape[1]
    for i in range(count):
        if argument == STATE:
            x, change = states[0, i], states[U, i]
        elif model.exists[argument, i]:
            x, change = pairs[argument, i], pairs[TRIAL, i]
        else:
            continue
        if function == POWER:
            power = x**p / x
            value += p * power * change
            slope += (1.0 + p * np.log(x)) * power * change
        elif function == X_LOG_X:
            value += (np.log(x) + 1.0) * change
        elif function == LOG:
            value += change / x
    return value, slope
