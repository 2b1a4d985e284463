"""Tune (alpha, beta, gamma) by gradients of the forecast on some random MDPs; play on others.

There are two parts, each with a table and a figure. `accuracy` compares the forecasts with
simulated regret over a grid of settings. `rivals` tunes for the stochastic world and compares with
searches by simulation, on held-out MDPs: a number of quasi-random points, and random search and
Optuna with as much processor time as the tuner. All of them minimize the tuner's objective in the
same box: the mean over the training MDPs of log regret.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS

Setting = tuple[float, float, float]  # alpha, beta, gamma
PAPER, APPENDIX, TUNED = "paper", "paper's appendix", "tuned"
TSALLIS, RANDOM, OPTUNA = "Tsallis, untuned", "random search", "Optuna"
#: The box of alpha, beta and gamma for the tuner and for all searches.
BOX = {"alpha": (0.01, 10.0), "beta": (0.01, 1000.0), "gamma": (0.25, 4.0)}


@dataclass(frozen=True)
class Args:
    """How much is tuned, played and compared."""

    episodes: int = 10_000
    """T"""
    train: int = 2
    """MDPs to tune on"""
    test: int = 2
    """held-out MDPs"""
    seed: int = 100
    """of the first held-out MDP; the training MDPs come before it"""
    seeds: int = 20
    """runs of every simulation on held-out MDPs"""
    size: tuple[int, int, int] = (3, 3, 3)
    """L, the states in each layer but the first, and A"""
    root: Path = Path("runs")
    """where the run's directory goes"""
    rival_mdps: int = 4
    """searches by simulation play this many training MDPs, the last ones; the tuner takes all"""
    betas: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)
    """grid of the comparison of forecasts with simulations"""
    gammas: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """likewise"""
    particles: int = 128
    """of a forecast by leaping, in the comparison with simulations"""
    steps: int = 30
    """of the tuner"""
    starts: int = 2
    """of the tuner"""
    trust: float = 0.7
    """share of noise up to which the tuner trusts a forecast"""
    points: int = 24
    """of the quasi-random search, each played once on each MDP; 0 for none"""
    budget: float = 0.0
    """seconds of processor time for random search and Optuna; 0 for as long as the tuner took"""
    parts: tuple[Literal["accuracy", "rivals"], ...] = ("accuracy", "rivals")
    """which parts to run"""

    @property
    def training(self) -> range:
        """Numbers of the training MDPs."""
        return range(self.seed - self.train, self.seed)

    @property
    def played(self) -> range:
        """Those of them that searches by simulation play."""
        return self.training[-max(self.rival_mdps, 1) :]

    @property
    def held_out(self) -> range:
        """Numbers of the held-out MDPs."""
        return range(self.seed, self.seed + self.test)

    def problem(self, number: int) -> tuple[occ.LayeredMDP, Tensor]:
        """An MDP and its mean losses."""
        mdp = occ.LayeredMDP.random(*self.size, seed=number)
        return mdp, common.random_means(mdp, number)


@cache
def simulated(args: Args, number: int, setting: Setting, seeds: int) -> Tensor:
    """The final regrets of a setting in the stochastic world of one MDP, `(N,)`."""
    mdp, mean = args.problem(number)
    learner, losses = occ.FTRL(mdp, occ.jin_luo(mdp, *setting)), occ.BernoulliLosses(mean)
    return common.final_regret(learner, losses, args.episodes, range(1, seeds + 1))


def accuracy(args: Args, directory: Path) -> list[str]:
    """The grid of settings: simulated, and forecast by mean path, by leaping and by the rule."""
    rows: list[dict[str, Any]] = []
    for number in args.held_out:
        grid = [(gamma, beta) for gamma in args.gammas for beta in args.betas]
        rows += [compare_forecasts(args, number, beta, gamma) for gamma, beta in grid]
        print(f"  MDP {number}: forecasts of {len(grid)} settings compared", flush=True)
    common.write_csv(directory / "accuracy.csv", rows)
    common.write_figure(directory / "accuracy.png", draw_accuracy(args, rows))
    lines = []
    keys = {"mean path": "mean_path", "leaping": "leaping", "by the rule": "chosen"}
    for name, key in keys.items():
        errors = np.array([abs(row[key] / row["simulated"] - 1) for row in rows])
        within = f"{(errors <= 0.1).mean():.0%} of {len(rows)} within 10 %"
        lines.append(
            f"{name}: {within}, median error {np.median(errors):.1%}, largest {errors.max():.1%}"
        )
        for number, own in zip(args.held_out, np.split(errors, args.test), strict=True):
            lines.append(f"  MDP {number}: {(own <= 0.1).sum()} of {len(own)}")
    for row in rows:
        if abs(row["error"]) > 0.1:
            setting = f"MDP {row['mdp']}, beta {row['beta']:g}, gamma {row['gamma']:g}"
            forecast = f"{row['chosen']:.0f} ({row['method']})"
            truth = f"{row['simulated']:.0f} +- {row['standard_error']:.0f}"
            lines.append(f"  missed: {setting}: {forecast}, simulated {truth}")
    return lines


def compare_forecasts(args: Args, number: int, beta: float, gamma: float) -> dict[str, Any]:
    """One setting on one MDP."""
    setting = (args.size[2] ** -0.5, beta, gamma)
    truth = occ.game.Mean.of(simulated(args, number, setting, args.seeds))
    mdp, mean = args.problem(number)
    psi = occ.jin_luo(mdp, *setting)
    with torch.no_grad():
        path = occ.forecast(mdp, psi, mean, args.episodes)
    leaps = occ.leap(mdp, psi, mean, args.episodes, particles=args.particles, seed=number)
    reliable = bool(path.reliable)
    chosen = float(path.final if reliable else leaps.final)
    row: dict[str, Any] = {"mdp": number, "beta": beta, "gamma": gamma}
    row |= {"simulated": truth.mean, "standard_error": truth.standard_error}
    row |= {"mean_path": float(path.final), "noise_share": float(path.noise_share)}
    row |= {"leaping": float(leaps.final), "leaping_error": float(leaps.standard_error[-1])}
    row |= {"method": "mean path" if reliable else "leaping", "chosen": chosen}
    return row | {"error": chosen / truth.mean - 1}


def draw_accuracy(args: Args, rows: list[dict[str, Any]]) -> Figure:
    """Forecast over simulated regret."""
    figure = common.new_figure(6, 4.6)
    axes = figure.subplots()
    truths = [row["simulated"] for row in rows]
    ends = np.array([0.8 * min(truths), 1.25 * max(truths)])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", label="within 10 %")
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    for i, (method, key) in enumerate((("mean path", "mean_path"), ("leaping", "leaping"))):
        for taken in (True, False):
            kept = [row for row in rows if (row["method"] == method) == taken]
            hollow = {"facecolors": "none", "edgecolors": COLOURS[i], "alpha": 0.45}
            look = {"color": COLOURS[i]} if taken else hollow
            label = f"{method}, {'chosen by the rule' if taken else 'not chosen'}"
            x, y = ([row[name] for row in kept] for name in ("simulated", key))
            axes.scatter(x, y, s=22, marker="o^"[i], label=label, linewidths=0.8, **look)
    title = f"{len(rows)} settings, T = {args.episodes:,}"
    labels = {"xlabel": "simulated regret", "ylabel": "forecast regret", "title": title}
    common.tidy(axes, xscale="log", yscale="log", **labels)
    axes.legend(frameon=False, fontsize="small")
    return figure


class Search(NamedTuple):
    """The result of a search by simulation."""

    best: Setting
    played: int  # points
    seconds: float  # of processor time


def judge(args: Args, setting: Setting) -> float:
    """The mean log regret of one run on each MDP that searches play."""
    regrets = [float(simulated(args, number, setting, 1)) for number in args.played]
    return float(np.mean([math.log(max(regret, 1.0)) for regret in regrets]))


def search(
    args: Args,
    ask: Callable[[], Setting],
    tell: Callable[[float], object],
    budget: float,
    points: int = 1,
) -> Search:
    """At least some points, and more until the budget is spent; the last one may end after it."""
    begun, found = time.process_time(), list[tuple[float, Setting]]()
    while len(found) < points or time.process_time() - begun < budget:
        setting = ask()
        found.append((judge(args, setting), setting))
        tell(found[-1][0])
    return Search(min(found)[1], len(found), time.process_time() - begun)


def from_cube(x: np.ndarray) -> Setting:
    """A point of the unit cube stands for the logarithms of a setting in the box."""
    low, high = (np.log([ends[i] for ends in BOX.values()]) for i in (0, 1))
    alpha, beta, gamma = np.exp(low + x * (high - low)).tolist()
    return alpha, beta, gamma


def search_all(args: Args, budget: float) -> dict[str, Search]:
    """The quasi-random points, and the two searches with this processor time."""
    from scipy.stats import qmc

    found, generator = {}, np.random.default_rng(args.seed)
    if args.points:
        sobol = iter(qmc.Sobol(len(BOX), seed=0).random_base2(math.ceil(math.log2(args.points))))
        ask = lambda: from_cube(next(sobol))  # noqa: E731
        found[f"search of {args.points} points"] = search(args, ask, float, 0.0, args.points)
    ask = lambda: from_cube(generator.random(len(BOX)))  # noqa: E731
    found[RANDOM] = search(args, ask, float, budget)
    try:
        import optuna
    except ImportError:
        print("Optuna is not installed (pip install 'torch-occ[tuning]'); left out")
        return found
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=args.seed))
    trials: list[Any] = []

    def ask_optuna() -> Setting:
        trials.append(study.ask())
        return from_cube(np.array([trials[-1].suggest_float(name, 0.0, 1.0) for name in BOX]))

    tell = lambda cost: study.tell(trials[-1], cost)  # noqa: E731
    return found | {OPTUNA: search(args, ask_optuna, tell, budget)}


def rivals(args: Args, directory: Path) -> list[str]:
    """The tuner against searches with the same objective."""
    mdps, means = zip(*map(args.problem, args.training), strict=True)
    short = replace(args, episodes=10)  # compiles, before the clock starts
    simulated(short, args.seed, (0.5, 1.0, 1.0), 1)
    psi = occ.jin_luo(mdps[0])
    worlds = [occ.tuning.World("stochastic", occ.tuning.stack(mdps), torch.stack(means))]
    occ.forecast(mdps[0], psi, means[0], 10)
    begun = time.process_time()
    objective = occ.tuning.ForecastObjective(
        worlds, args.episodes, reference=psi, robustness=1.0, trust=args.trust
    )
    tuned = occ.tune(
        objective, psi, steps=args.steps, starts=args.starts, rate=0.5, bounds=BOX,
        directory=directory / "tuning",
    )  # fmt: skip
    spent = time.process_time() - begun
    print(tuned, flush=True)
    lines = [
        f"tuner: {spent:.1f} s of processor time, {tuned.values.numel()} forecasts on each MDP",
        f"random search and Optuna got {common.seconds(args.budget or spent)} each",
    ]
    paper = (args.size[2] ** -0.5, 64.0 * args.size[0], 1.0)
    # The constants of the appendix, with the paper's beta.
    stochastic = occ.theory.tune_stochastic(args.problem(args.seed)[0])
    candidates: dict[str, tuple[Setting, float]] = {
        PAPER: (paper, 0.0),
        APPENDIX: ((stochastic.alpha, paper[1], stochastic.gamma), 0.0),
        # FTRL.tsallis(mdp): nothing is tuned, and there is no log-barrier.
        TSALLIS: ((0.0, 0.0, 1.0), 0.0),
        TUNED: (setting_of(tuned), spent),
    }
    for name, found in search_all(args, args.budget or spent).items():
        candidates[name] = found.best, found.seconds
        lines.append(
            f"{name}: {found.played} points, {common.seconds(found.seconds)} of processor time"
        )
    regrets = {name: held_out(args, setting) for name, (setting, _) in candidates.items()}
    header = ["", *BOX, "processor time", *(f"MDP {number}" for number in args.held_out)]
    cells = []
    for name, (setting, took) in candidates.items():
        found_here = regrets[name]
        each = [*found_here, found_here.mean(0)]
        line = [name, *(f"{x:.3g}" for x in setting), f"{took:.0f} s" if took else ""]
        cells.append([*line, *(str(occ.game.Mean.of(x)) for x in each)])
        apart = found_here.mean(0) - regrets[TUNED].mean(0)
        cells[-1].append(str(occ.game.Mean.of(100 * apart / regrets[TUNED].mean())))
    rows = [dict(zip(("setting", *header[1:], "mean", "more"), x, strict=True)) for x in cells]
    common.write_csv(directory / "rivals.csv", rows)
    return [*lines, common.table([*header, "mean", "more than tuned, %"], cells)]


def setting_of(tuned: occ.tuning.Tuned) -> Setting:
    """alpha, beta and gamma of what was tuned."""
    by_name = {name.rpartition(".")[2]: value for name, value in tuned.parameters.items()}
    return by_name["alpha"], by_name["beta"], by_name["gamma"]


def held_out(args: Args, setting: Setting) -> Tensor:
    """Final regrets in the stochastic worlds of the held-out MDPs, `(MDPs, seeds)`."""
    return torch.stack([simulated(args, number, setting, args.seeds) for number in args.held_out])


def main(args: Args) -> Path:
    """All parts."""
    directory = common.begin("meta_tune", args, args.seed)
    lines: list[str] = []
    for part in args.parts:
        found = {"accuracy": accuracy, "rivals": rivals}[part](args, directory)
        print("\n".join([part, *found, ""]), flush=True)
        lines += [part, *found, ""]
    common.write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
