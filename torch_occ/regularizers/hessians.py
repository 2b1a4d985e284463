"""Hessians of regularizers, in one of three forms from cheap to general.

    Separable   three vectors d, w, c: the block of a state is
                    H_s = diag(d + w) + (sum w + c) 1 1' - 1 w' - w 1'
    Blocks      one A x A matrix per state
    Full        one matrix over all pairs

`combine` adds two of them in the more general form of the two. Entries of masked pairs are zero.
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
        """D = d + w, `(*batch, S, A)`. If x and y keep q(s), then x' H_s y = sum x D y."""
        return self.d + self.w

    def to_blocks(self) -> Blocks:
        constant = (self.w.sum(-1) + self.c)[..., None, None]
        rank_two = constant - self.w.unsqueeze(-1) - self.w.unsqueeze(-2)
        pairs = self.actions.unsqueeze(-1) & self.actions.unsqueeze(-2)
        blocks = torch.diag_embed(self.curvature) + torch.where(pairs, rank_two, 0.0)
        return Blocks(blocks, self.actions)

    def to_full(self) -> Full:
        return self.to_blocks().to_full()


@dataclass(frozen=True)
class Blocks:
    """One matrix per state, `(*batch, S, A, A)`."""

    blocks: Tensor
    actions: Tensor

    @property
    def curvature(self) -> Tensor:
        return self.blocks.diagonal(dim1=-2, dim2=-1)

    def to_blocks(self) -> Blocks:
        return self

    def to_full(self) -> Full:
        *batch, num_states, num_actions, _ = self.blocks.shape
        states_last = self.blocks.movedim(-3, -1)
        full = torch.diag_embed(states_last, dim1=-4, dim2=-2)  # (*batch, S, A, S, A)
        count = num_states * num_actions
        return Full(full.reshape(*batch, count, count), self.actions)


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
    """Return the sum, in the more general form of the two."""
    if isinstance(first, Full) or isinstance(second, Full):
        return Full(first.to_full().matrix + second.to_full().matrix, first.actions)
    if isinstance(first, Blocks) or isinstance(second, Blocks):
        return Blocks(first.to_blocks().blocks + second.to_blocks().blocks, first.actions)
    return Separable(first.d + second.d, first.w + second.w, first.c + second.c, first.actions)
