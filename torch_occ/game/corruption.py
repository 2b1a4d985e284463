"""Corrupted losses: the means of another process are changed, within a budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torch_occ._support.spacing import CHUNK
from torch_occ.game.losses import LossProcess, State, check_table
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy


class Corrupted(LossProcess):
    """Another process whose means are corrupted until a budget is spent.

    The corruption of an episode is 2 sum_k max_{s in S_k, a} |mean - mean'|, where mean' is the
    uncorrupted mean, as in `sec:preliminaries_self_bounding`. `state["corruption"]` is the
    corruption spent so far by each seed, `(N,)`. `state["corruption_so_far"]` is its course over
    the last episodes, `(N, n)`.

    Strategies:
        "front" replaces every loss l by 1 - l from the first episode on.
        "uniform" spreads the same change evenly over `episodes` episodes.
        "targeted" charges 1 for the optimal actions of the mean loss `target`, from the first
        episode on.

    Raises:
        ValueError: if the budget is negative, the strategy is unknown, or it lacks `episodes` or
            `target`.
    """

    def __init__(
        self,
        base: LossProcess,
        budget: float,
        strategy: Literal["front", "uniform", "targeted"] = "front",
        *,
        episodes: int | None = None,
        target: Tensor | None = None,
    ) -> None:
        if not isinstance(base, LossProcess):
            raise TypeError(
                "base: expected an occ.LossProcess, for example occ.BernoulliLosses(mean), got "
                f"{type(base).__name__}"
            )
        if not budget >= 0:
            raise ValueError(f"budget: expected a non-negative number, got {budget}")
        if strategy not in ("front", "uniform", "targeted"):
            raise ValueError(f"strategy: expected front, uniform or targeted, got {strategy!r}")
        if strategy == "uniform" and (episodes is None or episodes < 1):
            raise ValueError(
                "episodes: expected the number of episodes over which to spread the budget, got "
                f"{episodes}"
            )
        if strategy == "targeted" and target is None:
            raise ValueError(
                "target: the targeted strategy needs the mean loss (S, A) whose optimal actions "
                "it attacks"
            )
        self.base, self.budget, self.strategy, self.episodes = base, budget, strategy, episodes
        self.target = target
        self.noise, self.stride, self.length = base.noise, min(base.stride, CHUNK), base.length

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        if self.target is not None:
            check_table("target", self.target, mdp)
        inner = {f"base.{name}": value for name, value in self.base.start(mdp, seeds).items()}
        return inner | {"corruption": torch.zeros(len(seeds), dtype=mdp.dtype, device=mdp.device)}

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        inner = {
            name.removeprefix("base."): value
            for name, value in state.items()
            if name.startswith("base.")
        }
        clean, inner = self.base.means(mdp, inner, t0, n, q)
        clean = clean.expand(n, *clean.shape[1:])
        # (n, N or 1, S, A)
        attack = torch.where(mdp.actions, self._attack(mdp, clean) - clean, 0.0)
        cost = 2 * sum(layer.abs().amax((-2, -1)) for layer in mdp.split(attack, -2))  # (n, N or 1)
        assert isinstance(cost, Tensor)
        if self.strategy == "uniform":
            assert self.episodes is not None
            share = torch.where(
                cost > 0, self.budget / self.episodes / cost.clamp(min=1e-300), 0.0
            ).clamp(max=1)
        else:
            share = torch.ones_like(cost)
        left = self.budget - state["corruption"]  # (N,)
        # A remainder of the size of rounding errors counts as nothing.
        left = torch.where(left > 1e-12 * self.budget, left, 0.0)
        asked = share * cost
        before = asked.cumsum(0) - asked
        granted = torch.minimum(asked, (left - before).clamp(min=0))  # (n, N)
        share = torch.where(cost > 0, granted / cost.clamp(min=1e-300), 0.0)
        spent = state["corruption"] + granted.cumsum(0)
        corrupted = clean + share[..., None, None] * attack
        kept = {"corruption": spent[-1].clone(), "corruption_so_far": spent.T}
        return corrupted, {f"base.{name}": value for name, value in inner.items()} | kept

    def _attack(self, mdp: LayeredMDP, clean: Tensor) -> Tensor:
        if self.strategy != "targeted":
            return 1 - clean
        assert self.target is not None
        return torch.where(optimal_policy(mdp, self.target, in_order=True).policy > 0, 1.0, clean)
