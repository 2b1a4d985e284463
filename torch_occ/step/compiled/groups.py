"""Calls of the kernels for a batch: elements in groups, groups in threads, and their memory.

A batch over a sparse MDP or one with narrow layers is solved in lanes, LANES elements at a time. A
single problem and other MDPs are solved in plain arrays, one element at a time. The choice does not
depend on the size of the batch, so an element has the same bits in every batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torch_occ._support.compiling import compile_message
from torch_occ._support.threads import for_each
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.lanes.vectors import LANES
from torch_occ.kernels.layout import (
    Bools,
    Floats,
    Ints,
    Kinds,
    Model,
    Work,
    lanes_in,
    make_work,
)
from torch_occ.kernels.solver.batches import (
    Room,
    find_entropies,
    make_room,
    solve_linear,
    solve_steps,
)
from torch_occ.kernels.solver.models import Models, solve_linear_of_models, solve_steps_of_models
from torch_occ.step.compiled.worlds import World

#: The smallest batch that is shared among threads.
_ALONE = 16

_ONLY = np.zeros(1, dtype=np.int64)


class Groups:
    """The kernels of a step, with scratch memory that calls share.

    Args:
        kinds: what the terms are, without their weights and exponents.
    """

    def __init__(self, kinds: Kinds) -> None:
        self.kinds = kinds
        # Memory that no thread uses now, by the way of solving and the storage of transitions.
        self.free: dict[Any, list[tuple[Room, Work, Model]]] = defaultdict(list)

    def solve(
        self,
        world: World,
        batch: torch.Size,
        terms: Floats,
        loss: Floats,
        start: Floats,
        tolerance: float,
        max_steps: int,
    ) -> tuple[Floats, Floats, Floats]:
        """Solve all steps; see `solve_steps`. Returns q, v and the certificates."""
        count = batch.numel()
        found = (*_empty(world, count), np.empty((count, 5)))
        kernels = (solve_steps, solve_steps_of_models)
        entropies = None
        if self.kinds[2] and terms.shape[1] > 1:
            entropies = np.empty(count, dtype=np.bool_)
            find_entropies(self.kinds, terms, entropies)
        arguments = (loss, start, *found, tolerance, max_steps)
        self._run(world, batch, terms, entropies, kernels, *arguments)
        return found

    def linear(
        self,
        world: World,
        batch: torch.Size,
        terms: Floats,
        q: Floats,
        x: Floats,
        r: Floats,
        wanted: int,
    ) -> tuple[Floats, Floats, Floats]:
        """Solve all linear systems; see `solve_linear`. Returns u, m and bars.

        Args:
            wanted: the length of bars.
        """
        count = batch.numel()
        found = (*_empty(world, count), np.empty((wanted, count, terms.shape[2])))
        kernels = (solve_linear, solve_linear_of_models)
        self._run(world, batch, terms, None, kernels, q, x, r, *found)
        return found

    def _run(
        self,
        world: World,
        batch: torch.Size,
        terms: Floats,
        entropies: Bools | None,
        kernels: Sequence[Callable[..., None]],
        *arguments: Any,
    ) -> None:
        """Run a kernel over all groups, in several threads if the batch is large enough.

        Args:
            kernels: for one MDP, and for an MDP for every element.
        """
        model = world.model
        if not batch:  # a single problem should not wait for Python
            with compile_message:
                self._run_single(model, terms, kernels[0], *arguments)
            return
        count = batch.numel()
        owners = world.owners(batch) if world.batch_shape else None
        lanes = lanes_in(model, count)
        way = 0 if lanes is None else 1 if owners is None else 2
        if lanes is None:
            order = np.arange(count)
        elif owners is not None:
            order = order_of(world.tables[2][owners] + (0 if entropies is None else 2 * entropies))
        else:
            order = plain_order(count, lanes) if entropies is None else order_of(entropies, lanes)
        kernel, groups = kernels[owners is not None], len(order) // (lanes or 1)
        threads = 1 if count < _ALONE else min(torch.get_num_threads(), groups)

        free = self.free[way, lanes, type(model.next_state)]

        def share(i: int) -> None:
            try:
                memory = free.pop()
            except IndexError:
                memory = _memory(model, terms.shape[2], way, lanes)
            room, work, own = memory
            given = model if owners is None else Models(*world.tables, owners, own)
            bounds = (i * groups // threads, (i + 1) * groups // threads)
            kernel(
                *(given, self.kinds, terms, *arguments),
                *(order, *bounds, room, work, width_of(lanes)),
            )
            free.append(memory)

        with compile_message:
            for_each(share, threads)

    def _run_single(
        self, model: Model, terms: Floats, kernel: Callable[..., None], *arguments: Any
    ) -> None:
        free = self.free[0, None, type(model.next_state)]
        try:
            memory = free.pop()
        except IndexError:
            memory = _memory(model, terms.shape[2], 0, None)
        kernel(model, self.kinds, terms, *arguments, _ONLY, 0, 1, *memory[:2], None)
        free.append(memory)


def _empty(world: World, count: int) -> tuple[Floats, Floats]:
    """Allocate rows of pairs and rows of states."""
    num_rows = count * world.mdp.num_states
    return np.empty((num_rows, world.mdp.num_actions)), np.empty(num_rows)


def _memory(model: Model, numbers: int, way: int, lanes: int | None) -> tuple[Room, Work, Model]:
    """Allocate memory for a group; `numbers` is the number of weights and `way` as in `_run`."""
    new = allocator(lanes)
    own = model
    if way == 2:
        tables = (model.next_state, model.arrivals, model.initial)
        next_state, arrivals, initial = (new(*x.shape) for x in tables)
        own = model._replace(next_state=next_state, arrivals=arrivals, initial=initial)
    return make_room(numbers, model, new), make_work(model, new), own


@lru_cache(16)
def plain_order(count: int, lanes: int = LANES) -> Ints:
    """The elements of a batch in groups; copies of the last element fill the last group."""
    return np.minimum(np.arange(-(-count // lanes) * lanes), count - 1)


def order_of(kinds: Any, lanes: int = LANES) -> Ints:
    """`plain_order` for each kind of elements, one after the other."""
    parts = [(kinds == kind).nonzero()[0] for kind in np.unique(kinds)]
    return np.concatenate([np.arange(0), *(part[plain_order(len(part), lanes)] for part in parts)])
