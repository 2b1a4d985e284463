"""Hessians of regularizers, stored at the cheapest level that holds them.

    Separable   three vectors d, w, c: the block of a state is
                    H_s = diag(d + w) + (sum w + c) 1 1' - 1 w' - w 1'
    Blocks      one A x A matrix a state
    Full        one matrix over all pairs

`combine` adds two of them at the coarser level. Entries of masked pairs are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Separable:
    """d, w, c: second derivatives of the scalar terms on q(s, a), q(s) - q(s, a) and q(s)."""

    d: Tensor  # (*batch, S, A)
    w: Tensor  # (*batch, S, A)
    c: Tensor  # (*batch, S)
    actions: Tensor  # (S, A) bool

    @property
    def curvature(self) -> Tensor:
        """D = d + w, all that is left of H_s between directions that keep q(s), `(*batch, S, A)`."""
        return self.d + self.w

    def to_blocks(self) -> Blocks:
        rank_two = (
            (self.w.sum(-1) + self.c)[..., None, None] - self.w.unsqueeze(-1) - self.w.unsqueeze(-2)
        )
        pairs = self.actions.unsqueeze(-1) & self.actions.unsqueeze(-2)
        return Blocks(
            torch.diag_embed(self.curvature) + torch.where(pairs, rank_two, 0.0), self.actions
        )

    def to_full(self) -> Full:
        return self.to_blocks().to_full()


@dataclass(frozen=True)
class Blocks:
    """One matrix a state, `(*batch, S, A, A)`."""

    blocks: Tensor
    actions: Tensor

    @property
    def curvature(self) -> Tensor:
        return self.blocks.diagonal(dim1=-2, dim2=-1)

    def to_blocks(self) -> Blocks:
        return self

    def to_full(self) -> Full:
        *batch, num_states, num_actions, _ = self.blocks.shape
        full = torch.diag_embed(
            self.blocks.movedim(-3, -1), dim1=-4, dim2=-2
        )  # (*batch, S, A, S, A)
        return Full(
            full.reshape(*batch, num_states * num_actions, num_states * num_actions), self.actions
        )


@dataclass(frozen=True)
class Full:
    """One matrix over all pairs, `(*batch, S*A, S*A)`."""

    matrix: Tensor
    actions: Tensor

    def to_full(self) -> Full:
        return self

    @property
    def curvature(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).unflatten(-1, tuple(self.actions.shape))


Hessian = Separable | Blocks | Full


def combine(first: Hessian, second: Hessian) -> Hessian:
    """The sum, at the coarser of the two levels."""
    if isinstance(first, Full) or isinstance(second, Full):
        return Full(first.to_full().matrix + second.to_full().matrix, first.actions)
    if isinstance(first, Blocks) or isinstance(second, Blocks):
        return Blocks(first.to_blocks().blocks + second.to_blocks().blocks, first.actions)
    return Separable(first.d + second.d, first.w + second.w, first.c + second.c, first.actions)
