"""Learners to compare FTRL with: a fixed policy, and those that plan with averages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.game.contracts import check_policy
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.base import Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import cheapest, interior_point, occupancy, optimal_policy


class FixedPolicy(Learner):
    """The same policy in every episode; uniform by default."""

    def __init__(self, mdp: LayeredMDP, policy: Tensor | None = None) -> None:
        super().__init__(mdp)
        self.q = (
            interior_point(mdp)
            if policy is None
            else occupancy(mdp, check_policy(mdp, policy), in_order=True)
        ).detach()

    @classmethod
    def best_in_hindsight(cls, mdp: LayeredMDP, mean: Tensor) -> FixedPolicy:
        """The optimal policy for the (average) mean loss `(S, A)`, which no learner knows."""
        return cls(mdp, optimal_policy(mdp, mean, in_order=True).policy)

    def propose(self, t: int) -> Tensor:
        return self.q[None]


class EmpiricalLearner(Learner):
    """Plays the optimal policy of an estimate built from counts and observed losses.

    Actions whose Q is within 1e-9 of the smallest are tied; the one with the lowest index is
    played.
    """

    def start(self, num_seeds: int) -> None:
        self.state = {"visits": self._zeros(num_seeds), "losses": self._zeros(num_seeds)}

    def index(self, t: int) -> Tensor:
        """The loss `(N, S, A)` for which the policy is optimal."""
        raise NotImplementedError(f"{type(self).__name__}: write index(t) -> loss, (N, S, A)")

    def propose(self, t: int) -> Tensor:
        return occupancy(self.mdp, cheapest(self.mdp, optimal_policy(self.mdp, self.index(t)).Q))

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        visits = self.state["visits"]
        self.state["visits"] = visits + feedback.scatter(torch.ones_like(feedback.losses), visits)
        self.state["losses"] = self.state["losses"] + feedback.scatter(feedback.losses, visits)


class FollowTheLeader(EmpiricalLearner):
    """The optimal policy for the average observed losses; unseen pairs cost nothing."""

    def index(self, t: int) -> Tensor:
        return self.state["losses"] / self.state["visits"].clamp(min=1)


class OptimisticValueIteration(EmpiricalLearner):
    """UCB-style value iteration for known transitions.

    The policy is optimal for the average observed loss minus scale * sqrt(log t / visits), but at
    least `floor`. Pairs that were never seen cost `floor`, which is 0 by default, the smallest
    possible loss. For L = 1, scale = sqrt(2) and floor = -inf this is UCB1 (Auer, Cesa-Bianchi and
    Fischer, 2002).

    Raises:
        ValueError: if `scale` is not positive; or if `floor` is positive, or infinite with more
            than one layer.
    """

    def __init__(self, mdp: LayeredMDP, scale: float = 0.5**0.5, floor: float = 0.0) -> None:
        super().__init__(mdp)
        if not scale > 0:
            raise ValueError(f"scale: expected a positive number, got {scale}")
        if not floor <= 0 or (math.isinf(floor) and mdp.horizon > 1):
            raise ValueError(
                "floor: expected a number of at most 0, finite if there is more than one layer, "
                f"got {floor}"
            )
        self.scale, self.floor = scale, floor

    def index(self, t: int) -> Tensor:
        visits = self.state["visits"].clamp(min=1)
        bonus = self.scale * (math.log(max(t, 2)) / visits).sqrt()
        seen = (self.state["losses"] / visits - bonus).clamp(min=self.floor)
        return torch.where(self.state["visits"] > 0, seen, self.floor)
