"""From torch objects to the arrays that the compiled kernels read, and the question whether they can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import in_forward_mode
from torch_occ.kernels.layout import (
    COMPLEMENT,
    PAIR,
    REST,
    STATE,
    Floats,
    Ints,
    Model,
    Rows,
)
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import SparseLayer
from torch_occ.mdp.validation import broadcast
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import TabularRegularizer
from torch_occ.regularizers.terms import Power, Term
from torch_occ.step.shaping import conserves_mass

_ARGUMENTS = {"pair": PAIR, "rest": REST, "state": STATE, "complement": COMPLEMENT}


def why_not_model(mdp: LayeredMDP) -> str | None:
    """The reason why the engine cannot work with this MDP, or None if it can."""
    if mdp.device.type != "cpu" or mdp.dtype != torch.float64:
        return f"the engine works in float64 on the CPU, the MDP is {mdp.dtype} on {mdp.device}"
    if mdp.batch_shape:
        return "the engine works with a single MDP, this is a batch"
    return None


def why_not(mdp: LayeredMDP, regularizer: Regularizer) -> str | None:
    """The reason why the engine cannot solve this step, or None if it can."""
    for leaf in regularizer.leaves():
        if not isinstance(leaf, TabularRegularizer):
            return f"{type(leaf).__name__} is not a table of elementary terms"
    return why_not_model(mdp)


def model_of(mdp: LayeredMDP) -> Model:
    """The MDP as arrays; transitions that are sparse stay so, and dense ones become so if that is expected to be faster."""

    def exists(name: str) -> np.ndarray:
        missing = mdp.missing[name]
        return (
            np.ones(tuple(mdp.actions.shape), dtype=np.bool_)
            if missing is None
            else ~missing.numpy()
        )

    start = np.array([0, *(layer.stop for layer in mdp.layer_slices)], dtype=np.int64)
    flags = np.stack([exists(name).reshape(-1) for name in ("pair", "rest", "complement")])
    next_state: Floats | Rows = rows_of(mdp) if prefers_rows(mdp) else _table_of(mdp)
    arrivals = np.zeros((0, 0)) if isinstance(next_state, Rows) else next_state.T.copy()
    initial = mdp.initial.detach().numpy().copy()
    return Model(mdp.num_actions, start, next_state, arrivals, flags, initial, conserves_mass(mdp))


def prefers_rows(mdp: LayeredMDP) -> bool:
    """Whether the engine reads only the probabilities that are not zero (torch_occ.kernels.conjugate) and does not factor whole layers
    (torch_occ.kernels.sweeps).

    Sparse transitions leave no choice. For dense ones, a model of both times in nanoseconds a Newton step, fitted to measurements from
    (3,3,3) to layers of 60 states; where they are close, factors it is.
    """
    if mdp.is_sparse:
        return True
    products = sum(
        m * n * (mdp.num_actions * n + m + n) for m, n in pairwise(mdp.layer_sizes)
    ) + sum(2 * n**3 for n in mdp.layer_sizes)
    entries = sum(int(layer.probabilities.count_nonzero()) for layer in mdp.layers[:-1])
    pairs = mdp.num_states * mdp.num_actions
    return 12 * entries + 110 * pairs < (0.25 * products + 150 * pairs) / 1.5


def _table_of(mdp: LayeredMDP) -> Floats:
    """Dense transitions of all layers, `(S * A, widest layer)`."""
    widest = max(mdp.layer_sizes)
    table = np.zeros((mdp.num_states, mdp.num_actions, widest))
    for here, p in zip(mdp.layer_slices[:-1], mdp.transitions[:-1], strict=True):
        table[here, :, : p.shape[-1]] = p.detach().numpy()
    return table.reshape(-1, widest)


def rows_of(mdp: LayeredMDP) -> Rows:
    """Sparse transitions of all layers. The last layer leads to the terminal state, which has no number."""
    starts, states, probabilities, count = (
        [np.zeros(1, dtype=np.uint64)],
        [np.zeros(0, dtype=np.uint32)],
        [np.zeros(0)],
        0,
    )
    for layer, there in zip(mdp.layers[:-1], mdp.layer_slices[1:], strict=True):
        if not isinstance(layer, SparseLayer):
            layer = SparseLayer.from_tensor(layer.dense.flatten(0, 1).to_sparse(), mdp.num_actions)
        starts.append((layer.pattern.starts[1:].numpy() + count).astype(np.uint64))
        states.append((layer.pattern.next.numpy() + there.start).astype(np.uint32))
        probabilities.append(layer.probabilities.detach().flatten().numpy())
        count += len(states[-1])
    last = np.full(mdp.layer_sizes[-1] * mdp.num_actions, count, dtype=np.uint64)
    return Rows(
        np.concatenate([*starts, last]), np.concatenate(states), np.concatenate(probabilities)
    )


def terms_of(regularizer: Regularizer, t: Tensor) -> list[Term]:
    """The elementary terms with their weights at t, as tensors that autograd follows."""
    found: list[Term] = []
    for part, weight in regularizer.parts(t):
        if not isinstance(
            part, TabularRegularizer
        ):  # `why_not` looked at the parts that there were
            raise RuntimeError(
                f"regularizer: {type(part).__name__} was added after the first use; make a new FTRLStep(mdp, regularizer)"
            )
        found += part.constant(weight)[0].terms
    return found


def kinds_of(terms: Sequence[Term]) -> tuple[Ints, Ints]:
    """Arguments and functions, `(K,)` each."""
    functions = [term.function.code for term in terms]
    return np.array([_ARGUMENTS[term.argument] for term in terms], dtype=np.int64), np.array(
        functions, dtype=np.int64
    )


def weights_of(terms: Sequence[Term]) -> Tensor:
    """Weights, `(*batch, K)`."""
    return _stack([term.weight for term in terms])


def exponents_of(terms: Sequence[Term]) -> Tensor:
    """Exponents of the powers, `(*batch, K)`; 0 for other functions."""
    return _stack(list_exponents(terms))


def list_exponents(terms: Sequence[Term]) -> list[Tensor | float]:
    """One for each term; 0 for functions other than powers."""
    return [term.function.p if isinstance(term.function, Power) else 0.0 for term in terms]


def _stack(values: Sequence[Tensor | float]) -> Tensor:
    """Scalars and `(*batch,)` tensors along a last dimension."""
    if not any(isinstance(x, Tensor) for x in values):
        return torch.tensor(values, dtype=torch.float64)
    tensors = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in values]
    batch = broadcast(*(x.shape for x in tensors))
    return torch.stack([x if x.shape == batch else x.expand(batch) for x in tensors], -1)


# -- tensors, arrays and numbers: a batch is rows, a single problem has plain numbers --------------


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
    values: list[Any] = (
        table.ravel().tolist()
        if not batch
        else list(table.swapaxes(1, 2).reshape(2 * table.shape[2], *batch))
    )
    return values


def shaped(bar: Any, x: Tensor, batch: torch.Size) -> Tensor:
    """The derivative in x, as a tensor of its shape."""
    return (
        summed(torch.from_numpy(np.broadcast_to(bar, batch).copy()), x)
        if batch
        else torch.from_numpy(np.array(bar))
    )


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
