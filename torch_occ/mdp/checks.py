"""The conditions that a valid layered MDP satisfies.

Every error names the argument, the place and the value, and says what was expected.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import indices

if TYPE_CHECKING:
    from torch_occ.mdp.layered import LayeredMDP


def unexpected(name: str, expected: object, found: object) -> ValueError:
    """The error of an argument that is not what was expected."""
    return ValueError(f"{name}: expected {expected}, got {found}")


def unwritten(part: object, method: str) -> NotImplementedError:
    """The error of a method that a subclass has to write, with its parameters and its result."""
    return NotImplementedError(f"{type(part).__name__}: write {method}")


def check_that(
    fine: bool, name: str, expected: object, found: object, error: type[Exception] = ValueError
) -> None:
    """Raise the error of an argument that is not what was expected, unless it is fine."""
    if not fine:
        raise error(f"{name}: expected {expected}, got {found}")


def check_type(name: str, x: Any, kind: Any, expected: object, advice: str = "") -> None:
    """Raise a TypeError unless x is an object of these classes; the advice follows what it is."""
    found = f"the class {x.__name__}; make an object of it" if isinstance(x, type) else ""
    found = found or f"{type(x).__name__}{advice}"
    check_that(isinstance(x, kind), name, expected, found, TypeError)


def check_kind(name: str, x: Any, kind: type, example: str = "") -> None:
    """`check_type` for a class of this package."""
    check_type(name, x, kind, f"an occ.{kind.__name__}{example}")


def whole(name: str, value: Any) -> int:
    """The value as a positive int; an error names the argument if it is not a whole number."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
    check_that(number >= 1, name, "at least 1", number)
    check_that(number < 2**63, name, "an integer below 2**63", number)
    return number


def integers(name: str, values: Any) -> tuple[int, ...]:
    """The values as ints; an error names the argument if it is no sequence of integers."""
    shown = values.tolist() if isinstance(values, Tensor) else values
    shown = list(shown) if isinstance(shown, Iterable) else shown
    try:
        if not any(isinstance(value, bool) for value in shown):  # a mask is no list of states
            return tuple(map(operator.index, shown))
    except TypeError:
        pass
    raise TypeError(f"{name}: expected integers, for example range(1, 9), got {shown!r}")


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, without its tens of microseconds if shapes are equal or ones."""
    distinct = {shape for shape in shapes if shape}
    if len(distinct) > 1:
        largest = max(distinct, key=lambda shape: (len(shape), math.prod(shape)))
        distinct = {shape for shape in distinct if shape == largest or {*shape} != {1}}
    if len(distinct) <= 1:
        return torch.Size(*distinct)
    return torch.broadcast_shapes(*distinct)


def check_dtype(name: str, x: Any, like: Any, owner: str) -> None:
    """Raise a ValueError unless x has the dtype and the device of `like`, which is `owner`."""
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(
            f"{name}: is {x.dtype} on {x.device}, {owner} {like.dtype} on {like.device}; convert "
            "one of them"
        )


#: What a user may give as a table.
Table = Tensor | np.ndarray[Any, Any]


def as_tensor(x: Any) -> Any:
    """A copy of a NumPy array as a tensor; anything else as it is."""
    return torch.tensor(x) if isinstance(x, np.ndarray) and x.ndim else x


def check_table(name: str, x: Tensor, mdp: LayeredMDP) -> Tensor:
    """Return a tensor `(*batch, S, A)` in the MDP's number type, or raise an error."""
    shape = f"shape (*batch, {mdp.num_states}, {mdp.num_actions})"
    check_type(name, x, Tensor, f"a tensor of {shape}")
    check_that(x.shape[-2:] == mdp.actions.shape, name, shape, tuple(x.shape))
    return x if x.dtype is mdp.dtype else x.to(mdp.dtype)


def check_shapes(
    transitions: Sequence[Table], actions: Tensor | None, initial: Tensor | None
) -> tuple[tuple[Tensor, ...], int]:
    """Check that layers fit together, with one dtype and device; return the tensors and A."""
    if isinstance(transitions, Tensor | np.ndarray):
        advice = "for the table (S, A, S) of an ordinary MDP use LayeredMDP.from_tables"
        found = f"one tensor of shape {tuple(transitions.shape)}; {advice}(transition, horizon)"
        raise unexpected("transitions", "one tensor per layer", found)
    tensors = tuple(map(as_tensor, transitions))
    check_that(bool(tensors), "transitions", "one tensor per layer", "none")
    first = tensors[0]
    for k, p in enumerate(tensors):
        name = f"transitions[{k}]"
        kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
        check_that(getattr(kind, "is_floating_point", False), name, "a floating-point tensor", kind)
        check_dtype(name, p, first, "transitions[0] is")
        if p.layout != torch.strided:
            fine = p.dim() == 2 and not p.dense_dim() and 0 not in p.shape
            shape = f"a sparse tensor of shape (S_{k} * A, S_{k + 1})"
            check_that(fine, name, shape, tuple(p.shape))
            _check_indices(name, p)
        elif p.dim() < 3:
            hint = "; make it sparse, or give it three dimensions" if p.dim() == 2 else ""
            expected = f"shape (*batch, S_{k}, A, S_{k + 1})"
            raise unexpected(name, expected, f"{tuple(p.shape)}{hint}")
    num_actions = _count_actions(tensors, actions, initial)
    num_next = None
    for k, p in enumerate(tensors):
        name, dense = f"transitions[{k}]", p.layout == torch.strided
        fine = not dense or (p.shape[-2] == num_actions and 0 not in p.shape)
        shape = f"shape (*batch, S_{k}, {num_actions if k else 'A'}, S_{k + 1})"
        check_that(fine, name, shape, tuple(p.shape))
        rows = f"a row for each of the {num_actions} actions of a state"
        check_that(dense or not p.shape[0] % num_actions, name, rows, f"{p.shape[0]} rows")
        num_states = p.shape[-3] if dense else p.shape[0] // num_actions
        if k and num_states != num_next:
            raise ValueError(
                f"{name}: layer {k} has {num_states} states, but transitions[{k - 1}] leads to "
                f"{num_next}"
            )
        num_next = p.shape[-1]
        _broadcast(name, p.shape[:-3], *(other.shape[:-3] for other in tensors[:k]))
    if num_next != 1:
        pairs = f"*batch, {num_states}, {num_actions}" if dense else num_states * num_actions
        raise ValueError(
            f"{name}: the last layer must lead to the single terminal state, shape ({pairs}, 1), "
            f"got {tuple(p.shape)}"
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
            advice = f"{p.layout}; convert it with p.to_sparse_csr()"
            raise unexpected(name, "the layout COO, CSR or CSC", advice)
    for what, index, size in (("row", rows, p.shape[0]), ("column", columns, p.shape[1])):
        for i in index[(index < 0) | (index >= size)][:1].tolist():
            raise ValueError(
                f"{name}: the {what} index {i} is outside a tensor of shape {tuple(p.shape)}"
            )


def _count_actions(
    tensors: tuple[Tensor, ...], actions: Tensor | None, initial: Tensor | None
) -> int:
    """A, which does not follow from the shape of a sparse tensor alone."""
    for p in tensors:
        if p.layout == torch.strided:
            return p.shape[-2] or 1  # zero is reported later, with the shapes
    if actions is not None and actions.dim() == 2 and actions.shape[-1]:
        return actions.shape[-1]
    k = min(len(tensors) - 1, 1)
    num_states = 1 if initial is None or not initial.dim() else initial.shape[-1]
    num_states, rows = tensors[0].shape[1] if k else num_states, tensors[k].shape[0]
    expected = f"A rows for each of the {num_states} states of layer {k}"
    check_that(not rows % num_states, f"transitions[{k}]", expected, f"{rows} rows")
    return rows // num_states


def check_actions(mdp: LayeredMDP) -> None:
    """Check that every state has an action, and the shapes of masks."""
    expected, mask = (mdp.num_states, mdp.num_actions), mdp.actions
    fine = (mask.dtype, mask.shape, mask.device) == (torch.bool, expected, mdp.device)
    found = f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}"
    check_that(fine, "actions", f"a boolean mask of shape {expected} on {mdp.device}", found)
    for state in (~mask.any(-1)).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"actions: {mdp.locate(state)} has no action; give every state at least one"
        )
    origin = tuple(mdp.origin.shape)
    check_that(origin == (mdp.num_states,), "origin", f"shape ({mdp.num_states},)", origin)


def check_distributions(mdp: LayeredMDP) -> None:
    """Check that every row is a distribution; masked rows are ignored."""
    size, initial = mdp.layer_sizes[0], mdp.initial
    kind = (initial.dtype, initial.device, initial.shape[-1:])
    found = f"{initial.dtype} on {initial.device} of shape {tuple(initial.shape)}"
    expected = f"a {mdp.dtype} tensor on {mdp.device} of shape ({size},)"
    check_that(kind == (mdp.dtype, mdp.device, (size,)), "initial", expected, found)
    _broadcast("initial", initial.shape[:-1], broadcast(*(p.batch_shape for p in mdp.layers)))
    check_rows("initial", initial.detach())
    for k, (layer, actions) in enumerate(zip(mdp.layers, mdp.split(mdp.actions, -2), strict=True)):
        layer.check(k, actions)


def _broadcast(argument: str, shape: torch.Size, *others: torch.Size) -> None:
    try:
        broadcast(shape, *others)
    except RuntimeError:
        raise ValueError(
            f"{argument}: its batch shape {tuple(shape)} does not broadcast with "
            f"{[tuple(s) for s in others]}"
        ) from None


def row_tolerance(dtype: torch.dtype) -> float:
    """How much the sum of a row of probabilities may differ from one by rounding."""
    return 1e-9 if dtype == torch.float64 else 1e-5


def check_rows(
    argument: str,
    entries: Tensor,
    words: tuple[str, ...] = (),
    *,
    sums: Tensor | None = None,
    used: Tensor | None = None,
    places: Sequence[Tensor] = (),
) -> None:
    """Check that rows are distributions: entries `(*batch, *row, n)`, or those of sparse rows.

    Args:
        words: what the numbers of a row's index count; those before them are the batch.
        sums: the sum of each row, for sparse rows.
        used: which rows matter; all by default.
        places: of sparse entries, the state, the action and the next state, `(n,)` each.
    """

    def place(index: Sequence[int]) -> str:
        batch, own = index[: len(index) - len(words)], index[len(index) - len(words) :]
        element = [f"batch element {tuple(batch)}"] if batch else []
        where = ", ".join([*element, *(f"{word} {i}" for word, i in zip(words, own, strict=True))])
        return f"{argument}: {where}: " if where else f"{argument}: "

    improper = (~entries.isfinite() | (entries < 0)).nonzero()
    if len(improper):
        index = improper[0].tolist()
        *row, column = [int(x[index[-1]]) for x in places] or index
        raise ValueError(
            f"{place(row)}the probability of {'next ' if words else ''}state {column} is "
            f"{float(entries[tuple(improper[0])])}; expected a number in [0, 1]"
        )
    sums = entries.sum(-1) if sums is None else sums
    wrong = (sums - 1).abs() > row_tolerance(entries.dtype)
    wrong = (wrong if used is None else wrong & used).nonzero()
    if len(wrong):
        index = wrong[0].tolist()
        raise ValueError(
            f"{place(index)}the probabilities sum to {float(sums[tuple(index)]):.12g}; expected 1"
        )
