"""Rewards as losses: the map between them, and a layered MDP with rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP


@dataclass(frozen=True)
class RewardMap:
    """loss = (high - reward) / (high - low) and back: rewards in [low, high] are losses in [0, 1].

    Over an episode of L steps, return = L high - (high - low) * total loss. So a regret in rewards
    is (high - low) times the regret in losses.

    Raises:
        ValueError: unless low < high are finite.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (-float("inf") < self.low < self.high < float("inf")):
            raise ValueError(
                f"rewards: expected finite numbers low < high, got {self.low} and {self.high}"
            )

    @classmethod
    def covering(cls, rewards: Tensor) -> RewardMap:
        """The map from the smallest to the largest reward, including zero.

        Zero is the reward of the absorbing end.

        Raises:
            ValueError: if a reward is not finite.
        """
        if not bool(rewards.isfinite().all()):
            raise ValueError(
                f"rewards: expected finite numbers, found {float(rewards[~rewards.isfinite()][0])}"
            )
        low, high = (
            (min(0.0, float(rewards.min())), max(0.0, float(rewards.max())))
            if rewards.numel()
            else (0.0, 0.0)
        )
        # If all rewards are zero, any interval will do.
        return cls(low, high if high > low else low + 1.0)

    @property
    def span(self) -> float:
        """high - low: the rewards that a loss of one stands for."""
        return self.high - self.low

    def loss(self, reward: Tensor) -> Tensor:
        """The loss of a reward."""
        return (self.high - reward) / self.span

    def reward(self, loss: Tensor) -> Tensor:
        """The reward of a loss."""
        return self.high - self.span * loss

    def total(self, total_loss: Tensor, horizon: int) -> Tensor:
        """The return of an episode of `horizon` steps, from its total loss."""
        return horizon * self.high - self.span * total_loss

    def regret(self, regret: Tensor) -> Tensor:
        """Convert a regret in losses to rewards."""
        return self.span * regret


class RewardMDP(LayeredMDP):
    """A `LayeredMDP` with rewards and the map that turns them into losses.

    `reward` holds expected rewards `(S, A)`, zero where the episode is over. `to` keeps them;
    `prune` and `with_transitions` return a plain `LayeredMDP`. Importers make it; see
    `LayeredMDP.from_gymnasium`.

    Args:
        reward: expected rewards `(original S, A)` of the original MDP.
        reward_map: the map from rewards to losses.
        layout: arguments of `LayeredMDP`.
    """

    reward: Tensor
    reward_map: RewardMap

    kept: ClassVar = ("reward", "reward_map")

    def __init__(self, *, reward: Tensor, reward_map: RewardMap, **layout: Any) -> None:
        super().__init__(**layout)
        reward = torch.where(self.actions, self.lift(reward), 0.0)
        self.__dict__.update(reward=reward, reward_map=reward_map)

    @property
    def loss(self) -> Tensor:
        """The mean losses `(S, A)`, in [0, 1]; at the absorbing end, that of a zero reward."""
        # Rounding may move an expectation of extreme rewards out of the interval by one ulp.
        return self.reward_map.loss(self.reward).clamp(0.0, 1.0)

    def expected_return(self, q: Tensor) -> Tensor:
        """The expected return ⟨q, reward⟩: `(*batch, S, A)` -> `(*batch,)`."""
        return (q * self.reward).sum((-2, -1))

    def regret_in_rewards(self, regret: Tensor) -> Tensor:
        """Convert the regret of a `History` to rewards."""
        return self.reward_map.regret(regret)
