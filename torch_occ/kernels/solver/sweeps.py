"""The linear system of a Newton step with dense transitions, solved layer by layer.

`solve` sweeps forward, backward and forward again, with the factors of
torch_occ.kernels.solver.factors. One pass over the pairs of a state multiplies both p and R by the
transitions: sum_a p_a P_a u + sum_a (R x)_a P_a = sum_a dq_a P_a.
"""

from __future__ import annotations

from torch_occ.kernels.layout import (
    AHEAD,
    DQ,
    FORCE,
    INVERSE,
    KAPPA,
    PULL,
    RESPONSE,
    SHARE,
    SOFT,
    Floats,
    M,
    Model,
    P,
    U,
    V,
    Work,
    adder,
    ahead,
    dot,
    inlined,
    part,
    span,
    unsigned,
)


@adder
def solve(model: Model, source: Floats, work: Work) -> None:
    """Solve H dq = x + E'v, E dq = r.

    x is the row FORCE, which is overwritten. r is `source`, (S,), or zero if `source` is empty. The
    rows DQ, V and AHEAD receive dq, v and E[v(next state)].
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    layers = len(start) - 1
    load(states, M, source)
    for k in range(layers):
        here, behind = start[k], start[k + 1]
        respond(num_actions, here, behind, work)
        for s in span(here, behind):
            states[PULL, s] = states[KAPPA, s] * states[M, s] - dot(
                pairs, P, pairs, FORCE, s * num_actions, (s + 1) * num_actions
            )
        if k + 1 < layers:
            for s in span(here, behind):
                passed = states[M, s]
                for j in range(behind - here):
                    passed -= work.gain[s, j] * states[PULL, unsigned(here + j)]
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[RESPONSE, i] += pairs[P, i] * passed
            if start[k + 2] - behind == 1 and model.conserved:
                states[M, behind] = mass(source, behind)
            else:
                flow_on(model, k, RESPONSE, M, True, work)
    for k in range(layers - 1, -1, -1):
        here, behind = start[k], start[k + 1]
        after = start[k + 2] - behind if k + 1 < layers else 0
        for j in range(after):
            for s in span(here, behind):
                states[PULL, s] += work.moves[j, s] * states[V, unsigned(behind + j)]
        for s in span(here, behind):
            held = 0.0
            for j in range(behind - here):
                held += work.gain[s, j] * states[PULL, unsigned(here + j)]
            states[V, s] = states[PULL, s] - states[KAPPA, s] * held
        for i in span(here * num_actions, behind * num_actions):
            pairs[AHEAD, i] = ahead(model.next_state, i, states, V, behind, after)
            pairs[FORCE, i] -= pairs[AHEAD, i]
    load(states, U, source)
    for k in range(layers):
        here, behind = start[k], start[k + 1]
        respond(num_actions, here, behind, work)
        for s in span(here, behind):
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[DQ, i] = pairs[P, i] * states[U, s] + pairs[RESPONSE, i]
        if k + 1 < layers:
            if start[k + 2] - behind == 1 and model.conserved:
                states[U, behind] = mass(source, behind)
            else:
                flow_on(model, k, DQ, U, True, work)


@inlined
def mass(source: Floats, last: int) -> float:
    """The sum of the sources of all states up to `last`; `source` is (S,) or empty."""
    total = 0.0
    for s in range(last + 1 if len(source) else 0):
        total += source[s]
    return total


@part
def load(states: Floats, row: int, source: Floats) -> None:
    """Fill a row of the states from an array (S,), or with zeros if the array is empty."""
    for s in range(states.shape[1]):
        states[row, s] = source[s] if len(source) else 0.0


@part
def respond(num_actions: int, here: int, behind: int, work: Work) -> None:
    """Write R x of states here, ..., behind - 1 into RESPONSE, for x in FORCE."""
    pairs, states = work.pairs, work.states
    for s in span(here, behind):
        first, mean = s * num_actions, 0.0
        origin = dot(pairs, SOFT, pairs, FORCE, first, first + num_actions)
        for i in span(first, first + num_actions):
            mean += pairs[INVERSE, i] * (pairs[FORCE, i] - origin)
        mean *= states[SHARE, s]
        for i in span(first, first + num_actions):
            pairs[RESPONSE, i] = ((pairs[FORCE, i] - origin) - mean) * pairs[INVERSE, i]


@inlined
def arrive(model: Model, row: int, k: int, work: Work) -> None:
    """Write the inflow of layer k into U: from a row of the pairs, or the initial distribution."""
    if k > 0:
        flow_on(model, k - 1, row, U, False, work)
    else:
        for s in span(0, model.start[1]):
            work.states[U, s] = model.initial[s]


@part
def flow_on(model: Model, k: int, row: int, out: int, add: bool, work: Work) -> None:
    """Write the inflow of layer k + 1 from a row of the pairs, or add it if `add` is true."""
    start, arrivals, pairs, states = model.start, model.arrivals, work.pairs, work.states
    first, stop, there = (
        start[k] * model.num_actions,
        start[k + 1] * model.num_actions,
        start[k + 1],
    )
    last = start[k + 2] - there - 1
    for j in range(0, last + 1, 4):  # four sums at once, none of which waits for another
        second, third, fourth = min(j + 1, last), min(j + 2, last), min(j + 3, last)
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for i in span(first, stop):
            x = pairs[row, i]
            a += x * arrivals[j, i]
            b += x * arrivals[second, i]
            c += x * arrivals[third, i]
            d += x * arrivals[fourth, i]
        if add:
            a, b, c, d = (
                a + states[out, there + j],
                b + states[out, there + second],
                c + states[out, there + third],
                d + states[out, there + fourth],
            )
        states[out, there + j], states[out, there + second] = a, b
        states[out, there + third], states[out, there + fourth] = c, d
