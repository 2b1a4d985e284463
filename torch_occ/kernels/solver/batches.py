"""A batch of FTRL steps in one call, and their derivatives; `FTRLStep` calls these kernels.

N is the size of the batch. It is merged into the states: arrays that are (N, S, A) elsewhere are
(N * S, A) here. An array that is the same for all elements may be passed once.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.layout import (
    DQ,
    FORCE,
    PAIR,
    Floats,
    Ints,
    Model,
    Terms,
    V,
    Work,
    inlined,
    kernel,
)
from torch_occ.kernels.solver.entropic import entropy_of, minimize
from torch_occ.kernels.solver.newton import floor_pairs, retract
from torch_occ.kernels.solver.psi import derive, pair_with
from torch_occ.kernels.solver.transitions import factorize, solve

#: Reported instead of a status when an input is invalid.
BAD_INPUT = -1


@inlined
def element(x: Floats, n: int, size: int) -> Floats:
    """Element n of a flat batch, `size` numbers; all of x if the elements share it."""
    return x[n * size : (n + 1) * size] if len(x) > size else x


@kernel
def solve_steps(
    model: Model,
    kinds: tuple[Ints, Ints],  # arguments and functions, (K,) each
    table: Floats,  # (2, N or 1, K or K * S * A), weights and exponents
    loss: Floats,  # (N * S or S, A)
    start: Floats,  # (N * S or S, A), positive; for entropies it may be zero
    q: Floats,  # (N * S, A), out
    v: Floats,  # (N * S,), out
    certificate: Floats,  # (N, 5), out: see torch_occ.step.solution.Solution
    tolerance: float,
    max_steps: int,
    first: int,
    stop: int,
    work: Work,
) -> None:
    """Solve the steps of elements first, ..., stop - 1 of a batch."""
    pairs, num_pairs, num_states = work.pairs, work.pairs.shape[1], work.states.shape[1]
    for n in range(first, stop):
        own_loss, own_start = (
            element(loss.reshape(-1), n, num_pairs),
            element(start.reshape(-1), n, num_pairs),
        )
        row = min(n, table.shape[1] - 1)
        own_weights, terms = table[0, row], Terms(kinds[0], kinds[1], table[1, row])
        in_logs, good = entropy_of(terms, own_weights)[0] > 0.0, True
        for i in range(num_pairs):
            if model.exists[PAIR, i]:
                pairs[PAIR, i] = own_start[i]
                good = good and np.isfinite(own_loss[i]) and 0.0 <= own_start[i] < np.inf
                good = good and (in_logs or own_start[i] > 0.0)
            else:
                pairs[PAIR, i] = 0.0
        if not good:
            certificate[n, 0] = BAD_INPUT
            continue
        if not in_logs:
            retract(model, PAIR, True, work)
        (
            certificate[n, 0],
            certificate[n, 1],
            certificate[n, 2],
            certificate[n, 3],
            certificate[n, 4],
        ) = minimize(model, terms, own_weights, own_loss, tolerance, max_steps, v[:0], work)
        own_q, own_v = element(q.reshape(-1), n, num_pairs), element(v, n, num_states)
        for i in range(num_pairs):
            own_q[i] = pairs[PAIR, i]
        for s in range(num_states):
            own_v[s] = work.states[V, s]


@kernel
def solve_linear(
    model: Model,
    kinds: tuple[Ints, Ints],
    table: Floats,  # (2, N or 1, K or K * S * A), weights and exponents
    q: Floats,  # (N * S, A)
    x: Floats,  # (N * S or S, A)
    r: Floats,  # (N * S or S,)
    u: Floats,  # (N * S, A), out
    m: Floats,  # (N * S,), out
    # (2, N, K or K * S * A), out: derivatives of <u, grad psi> by weights and exponents
    bars: Floats,
    first: int,
    stop: int,
    work: Work,
) -> None:
    """Solve H(q) u - E'm = -x, E u = r for elements first, ..., stop - 1 of a batch."""
    pairs, num_pairs, num_states = work.pairs, work.pairs.shape[1], work.states.shape[1]
    for n in range(first, stop):
        at, right, source = (
            element(q.reshape(-1), n, num_pairs),
            element(x.reshape(-1), n, num_pairs),
            element(r, n, num_states),
        )
        row = min(n, table.shape[1] - 1)
        own_weights, terms = table[0, row], Terms(kinds[0], kinds[1], table[1, row])
        for i in range(num_pairs):
            pairs[PAIR, i] = at[i]
            pairs[FORCE, i] = -right[i] if model.exists[PAIR, i] else 0.0
        floor_pairs(model, work)
        derive(model, terms, own_weights, work)
        factorize(model, True, work)
        solve(model, source, work)
        own_u, own_m = element(u.reshape(-1), n, num_pairs), element(m, n, num_states)
        for i in range(num_pairs):
            own_u[i] = pairs[DQ, i]
        for s in range(num_states):
            own_m[s] = work.states[V, s]
        for term in range(len(terms.argument)):
            pair_with(model, terms, term, own_weights, bars[0, n], bars[1, n], work)
