"""A batch of FTRL steps in one call, and their derivatives; `FTRLStep` calls these kernels.

N is the size of the batch. It is merged into the states: arrays that are (N, S, A) elsewhere are
(N * S, A) here. An array that is the same for all elements may be passed once.

Elements are solved in groups: of one element in plain arrays, of LANES elements in lanes. `order`
lists the elements of one group after the other, and may repeat an element to fill a group. In
lanes, every element may have its own transitions, which are copied to the lanes of its group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import CONVERGED
from torch_occ.engine.entropic import Aim as Aim
from torch_occ.engine.entropic import compare, entropy_of, follow, linear, settle
from torch_occ.engine.lanes import anywhere, in_lanes, lane, lanes_of
from torch_occ.engine.layout import (
    DQ,
    ERROR,
    FORCE,
    GUESSED,
    PAIR,
    Bools,
    Floats,
    Ints,
    Kinds,
    Model,
    Solver,
    Terms,
    V,
    Work,
    choose,
    finite,
    inlined,
    kernel,
)
from torch_occ.engine.newton import make_budgets, retract
from torch_occ.engine.psi import pair_with

#: Reported instead of a status when an input is invalid.
BAD_INPUT = -1


class Room(NamedTuple):
    """Memory for what a group reads and writes beside `Work`, for one element or one per lane."""

    weights: Floats  # (K or K * S * A,)
    exponents: Floats  # as the weights
    by_weights: Floats  # as the weights, derivatives
    by_exponents: Floats
    loss: Floats  # (S * A,)
    source: Floats  # (S,)
    budgets: Any  # BudgetArrays, or None


def make_room(numbers: int, num_budgets: int, model: Model, new: Callable[..., Any]) -> Room:
    """Allocate memory for a group; `numbers` is K or K * S * A."""
    num_pairs = model.exists.shape[1]
    return Room(
        weights=new(numbers),
        exponents=new(numbers),
        by_weights=new(numbers),
        by_exponents=new(numbers),
        loss=new(num_pairs),
        source=new(num_pairs // model.num_actions),
        budgets=make_budgets(num_budgets, model, new) if num_budgets else None,
    )


@inlined
def element(x: Floats, n: int, size: int) -> Floats:
    """Element n of a flat batch, `size` numbers; all of x if the elements share it."""
    return x[n * size : (n + 1) * size] if len(x) > size else x


@inlined
def copy(x: Floats, out: Floats) -> None:
    """Copy an array (n,)."""
    for i in range(len(x)):
        out[i] = x[i]


@inlined
def read_terms(table: Floats, e: int, n: int, room: Room) -> None:
    """Copy weights and exponents of element e to lane n."""
    row = min(e, table.shape[1] - 1)
    copy(table[0, row], lane(room.weights, n))
    copy(table[1, row], lane(room.exponents, n))


@inlined
def read_budgets(given: Any, e: int, own: Any) -> None:
    """Copy costs, limits and multipliers of element e."""
    for j in range(len(own.limits)):
        copy(given[0][e, j], own.costs[j])
    copy(given[1][e], own.limits)
    copy(given[2][e], own.y)


class Models(NamedTuple):
    """A batch of MDPs with one layout and dense transitions."""

    next_state: Floats  # (M, S * A, widest layer)
    initial: Floats  # (M, S_0)
    conserved: Bools  # (M,); the same for all elements of a group
    owner: Ints  # (N,), the MDP of every element
    # The layout, and memory for one MDP per lane: its transitions, arrivals and initial
    # distribution have a last axis of lanes.
    memory: Model


@inlined
def _gather_models(models: Models, order: Ints, group: int, width: Any) -> Model:
    """Copy the MDPs of a group to the lanes."""
    memory = models.memory
    next_state, arrivals, initial = memory.next_state, memory.arrivals, memory.initial
    lanes = len(width)
    for n in range(lanes):
        m = models.owner[order[group * lanes + n]]
        for i in range(next_state.shape[0]):
            for j in range(next_state.shape[1]):
                next_state[i, j, n] = models.next_state[m, i, j]
                arrivals[j, i, n] = models.next_state[m, i, j]
        for s in range(len(initial)):
            initial[s, n] = models.initial[m, s]
    return Model(
        memory.num_actions,
        memory.start,
        in_lanes(next_state, width),
        in_lanes(arrivals, width),
        memory.exists,
        in_lanes(initial, width),
        models.conserved[models.owner[order[group * lanes]]],
    )


@inlined
def _same_model(models: Model, order: Ints, group: int, width: Any) -> Model:
    return models


#: The MDP of a group, which is the same for all groups unless there are `Models`.
model_of_group = choose(lambda kind, *_: kind.instance_class is Models, _gather_models, _same_model)


@kernel
def find_entropies(kinds: Kinds, table: Floats, found: Bools) -> None:
    """Write for every row of a table of weights and exponents whether psi is an entropy."""
    for row in range(table.shape[1]):
        terms = Terms(kinds[0], kinds[1], kinds[2], table[1, row])
        found[row] = entropy_of(terms, table[0, row])[0] > 0.0


@kernel
def solve_steps(
    models: Model | Models,
    kinds: Kinds,
    table: Floats,  # (2, N or 1, K or K * S * A), weights and exponents
    loss: Floats,  # (N * S or S, A)
    start: Floats,  # (N * S or S, A), positive; for entropies it may be zero
    q: Floats,  # (N * S, A), out
    v: Floats,  # (N * S,), out
    certificate: Floats,  # (N, 5), out: see torch_occ.step.solution.Solution
    budgets: Any,  # None, or G (N, m, S * A), h (N, m), and y (N, m), in and out
    aim: Any,  # None, or an `Aim` of entropies; then q receives the derivative of the loss
    tolerance: float,
    max_steps: int,
    order: Ints,  # (groups * lanes,)
    first: int,
    stop: int,
    room: Room,
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Solve the steps of groups first, ..., stop - 1 of a batch.

    In lanes, room and work have a last axis of lanes. In a group, psi is an entropy in all elements
    or in none; see `find_entropies`.
    """
    room, work = in_lanes(room, width), in_lanes(work, width)
    pairs, num_pairs, num_states = work.pairs, work.pairs.shape[1], work.states.shape[1]
    lanes, terms = lanes_of(work.notes), Terms(kinds[0], kinds[1], kinds[2], room.exponents)
    losses, starts, solutions = loss.reshape(-1), start.reshape(-1), q.reshape(-1)
    solver = Solver(terms, room.weights, tolerance, max_steps, starts, room.budgets)
    for group in range(first, stop):
        model = model_of_group(models, order, group, width)
        for n in range(lanes):
            e, own = order[group * lanes + n], lane(pairs, n)
            read_terms(table, e, n, room)
            copy(element(losses, e, num_pairs), lane(room.loss, n))
            if budgets is not None:
                read_budgets(budgets, e, lane(room.budgets, n))
            own_start = element(starts, e, num_pairs)
            for i in range(num_pairs):
                own[PAIR, i] = own_start[i] if model.exists[PAIR, i] else 0.0
        entropy = (entropy_of(terms, room.weights)[0] > 0.0) & (budgets is None)
        good = work.notes[GUESSED] == work.notes[GUESSED]
        for i in range(num_pairs):
            if model.exists[PAIR, i]:
                x = pairs[PAIR, i]
                good = good & finite(room.loss[i]) & (x >= 0.0) & (x < np.inf)
                good = good & (entropy | (x > 0.0))
        if anywhere(good & (not entropy)):
            retract(model, PAIR, good & (not entropy), work)
        work.notes[ERROR], work.notes[GUESSED] = np.inf, 0.0
        if aim is None:
            found = follow(model, solver, room.loss, good, work)
        else:
            found = settle(model, solver, room.loss, good & entropy, work)
            elements = order[group * lanes : (group + 1) * lanes]
            compare(model, solver, aim, found[0] == CONVERGED, elements, work)
        status, steps, decrement, flow, dual = found
        for n in range(lanes):
            e, own, own_v = order[group * lanes + n], lane(pairs, n), lane(work.states, n)
            certificate[e, 0] = lane(status, n) if lane(good, n) else BAD_INPUT
            certificate[e, 1], certificate[e, 2] = lane(steps, n), lane(decrement, n)
            certificate[e, 3], certificate[e, 4] = lane(flow, n), lane(dual, n)
            copy(own[PAIR], element(solutions, e, num_pairs))
            copy(own_v[V], element(v, e, num_states))
            if budgets is not None:
                copy(lane(room.budgets.y, n), budgets[2][e])


@kernel
def solve_linear(
    models: Model | Models,
    kinds: Kinds,
    table: Floats,  # (2, N or 1, K or K * S * A), weights and exponents
    q: Floats,  # (N * S, A)
    x: Floats,  # (N * S or S, A)
    r: Floats,  # (N * S or S,)
    u: Floats,  # (N * S, A), out
    m: Floats,  # (N * S,), out
    # (0, 1 or 2, N, K or K * S * A), out: derivatives of <u, grad psi> by weights and exponents
    bars: Floats,
    order: Ints,  # (groups * lanes,)
    first: int,
    stop: int,
    room: Room,
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Solve H(q) u - E'm = -x, E u = r for groups first, ..., stop - 1 of a batch."""
    room, work = in_lanes(room, width), in_lanes(work, width)
    pairs, num_pairs, num_states = work.pairs, work.pairs.shape[1], work.states.shape[1]
    lanes, terms = lanes_of(work.notes), Terms(kinds[0], kinds[1], kinds[2], room.exponents)
    points, sides, solutions = q.reshape(-1), x.reshape(-1), u.reshape(-1)
    for group in range(first, stop):
        model = model_of_group(models, order, group, width)
        for n in range(lanes):
            e, own = order[group * lanes + n], lane(pairs, n)
            read_terms(table, e, n, room)
            copy(element(r, e, num_states), lane(room.source, n))
            at, right = element(points, e, num_pairs), element(sides, e, num_pairs)
            for i in range(num_pairs):
                own[PAIR, i] = at[i]
                own[FORCE, i] = -right[i] if model.exists[PAIR, i] else 0.0
        linear(model, terms, room.weights, room.source, work)
        for term in range(len(terms.argument) if len(bars) > 0 else 0):
            numbers = (room.weights, room.by_weights, room.by_exponents)
            pair_with(model, terms, term, *numbers, len(bars) > 1, work)
        for n in range(lanes):
            e, own, own_m = order[group * lanes + n], lane(pairs, n), lane(work.states, n)
            copy(own[DQ], element(solutions, e, num_pairs))
            copy(own_m[V], element(m, e, num_states))
            if len(bars) > 0:
                copy(lane(room.by_weights, n), bars[0, e])
            if len(bars) > 1:
                copy(lane(room.by_exponents, n), bars[1, e])
