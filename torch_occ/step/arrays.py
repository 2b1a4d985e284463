"""Conversion of torch objects to the arrays of the compiled kernels, and what these support."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import carries_derivative, in_forward_mode, versions_of
from torch_occ.engine.lanes import LANES
from torch_occ.engine.layout import (
    COMPLEMENT,
    PAIR,
    REST,
    STATE,
    Bools,
    Floats,
    Ints,
    Kinds,
    Model,
    Rows,
    Terms,
)
from torch_occ.engine.layout import NARROW as NARROW
from torch_occ.engine.psi import X_LOG_X
from torch_occ.mdp.layered import LayeredMDP, remembered
from torch_occ.mdp.layers import SparseLayer
from torch_occ.regularizers.base import Composition, Regularizer, Weights
from torch_occ.regularizers.terms import Weighted
from torch_occ.step.newton import conserves_mass
from torch_occ.step.ways import prefers_rows

#: The shape of the pairs for numbers that are the same for all pairs.
ONE = torch.Size((1, 1))

_ARGUMENTS = {"pair": PAIR, "rest": REST, "state": STATE, "complement": COMPLEMENT}


def model_of(mdp: LayeredMDP, *, dense: bool = False, steep: bool = False) -> Model:
    """Return the MDP as arrays; unless `dense`, transitions are sparse if `prefers_rows`."""

    def exists(name: str) -> np.ndarray:
        missing = mdp.missing[name]
        if missing is None:
            return np.ones(tuple(mdp.actions.shape), dtype=np.bool_)
        return ~missing.numpy()

    start = np.array([0, *(layer.stop for layer in mdp.layer_slices)], dtype=np.int64)
    flags = np.stack([exists(name).reshape(-1) for name in ("pair", "rest", "complement")])
    in_rows = not dense and prefers_rows(mdp, steep)
    next_state: Floats | Rows = rows_of(mdp) if in_rows else table_of(mdp)
    arrivals = np.zeros((0, 0)) if isinstance(next_state, Rows) else next_state.T.copy()
    initial = mdp.initial.detach().numpy().copy()
    return Model(mdp.num_actions, start, next_state, arrivals, flags, initial, conserves_mass(mdp))


def table_of(mdp: LayeredMDP) -> Floats:
    """Return dense transitions of all layers, `(*batch, S * A, widest layer)`."""
    widest, batch = max(mdp.layer_sizes), mdp.batch_shape
    table = np.zeros((*batch, mdp.num_states, mdp.num_actions, widest))
    for here, layer in zip(mdp.layer_slices[:-1], mdp.layers[:-1], strict=True):
        table[..., here, :, : layer.sizes[-1]] = layer.dense.detach().numpy()
    return table.reshape(*batch, -1, widest)


@remembered
def rows_of(mdp: LayeredMDP) -> Rows:
    """Return sparse transitions of all layers.

    Rows of the last layer are empty: it leads to the terminal state, which has no index.
    """
    starts = [np.zeros(1, dtype=np.uint64)]
    states = [np.zeros(0, dtype=np.uint32)]
    probabilities = [np.zeros(0)]
    count = 0
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


def kinds_of(terms: Sequence[Weighted]) -> Kinds:
    """Return the first fields of `Terms`: all but the exponents."""
    arguments = np.array([_ARGUMENTS[term.argument] for term in terms], dtype=np.int64)
    functions = np.array([term.function.code for term in terms], dtype=np.int64)
    return arguments, functions, True if (functions == X_LOG_X).all() else None


class WeightsOverTime:
    """The weights of psi as a function of t, for regularizers without batched parameters.

    Args:
        pairs: `(S, A)`.
    """

    def __init__(self, regularizer: Regularizer, pairs: torch.Size) -> None:
        self.composition = Composition(regularizer)
        self.pairs = pairs if regularizer.places() else ONE
        exponents = self._flat(self._weigh(torch.ones(1, dtype=torch.float64)).exponents, 1)[0]
        self.size = len(exponents)  # K or K * S * A
        self.terms = Terms(*kinds_of(self.composition.terms), exponents.numpy())
        #: Whether all weights are powers of t. They are not if a user wrote a schedule.
        self.are_powers = all(factor.key for factor in self.composition.factors[1:])

    def at(self, t: Tensor) -> Tensor:
        """Return the weights at times t `(n,)`, `(n, K or K * S * A)`."""
        return self._flat(self._weigh(t).terms, len(t))

    @torch.no_grad()
    def powers(self) -> Floats:
        """Return the weights at t = 1 and their powers of t, `(2, K or K * S * A)`."""
        assert self.are_powers
        one = torch.ones(1, dtype=torch.float64)
        values = self.composition.values(one)
        exponents = [
            sum((c * values[i] for i, c in term.weight.slopes), term.weight.time)
            for term in self.composition.terms
        ]
        return torch.cat([self.at(one), self._flat(exponents, 1)]).numpy()

    @torch.no_grad()
    def _weigh(self, t: Tensor) -> Weights:
        return self.composition.weigh(self.composition.values(t))

    def _flat(self, numbers: Sequence[Any], count: int) -> Tensor:
        """Return one row of numbers for every t: one per term, or one per term and pair."""
        found = torch.empty(count, len(numbers), *self.pairs, dtype=torch.float64)
        for k, x in enumerate(numbers):
            found[:, k] = x
        return found.reshape(count, -1)


# -- tensors, arrays and numbers: a batch is stored in rows, a single problem has plain numbers ----


def plain(x: Any) -> bool:
    """Return whether x is a tensor that kernels can read: dense, float64, on the CPU."""
    return (
        isinstance(x, Tensor)
        and x.dtype is torch.float64
        and x.is_cpu
        and x.layout is torch.strided
    )


#: Python makes `int | float` anew wherever it stands in a function, which takes time.
_NUMBERS = int | float


def number(x: Any) -> Any:
    """Return x as a number, or as an array for a batch; None if x is neither."""
    if type(x) is float:
        return x
    if isinstance(x, Tensor):
        if x.dim() == 0 and x.dtype is torch.float64 and x.is_cpu:
            return x.item()
        return x.detach().numpy() if plain(x) else None
    try:
        return float(x) if isinstance(x, _NUMBERS) else None
    except OverflowError:
        return None


def tabulate(values: list[Any], batch: torch.Size, pairs: torch.Size) -> Floats:
    """Return 2 K numbers or arrays in their spread form as one array for the kernels.

    It is `(2, N or 1, K)`, or `(2, N, K * S * A)` if `pairs` is not `ONE` but `(S, A)`; 1 if the
    batch shares the numbers.
    """
    if pairs is ONE and (not batch or all(type(x) is float for x in values)):
        return np.array(values).reshape(2, 1, -1)
    count = len(values) // 2
    table = np.empty((2, *batch, count, *pairs))
    for i, x in enumerate(values):
        table[i // count, ..., i % count, :, :] = x
    return table.reshape(2, batch.numel(), count * pairs.numel())


def untabulate(table: Floats, batch: torch.Size, pairs: torch.Size) -> list[Any]:
    """Return an array as from `tabulate`, `(n, N, ...)`, as n K numbers or arrays.

    An array has the shape `(*batch, *pairs)`.
    """
    if not batch and pairs is ONE:
        numbers: list[Any] = table.ravel().tolist()
        return numbers
    count = table.shape[2] // pairs.numel()
    table = table.reshape(len(table), batch.numel(), count, pairs.numel()).swapaxes(1, 2)
    return list(table.reshape(len(table) * count, *batch, *pairs))


def shaped(bar: Any, x: Tensor, is_time: bool, batch: torch.Size, pairs: torch.Size) -> Tensor:
    """Return the derivative `bar` with respect to x, of its shape.

    Both broadcast to `(*batch, *pairs)`, or x is t, `(*some of batch,)`.
    """
    if not batch and pairs is ONE:
        return torch.from_numpy(np.full(x.shape, bar) if x.dim() else np.array(bar))
    whole = torch.empty(*batch, *pairs, dtype=torch.float64)
    whole.numpy()[...] = bar
    return (whole.sum((-2, -1)) if is_time else whole).sum_to_size(x.shape)


def summed(bar: Tensor, x: Tensor) -> Tensor:
    """Sum a derivative over the dimensions along which x was broadcast."""
    return bar if bar.shape == x.shape else bar.sum_to_size(x.shape)


def rows(x: Tensor, batch: torch.Size, event_dims: int) -> Floats:
    """Return `(*some of batch, S, ...)` as a contiguous array `(N * S or S, ...)`."""
    x = x.detach() if x.requires_grad or in_forward_mode() else x
    split = x.dim() - event_dims
    if split and x.shape[:split] != batch and x.shape[:split].numel() > 1:
        x = x.expand(*batch, *x.shape[split:])
    array: Floats = (x if x.is_contiguous() else x.contiguous()).numpy()
    return array.reshape(-1, *x.shape[split + 1 :]) if split else array


# -- The MDPs of a batch of steps as the kernels read them: one for all elements, or one for ea ----


class MDPArrays:
    """An MDP or a batch of MDPs.

    Args:
        mdp: supported, see `why_not_world`.
        steep: as in `prefers_rows`.
    """

    def __init__(self, mdp: LayeredMDP, steep: bool) -> None:
        self.mdp, self.batch_shape, self.steep = mdp, mdp.batch_shape, steep
        differentiated = carries_derivative(*mdp.probabilities)
        # The tensors that may be differentiated: none, or the probabilities.
        self.tensors: tuple[Tensor, ...] = mdp.probabilities if differentiated else ()
        self._read = mdp.probabilities
        self._versions = versions_of(self._read)

    @property
    def is_current(self) -> bool:
        """Whether no probability was changed in place since, nor may be differentiated."""
        return not self.tensors and versions_of(self._read) == self._versions

    @cached_property
    def model(self) -> Model:
        """The MDP as arrays; of a batch, the first one."""
        if not self.batch_shape:
            return model_of(self.mdp, steep=self.steep)
        dims = (1, *(layer.event_dims for layer in self.mdp.layers))
        pairs = zip(self.mdp.probabilities, dims, strict=True)
        first = [p.detach().reshape(-1, *p.shape[p.dim() - dim :])[0] for p, dim in pairs]
        return model_of(self.mdp.with_probabilities(*first), dense=True)

    @cached_property
    def tables(self) -> tuple[Floats, Floats, Bools]:
        """Of a batch of M: transitions `(M, S * A, widest)`, initial distributions, `conserved`."""
        count, (num_pairs, widest) = self.batch_shape.numel(), self.model.next_state.shape
        next_state = table_of(self.mdp).reshape(count, num_pairs, widest)
        first = self.mdp.initial.detach().expand(*self.batch_shape, -1)
        initial: Floats = first.reshape(count, -1).contiguous().numpy()
        # The same rule as in torch_occ.step.newton.conserves_mass.
        width = np.repeat(self.mdp.layer_sizes[1:], self.mdp.layer_sizes[:-1])
        bound = (64 + width.repeat(self.mdp.num_actions)) * np.finfo(np.float64).eps
        off = np.abs(next_state[:, : len(bound)].sum(-1) - 1) > bound
        exists = self.model.exists[0, : len(bound)]
        return next_state, initial, ~(off & exists).any(-1)

    def owners(self, batch: torch.Size) -> Ints:
        """The MDP of every element of a batch."""
        numbers = np.arange(self.batch_shape.numel()).reshape(self.batch_shape)
        return np.broadcast_to(numbers, batch).flatten()  # always a copy: one type for kernels

    def pull_back(
        self, q: Tensor, v: Tensor, u: Tensor, m: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return derivatives with respect to the probabilities, of their shapes.

        (-u, m) is lambda of torch_occ.step.implicit. The equations contain P in -E'v and E q, and
        the initial distribution in b.
        """
        slices, layers = self.mdp.layer_slices, self.mdp.layers
        found: list[Tensor | None] = [None] * len(needed)
        if needed[0]:
            found[0] = summed(m[..., slices[0]], self.mdp.initial)
        for k, layer in enumerate(layers):
            if needed[k + 1]:
                bar = torch.zeros_like(layer.probabilities)
                if k + 1 < len(layers):
                    here, there = slices[k], slices[k + 1]
                    bar = q[..., here, :, None] * m[..., None, None, there]
                    bar = bar + u[..., here, :, None] * v[..., None, None, there]
                    bar = summed(bar, layer.probabilities)
                found[k + 1] = bar
        return found


@lru_cache(16)
def plain_order(count: int, lanes: int = LANES) -> Ints:
    """The elements of a batch in groups; copies of the last element fill the last group."""
    return np.minimum(np.arange(-(-count // lanes) * lanes), count - 1)


def order_of(kinds: Any, lanes: int = LANES) -> Ints:
    """`plain_order` for each kind of elements, one after the other."""
    parts = [(kinds == kind).nonzero()[0] for kind in np.unique(kinds)]
    return np.concatenate([np.arange(0), *(part[plain_order(len(part), lanes)] for part in parts)])
