"""One layer of transitions, dense or sparse: its two maps, and sums in a fixed order.

    arrive    (P'x)(s') = sum_{s, a} P(s' | s, a) x(s, a)        the mass that arrives
    ahead     (P v)(s, a) = sum_{s'} P(s' | s, a) v(s')          the expected next value

and `arrive_logs`, the first map on logarithms. Occupancy measures need nothing else of P, so its
storage is decided here: `DenseLayer` holds a table, `SparseLayer` the probabilities that are not
zero. The rest of the package uses only these maps, and one differentiable tensor of
`probabilities`.

The last bits of a matrix product depend on the order of its sums, which a library chooses by the
processor, the size of the batch, the place in memory and the number of threads. With `in_order`, it
is the order of the entries. Every computation that promises the same bits for a seed alone and
among others (docs/performance.md) uses it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torch_occ._support.private import has_tangent, inside_transform, versions_of
from torch_occ.mdp.checks import broadcast, check_rows

#: The largest number of products in memory, unless one batch element has more.
_MOST = 1 << 20


def running_total(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, from the first entry to the last, as a running sum."""
    return x.cumsum(dim).select(dim, -1)


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """A table `(*batch, S, A, S')`."""

    probabilities: Tensor

    #: The dimensions of `probabilities` after the batch shape.
    event_dims = 3

    @property
    def sizes(self) -> tuple[int, int, int]:
        """S, A, S'."""
        return tuple(self.probabilities.shape[-3:])  # type: ignore[return-value]

    @property
    def batch_shape(self) -> torch.Size:
        return self.probabilities.shape[:-3]

    @property
    def dense(self) -> Tensor:
        """The table `(*batch, S, A, S')`."""
        return self.probabilities

    tensor = dense  # the transitions in the form in which the user gave them

    def arrive(self, x: Tensor, in_order: bool = False) -> Tensor:
        """P'x: `(*batch, S, A)` -> `(*batch, S')`."""
        rows, x = self.probabilities.flatten(-3, -2), x.flatten(-2)
        if in_order:
            return self._in_parts(x, lambda part: running_total(rows * part.unsqueeze(-1), -2))
        return x @ rows if rows.dim() == 2 else (x.unsqueeze(-2) @ rows).squeeze(-2)

    def arrive_logs(self, x: Tensor) -> Tensor:
        """log P' e^x without underflow: `(*batch, S, A)` -> `(*batch, S')`."""
        rows, x = self.probabilities.flatten(-3, -2), x.flatten(-2).unsqueeze(-1)
        largest = torch.where(rows > 0, x, -torch.inf).amax(-2).detach()
        relative = (x - largest.unsqueeze(-2)).clamp(max=largest_exponent(x.dtype))
        return largest + (rows * relative.exp()).sum(-2).log()

    def ahead(self, v: Tensor, in_order: bool = False) -> Tensor:
        """P v: `(*batch, S')` -> `(*batch, S, A)`."""
        rows = self.probabilities.flatten(-3, -2)
        if in_order:
            found = self._in_parts(v, lambda part: running_total(rows * part.unsqueeze(-2), -1))
        else:  # if P has no batch shape, one product serves a whole batch of v
            found = v @ rows.mT if rows.dim() == 2 else (rows @ v.unsqueeze(-1)).squeeze(-1)
        return found.reshape(*found.shape[:-1], *self.sizes[:2])

    def _in_parts(self, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply `function` to x `(*batch, n)` in parts, so that the products fit into memory."""
        batch, each = x.shape[:-1], self.probabilities.numel()
        if self.batch_shape or batch.numel() * each <= _MOST:
            return function(x)
        parts = x.flatten(0, -2).split(max(1, _MOST // each))
        return torch.cat([function(part) for part in parts]).unflatten(0, batch)

    def draw(self, state: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
        """Draw next states `(N,)` from uniform numbers."""
        return invert(self._cumulative[state, action], uniform)

    @cached_property
    def _cumulative(self) -> Tensor:
        return self.probabilities.cumsum(-1)

    def rows(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        """The next states of pairs `(N,)` s * A + a, and their probabilities, `(N, K)` each.

        Where a pair has fewer than K successors, others have the probability zero.
        """
        shares = self.probabilities.flatten(0, 1)[pair]
        return torch.arange(shares.shape[-1], device=pair.device).expand_as(shares), shares

    def with_probabilities(self, probabilities: Tensor) -> DenseLayer:
        """The same layer with other probabilities."""
        return DenseLayer(probabilities)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> DenseLayer:
        """The same layer with every tensor converted."""
        return DenseLayer(function(self.probabilities))

    def mask(self, actions: Tensor) -> DenseLayer:
        """Set the probabilities of pairs that do not exist to zero."""
        return DenseLayer(torch.where(actions.unsqueeze(-1), self.probabilities, 0.0))

    def restrict(self, here: Tensor, there: Tensor) -> Tensor:
        """The transitions between some states, by masks `(S,)` and `(S',)`."""
        return self.probabilities[..., here, :, :][..., there]

    def check(self, k: int, actions: Tensor) -> None:
        """Raise a ValueError that names the first row that is not a distribution."""
        words = (f"layer {k}, state", "action")
        check_rows(f"transitions[{k}]", self.probabilities.detach(), words, used=actions)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The positions of the probabilities of a sparse layer, by pair, then by next state."""

    pair: Tensor  # (nnz,) int32, s * A + a
    next: Tensor  # (nnz,) int32
    sizes: tuple[int, int, int]  # S, A, S'

    @property
    def shape(self) -> tuple[int, int]:
        """S * A, S'."""
        return self.sizes[0] * self.sizes[1], self.sizes[2]

    @cached_property
    def starts(self) -> Tensor:
        """The index of each pair's first entry, and the number of entries, `(S * A + 1,)`."""
        return _starts(self.pair, self.shape[0])

    @cached_property
    def by_next(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transposed order: a permutation of the entries, their pairs, and the starts."""
        order = torch.argsort(self.next, stable=True)
        return order, self.pair[order], _starts(self.next[order], self.sizes[2])


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """The probabilities `(*batch, nnz)` of a pattern; given as a sparse tensor `(S * A, S')`.

    Plain numbers are multiplied with P and P' in compressed rows, by torch's sparse library.
    Derivatives, transforms and batches of probabilities use gathers and scatters instead, which
    torch can differentiate.
    """

    pattern: Pattern
    probabilities: Tensor

    event_dims = 1

    @classmethod
    def from_tensor(cls, tensor: Tensor, num_actions: int) -> SparseLayer:
        """A layer from a sparse tensor of any layout; entries that occur twice add up."""
        coo = (tensor if tensor.layout == torch.sparse_coo else tensor.to_sparse_coo()).coalesce()
        sizes = (tensor.shape[0] // num_actions, num_actions, tensor.shape[1])
        pair, following = coo.indices().to(torch.int32)
        return cls(Pattern(pair, following, sizes), coo.values())

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.pattern.sizes

    @property
    def batch_shape(self) -> torch.Size:
        return self.probabilities.shape[:-1]

    @property
    def tensor(self) -> Tensor:
        of = self.pattern
        index = torch.stack([of.pair, of.next]).long()
        return torch.sparse_coo_tensor(
            index, self.probabilities.clone(), of.shape, is_coalesced=True, check_invariants=False
        )

    @property
    def dense(self) -> Tensor:
        index = self.pattern.pair.long() * self.sizes[2] + self.pattern.next
        empty = self.probabilities.new_zeros(*self.batch_shape, math.prod(self.sizes))
        return empty.index_add(-1, index, self.probabilities).unflatten(-1, self.sizes)

    def arrive(self, x: Tensor, in_order: bool = False) -> Tensor:
        x, of = x.flatten(-2), self.pattern
        if not in_order and self._plain(x):
            return _multiply(self._into, x)
        return self._scatter(x, of.pair, of.next, of.shape[1], in_order)

    def arrive_logs(self, x: Tensor) -> Tensor:
        p, following = self.probabilities, self.pattern.next.long()
        x = x.flatten(-2).index_select(-1, self.pattern.pair)
        x = x.expand(broadcast(x.shape, p.shape))
        index, fixed = following.expand(x.shape), torch.where(p > 0, x, -torch.inf).detach()
        largest = fixed.new_full((*x.shape[:-1], self.sizes[2]), -torch.inf)
        largest = largest.scatter_reduce(-1, index, fixed, "amax")
        relative = (x - largest.gather(-1, index)).clamp(max=largest_exponent(x.dtype))
        found = torch.zeros_like(largest).index_add(-1, following, p * relative.exp())
        return largest + found.log()

    def ahead(self, v: Tensor, in_order: bool = False) -> Tensor:
        of = self.pattern
        if not in_order and self._plain(v):
            return _multiply(self._out_of, v).unflatten(-1, self.sizes[:2])
        found = self._scatter(v, of.next, of.pair, of.shape[0], in_order)
        return found.unflatten(-1, self.sizes[:2])

    def _scatter(
        self, x: Tensor, source: Tensor, target: Tensor, size: int, by_rows: bool
    ) -> Tensor:
        """Add x[source] * probability to the target: `(*batch, m)` -> `(*batch, size)`."""
        if by_rows and x.dim() > 1 and not self.batch_shape:  # torch has a faster loop for vectors
            rows = [self._scatter(row, source, target, size, False) for row in x.flatten(0, -2)]
            return torch.stack(rows).unflatten(0, x.shape[:-1])
        seen = self.probabilities * x.index_select(-1, source)
        return seen.new_zeros(*seen.shape[:-1], size).index_add(-1, target, seen)

    def _plain(self, x: Tensor) -> bool:
        """Whether compressed rows serve: one MDP, no derivative and no transform.

        They are forgotten if the probabilities were changed in place since.
        """
        p = self.probabilities
        recorded = torch.is_grad_enabled() and (x.requires_grad or p.requires_grad)
        moving = recorded or inside_transform() or has_tangent(x) or has_tangent(p)
        if moving or p.numel() != p.shape[-1] or p.dim() > x.dim():
            return False
        versions, own = versions_of([p]), self.__dict__
        if own.setdefault("_versions", versions) != versions:
            own.pop("_out_of", None), own.pop("_into", None)
            own["_versions"] = versions
        return True

    @cached_property
    def _out_of(self) -> Tensor:
        """P in compressed rows."""
        of = self.pattern
        return _compressed(of.starts, of.next, self.probabilities, of.shape)

    @cached_property
    def _into(self) -> Tensor:
        """P' in compressed rows."""
        order, pair, starts = self.pattern.by_next
        values = self.probabilities.flatten()[order]
        return _compressed(starts, pair, values, self.pattern.shape[::-1])

    def __getstate__(self) -> dict[str, Any]:
        """The state without caches, because torch cannot copy compressed tensors."""
        return {"pattern": self.pattern, "probabilities": self.probabilities}

    def draw(self, state: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
        following, shares = self.rows(state * self.sizes[1] + action)
        chosen = invert(shares.cumsum(-1), uniform)
        return following.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)

    def rows(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.pattern.starts[pair].long(), self.pattern.starts[pair + 1].long()
        # (N, most successors)
        entries = first.unsqueeze(-1) + torch.arange(int((end - first).max()), device=pair.device)
        exists = entries < end.unsqueeze(-1)
        entries = torch.where(exists, entries, 0)
        shares = torch.where(exists, self.probabilities[entries], 0.0)
        return self.pattern.next[entries].long(), shares

    def with_probabilities(self, probabilities: Tensor) -> SparseLayer:
        return SparseLayer(self.pattern, probabilities)

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> SparseLayer:
        pattern = Pattern(function(self.pattern.pair), function(self.pattern.next), self.sizes)
        return SparseLayer(pattern, function(self.probabilities))

    def mask(self, actions: Tensor) -> SparseLayer:
        exists, of = actions.flatten().index_select(0, self.pattern.pair), self.pattern
        if bool(exists.all()):
            return self
        pattern = Pattern(of.pair[exists], of.next[exists], self.sizes)
        return SparseLayer(pattern, self.probabilities[..., exists])

    def restrict(self, here: Tensor, there: Tensor) -> Tensor:
        rows = here.repeat_interleave(self.sizes[1]).nonzero().squeeze(-1)
        return self.tensor.index_select(0, rows).index_select(1, there.nonzero().squeeze(-1))

    def check(self, k: int, actions: Tensor) -> None:
        fixed = self.with_probabilities(self.probabilities.detach())
        sums = fixed.ahead(fixed.probabilities.new_ones(self.sizes[2]))
        (pair, following), given = (self.pattern.pair, self.pattern.next), fixed.probabilities
        places = (pair // self.sizes[1], pair % self.sizes[1], following)
        words = (f"layer {k}, state", "action")
        check_rows(f"transitions[{k}]", given, words, sums=sums, used=actions, places=places)


Layer = DenseLayer | SparseLayer


def largest_exponent(dtype: torch.dtype) -> float:
    """The largest x for which e^x does not overflow, with some room for sums."""
    return math.log(torch.finfo(dtype).max) - 10


def _starts(sorted_rows: Tensor, num_rows: int) -> Tensor:
    counts = torch.bincount(sorted_rows, minlength=num_rows)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _compressed(starts: Tensor, columns: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            starts, columns, values.detach().flatten(), shape, check_invariants=False
        )


def _multiply(matrix: Tensor, x: Tensor) -> Tensor:
    """Multiply a matrix `(n, m)` with every vector of `(*batch, m)`."""
    x = x.detach()
    if x.numel() == x.shape[-1]:
        return (matrix @ x.flatten()).view(*x.shape[:-1], matrix.shape[0])
    return (matrix @ x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])


def invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Sample indices `(N,)` from cumulative, unnormalized probabilities `(N, K)` by inversion."""
    # Keep the product below the total, so that an entry of probability zero is never drawn.
    target = uniform.clamp(max=1 - 4 * torch.finfo(uniform.dtype).eps) * cumulative[..., -1]
    return (cumulative <= target.unsqueeze(-1)).sum(-1)
