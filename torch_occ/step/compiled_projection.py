"""The adapter to the compiled projection: tensors in and out, a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import compile_message
from torch_occ._support.processes import for_each
from torch_occ.engine.layout import Floats
from torch_occ.engine.projection import Layers, layers_of, make_scratch, project_batch
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.arrays import model_of
from torch_occ.step.solution import Options

#: The smallest batch that is shared among threads.
_SHARED = 64


class Found(NamedTuple):
    """The result of the kernel, with the full batch shape."""

    q: Tensor  # (*batch, S, A)
    rows: tuple[Tensor, ...]  # (*batch, S_k, A, S_{k+1})
    value: Tensor  # (*batch, S)
    guess: Tensor  # (*batch, S), log q(s)
    certificate: Tensor  # (*batch, 4)


class CompiledProjection:
    """The projection in compiled code, for one layout."""

    def __init__(self, mdp: LayeredMDP, options: Options) -> None:
        self.mdp, self.options = mdp, options
        self.shapes = [(n, mdp.num_actions, after) for n, after in pairwise((*mdp.layer_sizes, 1))]

    @cached_property
    def layers(self) -> Layers:
        """The layout as arrays, made at the first solve, which no transform encloses."""
        return layers_of(model_of(self.mdp))

    def __call__(self, q: Tensor, loss: Tensor, rate: Tensor, *rows: Tensor) -> Found:
        """Project; `rows` are transitions, lower and upper bounds, one tensor per layer each."""
        parts = [rows[i * len(self.shapes) :][: len(self.shapes)] for i in range(3)]
        batch = broadcast(
            *(q.shape[:-2], loss.shape[:-2], rate.shape), *(x.shape[:-3] for x in rows)
        )
        arrays = [_flat([x], 2, batch) for x in (q, loss)]
        tables = [_flat(part, 3, batch) for part in parts]
        rates = rate.detach().expand(batch).reshape(-1).numpy().copy()
        count, num_states = len(rates), int(self.layers.start[-1])
        values, guesses = np.zeros((count, num_states)), np.zeros((count, num_states))
        certificate = np.zeros((count, 4))
        tolerance = self.options.tolerance_in(torch.float64)
        threads = min(torch.get_num_threads(), count) if count >= _SHARED else 1

        def share(i: int) -> None:
            project_batch(
                self.layers,
                arrays[0],
                tables[0],
                tables[1],
                tables[2],
                arrays[1],
                rates,
                tolerance,
                self.options.max_steps,
                values,
                guesses,
                certificate,
                i * count // threads,
                (i + 1) * count // threads,
                make_scratch(self.layers),
            )

        with compile_message:
            for_each(share, threads)
        sizes = [n * a * after for n, a, after in self.shapes]
        found = torch.from_numpy(tables[0]).view(*batch, -1).split(sizes, -1)
        return Found(
            torch.from_numpy(arrays[0]).view(*batch, *q.shape[-2:]),
            tuple(x.unflatten(-1, shape) for x, shape in zip(found, self.shapes, strict=True)),
            torch.from_numpy(values).view(*batch, num_states),
            torch.from_numpy(guesses).view(*batch, num_states),
            torch.from_numpy(certificate).view(*batch, 4),
        )


def _flat(parts: Sequence[Tensor], event_dims: int, batch: torch.Size) -> Floats:
    """A copy of the parts side by side, one row per batch element, `(N, ...)`."""
    flat = torch.cat([x.detach().flatten(-event_dims) for x in _alike(parts, event_dims)], -1)
    return flat.expand(*batch, flat.shape[-1]).reshape(-1, flat.shape[-1]).numpy().copy()


def _alike(parts: Sequence[Tensor], event_dims: int) -> list[Tensor]:
    """The parts with the same batch shape."""
    batch = broadcast(*(x.shape[: x.dim() - event_dims] for x in parts))
    return [x.expand(*batch, *x.shape[x.dim() - event_dims :]) for x in parts]
