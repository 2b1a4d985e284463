"""Gymnasium's grid worlds, learned from bandit feedback alone and played in the real environment.

The learner knows the table of transitions and sees the loss of each pair that it visits. After T
episodes its policy is drawn on the map and played in `env.step`. The mean return is compared with
the prediction of the occupancy measure, <q, reward>. A game is written <world>:<horizon>. The
worlds are lake (no slipping), slippery, big-lake (8x8), cliff, slippery-cliff, trip (one passenger
of the taxi) and taxi (all passengers).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrow, Rectangle
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS, Game, Runs
from torch_occ.game.losses import Noise, Stationary

FTRL, LEADER = "FTRL (Jin-Luo, small β)", "follow the leader, optimistic"


@dataclass(frozen=True)
class Args(Runs):
    """Which worlds are learned, and for how long."""

    games: tuple[str, ...] = ("lake:8", "lake:12", "slippery:8", "cliff:14", "trip:12")
    """<world>:<horizon>"""
    episodes: int = 6000
    """T"""
    seeds: int = 2
    """independent runs; the first one's policy is played"""
    seed: int = 0
    """of the first run"""
    gamma: float = 1.0
    """of FTRL"""
    beta: float = 0.01
    """of FTRL"""
    alone: int = 5000
    """with more pairs than this FTRL is left out, and follow-the-leader learns alone"""
    rollouts: int = 4000
    """episodes played in the real environment"""


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
    env: Any
    mdp: occ.mdp.RewardMDP

    @property
    def start(self) -> int | None:
        """The environment's state from which every episode starts; None if it is drawn."""
        start, base = self.world.start, self.env.unwrapped
        return None if start is None else base.encode(*start)


def make_task(name: str) -> Task:
    """`<world>:<horizon>` -> the task."""
    key, _, steps = name.partition(":")
    if key not in WORLDS or not steps.isdigit():
        raise ValueError(
            f"games: expected <world>:<horizon> with a world of {', '.join(WORLDS)}, got {name!r}"
        )
    world = WORLDS[key]
    env: Any = gymnasium.make(world.id, **world.options)
    start = None if world.start is None else env.unwrapped.encode(*world.start)
    return Task(name, world, env, occ.LayeredMDP.from_gymnasium(env, int(steps), start))


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
            state = env.unwrapped.s = task.start
        for k in range(task.mdp.horizon):
            row = cumulative[index[k][int(state)]]
            action = int((row <= choose.random() * row[-1]).sum())
            state, reward, terminated, _, _ = env.step(action)
            returns[i] += float(reward)
            if terminated:
                break
    return returns


@dataclass(frozen=True)
class Verdict:
    """A learned policy: its predicted return, and its returns in the environment."""

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
        """Around the mean of the returns."""
        quantile = statistics.NormalDist().inv_cdf((1 + self.level) / 2)
        half = quantile * self.returns.std() / math.sqrt(len(self.returns)) + 1e-9
        return float(self.returns.mean()) - half, float(self.returns.mean()) + half

    @property
    def agrees(self) -> bool:
        low, high = self.interval
        return low <= self.predicted <= high

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        low, high = self.interval
        mdp, regret = self.task.mdp, self.history.regret[:, -1].mean()
        row: dict[str, Any] = {"game": self.task.name, "pairs": mdp.num_pairs}
        row |= {"learner": self.learner, "episodes": int(self.history.episodes[-1])}
        row |= {"best": self.best, "uniform": self.uniform, "predicted": self.predicted}
        row |= {"played": float(self.returns.mean()), "lower": low, "upper": high}
        row |= {"agrees": self.agrees, "regret_in_losses": float(regret)}
        return row | {"regret_in_rewards": float(mdp.regret_in_rewards(regret))}


def learners(args: Args, mdp: occ.mdp.RewardMDP) -> dict[str, occ.Learner]:
    """FTRL, where its step is quick enough, and follow-the-leader.

    For follow-the-leader an unseen pair is free, so it explores well where losses have no noise.
    """
    leader: dict[str, occ.Learner] = {LEADER: occ.FollowTheLeader(mdp)}
    if mdp.num_pairs > args.alone:
        return leader
    return {FTRL: occ.FTRL(mdp, occ.jin_luo(mdp, beta=args.beta, gamma=args.gamma))} | leader


def run_task(args: Args, task: Task, directory: Path, level: float) -> list[Verdict]:
    """Learn, then play the learned policies."""
    mdp = task.mdp
    losses = Stationary(mdp.loss, task.world.noise)
    games = [
        Game(task.name, name, learner, losses) for name, learner in learners(args, mdp).items()
    ]
    histories = common.play_all(games, args, directory)
    best = float(mdp.expected_return(occ.occupancy(mdp, occ.optimal_policy(mdp, mdp.loss).policy)))
    uniform = float(mdp.expected_return(occ.interior_point(mdp)))
    found = []
    for (_, name), history in histories.items():
        q = history.last_q[0]
        returns = play_policy(task, occ.policy_of(mdp, q), args.rollouts, seed=1)
        found.append(Verdict(task, name, history, q, returns, best, uniform, level))
    return found


def draw(verdicts: list[Verdict], shown: Verdict) -> Figure:
    """The learning curves, the policy of `shown` on a lake, and its returns in the environment."""
    task, mdp = shown.task, shown.task.mdp
    figure = common.new_figure(10.5, 3.5)
    axes = figure.subplots(1, 3, width_ratios=[1.15, 1.0, 1.05])
    draw_learning(axes[0], verdicts, shown)
    draw_policy(axes[1], task.env.unwrapped.desc, visits(mdp, shown.q))
    draw_returns(axes[-1], shown)
    for place in (axes[0], axes[-1]):
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        place.legend(frameon=False, fontsize=7.5, ncols=2, **below)
        common.tidy(place)
        place.title.set_fontsize(9)
        place.tick_params(labelsize=8)
    size_text = f"{task.world.id}, {mdp.horizon} steps, {mdp.num_pairs:,} pairs"
    learned = f"{shown.learner} after {int(shown.history.episodes[-1]):,} episodes"
    title = f"{size_text}: the policy of {learned}"
    figure.suptitle(title, fontsize=10.5, color=INK)
    return figure


def draw_learning(axes: Any, verdicts: list[Verdict], shown: Verdict) -> None:
    """The mean return of the episodes so far: the best policy's return, less the regret."""
    lowest, mdp = shown.uniform, shown.task.mdp
    for i, verdict in enumerate(verdicts):
        t = verdict.history.episodes
        curves = verdict.best - mdp.regret_in_rewards(verdict.history.regret) / t  # (seeds, C)
        lowest = min(lowest, float(curves.min()))
        axes.plot(t, curves.T, color=COLOURS[i], linewidth=0.8, alpha=0.35)
        axes.plot(t, curves.mean(0), color=COLOURS[i], linewidth=2, label=verdict.learner)
    axes.axhline(shown.best, color="0.45", linewidth=1, linestyle="--", label="best policy")
    axes.axhline(shown.uniform, color="0.6", linewidth=1, linestyle=":", label="uniform policy")
    room = 0.06 * (shown.best - lowest)
    axes.set(xscale="log", xlabel="episodes", title="learning: mean return so far")
    axes.set_xlim(1, float(shown.history.episodes[-1]))
    axes.set_ylim(lowest - room, shown.best + room)


def draw_returns(axes: Any, shown: Verdict) -> None:
    """The returns of the episodes in the environment, their mean, and the prediction."""
    values, counts = np.unique(np.round(shown.returns, 6), return_counts=True)
    shares = counts / counts.sum()
    if len(values) <= 40:
        axes.vlines(values, 0, shares, color=COLOURS[0], linewidth=5 if len(values) < 15 else 3)
    else:
        weights = np.full(len(shown.returns), 1 / len(shown.returns))
        axes.hist(shown.returns, bins=40, weights=weights, color=COLOURS[0])
    low, high = shown.interval
    played = f"played: {shown.returns.mean():.3f} ± {(high - low) / 2:.3f}"
    axes.axvspan(low, high, color="0.55", alpha=0.35, linewidth=0, label=played)
    predicted = f"predicted: {shown.predicted:.3f}"
    axes.axvline(shown.predicted, color="#C8553D", linewidth=1.4, label=predicted)
    axes.set(xlabel="return", ylabel="share", ylim=(0, None))
    axes.set_title(f"{len(shown.returns):,} episodes in env.step")
    margin = max(0.08 * float(np.ptp(values)), 0.5)
    axes.set_xlim(float(values.min()) - margin, float(values.max()) + margin)


# On the map, a layered policy with an arrow for every step and square is shown by its mean,
# weighted by visits: pi(a | s) = sum_k q_k(s, a) / sum_k q_k(s).

INK, WALL, GOAL, START = "#1F2430", "#39404F", "#F2C14E", "#5B8E7D"

#: (row, column) of every action.
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


def visits(mdp: occ.LayeredMDP, q: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """sum_k q_k(s, a) by the environment's own states, `(S, A)`."""
    alive = mdp.origin >= 0  # the others stand for the end of an episode
    total = torch.zeros(64, mdp.num_actions, dtype=q.dtype)  # the largest lake
    return total.index_add(0, mdp.origin[alive], q[alive]).numpy()


def square(axes: Any, row: int, column: int, colour: Any, text: str = "", **look: Any) -> None:
    """One square of a map, with a word in it."""
    box = {"facecolor": colour, "edgecolor": "#D5DAE3", "linewidth": 0.8} | look
    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **box))
    ink = "white" if colour == WALL else INK
    axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink, zorder=2)


def draw_policy(axes: Any, lake: Any, seen: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """The map, shaded by visits per episode, with arrows for actions.

    The shade follows the square root of the visits. The length of an arrow is the probability of
    its action.
    """
    white, blue = np.array(to_rgb("#FFFFFF")), np.array(to_rgb("#9CC3E6"))
    marks = {b"H": (WALL, "hole"), b"G": (GOAL, "goal")}
    for state, ((row, column), letter) in enumerate(np.ndenumerate(lake)):
        total = float(seen[state].sum())
        shade = tuple(white + min(1.0, total) ** 0.5 * (blue - white))
        square(axes, row, column, *marks.get(letter, (shade,)))
        if total < 1e-3 or letter in marks:
            continue
        look: dict[str, Any] = {"color": INK, "alpha": 0.25 + 0.75 * min(1.0, total) ** 0.5}
        for move, probability in zip(MOVES, seen[state] / total, strict=True):
            if probability > 0.03:
                down, right = (0.36 * probability * x for x in move)
                head: dict[str, Any] = {"width": 0.035, "head_width": 0.16, "head_length": 0.11}
                axes.add_patch(FancyArrow(column, row, right, down, lw=0, zorder=3, **head, **look))
    ring = {"facecolor": "none", "edgecolor": START, "linewidth": 1.6, "zorder": 2}
    axes.add_patch(Circle((0, 0), 0.44, **ring))
    rows, columns = lake.shape
    limits = {"xlim": (-0.55, columns - 0.45), "ylim": (rows - 0.45, -0.55)}
    axes.set(aspect="equal", xticks=[], yticks=[], **limits)
    axes.spines[:].set_visible(False)


def main(args: Args) -> Path:
    """Learn, draw, play and compare."""
    tasks = [make_task(name) for name in args.games]  # errors before anything is learned
    directory = common.begin("gym_control", args)
    count = sum(len(learners(args, task.mdp)) for task in tasks)
    level = 1 - 0.01 / count  # all intervals hold together with probability 99 %
    verdicts: list[Verdict] = []
    for task in tasks:
        found = run_task(args, task, directory, level)
        for verdict in found if "Lake" in task.world.id else ():
            name = f"{common.slug(task.name)}__{common.slug(verdict.learner)}.png"
            common.write_figure(directory / name, draw(found, verdict))
        verdicts += found
    rows = [verdict.row() for verdict in verdicts]
    common.write_csv(directory / "gym_control.csv", rows)
    header = ["game", "pairs", "learner", "uniform", "best", "predicted", "played", "agree"]
    header += ["regret (losses)", "regret (rewards)"]
    cells = []
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("uniform", "best", "predicted")]
        numbers += [f"{row['played']:.3f} ± {(row['upper'] - row['lower']) / 2:.3f}"]
        numbers += ["yes" if row["agrees"] else "NO"]
        numbers += [f"{row[name]:.1f}" for name in ("regret_in_losses", "regret_in_rewards")]
        cells.append([row["game"], f"{row['pairs']:,}", row["learner"], *numbers])
    print("\nReturns of an episode, as q predicts them and as played in the environment: mean of")
    print(f"{args.rollouts:,} episodes; {common.machine()}\n")
    print(common.table(header, cells, left=(0, 2)))
    agreeing = f"{sum(row['agrees'] for row in rows)} of {len(rows)} predictions"
    print(f"\n{agreeing} lie in the intervals, which hold together with probability 99 %.")
    print(f"written to {directory}: figures of the lakes, gym_control.csv and config.json;")
    print("every game has its own directory with a history and a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
