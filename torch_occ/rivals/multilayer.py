"""Multi-layer UCBVI (simplified): losses of which an unknown part was changed."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.beliefs import num_transitions, visited_transitions
from torch_occ.rivals.planning import Averages, check_delta, needed_episodes, plan, sharp_hoeffding
from torch_occ.rivals.sampling import keys_of, uniform


class MultiLayerUCBVI(Learner):
    """Multi-layer UCBVI, simplified (after Lykouris, Simchowitz, Slivkins and Sun, 2021).

    The losses are stochastic, but an adversary has changed some of them, by an unknown amount C
    (`occ.Corrupted`). There are R = ceil(log2 T) copies of UCBVI, called layers; layer r is robust
    to C = 2^r. An episode belongs to layer r with probability 2^-r (the rest to layer 1). A layer
    has the tightest bounds of two kinds of data, with the bonus of `UCBVI(bonus="sharp")` plus

    - min(1, (ln(2 L R / delta) + 3) / N) for its own episodes: if C <= 2^r, they contain changes of
      at most ln(2 L R / delta) + 3 per pair, with high probability, because so few episodes belong
      to it;
    - min(1, 2^r / (2 N)) for the episodes of all layers.

    The slow layers supervise the fast ones. When a layer has planned, it finds those actions
    possible whose lower bound is at most the smallest upper bound. A layer plays the smallest lower
    bound among the actions that every slower layer found possible at its last turn. (If slower
    layers leave no action in a state, the slowest ones count.)

    What is simplified: the paper passes control to slower layers within an episode, so that they
    see states that only fast layers reach; its bonuses are larger; it also covers changed
    transitions. Its guarantee does not carry over. What holds here by the argument above, with
    probability 1 - delta: no layer with 2^r >= C excludes an optimal action. For L = 1 it resembles
    the multi-layer race of Lykouris, Mirrokni and Paes Leme (2018).

    Raises:
        TypeError: if `episodes` is no whole number.
        ValueError: if `episodes` or `delta` is not valid.
    """

    def __init__(self, mdp: LayeredMDP, episodes: int, delta: float = 0.1) -> None:
        super().__init__(mdp.blind())
        self.max_episodes = needed_episodes(
            "MultiLayerUCBVI", episodes, "which decides the number of its layers"
        )
        self.delta = check_delta("MultiLayerUCBVI", delta)

    @property
    def layers(self) -> int:
        """R, the number of layers."""
        assert self.max_episodes is not None
        return max(1, math.ceil(math.log2(self.max_episodes)))

    @property
    def log(self) -> float:
        """The logarithm in the bonus, ln(4 S A (R + 1) T / delta): a union over data and visits."""
        assert self.max_episodes is not None
        return math.log(4 * self.mdp.num_pairs * (self.layers + 1) * self.max_episodes / self.delta)

    @property
    def corruption(self) -> float:
        """Twice the changes that a slow layer sees, as `UCBVI` counts them."""
        return 2 * (math.log(2 * self.mdp.horizon * self.layers / self.delta) + 3)

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds).unsqueeze(1).repeat(1, self.layers, 1, 1)
        counts = pairs.new_zeros(num_seeds, self.layers, num_transitions(self.mdp))
        self.state = {"visits": pairs, "losses": pairs.clone(), "counts": counts}
        self.state["possible"] = self.mdp.actions.to(pairs).expand_as(pairs).clone()

    def drawn(self, t: int) -> Tensor:
        """The layer of episode t for every seed, `(N,)`, numbered from 0."""
        seeds = self.seeds or range(len(self.state["visits"]))
        numbers = uniform(keys_of(seeds, t, 1)[:, 0], 0)
        shares = 0.5 ** np.arange(1, self.layers + 1)
        layer = (numbers[:, None] < shares).sum(-1)  # R if the number belongs to no layer
        return torch.from_numpy(np.where(layer < self.layers, layer, 0)).to(self.mdp.device)

    @torch.no_grad()
    def propose_policy(self, t: int) -> Tensor:
        state, layer, log = self.state, self.drawn(t), self.log
        every = torch.arange(len(layer), device=layer.device)
        own, together = (
            Averages.of(self.mdp, *(pick(state[name]) for name in ("visits", "losses", "counts")))
            for pick in (lambda x: x[every, layer], lambda x: x.sum(1))
        )
        robust_to = 2.0 ** (layer + 1).to(self.mdp.dtype)[:, None, None]  # layers count from 0
        found = plan(
            self.mdp,
            own,
            lambda stage: sharp_hoeffding(stage, log, self.corruption),
            allowed=self.allowed(layer),
            also=[(together, lambda stage: sharp_hoeffding(stage, log, robust_to))],
        )
        state["possible"] = state["possible"].index_put(
            (every, layer), found.possible.to(self.mdp.dtype)
        )
        return found.policy

    def allowed(self, layer: Tensor) -> Tensor:
        """The actions that all layers slower than `layer` `(N,)` found possible, `(N, S, A)`."""
        allowed = self.mdp.actions.expand_as(self.state["visits"][:, 0])
        for r in reversed(range(1, self.layers)):
            fewer = allowed & (self.state["possible"][:, r] > 0)
            counts = (layer < r)[:, None, None] & fewer.any(-1, keepdim=True)
            allowed = torch.where(counts, fewer, allowed)
        return allowed

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        mine = torch.arange(self.layers, device=self.mdp.device) == self.drawn(t)[:, None]  # (N, R)
        seen, ones = mine[:, :, None, None].to(self.mdp.dtype), torch.ones_like(feedback.losses)
        state, like = self.state, self.state["visits"][:, 0]
        places = visited_transitions(self.mdp, feedback)
        counted = torch.zeros_like(state["counts"][:, 0]).scatter_add(-1, places, ones)
        state["visits"] = state["visits"] + seen * feedback.scatter(ones, like)[:, None]
        state["losses"] = state["losses"] + seen * feedback.scatter(feedback.losses, like)[:, None]
        state["counts"] = state["counts"] + seen[..., 0] * counted[:, None]
