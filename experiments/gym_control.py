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
from typing import Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, run_directory, table, write_csv, write_figure
from experiments.games import Game, Settings, play_all, slug, write_configuration
from experiments.gym_worlds import Task, make_task, moments, play_policy
from experiments.maps import INK, draw_policy, panels, visits
from torch_occ.game.figures import COLOURS
from torch_occ.game.losses import Stationary

FTRL, LEADER = "FTRL (Jin-Luo, small β)", "follow the leader, optimistic"

#: Printed if follow-the-leader is ahead.
WHY = """
The losses of these worlds do not change from episode to episode, most of them have no noise, the
transitions are known and the horizons are short. Follow-the-leader counts an unseen pair as free,
so it tries each promising pair once, like UCB, and then plays the best policy. Optimism is the
right tool here. FTRL goes on exploring, since an adversary could change the losses, and its
estimates have the variance of importance weights. Its advantage is robustness: in
best_of_both_worlds, follow-the-leader has linear regret in all four environments, and FTRL in none.
"""


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
    """the learners: FTRL, follow-the-leader"""
    alone: int = 5000
    """with more pairs than this FTRL is left out, and follow-the-leader learns alone"""
    rollouts: int = 4000
    """episodes played in the real environment"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


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
        """Around the mean of the returns, with the variance that the environment's table implies.

        The sample variance would miss a rare fall that did not happen in the sample.
        """
        _, deviation = moments(self.task, occ.policy_of(self.task.mdp, self.q))
        quantile = statistics.NormalDist().inv_cdf((1 + self.level) / 2)
        half = quantile * deviation / math.sqrt(len(self.returns)) + 1e-9
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
        row |= {
            "best": self.best,
            "uniform": self.uniform,
            "predicted": self.predicted,
            "played": float(self.returns.mean()),
        }
        row |= {"lower": low, "upper": high, "agrees": self.agrees}
        return row | {
            "regret_in_losses": float(regret),
            "regret_in_rewards": float(mdp.regret_in_rewards(regret)),
        }


# -- drawing --------------------------------------------------------------------------------------


def draw(verdicts: list[Verdict], shown: Verdict) -> Figure:
    """The learning curves, the policy of `shown` on the map, and its returns in the environment."""
    task, mdp = shown.task, shown.task.mdp
    maps = panels(task.env, mdp, shown.q)
    wide = 2.2 if "Cliff" in task.world.id else 1.0
    size = (7.4 + 3.1 * wide * len(maps), 3.5)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2 + len(maps), width_ratios=[1.15, *[wide] * len(maps), 1.05])
    draw_learning(axes[0], verdicts, shown)
    seen = visits(mdp, shown.q, int(task.env.observation_space.n))  # type: ignore[attr-defined]
    for place, panel in zip(axes[1:-1], maps, strict=True):
        draw_policy(place, task.env, panel, seen)
    draw_returns(axes[-1], shown)
    for place in (axes[0], axes[-1]):
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        place.legend(frameon=False, fontsize=7.5, ncols=2, **below)
        place.spines[["top", "right"]].set_visible(False)
        place.grid(visible=True, which="major", color="0.92", linewidth=0.6)
        place.title.set_fontsize(9)
        place.tick_params(labelsize=8)
    size_text = f"{task.world.id}, {mdp.horizon} steps, {mdp.num_pairs:,} pairs"
    learned = f"{shown.learner} after {int(shown.history.episodes[-1]):,} episodes"
    title = f"{size_text}: the policy of {learned}"
    figure.suptitle(title, fontsize=10.5, color=INK)
    return figure


def draw_learning(axes: Axes, verdicts: list[Verdict], shown: Verdict) -> None:
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


def draw_returns(axes: Axes, shown: Verdict) -> None:
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


# -- the script -----------------------------------------------------------------------------------


def learners(args: Args, mdp: occ.RewardMDP) -> dict[str, occ.Learner]:
    """FTRL, where its step is quick enough, and follow-the-leader.

    For follow-the-leader an unseen pair is free, so it explores well where losses have no noise.
    """
    found: dict[str, occ.Learner] = {}
    if "ftrl" in args.players and mdp.num_pairs <= args.alone:
        found[FTRL] = occ.FTRL(mdp, occ.jin_luo(mdp, beta=args.beta, gamma=args.gamma))
    if "leader" in args.players or not found:
        found[LEADER] = occ.FollowTheLeader(mdp)
    return found


def run_task(args: Args, task: Task, directory: Path, level: float) -> list[Verdict]:
    """Learn, then play the learned policies."""
    mdp = task.mdp
    losses = Stationary(mdp.loss, task.world.noise)
    games = [
        Game(task.name, name, learner, losses) for name, learner in learners(args, mdp).items()
    ]
    settings = Settings(args.episodes, args.seeds, args.processes, args.tensorboard, 0)
    histories = play_all(games, settings, directory)
    best = float(mdp.expected_return(occ.occupancy(mdp, occ.optimal_policy(mdp, mdp.loss).policy)))
    uniform = float(mdp.expected_return(occ.interior_point(mdp)))
    found = []
    for (_, name), history in histories.items():
        q = history.last_q[0]
        returns = play_policy(task, occ.policy_of(mdp, q), args.rollouts, seed=1)
        found.append(Verdict(task, name, history, q, returns, best, uniform, level))
    return found


def comparison(rows: list[dict[str, Any]]) -> str:
    """In how many games follow-the-leader has less regret than FTRL, and why."""
    regret = {(row["game"], row["learner"]): row["regret_in_losses"] for row in rows}
    both = [game for game, name in regret if name == FTRL and (game, LEADER) in regret]
    ahead = sum(regret[game, LEADER] < regret[game, FTRL] for game in both)
    if not both:
        return ""
    text = f"{LEADER}: less regret than {FTRL} in {ahead} of {len(both)} games."
    return f"{text}\n{WHY}" if ahead else f"{text}\n"


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
            name = f"{slug(task.name)}__{slug(verdict.learner)}.png"
            write_figure(directory / name, draw(found, verdict))
        verdicts += found
    rows = [verdict.row() for verdict in verdicts]
    write_csv(directory / "gym_control.csv", rows)
    header = ["game", "pairs", "learner", "uniform", "best", "predicted", "played", "agree"]
    header += ["regret (losses)", "regret (rewards)"]
    cells = []
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("uniform", "best", "predicted")]
        numbers += [f"{row['played']:.3f} ± {(row['upper'] - row['lower']) / 2:.3f}"]
        numbers += ["yes" if row["agrees"] else "NO"]
        numbers += [f"{row[name]:.1f}" for name in ("regret_in_losses", "regret_in_rewards")]
        cells.append([row["game"], f"{row['pairs']:,}", row["learner"], *numbers])
    print(
        "\nReturns of an episode, as q predicts them and as played in the environment: the mean of"
    )
    print(f"{args.rollouts:,} episodes; {machine()}\n")
    print(table(header, cells, left=(0, 2)))
    agreeing = f"{sum(row['agrees'] for row in rows)} of {len(rows)} predictions"
    print(f"\n{agreeing} lie in the intervals, which hold together with probability 99 %.")
    print(comparison(rows))
    print(f"written to {directory}: a figure for every policy, gym_control.csv and config.json;")
    print("every game has its own directory with a history and a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
