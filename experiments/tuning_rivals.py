"""Searches by simulation, with which the tuner is compared.

There are three: a fixed number of quasi-random points, random points for some seconds, and Optuna
for some seconds. All of them minimize the tuner's objective in the same box: the mean over the
training MDPs of log regret in the stochastic world. Every point is judged with the same seeds. Time
is processor time of this process, without compiling, so a busy machine changes little.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import torch_occ as occ
from experiments.common import write_csv
from experiments.tuning_worlds import STOCHASTIC, Family, Setting

#: The box of alpha, beta and gamma for the tuner and for all searches.
BOX = {"alpha": (0.01, 10.0), "beta": (0.01, 1000.0), "gamma": (0.25, 4.0)}


class Point(NamedTuple):
    """A setting that was played."""

    setting: Setting
    cost: float
    seconds: float  # of processor time


class Search(NamedTuple):
    """The result of a search."""

    points: list[Point]
    played: int  # points, those of the first round too
    seconds: float  # of processor time, of all of them

    @property
    def best(self) -> list[Point]:
        """The points, the best one first."""
        return sorted(self.points, key=lambda point: point.cost)


def judge(family: Family, mdps: range, setting: Setting, seeds: int) -> Point:
    """Play one setting."""
    begun, logs = time.process_time(), []
    for number in mdps:
        mdp, _ = family.problem(number)
        learner = occ.FTRL(mdp, occ.jin_luo(mdp, *setting))
        losses = family.environment(number, STOCHASTIC)
        history = occ.simulate(
            mdp,
            learner,
            losses,
            family.episodes,
            range(1, seeds + 1),
            checkpoints=[family.episodes],
        )
        logs.append(math.log(max(float(history.regret.mean()), 1.0)))
    return Point(setting, float(np.mean(logs)), time.process_time() - begun)


def warm_up(family: Family, mdps: range) -> None:
    """Compile, before the clock starts."""
    short = family._replace(episodes=10)
    judge(short, mdps[:1], (0.5, 1.0, 1.0), 1)
    mdp, mean = family.problem(mdps[0])
    occ.leap(mdp, occ.jin_luo(mdp), mean, short.episodes, particles=1)


def quasi_random(count: int, seed: int) -> Iterator[Setting]:
    """A scrambled Sobol sequence in the logarithms of the box."""
    from scipy.stats import qmc

    unit = qmc.Sobol(len(BOX), seed=seed).random(2 ** math.ceil(math.log2(max(count, 2))))[:count]
    low, high = (np.log([ends[i] for ends in BOX.values()]) for i in (0, 1))
    yield from (
        (alpha, beta, gamma) for alpha, beta, gamma in np.exp(low + unit * (high - low)).tolist()
    )


def search_points(
    family: Family, mdps: range, count: int, again: int, seeds: int, seed: int, kept: Path
) -> Search:
    """Quasi-random points with one run per MDP, then the best `again` of them with `seeds` runs.

    Only the second round counts. Everything is kept in a file, so an interrupted search continues.
    """
    warm_up(family, mdps)
    first = _kept(kept, quasi_random(count, seed), lambda setting: judge(family, mdps, setting, 1))
    best = sorted(first, key=lambda point: point.cost)[:again]
    again_in = kept.with_suffix(f".{seeds}runs.csv")
    second = _kept(
        again_in,
        (point.setting for point in best),
        lambda setting: judge(family, mdps, setting, seeds),
    )
    return Search(second, len(first), sum(point.seconds for point in first + second))


def _kept(path: Path, settings: Iterable[Setting], play: Callable[[Setting], Point]) -> list[Point]:
    """The points of these settings in this order, read from a file as far as it has them."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = [
            {name: float(x) for name, x in row.items()}
            for row in csv.DictReader(path.read_text().splitlines())
        ]
    points = []
    for i, setting in enumerate(settings):
        if i < len(rows) and not np.allclose([rows[i][name] for name in BOX], setting, rtol=1e-6):
            reason = "the file belongs to another search, so give another --cache"
            raise SystemExit(f"{path}: its row {i} is not {setting}; {reason}")
        if i >= len(rows):
            point = play(setting)
            rows.append(
                dict(zip(BOX, setting, strict=True))
                | {"cost": point.cost, "seconds": point.seconds}
            )
            write_csv(path, rows)
        points.append(Point(setting, rows[i]["cost"], rows[i]["seconds"]))
    return points


def search_randomly(family: Family, mdps: range, seeds: int, budget: float, seed: int) -> Search:
    """Log-uniform points until the time is up."""
    generator, low, high = (
        np.random.default_rng(seed),
        *(np.log([ends[i] for ends in BOX.values()]) for i in (0, 1)),
    )

    def draw() -> Setting:
        alpha, beta, gamma = np.exp(generator.uniform(low, high)).tolist()
        return alpha, beta, gamma

    return _until(budget, lambda: judge(family, mdps, draw(), seeds))


def search_optuna(
    family: Family, mdps: range, seeds: int, budget: float, seed: int
) -> Search | None:
    """Points of Optuna's default sampler until the time is up; None if Optuna is missing."""
    try:
        import optuna
    except ImportError:
        print("Optuna is not installed (pip install torch-occ[tuning]); left out")
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))

    def ask() -> Point:
        trial = study.ask()
        alpha, beta, gamma = (
            trial.suggest_float(name, low, high, log=True) for name, (low, high) in BOX.items()
        )
        point = judge(family, mdps, (alpha, beta, gamma), seeds)
        study.tell(trial, point.cost)
        return point

    return _until(budget, ask)


def _until(budget: float, step: Callable[[], Point]) -> Search:
    """One point at least; the last one may end after the budget."""
    points: list[Point] = []
    while not points or sum(point.seconds for point in points) < budget:
        points.append(step())
    return Search(points, len(points), sum(point.seconds for point in points))
