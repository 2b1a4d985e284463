"""alpha, beta and gamma of `alg:main_alg`, and the learning rate that gamma sets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_occ.game.estimators import ImportanceWeighted
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer, Scaled, Sum
from torch_occ.regularizers.catalog import HybridTsallis, LogBarrier, jin_luo
from torch_occ.regularizers.schedules import InverseSqrt


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
        whole = learner.step.regularizer
        first, second = (
            whole.terms if isinstance(whole, Sum) and len(whole.terms) == 2 else (whole, whole)
        )
        if (
            isinstance(first, Scaled)
            and isinstance(hybrid := first.regularizer, HybridTsallis)
            and isinstance(rate := first.factor, InverseSqrt)
            and first.power == -1
            and isinstance(second, LogBarrier)
        ):
            return cls(*(float(x.detach()) for x in (hybrid.alpha, second.beta, rate.gamma)))
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
