"""What a valid layered MDP is. Every error names the argument, the place and the value, and says what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_occ.mdp import LayeredMDP


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, which takes tens of microseconds, for the many times when there is nothing to do."""
    distinct = {shape for shape in shapes if shape}
    if len(distinct) <= 1:
        return torch.Size(*distinct)
    return torch.broadcast_shapes(*distinct)


def check_shapes(transitions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Layers fit together, and there is one number type on one device."""
    tensors = tuple(transitions)
    if not tensors:
        raise ValueError("transitions: expected one tensor a layer, got none")
    first = tensors[0]
    for k, p in enumerate(tensors):
        name = f"transitions[{k}]"
        if not isinstance(p, Tensor) or not p.is_floating_point():
            kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
            raise ValueError(f"{name}: expected a floating-point tensor, got {kind}")
        if p.dtype != first.dtype or p.device != first.device:
            raise ValueError(f"{name}: is {p.dtype} on {p.device}, transitions[0] is {first.dtype} on {first.device}; convert one of them")
        if p.dim() < 3 or p.shape[-2] != first.shape[-2] or 0 in p.shape:
            num_actions = first.shape[-2] if k else "A"
            raise ValueError(f"{name}: expected shape (*batch, S_{k}, {num_actions}, S_{k + 1}), got {tuple(p.shape)}")
        if k and p.shape[-3] != tensors[k - 1].shape[-1]:
            raise ValueError(f"{name}: layer {k} has {p.shape[-3]} states, but transitions[{k - 1}] leads to {tensors[k - 1].shape[-1]}")
        _broadcast(name, p.shape[:-3], *(other.shape[:-3] for other in tensors[:k]))
    last = tensors[-1]
    if last.shape[-1] != 1:
        raise ValueError(
            f"transitions[{len(tensors) - 1}]: the last layer must lead to the single terminal state, "
            f"shape (*batch, {last.shape[-3]}, {last.shape[-2]}, 1), got {tuple(last.shape)}"
        )
    return tensors


def check_actions(mdp: LayeredMDP) -> None:
    """Every state has an action."""
    expected, mask = (mdp.num_states, mdp.num_actions), mdp.actions
    if mask.dtype != torch.bool or tuple(mask.shape) != expected:
        raise ValueError(f"actions: expected a boolean mask of shape {expected}, got {mask.dtype} of shape {tuple(mask.shape)}")
    if mask.device != mdp.device:
        raise ValueError(f"actions: is on {mask.device}, the transitions are on {mdp.device}; move one of them")
    empty = (~mask.any(-1)).nonzero()
    if len(empty):
        raise ValueError(f"actions: {mdp.locate(int(empty[0]))} has no action; give every state at least one")
    if tuple(mdp.origin.shape) != (mdp.num_states,):
        raise ValueError(f"origin: expected shape ({mdp.num_states},), got {tuple(mdp.origin.shape)}")


def check_probabilities(mdp: LayeredMDP) -> None:
    """Every row is a distribution; masked rows are ignored."""
    size = mdp.layer_sizes[0]
    initial = mdp.initial
    if initial.dtype != mdp.dtype or initial.device != mdp.device or initial.shape[-1:] != (size,):
        raise ValueError(
            f"initial: expected a {mdp.dtype} tensor on {mdp.device} of shape ({size},), "
            f"got {initial.dtype} on {initial.device} of shape {tuple(initial.shape)}"
        )
    _broadcast("initial", initial.shape[:-1], _broadcast("transitions", torch.Size(), *(p.shape[:-3] for p in mdp.transitions)))
    check_rows("initial", initial.detach(), None, ())
    for k, (transition, actions) in enumerate(zip(mdp.transitions, mdp.split(mdp.actions, -2), strict=True)):
        check_rows(f"transitions[{k}]", transition.detach(), actions, (f"layer {k}, state", "action"))


def _broadcast(argument: str, shape: torch.Size, *others: torch.Size) -> torch.Size:
    try:
        return broadcast(shape, *others)
    except RuntimeError:
        raise ValueError(f"{argument}: its batch shape {tuple(shape)} does not broadcast with {[tuple(s) for s in others]}") from None


def row_tolerance(dtype: torch.dtype) -> float:
    """How far from one the sum of a row of probabilities may be by rounding."""
    return 1e-9 if dtype == torch.float64 else 1e-5


def check_rows(argument: str, rows: Tensor, used: Tensor | None, words: tuple[str, ...]) -> None:
    """Rows are distributions. `words` name the last dimensions of a row's index; what comes before them is the batch."""

    def place(index: list[int]) -> str:
        batch, own = index[: len(index) - len(words)], index[len(index) - len(words) :]
        element = [f"batch element {tuple(batch)}"] if batch else []
        where = ", ".join([*element, *(f"{word} {i}" for word, i in zip(words, own, strict=True))])
        return f"{argument}: {where}: " if where else f"{argument}: "

    improper = (~rows.isfinite() | (rows < 0)).nonzero()
    if len(improper):
        *row, column = index = improper[0].tolist()
        found = float(rows[tuple(index)])
        raise ValueError(f"{place(row)}the probability of {'next ' if words else ''}state {column} is {found}; expected a number in [0, 1]")
    sums = rows.sum(-1)
    wrong = (sums - 1).abs() > row_tolerance(rows.dtype)
    wrong = (wrong if used is None else wrong & used).nonzero()
    if len(wrong):
        index = wrong[0].tolist()
        raise ValueError(f"{place(index)}the probabilities sum to {float(sums[tuple(index)]):.12g}; expected 1")


Backend = Literal["auto", "torch", "engine"]


def check_backend(backend: Backend) -> Backend:
    """One of the three."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected auto, torch or engine, got {backend!r}")
    return backend
