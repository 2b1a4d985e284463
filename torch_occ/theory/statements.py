"""A statement of the paper, evaluated: both sides, their difference, and the rounding allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Relation = Literal["<=", "="]


@dataclass(frozen=True)
class Statement:
    """left <= right, or left = right, on a batch of data.

    The label is the one in the paper's LaTeX source.
    """

    label: str
    left: Tensor  # (*batch,)
    right: Tensor  # (*batch,)
    rounding: Tensor  # (*batch,), the part of right - left that rounding can explain
    relation: Relation = "<="

    @property
    def slack(self) -> Tensor:
        """right - left, `(*batch,)`."""
        return self.right - self.left

    @property
    def ratio(self) -> Tensor:
        """left / right, `(*batch,)`: 1 is tight. It is 1 where both sides vanish."""
        return torch.where((self.left == 0) & (self.right == 0), 1.0, self.left / self.right)

    @property
    def holds(self) -> Tensor:
        """Whether the statement is true up to rounding, `(*batch,)`; false for NaN."""
        return (
            self.slack >= -self.rounding
            if self.relation == "<="
            else self.slack.abs() <= self.rounding
        )

    def __repr__(self) -> str:
        sides = (
            f"{float(self.left):.6g} {self.relation} {float(self.right):.6g}"
            if self.left.dim() == 0
            else f"{tuple(self.left.shape)}"
        )
        count = f"{int(self.holds.sum())} of {self.holds.numel()} hold"
        return f"Statement({self.label}: {sides}, {count})"


def statement(
    label: str,
    left: Tensor,
    right: Tensor | float,
    terms: int,
    *,
    scale: Tensor | float | None = None,
    relation: Relation = "<=",
) -> Statement:
    """A statement whose sides are sums of at most `terms` products.

    The error of a floating-point sum of n products is about n eps times the sum of their absolute
    values. Four times that is allowed, for the square roots and quotients inside.

    Args:
        label: the label in the paper's LaTeX source.
        left: the left side, `(*batch,)`.
        right: the right side, which broadcasts with the left one.
        terms: the number n of products.
        scale: the sum of their absolute values; by default the larger side, which is right if all
            terms are positive.
        relation: how the sides are compared, "<=" or "=".
    """
    left, larger = torch.broadcast_tensors(
        left, torch.as_tensor(right, dtype=left.dtype, device=left.device)
    )
    size = (
        torch.maximum(left.abs(), larger.abs())
        if scale is None
        else torch.as_tensor(scale, dtype=left.dtype, device=left.device)
    )
    rounding = 4 * terms * torch.finfo(left.dtype).eps * size
    return Statement(label, left, larger, rounding.expand_as(left), relation)
