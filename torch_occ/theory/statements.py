"""A statement of the paper, evaluated: both sides, how far apart they are, and what rounding may hide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Relation = Literal["<=", "="]


@dataclass(frozen=True)
class Statement:
    """left <= right (or left = right) on a batch of data; the label is the one in the paper's LaTeX source."""

    label: str
    left: Tensor  # (*batch,)
    right: Tensor  # (*batch,)
    rounding: Tensor  # (*batch,), how much of right - left rounding alone can explain
    relation: Relation = "<="

    @property
    def slack(self) -> Tensor:
        """right - left, `(*batch,)`."""
        return self.right - self.left

    @property
    def ratio(self) -> Tensor:
        """left / right: 1 is tight, 0 far from it. Where both sides vanish it is 1."""
        return torch.where((self.left == 0) & (self.right == 0), 1.0, self.left / self.right)

    @property
    def holds(self) -> Tensor:
        """Whether the statement is true up to rounding, `(*batch,)`; NaN is not."""
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
        return f"Statement({self.label}: {sides}, {int(self.holds.sum())} of {self.holds.numel()} hold)"


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

    A floating-point sum of n products is wrong by at most about n eps times the sum of their absolute values; four times that is allowed,
    for the square roots and quotients inside. `scale` is that sum of absolute values, by default the larger side (all terms positive).
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
