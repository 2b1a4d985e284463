"""Compiled sweeps for torch_occ.step.iterative, with separable Hessians and sparse transitions."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ.kernels.layout import Rows
from torch_occ.kernels.solver.conjugate import sweep_all
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import SparseLayer
from torch_occ.mdp.validation import broadcast
from torch_occ.step.compiled.inputs import rows_of
from torch_occ.step.iterative import Swept
from torch_occ.step.states import SeparableStates

_ROWS: WeakKeyDictionary[LayeredMDP, Rows] = WeakKeyDictionary()


def applies(mdp: LayeredMDP) -> bool:
    """Return whether the kernel supports this MDP: single, sparse, float64, on the CPU."""
    sparse = all(isinstance(layer, SparseLayer) for layer in mdp.layers[:-1])
    plain = mdp.device.type == "cpu" and mdp.dtype == torch.float64
    return sparse and not mdp.batch_shape and plain


class CompiledSweeps:
    """The compiled twin of torch_occ.step.iterative.TorchSweeps; loops over a batch."""

    def __init__(self, states: SeparableStates, mdp: LayeredMDP) -> None:
        if mdp not in _ROWS:
            _ROWS[mdp] = rows_of(mdp)
        self.rows = _ROWS[mdp]
        self.pairs = tuple(states.p.shape[-2:])
        softest = states.softest.squeeze(-1).to(states.p.dtype)
        self.states = [part.detach() for part in (states.p, states.inverse, states.total, softest)]

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        p, inverse, total, softest = self.states
        given = [(z, 1), (p, 2)]
        given += [(part, dims) for part, dims in ((x, 2), (r, 1)) if part is not None]
        batch = broadcast(*(part.shape[: part.dim() - dims] for part, dims in given))
        v, within = z.new_empty(*batch, self.pairs[0]), z.new_empty(*batch, *self.pairs)
        du = z.new_zeros(*batch, self.pairs[0])
        count = batch.numel()
        if r is not None:
            du.copy_(r)
        force = np.zeros((1, 0)) if x is None else _flat(x, batch, 2)
        own = ((p, 2), (inverse, 2), (total, 1), (softest, 1))
        parts: Any = tuple(_flat(part, batch, dims) for part, dims in own)
        out = (part.view(count, -1).numpy() for part in (v, within, du))
        sweep_all(self.pairs[1], self.rows, parts, _flat(z, batch, 1), force, x is not None, *out)
        return Swept(v, within, du)


def _flat(part: Tensor, batch: torch.Size, dims: int) -> NDArray[Any]:
    """Return one row per element of the batch, or a single row if all elements share it."""
    event = part.shape[part.dim() - dims :]
    part = part.detach() if part.numel() == event.numel() else part.detach().expand(*batch, *event)
    return part.reshape(-1, event.numel()).contiguous().numpy()
