"""Between tensors, arrays and numbers: a batch of problems is rows for the kernels, and a single one has plain numbers for parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import in_forward_mode
from torch_occ.kernels.layout import Floats


def plain(x: Any) -> bool:
    """Whether it is a tensor that kernels can read."""
    return isinstance(x, Tensor) and x.dtype is torch.float64 and x.is_cpu


def number(x: Any) -> Any:
    """A number, or an array for a batch of them; None for what is neither."""
    if type(x) is float:
        return x
    if plain(x):
        return x.item() if x.dim() == 0 else x.detach().numpy()
    return float(x) if isinstance(x, int | float) else None


def followed(*inputs: Tensor | float) -> bool:
    """Whether autograd wants to know what becomes of them."""
    return any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def tabulate(values: list[Any], batch: torch.Size) -> Floats:
    """2 K numbers or arrays as `(2, N or 1, K)`."""
    if not batch:
        return np.array(values).reshape(2, 1, -1)
    table = np.array([np.broadcast_to(x, batch).ravel() for x in values])
    return np.ascontiguousarray(table.reshape(2, len(values) // 2, batch.numel()).swapaxes(1, 2))


def untabulate(table: Floats, batch: torch.Size) -> list[Any]:
    """`(2, N, K)` as 2 K numbers or arrays."""
    values: list[Any] = table.ravel().tolist() if not batch else list(table.swapaxes(1, 2).reshape(2 * table.shape[2], *batch))
    return values


def shaped(bar: Any, x: Tensor, batch: torch.Size) -> Tensor:
    """The derivative in x, as a tensor of its shape."""
    return summed(torch.from_numpy(np.broadcast_to(bar, batch).copy()), x) if batch else torch.from_numpy(np.array(bar))


def summed(bar: Tensor, x: Tensor) -> Tensor:
    """Over what x was broadcast along."""
    return bar if bar.shape == x.shape else bar.sum_to_size(x.shape)


def rows(x: Tensor, batch: torch.Size, event_dims: int) -> Floats:
    """`(*some of batch, S, ...)` as `(N * S or S, ...)`, contiguous."""
    x = x.detach() if x.requires_grad or in_forward_mode() else x
    split = x.dim() - event_dims
    if split and x.shape[:split].numel() > 1:
        x = x.expand(*batch, *x.shape[split:])
    array: Floats = x.contiguous().numpy()
    return array.reshape(-1, *x.shape[split + 1 :]) if split else array
