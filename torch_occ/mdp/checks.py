"""The conditions that a valid layered MDP satisfies.

Every error names the argument, the place and the value, and says what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import indices

if TYPE_CHECKING:
    from torch_occ.mdp.layered import LayeredMDP


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, with a fast path if all nonempty shapes are equal.

    The original takes tens of microseconds.
    """
    distinct = {shape for shape in shapes if shape}
    if len(distinct) <= 1:
        return torch.Size(*distinct)
    return torch.broadcast_shapes(*distinct)


#: What a user may give as a table.
Table = Tensor | np.ndarray[Any, Any]


def as_tensor(x: Any) -> Any:
    """A copy of a NumPy array as a tensor; anything else as it is."""
    return torch.tensor(x) if isinstance(x, np.ndarray) and x.ndim else x


def check_table(name: str, x: Tensor, mdp: LayeredMDP) -> None:
    """Check that x is a tensor `(*batch, S, A)`.

    Raises:
        TypeError: if x is not a tensor.
        ValueError: if its shape is wrong.
    """
    expected = (mdp.num_states, mdp.num_actions)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: expected a tensor of shape (*batch, {expected[0]}, {expected[1]}), "
            f"got {type(x).__name__}"
        )
    if tuple(x.shape[-2:]) != expected:
        raise ValueError(
            f"{name}: expected shape (*batch, {expected[0]}, {expected[1]}), got {tuple(x.shape)}"
        )


def check_shapes(
    transitions: Sequence[Table], actions: Tensor | None, initial: Tensor | None
) -> tuple[tuple[Tensor, ...], int]:
    """Check that layers fit together, with one dtype and device; return the tensors and A."""
    if isinstance(transitions, Tensor | np.ndarray):
        raise ValueError(
            "transitions: expected one tensor per layer, got one tensor of shape "
            f"{tuple(transitions.shape)}; for the table (S, A, S) of an ordinary MDP use "
            "LayeredMDP.from_tables(transition, horizon)"
        )
    tensors = tuple(map(as_tensor, transitions))
    if not tensors:
        raise ValueError("transitions: expected one tensor per layer, got none")
    first = tensors[0]
    for k, p in enumerate(tensors):
        name = f"transitions[{k}]"
        if not isinstance(p, Tensor) or not p.is_floating_point():
            kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
            raise ValueError(f"{name}: expected a floating-point tensor, got {kind}")
        if p.dtype != first.dtype or p.device != first.device:
            raise ValueError(
                f"{name}: is {p.dtype} on {p.device}, transitions[0] is {first.dtype} on "
                f"{first.device}; convert one of them"
            )
        if p.layout != torch.strided and (p.dim() != 2 or p.dense_dim() or 0 in p.shape):
            raise ValueError(
                f"{name}: expected a sparse tensor of shape (S_{k} * A, S_{k + 1}), got "
                f"{tuple(p.shape)}"
            )
        if p.layout != torch.strided:
            _check_indices(name, p)
        if p.layout == torch.strided and p.dim() < 3:
            hint = "; make it sparse, or give it three dimensions" if p.dim() == 2 else ""
            raise ValueError(
                f"{name}: expected shape (*batch, S_{k}, A, S_{k + 1}), got {tuple(p.shape)}{hint}"
            )
    num_actions = _count_actions(tensors, actions, initial)
    for k, p in enumerate(tensors):
        name = f"transitions[{k}]"
        if p.layout == torch.strided:
            if p.shape[-2] != num_actions or 0 in p.shape:
                expected = num_actions if k else "A"
                raise ValueError(
                    f"{name}: expected shape (*batch, S_{k}, {expected}, S_{k + 1}), got "
                    f"{tuple(p.shape)}"
                )
        elif p.shape[0] % num_actions:
            raise ValueError(
                f"{name}: expected a row for each of the {num_actions} actions of a state, got "
                f"{p.shape[0]} rows"
            )
        num_states = _num_states(p, num_actions)
        if k and num_states != tensors[k - 1].shape[-1]:
            raise ValueError(
                f"{name}: layer {k} has {num_states} states, but transitions[{k - 1}] leads to "
                f"{tensors[k - 1].shape[-1]}"
            )
        _broadcast(name, p.shape[:-3], *(other.shape[:-3] for other in tensors[:k]))
    last = tensors[-1]
    if last.shape[-1] != 1:
        num_states = _num_states(last, num_actions)
        expected = (
            f"(*batch, {num_states}, {num_actions}, 1)"
            if last.layout == torch.strided
            else f"({num_states * num_actions}, 1)"
        )
        raise ValueError(
            f"transitions[{len(tensors) - 1}]: the last layer must lead to the single terminal "
            f"state, shape {expected}, got {tuple(last.shape)}"
        )
    return tensors, num_actions


def _check_indices(name: str, p: Tensor) -> None:
    """Check the indices of a sparse tensor; torch would read memory out of bounds."""
    match p.layout:
        case torch.sparse_coo:
            rows, columns = indices(p)
        case torch.sparse_csr:
            rows, columns = p.crow_indices()[-1:] - len(p.values()), p.col_indices()
        case torch.sparse_csc:
            rows, columns = p.row_indices(), p.ccol_indices()[-1:] - len(p.values())
        case _:
            raise ValueError(
                f"{name}: expected the layout COO, CSR or CSC, got {p.layout}; convert it with "
                "p.to_sparse_csr()"
            )
    for what, index, size in (("row", rows, p.shape[0]), ("column", columns, p.shape[1])):
        wrong = ((index < 0) | (index >= size)).nonzero()
        if len(wrong):
            raise ValueError(
                f"{name}: the {what} index {int(index[wrong[0]])} is outside a tensor of shape "
                f"{tuple(p.shape)}"
            )


def _num_states(p: Tensor, num_actions: int) -> int:
    return p.shape[-3] if p.layout == torch.strided else p.shape[0] // num_actions


def _count_actions(
    tensors: tuple[Tensor, ...], actions: Tensor | None, initial: Tensor | None
) -> int:
    """A, which does not follow from the shape of a sparse tensor alone."""
    for p in tensors:
        if p.layout == torch.strided:
            return p.shape[-2] or 1  # zero is reported later, with the shapes
    if actions is not None and actions.dim() == 2 and actions.shape[-1]:
        return actions.shape[-1]
    first = tensors[0].shape[0]
    num_states = 1 if initial is None or not initial.dim() else initial.shape[-1]
    if len(tensors) > 1:
        first, num_states = tensors[1].shape[0], tensors[0].shape[1]
    if first % num_states:
        k = min(len(tensors) - 1, 1)
        raise ValueError(
            f"transitions[{k}]: expected A rows for each of the {num_states} states of layer {k}, "
            f"got {first} rows"
        )
    return first // num_states


def check_actions(mdp: LayeredMDP) -> None:
    """Check that every state has an action, and the shapes of masks."""
    expected, mask = (mdp.num_states, mdp.num_actions), mdp.actions
    if mask.dtype != torch.bool or tuple(mask.shape) != expected:
        raise ValueError(
            f"actions: expected a boolean mask of shape {expected}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    if mask.device != mdp.device:
        raise ValueError(
            f"actions: is on {mask.device}, the transitions are on {mdp.device}; move one of them"
        )
    empty = (~mask.any(-1)).nonzero()
    if len(empty):
        raise ValueError(
            f"actions: {mdp.locate(int(empty[0]))} has no action; give every state at least one"
        )
    if tuple(mdp.origin.shape) != (mdp.num_states,):
        raise ValueError(
            f"origin: expected shape ({mdp.num_states},), got {tuple(mdp.origin.shape)}"
        )


def check_distributions(mdp: LayeredMDP) -> None:
    """Check that every row is a distribution; masked rows are ignored."""
    size = mdp.layer_sizes[0]
    initial = mdp.initial
    if initial.dtype != mdp.dtype or initial.device != mdp.device or initial.shape[-1:] != (size,):
        raise ValueError(
            f"initial: expected a {mdp.dtype} tensor on {mdp.device} of shape ({size},), got "
            f"{initial.dtype} on {initial.device} of shape {tuple(initial.shape)}"
        )
    _broadcast(
        "initial",
        initial.shape[:-1],
        _broadcast("transitions", torch.Size(), *(layer.batch_shape for layer in mdp.layers)),
    )
    check_rows("initial", initial.detach(), None, ())
    for k, (layer, actions) in enumerate(zip(mdp.layers, mdp.split(mdp.actions, -2), strict=True)):
        layer.check(k, actions)


def _broadcast(argument: str, shape: torch.Size, *others: torch.Size) -> torch.Size:
    try:
        return broadcast(shape, *others)
    except RuntimeError:
        raise ValueError(
            f"{argument}: its batch shape {tuple(shape)} does not broadcast with "
            f"{[tuple(s) for s in others]}"
        ) from None


def row_tolerance(dtype: torch.dtype) -> float:
    """How much the sum of a row of probabilities may differ from one by rounding."""
    return 1e-9 if dtype == torch.float64 else 1e-5


def check_rows(argument: str, rows: Tensor, used: Tensor | None, words: tuple[str, ...]) -> None:
    """Check that rows are distributions.

    `words` name the last dimensions of a row's index; the dimensions before them are the batch.
    """
    check_entries(
        argument, rows, lambda entry: _unravel(entry, rows.shape), rows.sum(-1), used, words
    )


def check_entries(
    argument: str,
    entries: Tensor,
    locate: Callable[[int], Sequence[int]],
    sums: Tensor,
    used: Tensor | None,
    words: tuple[str, ...],
) -> None:
    """Check sparse entries, with the index `(*row, column)` of each, and their row sums."""

    def place(index: Sequence[int]) -> str:
        batch, own = index[: len(index) - len(words)], index[len(index) - len(words) :]
        element = [f"batch element {tuple(batch)}"] if batch else []
        where = ", ".join([*element, *(f"{word} {i}" for word, i in zip(words, own, strict=True))])
        return f"{argument}: {where}: " if where else f"{argument}: "

    improper = (~entries.isfinite() | (entries < 0)).flatten().nonzero()
    if len(improper):
        *row, column = locate(int(improper[0]))
        found = float(entries.flatten()[improper[0]])
        raise ValueError(
            f"{place(row)}the probability of {'next ' if words else ''}state {column} is {found}; "
            "expected a number in [0, 1]"
        )
    wrong = (sums - 1).abs() > row_tolerance(entries.dtype)
    wrong = (wrong if used is None else wrong & used).nonzero()
    if len(wrong):
        index = wrong[0].tolist()
        raise ValueError(
            f"{place(index)}the probabilities sum to {float(sums[tuple(index)]):.12g}; expected 1"
        )


def _unravel(entry: int, shape: torch.Size) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        entry, remainder = divmod(entry, size)
        index.insert(0, remainder)
    return index
