"""Sums over very many episodes from few evaluations.

A function that changes smoothly on the scale of t is summed exactly over the first episodes of
every phase. From there on it is summed by Gauss quadrature, over panels that are evenly spaced in
the logarithm: by Euler and Maclaurin, sum_{a < t <= b} f(t) is the integral of f from a + 1/2 to
b + 1/2 minus (f'(b + 1/2) - f'(a + 1/2)) / 24, up to terms in the third derivative. So every
tenfold of episodes has the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

#: Gauss nodes per panel, and episodes at the beginning of a phase that are summed one by one.
NODES, HEAD = 3, 8


@dataclass(frozen=True)
class Quadrature:
    """The nodes at which a function of the episode is evaluated, and its sums as matrices."""

    t: Tensor  # (K,), nodes
    phase: Tensor  # (K,), the phase of each node
    before: Tensor  # (K, K): row k maps f(t) to the sum over all episodes before node k
    ends: Tensor  # (C,), episodes at which curves have a point
    upto: Tensor  # (C, K): row c maps f(t) to the sum over the first ends[c] episodes

    @classmethod
    def over(
        cls, starts: Sequence[int], episodes: int, per_decade: float, like: Tensor
    ) -> Quadrature:
        """Nodes for phases that begin after the episodes `starts`, of which the first is 0.

        There are `per_decade` panels for every tenfold of episodes since the phase began.
        """
        inside, weights, slopes = _gauss(NODES)
        t: list[float] = []
        phase: list[int] = []
        before: list[dict[int, float]] = []
        upto: list[dict[int, float]] = []
        ends: list[int] = []
        total: dict[int, float] = {}  # the sum so far, as node -> weight
        for p, (start, stop) in enumerate(zip(starts, [*starts[1:], episodes], strict=True)):
            for episode in range(start + 1, min(start + HEAD, stop) + 1):
                before.append(dict(total))
                total[len(t)] = 1.0
                t.append(float(episode))
                phase.append(p)
                ends.append(episode)
                upto.append(dict(total))
            if stop - start <= HEAD:
                continue
            count = max(1, int(np.ceil(per_decade * np.log10((stop - start + 0.5) / (HEAD + 0.5)))))
            edges = np.unique(
                np.round(np.geomspace(HEAD + 0.5, stop - start + 0.5, count + 1) - 0.5) + 0.5
            )
            for low, high in pairwise(edges):
                first, width = len(t), np.log(high / low)
                local = low * np.exp(width * inside[0])
                for i in range(NODES):
                    # Up to the middle of node i, minus the half of its own episode before it.
                    row = dict(total)
                    for j in range(NODES):
                        row[first + j] = width * inside[1][i, j] * local[j] - (
                            0.5 if i == j else 0.0
                        )
                    before.append(row)
                    t.append(start + local[i])
                    phase.append(p)
                for j in range(NODES):
                    ends_slope = slopes[1, j] / (width * high) - slopes[0, j] / (width * low)
                    total[first + j] = width * weights[j] * local[j] - ends_slope / 24
                ends.append(start + int(high))
                upto.append(dict(total))
        return cls(
            torch.tensor(t, dtype=like.dtype, device=like.device),
            torch.tensor(phase, device=like.device),
            _matrix(before, len(t), like),
            torch.tensor(ends, device=like.device),
            _matrix(upto, len(t), like),
        )

    def sums_before(self, f: Tensor) -> Tensor:
        """sum_{tau < t} f(tau) at every node: `(K, *event)` -> `(K, *event)`."""
        return torch.tensordot(self.before, f, 1)

    def sums(self, f: Tensor) -> Tensor:
        """sum_{tau <= end} f(tau) at every end: `(K, *event)` -> `(C, *event)`."""
        return torch.tensordot(self.upto, f, 1)


def _gauss(n: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """Gauss quadrature on [0, 1].

    Returns:
        The nodes with the matrix that integrates up to each node, the weights of the whole
        interval, and the coefficients of the slopes at 0 and at 1.
    """
    x, w = np.polynomial.legendre.leggauss(n)
    nodes, powers = (x + 1) / 2, np.arange(n)
    basis = np.linalg.inv(nodes[:, None] ** powers)  # values at the nodes -> coefficients
    partial = nodes[:, None] ** (powers + 1) / (powers + 1)
    slopes = np.stack([(powers == 1).astype(float), powers.astype(float)])
    return (nodes, partial @ basis), w / 2, slopes @ basis


def _matrix(rows: list[dict[int, float]], columns: int, like: Tensor) -> Tensor:
    dense = np.zeros((len(rows), columns))
    for i, row in enumerate(rows):
        dense[i, list(row)] = list(row.values())
    return torch.tensor(dense, dtype=like.dtype, device=like.device)
