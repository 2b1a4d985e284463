"""Batches of FTRL steps in which every element has its own transitions, in lanes.

The kernels are those of torch_occ.kernels.solver.batches. Before a group is solved, the transitions
of its elements are copied to the lanes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_occ.kernels.lanes.arrays import in_lanes
from torch_occ.kernels.layout import (
    Bools,
    Floats,
    Ints,
    Kinds,
    Model,
    Work,
    inlined,
    kernel,
)
from torch_occ.kernels.solver.batches import Room, solve_linear, solve_steps


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
def gather_models(models: Models, order: Ints, group: int, width: Any) -> Model:
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


@kernel
def solve_steps_of_models(
    models: Models,
    kinds: Kinds,
    table: Floats,
    loss: Floats,
    start: Floats,
    q: Floats,
    v: Floats,
    certificate: Floats,
    tolerance: float,
    max_steps: int,
    order: Ints,
    first: int,
    stop: int,
    room: Room,
    work: Work,
    width: Any,
) -> None:
    """`solve_steps` in lanes, every element with its own MDP."""
    for group in range(first, stop):
        model = gather_models(models, order, group, width)
        given, found = (table, loss, start), (q, v, certificate)
        limits, place = (tolerance, max_steps), (group, group + 1)
        solve_steps(model, kinds, *given, *found, *limits, order, *place, room, work, width)


@kernel
def solve_linear_of_models(
    models: Models,
    kinds: Kinds,
    table: Floats,
    q: Floats,
    x: Floats,
    r: Floats,
    u: Floats,
    m: Floats,
    bars: Floats,
    order: Ints,
    first: int,
    stop: int,
    room: Room,
    work: Work,
    width: Any,
) -> None:
    """`solve_linear` in lanes, every element with its own MDP."""
    for group in range(first, stop):
        model, place = gather_models(models, order, group, width), (group, group + 1)
        solve_linear(model, kinds, table, q, x, r, u, m, bars, order, *place, room, work, width)
