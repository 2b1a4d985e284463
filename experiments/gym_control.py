"""Gymnasium's grid worlds, learned from bandit feedback alone, drawn on their maps, and played in the real environment.

The learner knows the table of transitions and sees the loss of each pair that it visits. What it has learned after T episodes is played in
`env.step`, and the mean return is held against what the occupancy measure predicts, <q, reward>. Games are written <world>:<horizon>;
the worlds are lake (no slipping), slippery, big-lake (8x8), cliff, slippery-cliff, trip (one passenger of the taxi) and taxi (all of them).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, run_directory, table, write_csv, write_figure
from experiments.games import Game, Settings, play_all, slug, write_configuration
from experiments.maps import INK, draw_policy, panels, visits
from torch_occ.game.figures import COLOURS
from torch_occ.game.losses import Noise, Stationary
from torch_occ.mdp.unrolling import ABSORBING

FTRL, LEADER = "FTRL (Jin-Luo, small β)", "follow the leader, optimistic"


@dataclass(frozen=True)
class World:
    """An environment, how its losses vary around their means, and from where it starts (a row, a column, a passenger, a destination)."""

    id: str
    options: dict[str, Any]
    noise: Noise = "none"
    start: tuple[int, int, int, int] | None = None


WORLDS = {
    "lake": World("FrozenLake-v1", {"is_slippery": False}),
    "slippery": World("FrozenLake-v1", {}, "bernoulli"),
    "big-lake": World("FrozenLake8x8-v1", {"is_slippery": False}),
    "cliff": World("CliffWalking-v1", {}),
    "slippery-cliff": World("CliffWalkingSlippery-v1", {}, "bernoulli"),
    "trip": World("Taxi-v4", {}, start=(1, 1, 0, 2)),
    "taxi": World("Taxi-v4", {}),
}


@dataclass(frozen=True)
class Args:
    """Which worlds are learned, and for how long."""

    games: tuple[str, ...] = ("lake:8", "lake:12", "slippery:8", "cliff:14", "trip:12")
    """<world>:<horizon>"""
    episodes: int = 6000
    """T"""
    seeds: int = 2
    """independent runs; the first one's policy is played"""
    gamma: float = 1.0
    """of FTRL"""
    beta: float = 0.01
    """of FTRL"""
    players: tuple[Literal["ftrl", "leader"], ...] = ("ftrl", "leader")
    """who learns: FTRL, or follow-the-leader"""
    alone: int = 5000
    """beyond so many pairs FTRL is left out, and follow-the-leader learns alone"""
    rollouts: int = 4000
    """episodes played in the real environment"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


@dataclass(frozen=True)
class Task:
    """A world unrolled to a horizon."""

    name: str
    world: World
    env: gymnasium.Env[Any, Any]
    mdp: occ.RewardMDP

    @property
    def start(self) -> int | None:
        """The environment's state from which every episode starts, if it is not drawn by the environment."""
        return None if self.world.start is None else self.env.unwrapped.encode(*self.world.start)  # type: ignore[attr-defined]


def make_task(name: str) -> Task:
    """`lake:8` and the like."""
    key, _, steps = name.partition(":")
    if key not in WORLDS or not steps.isdigit():
        raise ValueError(f"games: expected <world>:<horizon> with a world of {', '.join(WORLDS)}, got {name!r}")
    world = WORLDS[key]
    env = gymnasium.make(world.id, **world.options)
    start = None if world.start is None else env.unwrapped.encode(*world.start)  # type: ignore[attr-defined]
    return Task(name, world, env, occ.LayeredMDP.from_gymnasium(env, int(steps), start))


# -- playing ----------------------------------------------------------------------------------------------------------------


def layered_index(mdp: occ.LayeredMDP) -> list[dict[int, int]]:
    """For every layer, where each of the environment's states stands among the layered ones."""
    return [{int(s): layer.start + i for i, s in enumerate(mdp.origin[layer].tolist())} for layer in mdp.layer_slices]


def play_policy(task: Task, policy: Tensor, rollouts: int, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Returns `(rollouts,)` of a layered policy in the environment itself, through `reset` and `step`."""
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
    """Mean and standard deviation of the return, by backward induction over the environment's own table and nothing of ours."""
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
    mean, square = (sum(p * value[s][j] for p, s in zip(initial, states, strict=True)) for j in (0, 1))
    return mean, math.sqrt(max(square - mean**2, 0.0))


@dataclass(frozen=True)
class Verdict:
    """What was predicted of a learned policy, and what it did."""

    task: Task
    learner: str
    history: occ.History
    q: Tensor  # (S, A), of the first seed
    returns: np.ndarray[Any, np.dtype[np.float64]]
    best: float
    uniform: float
    level: float  # of the interval

    @property
    def predicted(self) -> float:
        return float(self.task.mdp.expected_return(self.q))

    @property
    def interval(self) -> tuple[float, float]:
        """Around the played mean, as wide as the variance that the table implies: a rare fall that was not seen counts too."""
        _, deviation = moments(self.task, occ.policy_of(self.task.mdp, self.q))
        half = statistics.NormalDist().inv_cdf((1 + self.level) / 2) * deviation / math.sqrt(len(self.returns)) + 1e-9
        return float(self.returns.mean()) - half, float(self.returns.mean()) + half

    @property
    def agrees(self) -> bool:
        low, high = self.interval
        return low <= self.predicted <= high

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        low, high = self.interval
        mdp, regret = self.task.mdp, self.history.regret[:, -1].mean()
        row: dict[str, Any] = {
            "game": self.task.name,
            "pairs": mdp.num_pairs,
            "learner": self.learner,
            "episodes": int(self.history.episodes[-1]),
        }
        row |= {"best": self.best, "uniform": self.uniform, "predicted": self.predicted, "played": float(self.returns.mean())}
        row |= {"lower": low, "upper": high, "agrees": self.agrees}
        return row | {"regret_in_losses": float(regret), "regret_in_rewards": float(mdp.regret_in_rewards(regret))}


# -- drawing ----------------------------------------------------------------------------------------------------------------


def draw(verdicts: list[Verdict], shown: Verdict) -> Figure:
    """What the learners lost on the way, the shown one's policy on the map, and the returns of its episodes in the environment."""
    task, mdp = shown.task, shown.task.mdp
    maps = panels(task.env, mdp, shown.q)
    wide = 2.2 if "Cliff" in task.world.id else 1.0
    figure = Figure(figsize=(7.4 + 3.1 * wide * len(maps), 3.5), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2 + len(maps), width_ratios=[1.15, *[wide] * len(maps), 1.05])
    lowest = shown.uniform
    for i, verdict in enumerate(verdicts):
        # The mean return of an episode so far: the best one's, less the regret.
        curves = verdict.best - mdp.regret_in_rewards(verdict.history.regret) / verdict.history.episodes  # (seeds, C)
        lowest = min(lowest, float(curves.min()))
        axes[0].plot(verdict.history.episodes, curves.T, color=COLOURS[i], linewidth=0.8, alpha=0.35)
        axes[0].plot(verdict.history.episodes, curves.mean(0), color=COLOURS[i], linewidth=2, label=verdict.learner)
    axes[0].axhline(shown.best, color="0.45", linewidth=1, linestyle="--", label="best policy")
    axes[0].axhline(shown.uniform, color="0.6", linewidth=1, linestyle=":", label="uniform policy")
    room = 0.06 * (shown.best - lowest)
    axes[0].set(xscale="log", xlabel="episodes", title="learning: mean return so far")
    axes[0].set(xlim=(1, float(shown.history.episodes[-1])), ylim=(lowest - room, shown.best + room))
    axes[0].legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    seen = visits(mdp, shown.q, int(task.env.observation_space.n))  # type: ignore[attr-defined]
    for place, panel in zip(axes[1:-1], maps, strict=True):
        draw_policy(place, task.env, panel, seen)
    values, counts = np.unique(np.round(shown.returns, 6), return_counts=True)
    shares = counts / counts.sum()
    if len(values) <= 40:
        axes[-1].vlines(values, 0, shares, color=COLOURS[0], linewidth=5 if len(values) < 15 else 3)
    else:
        axes[-1].hist(shown.returns, bins=40, weights=np.full(len(shown.returns), 1 / len(shown.returns)), color=COLOURS[0])
    low, high = shown.interval
    axes[-1].axvspan(low, high, color="0.55", alpha=0.35, linewidth=0, label=f"played: {shown.returns.mean():.3f} ± {(high - low) / 2:.3f}")
    axes[-1].axvline(shown.predicted, color="#C8553D", linewidth=1.4, label=f"predicted: {shown.predicted:.3f}")
    axes[-1].set(title=f"{len(shown.returns):,} episodes in env.step", xlabel="return", ylabel="share", ylim=(0, None))
    margin = max(0.08 * float(np.ptp(values)), 0.5)
    axes[-1].set_xlim(float(values.min()) - margin, float(values.max()) + margin)
    axes[-1].legend(frameon=False, fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    for place in (axes[0], axes[-1]):
        place.spines[["top", "right"]].set_visible(False)
        place.grid(visible=True, which="major", color="0.92", linewidth=0.6)
        place.title.set_fontsize(9)
        place.tick_params(labelsize=8)
    learned = f"{shown.learner} after {int(shown.history.episodes[-1]):,} episodes"
    figure.suptitle(f"{task.world.id}, {mdp.horizon} steps, {mdp.num_pairs:,} pairs: the policy of {learned}", fontsize=10.5, color=INK)
    return figure


def learners(args: Args, mdp: occ.RewardMDP) -> dict[str, occ.Learner]:
    """FTRL where its step is quick enough, and follow-the-leader, for which an unseen pair is free: without noise it explores well."""
    found: dict[str, occ.Learner] = {}
    if "ftrl" in args.players and mdp.num_pairs <= args.alone:
        found[FTRL] = occ.FTRL(mdp, occ.jin_luo(mdp, beta=args.beta, gamma=args.gamma))
    if "leader" in args.players or not found:
        found[LEADER] = occ.FollowTheLeader(mdp)
    return found


def run_task(args: Args, task: Task, directory: Path, level: float) -> list[Verdict]:
    """Learn, then play what was learned."""
    mdp = task.mdp
    games = [Game(task.name, name, learner, Stationary(mdp.loss, task.world.noise)) for name, learner in learners(args, mdp).items()]
    histories = play_all(games, Settings(args.episodes, args.seeds, args.processes, args.tensorboard, 0), directory)
    best = float(mdp.expected_return(occ.occupancy(mdp, occ.optimal_policy(mdp, mdp.loss).policy)))
    uniform = float(mdp.expected_return(occ.interior_point(mdp)))
    found = []
    for (_, name), history in histories.items():
        q = history.last_q[0]
        returns = play_policy(task, occ.policy_of(mdp, q), args.rollouts, seed=1)
        found.append(Verdict(task, name, history, q, returns, best, uniform, level))
    return found


def main(args: Args) -> Path:
    """Learn, draw, play and compare."""
    torch.set_num_threads(1)
    tasks = [make_task(name) for name in args.games]  # errors before anything is learned
    directory = run_directory(args.root, "gym_control", 0)
    write_configuration(directory, args)
    count = sum(len(learners(args, task.mdp)) for task in tasks)
    level = 1 - 0.01 / count  # all intervals hold together with probability 99 %
    verdicts: list[Verdict] = []
    for task in tasks:
        found = run_task(args, task, directory, level)
        for verdict in found:
            write_figure(directory / f"{slug(task.name)}__{slug(verdict.learner)}.png", draw(found, verdict))
        verdicts += found
    rows = [verdict.row() for verdict in verdicts]
    write_csv(directory / "gym_control.csv", rows)
    header = ["game", "pairs", "learner", "uniform", "best", "predicted", "played", "agree", "regret (losses)", "regret (rewards)"]
    cells = []
    for row in rows:
        played = f"{row['played']:.3f} ± {(row['upper'] - row['lower']) / 2:.3f}"
        numbers = [f"{row[name]:.3f}" for name in ("uniform", "best", "predicted")]
        regrets = [f"{row[name]:.1f}" for name in ("regret_in_losses", "regret_in_rewards")]
        cells.append([row["game"], f"{row['pairs']:,}", row["learner"], *numbers, played, "yes" if row["agrees"] else "NO", *regrets])
    print(f"\nReturns of an episode: what q predicts, and the mean of {args.rollouts:,} episodes in the environment; {machine()}\n")
    print(table(header, cells, left=(0, 2)))
    agreeing = sum(row["agrees"] for row in rows)
    print(f"\n{agreeing} of {len(rows)} predictions lie in the intervals, which hold together with probability 99 %.")
    print(f"written to {directory}: a figure for every policy, gym_control.csv, config.json, and each game's history and TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
