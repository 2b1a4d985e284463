"""A statement of the paper, evaluated, and the parameters of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torch_occ.game.estimators import ImportanceWeighted
from torch_occ.game.learners import FTRL, Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer, Scaled
from torch_occ.regularizers.catalog import HybridTsallis, LogBarrier, jin_luo
from torch_occ.regularizers.schedules import InverseSqrt

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
        gap = self.slack if self.relation == "<=" else -self.slack.abs()
        return gap >= -self.rounding

    def __repr__(self) -> str:
        sides = f"{tuple(self.left.shape)}"
        if self.left.dim() == 0:
            sides = f"{float(self.left):.6g} {self.relation} {float(self.right):.6g}"
        count = f"{int(self.holds.sum())} of {self.holds.numel()} hold"
        return f"Statement({self.label}: {sides}, {count})"


def statement(
    label: str,
    left: Tensor,
    right: Tensor | float,
    terms: int,
    scale: Tensor | float | None = None,
    relation: Relation = "<=",
) -> Statement:
    """A statement whose sides, `(*batch,)`, are sums of at most `terms` products.

    The error of a floating-point sum of n products is about n eps times the sum of their absolute
    values, `scale`; by default it is the larger side, right if all terms are positive. Four times
    that is allowed, for the square roots and quotients inside.
    """
    dtype, device = left.dtype, left.device
    left, larger = torch.broadcast_tensors(left, torch.as_tensor(right, dtype=dtype, device=device))
    size = torch.maximum(left.abs(), larger.abs()) if scale is None else scale
    size = torch.as_tensor(size, dtype=dtype, device=device)
    rounding = 4 * terms * torch.finfo(dtype).eps * size
    return Statement(label, left, larger, rounding.expand_as(left), relation)


def equality(
    label: str, left: Tensor, right: Tensor | float, terms: int, scale: Tensor | float
) -> Statement:
    """A `statement` that both sides are equal."""
    return statement(label, left, right, terms, scale, "=")


@dataclass(frozen=True)
class Parameters:
    """The constants of psi_t = phi_H / eta_t + phi_L.

    Raises:
        ValueError: if alpha or gamma is not positive, or if beta is negative.
    """

    alpha: float
    beta: float
    gamma: float = 1.0

    def __post_init__(self) -> None:
        for name, low in (("alpha", self.alpha), ("gamma", self.gamma)):
            if not low > 0:
                raise ValueError(f"{name}: the paper's analysis needs a positive number, got {low}")
        if not self.beta >= 0:
            raise ValueError(f"beta: expected a number that is not negative, got {self.beta}")

    @classmethod
    def paper(cls, mdp: LayeredMDP) -> Parameters:
        """alpha = 1 / sqrt(A), beta = 64 L and gamma = 1, the constants of `thm:main`."""
        return cls(mdp.num_actions**-0.5, 64.0 * mdp.horizon, 1.0)

    @classmethod
    def of(cls, learner: Learner) -> Parameters:
        """The constants of a learner that plays `alg:main_alg`.

        Raises:
            ValueError: if the learner plays something else; the message names the difference.
        """
        if not isinstance(learner, FTRL):
            raise ValueError(f"learner: the theory is about FTRL, not {type(learner).__name__}")
        if type(learner.estimator) is not ImportanceWeighted:
            raise ValueError(
                "learner: the theory is about the importance-weighted estimator, "
                f"not {type(learner.estimator).__name__}"
            )
        match [*getattr(learner.step.regularizer, "terms", ())]:
            case [
                Scaled(regularizer=HybridTsallis(alpha=a), factor=InverseSqrt(gamma=c), power=-1),
                LogBarrier(beta=b),
            ]:
                return cls(*(float(x.detach()) for x in (a, b, c)))
        raise ValueError(
            "learner: the theory is about HybridTsallis(alpha) / InverseSqrt(gamma) "
            "+ LogBarrier(beta); make it with jin_luo"
        )

    def regularizer(self, mdp: LayeredMDP) -> Regularizer:
        """psi_t as a regularizer of `FTRLStep`."""
        return jin_luo(mdp, self.alpha, self.beta, self.gamma)

    def eta(self, t: Tensor) -> Tensor:
        """eta_t = gamma / sqrt(t), shaped like t."""
        return self.gamma / t.sqrt()

    def eta_step(self, t: Tensor) -> Tensor:
        """1/eta_t - 1/eta_{t-1} = 1 / (gamma (sqrt(t) + sqrt(t-1))), shaped like t.

        1/eta_0 is 0.
        """
        return 1 / (self.gamma * (t.sqrt() + (t - 1).sqrt()))


def episodes(count: int, like: Tensor) -> Tensor:
    """1, 2, ..., count as floats `(count,)`, with the dtype and device of `like`."""
    return torch.arange(1, count + 1, dtype=like.dtype, device=like.device)
