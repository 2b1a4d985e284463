"""The two maps of a layer, and sums, in a fixed order of summation.

The last bits of a matrix product depend on the order of its sums. A library chooses this order by
the processor, the size of the batch, the place in memory and the number of threads. Here the order
is that of the entries, independently of the rest of the batch. Every computation that promises the
same bits for a seed alone and among others (docs/performance.md) uses this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_occ.mdp.layers import DenseLayer, Layer

#: The largest number of products in memory, unless one batch element has more.
_MOST = 1 << 20


def total(x: Tensor, dim: int) -> Tensor:
    """The sum along a dimension, from the first entry to the last, as a running sum."""
    return x.cumsum(dim).select(dim, -1)


@dataclass(frozen=True, eq=False)
class InOrder:
    """`arrive` and `ahead` of torch_occ.mdp.layers, in order."""

    layer: Layer

    def arrive(self, x: Tensor) -> Tensor:
        """P'x: `(*batch, S, A)` -> `(*batch, S')`."""
        if isinstance(self.layer, DenseLayer):
            rows = self.layer.probabilities.flatten(-3, -2)  # (*batch, S * A, S')
            return self._in_parts(lambda part: total(rows * part.unsqueeze(-1), -2), x.flatten(-2))
        pattern, size = self.layer.pattern, self.layer.sizes[2]
        return self._scattered(x.flatten(-2), pattern.pair, pattern.next, size)

    def ahead(self, v: Tensor) -> Tensor:
        """P v: `(*batch, S')` -> `(*batch, S, A)`."""
        if isinstance(self.layer, DenseLayer):
            rows = self.layer.probabilities.flatten(-3, -2)
            found = self._in_parts(lambda part: total(rows * part.unsqueeze(-2), -1), v)
        else:
            pattern, (num_states, num_actions, _) = self.layer.pattern, self.layer.sizes
            found = self._scattered(v, pattern.next, pattern.pair, num_states * num_actions)
        return found.unflatten(-1, self.layer.sizes[:2])

    def _in_parts(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply `function` to x `(*batch, n)` in parts, so that the products fit into memory."""
        batch, each = x.shape[:-1], self.layer.probabilities.numel()
        if self.layer.batch_shape or batch.numel() * each <= _MOST:
            return function(x)
        parts = x.flatten(0, -2).split(max(1, _MOST // each))
        return torch.cat([function(part) for part in parts]).unflatten(0, batch)

    def _scattered(self, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
        """Add x[source] * probability to the target, entry by entry.

        `(*batch, m)` -> `(*batch, size)`.
        """
        probabilities = self.layer.probabilities
        if self.layer.batch_shape:
            seen = probabilities * x.index_select(-1, source)
            return seen.new_zeros(*seen.shape[:-1], size).index_add(-1, target, seen)
        if x.dim() > 1:  # one vector at a time, because torch has a faster loop for it
            return torch.stack(
                [self._scattered(row, source, target, size) for row in x.flatten(0, -2)]
            ).unflatten(0, x.shape[:-1])
        return x.new_zeros(size).index_add(0, target, probabilities * x.index_select(0, source))
