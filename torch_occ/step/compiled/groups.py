"""Calls of the kernels for a batch: elements in groups, groups in threads, and their memory.

A batch over an MDP with narrow layers is solved in lanes, LANES elements at a time. A single
problem and an MDP with wide layers are solved in plain arrays, one element at a time. The choice
does not depend on the size of the batch, so an element has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_occ._support.compiling import compile_message
from torch_occ._support.threads import for_each
from torch_occ.kernels.lanes.arrays import zeros
from torch_occ.kernels.lanes.vectors import LANES
from torch_occ.kernels.layout import Floats, Ints, Model, Work, make_work, narrow
from torch_occ.kernels.solver.batches import (
    Room,
    find_entropies,
    make_room,
    solve_linear,
    solve_linear_in_lanes,
    solve_steps,
    solve_steps_in_lanes,
)
from torch_occ.kernels.solver.psi import X_LOG_X

#: The smallest batch that is shared among threads.
_ALONE = 16

_ONLY = np.zeros(1, dtype=np.int64)


class Groups:
    """The kernels of a step, with scratch memory that calls share.

    Args:
        kinds: arguments and functions of the terms, `(K,)` each.
    """

    def __init__(self, model: Model, kinds: tuple[Ints, Ints]) -> None:
        self.model, self.kinds = model, kinds
        self.narrow = narrow(model)
        self.num_states = model.exists.shape[1] // model.num_actions
        self.entropic = bool((kinds[1] == X_LOG_X).all())
        # Memory that no thread uses now: in plain arrays, and in lanes.
        self.free: tuple[list[tuple[Room, Work]], ...] = ([], [])

    def solve(
        self,
        batch: torch.Size,
        terms: Floats,
        loss: Floats,
        start: Floats,
        tolerance: float,
        max_steps: int,
    ) -> tuple[Floats, Floats, Floats]:
        """Solve all steps; see `solve_steps`. Returns q, v and the certificates."""
        count = batch.numel()
        found = (*self._empty(count), np.empty((count, 5)))
        kernel = solve_steps_in_lanes if self._in_lanes(batch) else solve_steps
        order = self._order(batch, terms)
        inputs = (self.model, self.kinds, terms, loss, start)
        self._run(batch, terms, order, kernel, *inputs, *found, tolerance, max_steps)
        return found

    def linear(
        self, batch: torch.Size, terms: Floats, q: Floats, x: Floats, r: Floats, wanted: int
    ) -> tuple[Floats, Floats, Floats]:
        """Solve all linear systems; see `solve_linear`. Returns u, m and bars.

        Args:
            wanted: the length of bars.
        """
        count = batch.numel()
        found = (*self._empty(count), np.empty((wanted, count, terms.shape[2])))
        kernel = solve_linear_in_lanes if self._in_lanes(batch) else solve_linear
        order = _fill([np.arange(count)]) if self._in_lanes(batch) else np.arange(count)
        self._run(batch, terms, order, kernel, self.model, self.kinds, terms, q, x, r, *found)
        return found

    def _in_lanes(self, batch: torch.Size) -> bool:
        return self.narrow and len(batch) > 0

    def _empty(self, count: int) -> tuple[Floats, Floats]:
        """Allocate rows of pairs and rows of states."""
        num_rows = count * self.num_states
        return np.empty((num_rows, self.model.num_actions)), np.empty(num_rows)

    def _order(self, batch: torch.Size, terms: Floats) -> Ints:
        """The elements of one group after the other; see `solve_steps`."""
        count = batch.numel()
        if not self._in_lanes(batch):
            return np.arange(count) if batch else _ONLY
        if not self.entropic or terms.shape[1] == 1:
            return _fill([np.arange(count)])
        entropies = np.empty(count, dtype=np.bool_)
        find_entropies(self.kinds, terms, entropies)
        return _fill([entropies.nonzero()[0], (~entropies).nonzero()[0]])

    def _run(
        self,
        batch: torch.Size,
        terms: Floats,
        order: Ints,
        kernel: Callable[..., None],
        *arguments: Any,
    ) -> None:
        """Run a kernel over all groups, in several threads if the batch is large enough."""
        in_lanes = self._in_lanes(batch)
        groups = len(order) // (LANES if in_lanes else 1)
        threads = 1 if batch.numel() < _ALONE else min(torch.get_num_threads(), groups)

        def share(i: int) -> None:
            first, stop = i * groups // threads, (i + 1) * groups // threads
            room, work = self._memory(terms.shape[2], in_lanes)
            kernel(*arguments, order, first, stop, room, work)
            self.free[in_lanes].append((room, work))

        with compile_message:
            for_each(share, threads)

    def _memory(self, numbers: int, in_lanes: bool) -> tuple[Room, Work]:
        """Memory for a group; `numbers` is the number of weights, which is the same in all calls."""
        try:
            return self.free[in_lanes].pop()
        except IndexError:
            new = zeros if in_lanes else lambda *shape: np.zeros(shape)
            return make_room(numbers, self.model, new), make_work(self.model, new)


def _fill(parts: list[Ints]) -> Ints:
    """Join parts of a batch, each filled to whole groups with copies of its last element."""
    filled = [np.append(part, np.repeat(part[-1:], -len(part) % LANES)) for part in parts]
    return np.concatenate(filled)
