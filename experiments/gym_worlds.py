"""Gymnasium's grid worlds as tasks: unrolled to a horizon, played in the environment itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

import torch_occ as occ
from torch_occ.game.losses import Noise
from torch_occ.mdp.unroll import ABSORBING


@dataclass(frozen=True)
class GridWorld:
    """An environment, the noise of its losses, and where it starts.

    The start is a row, a column, a passenger and a destination; None leaves it to the environment.
    """

    id: str
    options: dict[str, Any]
    noise: Noise = "none"
    start: tuple[int, int, int, int] | None = None


WORLDS = {
    "lake": GridWorld("FrozenLake-v1", {"is_slippery": False}),
    "slippery": GridWorld("FrozenLake-v1", {}, "bernoulli"),
    "big-lake": GridWorld("FrozenLake8x8-v1", {"is_slippery": False}),
    "cliff": GridWorld("CliffWalking-v1", {}),
    "slippery-cliff": GridWorld("CliffWalkingSlippery-v1", {}, "bernoulli"),
    "trip": GridWorld("Taxi-v4", {}, start=(1, 1, 0, 2)),
    "taxi": GridWorld("Taxi-v4", {}),
}


@dataclass(frozen=True)
class Task:
    """A world unrolled to a horizon."""

    name: str
    world: GridWorld
    env: gymnasium.Env[Any, Any]
    mdp: occ.RewardMDP

    @property
    def start(self) -> int | None:
        """The environment's state from which every episode starts; None if it is drawn."""
        return None if self.world.start is None else self.env.unwrapped.encode(*self.world.start)  # type: ignore[attr-defined]


def make_task(name: str) -> Task:
    """`<world>:<horizon>` -> the task."""
    key, _, steps = name.partition(":")
    if key not in WORLDS or not steps.isdigit():
        raise ValueError(
            f"games: expected <world>:<horizon> with a world of {', '.join(WORLDS)}, got {name!r}"
        )
    world = WORLDS[key]
    env = gymnasium.make(world.id, **world.options)
    start = None if world.start is None else env.unwrapped.encode(*world.start)  # type: ignore[attr-defined]
    return Task(name, world, env, occ.LayeredMDP.from_gymnasium(env, int(steps), start))


# -- playing --------------------------------------------------------------------------------------


def layered_index(mdp: occ.LayeredMDP) -> list[dict[int, int]]:
    """For every layer: the environment's state -> its index among the states of the layered MDP."""
    return [
        {int(s): layer.start + i for i, s in enumerate(mdp.origin[layer].tolist())}
        for layer in mdp.layer_slices
    ]


def play_policy(
    task: Task, policy: Tensor, rollouts: int, seed: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns `(rollouts,)` of a layered policy, played with `env.reset` and `env.step`."""
    env, index, cumulative = task.env, layered_index(task.mdp), policy.cumsum(-1).numpy()
    choose = np.random.default_rng(seed)
    env.reset(seed=seed)
    returns = np.zeros(rollouts)
    for i in range(rollouts):
        state, _ = env.reset()
        if task.start is not None:
            state = env.unwrapped.s = task.start  # type: ignore[attr-defined]
        for k in range(task.mdp.horizon):
            row = cumulative[index[k][int(state)]]
            action = int((row <= choose.random() * row[-1]).sum())
            state, reward, terminated, _, _ = env.step(action)
            returns[i] += float(reward)
            if terminated:
                break
    return returns


def moments(task: Task, policy: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the return, by backward induction.

    It reads the environment's own table and uses no code of the package.
    """
    P, index = task.env.unwrapped.P, layered_index(task.mdp)  # type: ignore[attr-defined]
    probabilities = policy.tolist()
    value: dict[int, tuple[float, float]] = {}
    for k in reversed(range(task.mdp.horizon)):
        now = {}
        for state, i in index[k].items():
            first = second = 0.0
            for action, weight in enumerate(probabilities[i] if state != ABSORBING else ()):
                for p, after, r, terminated in P[state][action] if weight > 0 else ():
                    mean, square = (0.0, 0.0) if terminated else value.get(int(after), (0.0, 0.0))
                    first += weight * p * (r + mean)
                    second += weight * p * (r * r + 2 * r * mean + square)
            now[state] = first, second
        value = now
    initial = task.mdp.initial.tolist()
    states = list(index[0])
    mean, square = (
        sum(p * value[s][j] for p, s in zip(initial, states, strict=True)) for j in (0, 1)
    )
    return mean, math.sqrt(max(square - mean**2, 0.0))
