"""Demonstrations on Gymnasium's maps, and three programs that fit a reward to them.

The reward is a function r(s) of the environment's state. An episode that has terminated stays in
its last state until the horizon. All programs see the same finite MDP: transitions (S, A, S), a
first distribution and a horizon. The gradient of maximum-causal-entropy IRL (Ziebart, 2010) in
r(s) is

    visits of the demonstrations - visits of the soft-optimal policy of r.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor

import torch_occ as occ

F64 = torch.float64
RATE = 0.02  # of Adam


@dataclass(frozen=True)
class World:
    """A map, a horizon, and how sharply its expert prefers rewards."""

    id: str
    horizon: int
    sharpness: float

    @cached_property
    def env(self) -> Any:
        return gymnasium.make(self.id).unwrapped

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """P `(S, A, S)`, rewards `(S, A)` and the first distribution `(S,)`."""
        published = self.env.P
        size, num_actions = len(published), len(published[0])
        outcomes = [
            (s, a, *outcome)
            for s, a in np.ndindex(size, num_actions)
            for outcome in published[s][a]
        ]
        last = {following for *_, following, _, done in outcomes if done}
        transition = torch.zeros(size, num_actions, size, dtype=F64)
        reward = torch.zeros(size, num_actions, dtype=F64)
        for s, a, p, following, r, _ in outcomes:
            if s in last:
                transition[s, a, s] = 1.0
            else:
                transition[s, a, following] += p
                reward[s, a] += p * r
        return transition, reward, torch.from_numpy(self.env.initial_state_distrib.astype(float))

    @cached_property
    def mdp(self) -> occ.LayeredMDP:
        transition, _, first = self.tables
        if len(first) > 100:
            transition = transition.flatten(0, 1).to_sparse()
        return occ.LayeredMDP.from_tables(transition, self.horizon, first)

    @cached_property
    def features(self) -> Tensor:
        """One-hot coordinates of each state `(S, F)`: row, column and tile, or those of a taxi."""
        count = len(self.env.P)
        if hasattr(self.env, "decode"):
            places = [list(self.env.decode(s)) for s in range(count)]
        else:
            columns = self.env.ncol if hasattr(self.env, "ncol") else self.env.shape[1]
            places = [[s // columns, s % columns, self._tile(s)] for s in range(count)]
        index = torch.tensor(places)
        parts = [torch.nn.functional.one_hot(x).to(F64) for x in index.T]
        return torch.cat(parts, -1)

    def _tile(self, s: int) -> int:
        if hasattr(self.env, "desc"):
            return int(b"SFHG".index(self.env.desc.flatten()[s]))
        return 1 + int(self.env._cliff.flatten()[s]) if s != 47 else 0

    def losses(self, reward: Tensor) -> Tensor:
        """-r(s) for every pair of the layered MDP: `(S,)` -> `(S', A)`."""
        table = reward.unsqueeze(-1).expand(-1, self.mdp.num_actions)
        return -self.mdp.lift(table)

    def visits(self, q: Tensor) -> Tensor:
        """The expected number of visits of each state of the environment, `(S', A)` -> `(S,)`."""
        total = torch.zeros(len(self.tables[2]), dtype=q.dtype)
        return total.index_add(0, self.mdp.origin, q.sum(-1))


WORLDS = {
    "lake": World("FrozenLake-v1", 20, 10.0),
    "big-lake": World("FrozenLake8x8-v1", 40, 10.0),
    "cliff": World("CliffWalking-v1", 20, 0.3),
    "taxi": World("Taxi-v4", 15, 0.5),
}


class Demonstrations(NamedTuple):
    """Trajectories: states, numbered over all layers, and actions, `(N, L)` each."""

    states: Tensor
    actions: Tensor

    def visits(self, world: World) -> Tensor:
        """The mean number of visits of each state of the environment, `(S,)`."""
        origin = world.mdp.origin[self.states.flatten()]
        counts = torch.bincount(origin, minlength=len(world.tables[2]))
        return counts.to(F64) / len(self.states)


def demonstrate(mdp: occ.LayeredMDP, policy: Tensor, count: int, seed: int) -> Demonstrations:
    """Draw trajectories of a policy `(S, A)`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    here = draw(mdp.initial.expand(count, -1))
    states, actions = [], []
    for k, layer in enumerate(mdp.layers):
        states.append(here + mdp.layer_slices[k].start)
        actions.append(draw(policy[states[-1]]))
        here = layer.draw(here, actions[-1], torch.rand(count, dtype=F64, generator=generator))
    return Demonstrations(torch.stack(states, -1), torch.stack(actions, -1))


def expert(world: World) -> Tensor:
    """The soft-optimal policy of the true rewards, `(S, A)`."""
    losses = -world.sharpness * world.mdp.lift(world.tables[1])
    step = occ.FTRLStep(world.mdp, occ.ConditionalEntropy())
    return occ.policy_of(world.mdp, step(losses))


# -- rewards ---------------------------------------------------------------------------------------


def linear_reward(world: World, seed: int) -> torch.nn.Module:
    """One number per state: a linear function of one-hot states."""
    return _Reward(torch.nn.Linear(len(world.tables[2]), 1, bias=False, dtype=F64), seed)


def neural_reward(world: World, seed: int) -> torch.nn.Module:
    """A network of two layers, of the coordinates of a state."""
    width = world.features.shape[1]
    layers = (torch.nn.Linear(width, 32, dtype=F64), torch.nn.Tanh())
    return _Reward(torch.nn.Sequential(*layers, torch.nn.Linear(32, 1, dtype=F64)), seed)


class _Reward(torch.nn.Module):
    """A network with weights from its own generator; it returns `(N,)`."""

    def __init__(self, network: torch.nn.Module, seed: int) -> None:
        super().__init__()
        self.network = network
        generator = torch.Generator().manual_seed(seed)
        for weight in network.parameters():
            torch.nn.init.normal_(weight, std=0.1, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).squeeze(-1)


def inputs_of(world: World, kind: str) -> Tensor:
    """What the reward sees of every state, `(S, F)`."""
    return torch.eye(len(world.tables[2]), dtype=F64) if kind == "linear" else world.features


class Fitted(NamedTuple):
    """The reward that was found, and the processor time per update in seconds."""

    reward: Tensor  # (S,)
    seconds: float


def fit(
    network: torch.nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], updates: int
) -> Fitted:
    """Minimize a loss of the rewards with Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    loss(network(x)).backward()  # compiles
    begin = time.process_time()
    for _ in range(updates):
        optimizer.zero_grad()
        loss(network(x)).backward()
        optimizer.step()
    seconds = (time.process_time() - begin) / updates
    return Fitted(network(x).detach(), seconds)


# -- torch_occ -------------------------------------------------------------------------------------


def match_visits(world: World, shown: Demonstrations) -> Callable[[Tensor], Tensor]:
    """The published gradient: visits of the plan minus visits of the demonstrations."""
    step, target = occ.FTRLStep(world.mdp, occ.ConditionalEntropy()), shown.visits(world)

    def loss(reward: Tensor) -> Tensor:
        with torch.no_grad():
            difference = world.visits(step(world.losses(reward))) - target
        return (difference * reward).sum()

    return loss


def likelihood(
    world: World, shown: Demonstrations, psi: occ.Regularizer
) -> Callable[[Tensor], Tensor]:
    """The negative log-likelihood of the demonstrated actions, for any regularizer."""
    step = occ.FTRLStep(world.mdp, psi)
    return lambda reward: occ.negative_log_likelihood(step, world.losses(reward), *shown)


# -- others ----------------------------------------------------------------------------------------


def reference(world: World, shown: Demonstrations) -> Callable[[Tensor], Tensor]:
    """The recursions (9.1) to (9.3) of Ziebart's thesis in NumPy, without torch_occ."""
    transition, _, first = (x.numpy() for x in world.tables)
    target, horizon = shown.visits(world), world.horizon

    def visits(reward: Any) -> Any:
        policies, value = [], np.zeros(len(reward))
        for _ in range(horizon):
            Q = reward[:, None] + transition @ value
            largest = Q.max(1, keepdims=True)
            value = np.log(np.exp(Q - largest).sum(1)) + largest[:, 0]
            policies.append(np.exp(Q - value[:, None]))
        here, total = first, np.zeros_like(reward)
        for policy in reversed(policies):
            total = total + here
            here = np.einsum("s,sa,sat->t", here, policy, transition, optimize=True)
        return total

    def loss(reward: Tensor) -> Tensor:
        difference = torch.from_numpy(visits(reward.detach().numpy())) - target
        return (difference * reward).sum()

    return loss


def imitation(
    world: World, shown: Demonstrations, network: torch.nn.Module, x: Tensor, updates: int
) -> Fitted | None:
    """The tabular MCE-IRL of the package `imitation`, or None if it is not there.

    Its visits include the state after the last action, whose reward its plan does not count.
    """
    try:
        from imitation.algorithms.mce_irl import MCEIRL
        from imitation.rewards.reward_nets import RewardNet
        from seals.base_envs import TabularModelPOMDP
    except ImportError:
        return None

    class Net(RewardNet):  # type: ignore[misc]
        def forward(self, state: Tensor, *_: Any) -> Tensor:
            found: Tensor = network(state)
            return found

    transition, reward, first = (y.numpy() for y in world.tables)
    env = TabularModelPOMDP(
        transition_matrix=transition,
        observation_matrix=x.numpy(),
        reward_matrix=reward.mean(1),
        horizon=world.horizon,
        initial_state_dist=first,
    )
    net = Net(env.observation_space, env.action_space)
    net.add_module("network", network)
    # Where the last action leads is not part of a demonstration; its expectation stands for it.
    last = world.mdp.origin[shown.states[:, -1]]
    after = torch.from_numpy(transition)[last, shown.actions[:, -1]].mean(0)
    target = (shown.visits(world) + after).numpy()
    algorithm = MCEIRL(
        target,
        env,
        net,
        np.random.default_rng(0),
        optimizer_kwargs={"lr": RATE},
        linf_eps=0.0,
        grad_l2_eps=0.0,
        log_interval=None,
    )
    begin = time.process_time()
    algorithm.train(max_iter=updates)
    seconds = (time.process_time() - begin) / updates
    return Fitted(network(x).detach(), seconds)
