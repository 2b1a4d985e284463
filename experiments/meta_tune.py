"""Tune (alpha, beta, gamma) by gradients of the forecast on some random MDPs; play on others.

There are two parts, each with a table and a figure. `accuracy` compares the forecasts with
simulated regret over a grid of settings. `rivals` tunes for the stochastic world and compares with
searches by simulation, on held-out MDPs: a search with a fixed number of points, and random search
and Optuna with as much time as the tuner. For tuning under a guard against an adversary, see
`both_worlds`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

import torch_occ as occ
from experiments import tuning_figures as figures
from experiments.common import run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from experiments.tuning_rivals import (
    BOX,
    Search,
    search_optuna,
    search_points,
    search_randomly,
    warm_up,
)
from experiments.tuning_worlds import STOCHASTIC, Family, Setting
from torch_occ.tuning.recommended import Recipe

PAPER, APPENDIX, TUNED = "paper", "paper's appendix", "tuned"
TSALLIS = "Tsallis, untuned"
RANDOM, OPTUNA = "random search", "Optuna"


@dataclass(frozen=True)
class Args:
    """How much is tuned, played and compared."""

    episodes: int = 10_000
    """T"""
    train: int = 2
    """MDPs to tune on"""
    rival_mdps: int = 4
    """searches by simulation play this many of them, the last ones; the tuner leaps on all"""
    test: int = 2
    """held-out MDPs"""
    seeds: int = 20
    """runs of every simulation"""
    seed: int = 100
    """of the first held-out MDP; the training MDPs come before it"""
    betas: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)
    """grid of the comparison of forecasts with simulations"""
    gammas: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """likewise"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    particles: int = 128
    """of a forecast by leaping, in the comparison with simulations"""
    recipe: Recipe = field(default_factory=Recipe)
    """of the tuner"""
    points: int = 24
    """of the search with a fixed number of points, each played once on each MDP; 0 for none"""
    again: int = 4
    """how many of these points, the best ones, are played again"""
    search_seeds: int = 4
    """runs of each point that is played again"""
    rival_seeds: int = 1
    """runs of each point of random search and of Optuna"""
    finalists: int = 2
    """how many of these points are played on the held-out MDPs; the best one there counts"""
    budget: float = 0.0
    """seconds of processor time for random search and Optuna; 0 for as long as the tuner took"""
    parts: tuple[str, ...] = ("accuracy", "rivals")
    """which parts to run"""
    cache: Path = Path("runs/meta_tune_cache")
    """where simulations are kept, so that none is repeated"""
    only_cached: bool = False
    """compare forecasts only with simulations that are in the cache"""
    root: Path = Path("runs")
    """where the run's directory goes"""

    @property
    def family(self) -> Family:
        return Family(self.episodes, self.horizon, self.width, self.actions)

    @property
    def training(self) -> range:
        """Numbers of the training MDPs."""
        return range(self.seed - self.train, self.seed)

    @property
    def played(self) -> range:
        """Those of them that searches by simulation play."""
        return range(max(self.seed - max(self.rival_mdps, 1), self.training.start), self.seed)

    @property
    def held_out(self) -> range:
        """Numbers of the held-out MDPs."""
        return range(self.seed, self.seed + self.test)


# -- forecasts against simulations ----------------------------------------------------------------


def accuracy(args: Args, directory: Path) -> list[str]:
    """The grid of settings: simulated, and forecast by mean path, by leaping and by the rule."""
    rows: list[dict[str, Any]] = []
    for number in args.held_out:
        before = len(rows)
        rows += [
            row
            for gamma in args.gammas
            for beta in args.betas
            if (row := compare_forecasts(args, number, beta, gamma))
        ]
        print(f"  MDP {number}: forecasts of {len(rows) - before} settings compared", flush=True)
    write_csv(directory / "accuracy.csv", rows)
    alpha = args.actions**-0.5
    shown = [(args.betas[-1], 1.0), (10.0, 1.0), (1.0, 1.0), (1.0, 4.0), (args.betas[0], 4.0)]
    curves = {
        (beta, gamma): args.family.simulated(
            args.cache, args.seed, (alpha, beta, gamma), STOCHASTIC, args.seeds
        )
        for beta, gamma in shown
        if beta in args.betas and gamma in args.gammas
    }
    figure = figures.draw_accuracy(args.family, rows, args.seed, curves, args.particles)
    write_figure(directory / "accuracy.png", figure)
    lines = []
    keys = {"mean path": "mean_path", "leaping": "leaping", "by the rule": "chosen"}
    for name, key in keys.items():
        errors = np.array([abs(row[key] / row["simulated"] - 1) for row in rows])
        within = f"{(errors <= 0.1).mean():.0%} of {len(rows)} within 10 %"
        lines.append(
            f"{name}: {within}, median error {np.median(errors):.1%}, largest {errors.max():.1%}"
        )
        for number in dict.fromkeys(row["mdp"] for row in rows):
            own = np.array(
                [error for error, row in zip(errors, rows, strict=True) if row["mdp"] == number]
            )
            lines.append(f"  MDP {number}: {(own <= 0.1).sum()} of {len(own)}")
    for row in rows:
        if abs(row["error"]) > 0.1:
            setting = f"MDP {row['mdp']}, beta {row['beta']:g}, gamma {row['gamma']:g}"
            forecast = f"{row['chosen']:.0f} ({row['method']})"
            simulated = f"{row['simulated']:.0f} +- {row['standard_error']:.0f}"
            lines.append(f"  missed: {setting}: {forecast}, simulated {simulated}")
    return lines


def compare_forecasts(args: Args, number: int, beta: float, gamma: float) -> dict[str, Any] | None:
    """One setting on one MDP; None with `only_cached` if it is not in the cache."""
    setting = (args.actions**-0.5, beta, gamma)
    kept = args.family.kept(args.cache, number, setting, STOCHASTIC, args.seeds)
    if args.only_cached and not kept.exists():
        return None
    history = args.family.simulated(args.cache, number, setting, STOCHASTIC, args.seeds)
    truth = history.regret[:, -1]
    mdp, mean = args.family.problem(number)
    psi = occ.jin_luo(mdp, *setting)
    with torch.no_grad():
        path = occ.forecast(mdp, psi, mean, args.episodes)
    begun = time.monotonic()
    leaps = occ.leap(mdp, psi, mean, args.episodes, particles=args.particles, seed=number)
    chosen = float(path.final if bool(path.reliable) else leaps.final)
    return {
        "mdp": number,
        "beta": beta,
        "gamma": gamma,
        "simulated": float(truth.mean()),
        "standard_error": float(truth.std()) / len(truth) ** 0.5,
        "mean_path": float(path.final),
        "noise_share": float(path.noise_share),
        "leaping": float(leaps.final),
        "leaping_error": float(leaps.standard_error[-1]),
        "leaps": float(leaps.leaps.double().mean()),
        "leaping_seconds": time.monotonic() - begun,
        "simulation_seconds": float(history.wall_time[-1]),
        "method": "mean path" if bool(path.reliable) else "leaping",
        "chosen": chosen,
        "error": chosen / float(truth.mean()) - 1,
    }


# -- tuning for the stochastic world, and searches by simulation ----------------------------------


def objective_of(args: Args) -> tuple[occ.ForecastObjective, occ.Regularizer]:
    """The forecast on the training MDPs, and the regularizer with the paper's constants."""
    psi = occ.jin_luo(args.family.problem(args.training[0])[0])
    return occ.ForecastObjective(
        [args.family.stochastic(args.training)], args.episodes, reference=psi, robustness=1.0
    ), psi


def rivals(args: Args, directory: Path) -> list[str]:
    """The tuner without a guard, against searches with the same objective."""
    family = args.family
    warm_up(family, args.training)
    begun = time.process_time()
    objective, psi = objective_of(args)
    refined = occ.tune_and_refine(
        objective,
        psi,
        args.recipe,
        bounds=BOX,
        directory=directory / "tuning",
        save_to=directory / "tuning.pt",
    )
    tuned = refined.start
    spent = time.process_time() - begun
    print(f"{tuned}\nrefined: {refined.tuned}", flush=True)
    write_figure(directory / "landscape.png", figures.draw_landscape(objective, tuned, refined))
    budget = args.budget or spent
    parts = f"{tuned.seconds:.1f} s by gradients, {refined.seconds:.1f} s by"
    lines = [
        f"tuner: {spent:.1f} s of processor time; {parts} {len(refined.values)} trials",
        f"random search and Optuna got {seconds(budget)} each",
    ]
    mdps = f"mdps{args.played[0]}-{args.played[-1]}"
    kept = args.cache / f"search_{family.sizes}_T{args.episodes}_{mdps}_{args.points}.csv"
    fixed = None
    if args.points:
        fixed = search_points(
            family, args.played, args.points, args.again, args.search_seeds, 0, kept
        )
    searches: dict[str, Search | None] = {
        f"search of {args.points} points": fixed,
        RANDOM: search_randomly(family, args.played, args.rival_seeds, budget, args.seed),
        OPTUNA: search_optuna(family, args.played, args.rival_seeds, budget, args.seed),
    }
    # The constants of the appendix, with the paper's beta.
    stochastic = occ.theory.tune_stochastic(family.problem(args.seed)[0])
    candidates: list[tuple[str, Setting, float]] = [
        (PAPER, family.paper, 0.0),
        (APPENDIX, (stochastic.alpha, family.paper[1], stochastic.gamma), 0.0),
        # FTRL.tsallis(mdp): nothing is tuned, and there is no log-barrier.
        (TSALLIS, (0.0, 0.0, 1.0), 0.0),
        (TUNED, figures.setting_of(refined.tuned), spent),
    ]
    for name, found in searches.items():
        if found is not None:
            count = args.finalists if name.startswith("search") else 1
            candidates += [
                (f"{name}, no. {i + 1}" if count > 1 else name, p.setting, found.seconds)
                for i, p in enumerate(found.best[:count])
            ]
            lines.append(
                f"{name}: {found.played} points, {seconds(found.seconds)} of processor time"
            )
    rows = [
        judge_held_out(args, name, setting) | {"seconds": spent}
        for name, setting, spent in candidates
    ]
    write_csv(directory / "rivals.csv", rows)
    write_figure(directory / "rivals.png", figures.draw_rivals(family, rows, args.seeds))
    names = [f"MDP {number}" for number in args.held_out]
    header = ["", "α", "β", "γ", "processor time", *names, "mean", "relative to the tuned one"]
    own = next(row for row in rows if row["setting"] == TUNED)
    cells = []
    for row in rows:
        line = [row["setting"], *(f"{row[key]:.3g}" for key in BOX)]
        line += [f"{row['seconds']:.0f} s" if row["seconds"] else ""]
        line += [f"{row[name]:.0f} ± {row[f'{name}, standard error']:.0f}" for name in names]
        line += [f"{row['regret']:.0f} ± {row['standard_error']:.0f}"]
        cells.append([*line, f"{row['regret'] / own['regret']:.3g}"])
    for name, setting, _ in candidates:
        if name in (PAPER, APPENDIX, TUNED):
            continue
        excess, error = excess_of(args, figures.setting_of(refined.tuned), setting)
        lines.append(f"{TUNED}: {excess:+.1%} ± {error:.1%} of regret, relative to {name}")
    return [*lines, table(header, cells)]


def excess_of(args: Args, setting: Setting, other: Setting) -> tuple[float, float]:
    """How much more regret a setting has than another, as a share, on the held-out MDPs.

    The second number is the standard error over seeds.
    """

    def by_seed(candidate: Setting) -> torch.Tensor:
        found = [
            args.family.simulated(args.cache, number, candidate, STOCHASTIC, args.seeds)
            for number in args.held_out
        ]
        return torch.stack([history.regret[:, -1] for history in found]).mean(0)

    own, its = by_seed(setting), by_seed(other)
    difference = (own - its) / its.mean()
    return float(difference.mean()), float(difference.std()) / len(difference) ** 0.5


def judge_held_out(args: Args, name: str, setting: Setting) -> dict[str, Any]:
    """One setting in the stochastic worlds of all held-out MDPs."""
    row: dict[str, Any] = {"setting": name} | dict(zip(BOX, setting, strict=True))
    means, errors = [], []
    for number in args.held_out:
        history = args.family.simulated(args.cache, number, setting, STOCHASTIC, args.seeds)
        regret = history.regret[:, -1]
        means.append(float(regret.mean()))
        errors.append(float(regret.std()) / len(regret) ** 0.5)
        row |= {f"MDP {number}": means[-1], f"MDP {number}, standard error": errors[-1]}
    return row | {
        "regret": float(np.mean(means)),
        "standard_error": float(np.linalg.norm(errors)) / len(means),
    }


PARTS = {"accuracy": accuracy, "rivals": rivals}


def main(args: Args) -> Path:
    """All parts."""
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        raise SystemExit(f"parts: there is no {unknown[0]!r}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    directory = run_directory(args.root, "meta_tune", args.seed)
    write_configuration(directory, args)
    lines: list[str] = []
    for part in args.parts:
        found = PARTS[part](args, directory)
        print("\n".join([part, *found, ""]), flush=True)
        lines += [part, *found, ""]
    write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
