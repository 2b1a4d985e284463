"""Tune (alpha, beta, gamma) by gradients of the forecast on some random MDPs, and play with them on others: is it worth it?

Parts, each with a table and a figure. `accuracy`: the forecasts against simulated regret over a grid of settings. `tune`: the tuning itself
on training MDPs, in three environments at once that can be forecast and guarded by runs against an adversary that cannot; random search and
Optuna by real simulation, in the same wall time; and all of them, with the paper's constants and its appendix's tuning for the stochastic
case, on held-out MDPs, by simulation. `tradeoff`: what a setting costs in the stochastic world and against the adversary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from torch_occ.figures import COLOURS, band

Setting = tuple[float, float, float]  # alpha, beta, gamma
PAPER, APPENDIX, TUNED, RANDOM, OPTUNA = "paper", "paper's appendix", "tuned by gradients", "random search", "Optuna"
STOCHASTIC, CORRUPTED, SWITCHING, GREEDY = "stochastic", "corrupted", "switching", "greedy adversary"


@dataclass(frozen=True)
class Args:
    """How much of everything."""

    episodes: int = 10_000
    """T"""
    train: int = 2
    """MDPs to tune on"""
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
    steps: int = 40
    """of the optimizer"""
    starts: int = 3
    """of the optimizer"""
    rounds: int = 2
    """of the refinement by leaping"""
    guard_mdps: int = 4
    """training MDPs on which each point of the refinement is played against the greedy adversary; 0 to tune without it"""
    guard_seeds: int = 6
    """runs on each of them"""
    margin: float = 0.0
    """how much less regret than the paper's constants to demand there, since runs are few and held-out MDPs are others"""
    particles: int = 128
    """of a forecast by leaping"""
    search_seeds: int = 4
    """runs of each point of the searches"""
    budget: float = 0.0
    """seconds for each search; 0 for as long as the tuner took"""
    tradeoff_alpha: float = 0.213
    """alpha of the part `tradeoff`; its runs are `search_seeds`"""
    tradeoff_betas: tuple[float, ...] = (0.1, 0.76, 3.0, 10.0, 30.0, 192.0)
    """likewise"""
    tradeoff_gammas: tuple[float, ...] = (0.5, 1.0, 1.55, 3.0)
    """likewise"""
    parts: tuple[str, ...] = ("accuracy", "tune")
    """which parts to run"""
    cache: Path = Path("runs/meta_tune_cache")
    """where simulations are kept, so that none is ever repeated"""
    only_cached: bool = False
    """compare forecasts with those simulations only that have been made already"""
    root: Path = Path("runs")
    """where the run's directory goes"""


# -- worlds ---------------------------------------------------------------------------------------------------------------


def problem(args: Args, seed: int) -> tuple[occ.LayeredMDP, Tensor]:
    """A random MDP with uniformly random mean losses."""
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    return mdp, torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator)


def environments(args: Args, seed: int) -> dict[str, occ.LossProcess]:
    """Losses for one MDP. The last one reacts to the learner: nothing forecasts it, and the tuner has to play."""
    (_, mean), (_, other) = problem(args, seed), problem(args, seed + 10_000)
    period = max(args.episodes // 4, 1)
    return {
        STOCHASTIC: occ.BernoulliLosses(mean),
        CORRUPTED: occ.Corrupted(occ.BernoulliLosses(mean), math.sqrt(args.episodes) * 4, "targeted", target=mean),
        SWITCHING: occ.SwitchingLosses(torch.stack([mean, other]), period, noise="bernoulli"),
        GREEDY: occ.GreedyAdversary(),
    }


def cached(args: Args, seed: int, setting: Setting, environment: str, runs: int) -> Path:
    """Where a simulation is kept."""
    sizes = f"{args.horizon}x{args.width}x{args.actions}"
    numbers = "_".join(f"{x:.6g}" for x in setting)
    return args.cache / f"{sizes}_mdp{seed}_{environment.replace(' ', '-')}_{numbers}_T{args.episodes}_n{runs}.npz"


def simulated(args: Args, seed: int, setting: Setting, environment: str, runs: int) -> occ.History:
    """A simulation, from the cache if it was ever made."""
    path = cached(args, seed, setting, environment, runs)
    if not path.exists():
        mdp, _ = problem(args, seed)
        learner = occ.FTRL(mdp, occ.jin_luo(mdp, *setting))
        occ.simulate(mdp, learner, environments(args, seed)[environment], args.episodes, range(1, runs + 1)).save(path)
    return occ.History.load(path)


# -- forecasts against simulations ----------------------------------------------------------------------------------------


def accuracy(args: Args, directory: Path) -> list[str]:
    """The grid: simulated, by the mean path, by leaping, and by what the rule chooses."""
    rows: list[dict[str, Any]] = []
    alpha = args.actions**-0.5
    for seed in range(args.seed, args.seed + args.test):
        mdp, mean = problem(args, seed)
        before = len(rows)
        for gamma in args.gammas:
            for beta in args.betas:
                if args.only_cached and not cached(args, seed, (alpha, beta, gamma), STOCHASTIC, args.seeds).exists():
                    continue
                history = simulated(args, seed, (alpha, beta, gamma), STOCHASTIC, args.seeds)
                truth = history.regret[:, -1]
                psi = occ.jin_luo(mdp, alpha, beta, gamma)
                with torch.no_grad():
                    path = occ.forecast(mdp, psi, mean, args.episodes)
                begun = time.monotonic()
                leaps = occ.leap(mdp, psi, mean, args.episodes, particles=args.particles, seed=seed)
                reliable = bool(path.reliable)
                chosen = float(path.final if reliable else leaps.final)
                rows.append(
                    {
                        "mdp": seed,
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
                        "method": "mean path" if reliable else "leaping",
                        "chosen": chosen,
                        "error": chosen / float(truth.mean()) - 1,
                    }
                )
        print(f"  MDP {seed}: forecasts of {len(rows) - before} settings compared", flush=True)
    write_csv(directory / "accuracy.csv", rows)
    write_figure(directory / "accuracy.png", draw_accuracy(args, rows))
    lines = []
    for name, key in (("mean path", "mean_path"), ("leaping", "leaping"), ("by the rule", "chosen")):
        errors = np.array([abs(row[key] / row["simulated"] - 1) for row in rows])
        within = f"{(errors <= 0.1).mean():.0%} of {len(rows)} within 10 %"
        lines.append(f"{name}: {within}, median error {np.median(errors):.1%}, largest {errors.max():.1%}")
        for seed in dict.fromkeys(row["mdp"] for row in rows):
            own = np.array([error for error, row in zip(errors, rows, strict=True) if row["mdp"] == seed])
            lines.append(f"  MDP {seed}: {(own <= 0.1).sum()} of {len(own)}")
    wrong = [row for row in rows if abs(row["error"]) > 0.1]
    lines += [
        f"  missed: MDP {row['mdp']}, beta {row['beta']:g}, gamma {row['gamma']:g}: {row['chosen']:.0f} ({row['method']}), "
        f"simulated {row['simulated']:.0f} +- {row['standard_error']:.0f}"
        for row in wrong
    ]
    return lines


def draw_accuracy(args: Args, rows: list[dict[str, Any]]) -> Any:
    """Left: every setting, forecast over simulated. Right: curves of one MDP."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = np.array([0.8 * min(row["simulated"] for row in rows), 1.25 * max(row["simulated"] for row in rows)])
    left.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", label="within 10 %")
    left.plot(ends, ends, color="0.5", linewidth=0.8)
    for method, key, colour, marker in (("mean path", "mean_path", COLOURS[0], "o"), ("leaping", "leaping", COLOURS[1], "^")):
        for taken in (True, False):
            kept = [row for row in rows if (row["method"] == method) == taken]
            style: dict[str, Any] = {"color": colour} if taken else {"facecolors": "none", "edgecolors": colour, "alpha": 0.45}
            label = f"{method}, {'chosen by the rule' if taken else 'not chosen'}"
            left.scatter(
                [row["simulated"] for row in kept], [row[key] for row in kept], s=22, marker=marker, label=label, linewidths=0.8, **style
            )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="simulated regret",
        ylabel="forecast regret",
        title=f"{len(rows)} settings, T = {args.episodes:,}",
    )
    left.legend(frameon=False, fontsize="small")
    seed, alpha = args.seed, args.actions**-0.5
    mdp, mean = problem(args, seed)
    shown = [(args.betas[-1], 1.0), (10.0, 1.0), (1.0, 1.0), (1.0, 4.0), (args.betas[0], 4.0)]
    shown = [pair for pair in shown if pair[0] in args.betas and pair[1] in args.gammas]
    for (beta, gamma), colour in zip(shown, COLOURS, strict=False):
        history = simulated(args, seed, (alpha, beta, gamma), STOCHASTIC, args.seeds)
        mean_curve, lower, upper = (x.numpy() for x in band(history.regret))
        t = history.episodes.numpy()
        right.fill_between(t, np.maximum(lower, 0.1), upper, color=colour, alpha=0.25, linewidth=0)
        right.plot(t, mean_curve, color=colour, linewidth=1.0, label=f"β = {beta:g}, γ = {gamma:g}")
        psi = occ.jin_luo(mdp, alpha, beta, gamma)
        with torch.no_grad():
            path = occ.forecast(mdp, psi, mean, args.episodes)
        leaps = occ.leap(mdp, psi, mean, args.episodes, particles=args.particles, seed=seed)
        right.plot(path.episodes, path.regret, color=colour, linestyle="--", linewidth=1.3)
        right.plot(leaps.episodes, leaps.mean, color=colour, linestyle=":", linewidth=1.6)
    right.plot([], [], color="0.3", linestyle="--", label="mean path")
    right.plot([], [], color="0.3", linestyle=":", label="leaping")
    right.set(
        xscale="log",
        yscale="log",
        xlim=(3, args.episodes),
        xlabel="episodes",
        ylabel="regret",
        title=f"MDP {seed}: simulated (95 % band) and forecast",
    )
    right.set_ylim(bottom=1)
    right.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.grid(visible=True, which="major", color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


# -- tuning ---------------------------------------------------------------------------------------------------------------


def train(args: Args, directory: Path) -> tuple[Setting, occ.Tuned, occ.Refined | None]:
    """Minimize the forecast over the training MDPs and environments, then refine by leaping and by playing the adversary."""
    found = [problem(args, seed) for seed in range(args.seed - args.train, args.seed)]
    worlds = [occ.World(STOCHASTIC, occ.stack([mdp for mdp, _ in found]), torch.stack([mean for _, mean in found]))]
    for seed, (mdp, _) in zip(range(args.seed - args.train, args.seed), found, strict=True):
        worlds += [occ.World(name, mdp, environments(args, seed)[name]) for name in (CORRUPTED, SWITCHING)]
    psi = occ.jin_luo(found[0][0])
    objective = occ.ForecastObjective(worlds, args.episodes, reference=psi, robustness=1.0, floor=math.sqrt(args.episodes))
    bounds = {"alpha": (0.01, 10.0), "beta": (0.01, 1000.0), "gamma": (0.25, 4.0)}
    tuned = occ.tune(
        objective,
        psi,
        steps=args.steps,
        starts=args.starts,
        rate=0.3,
        bounds=bounds,
        directory=directory / "tuning",
        save_to=directory / "tuning.pt",
    )
    print(tuned, flush=True)
    if not args.rounds:
        return _setting(tuned), tuned, None
    guard = None
    if args.guard_mdps:
        before = range(args.seed - args.guard_mdps, args.seed)
        played = [occ.World(GREEDY, problem(args, seed)[0], occ.GreedyAdversary()) for seed in before]  # one name: averaged
        guard = occ.Guard(played, args.episodes, psi, seeds=range(1, args.guard_seeds + 1), margin=args.margin)
    refined = occ.refine(objective, psi, tuned, rounds=args.rounds, radius=1.1, particles=32, accuracy=1.0, guard=guard)
    columns = ("points", "values", "excess")
    rows = zip(*(getattr(refined, name).tolist() for name in columns), strict=True)
    write_csv(
        directory / "refinement.csv",
        [dict(zip(tuned.names, point, strict=True)) | {"value": value, "excess": excess} for point, value, excess in rows],
    )
    print(f"refined by leaping: {refined.tuned}", flush=True)
    return _setting(refined.tuned), tuned, refined


def _setting(tuned: occ.Tuned) -> Setting:
    by_name = {name.rpartition(".")[2]: value for name, value in tuned.parameters.items()}
    return by_name["alpha"], by_name["beta"], by_name["gamma"]


def search_cost(args: Args, setting: Setting) -> float:
    """What the searches minimize: the mean over training MDPs and environments of log regret, simulated."""
    logs = []
    for seed in range(args.seed - args.train, args.seed):
        for name in (STOCHASTIC, CORRUPTED, SWITCHING):
            regret = float(simulated(args, seed, setting, name, args.search_seeds).regret[:, -1].mean())
            logs.append(math.log(max(regret, 0.0) + math.sqrt(args.episodes)))
    return float(np.mean(logs))


def random_search(args: Args, budget: float) -> tuple[Setting, int]:
    """Log-uniform points until the time is up."""
    generator, begun, best, count = np.random.default_rng(args.seed), time.monotonic(), (math.inf, (0.5, 1.0, 1.0)), 0
    while time.monotonic() - begun < budget:
        point = tuple(float(10 ** generator.uniform(low, high)) for low, high in ((-2, 1), (-2, 3), (-1, 2)))
        best = min(best, (search_cost(args, point), point))  # type: ignore[arg-type, assignment]
        count += 1
    return best[1], count


def optuna_search(args: Args, budget: float) -> tuple[Setting, int] | None:
    """The same with Optuna's default sampler, if it is installed."""
    try:
        import optuna
    except ImportError:
        print("Optuna is not installed (pip install torch-occ[tuning]); left out")
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=args.seed))

    def cost(trial: Any) -> float:
        ranges = (("alpha", 1e-2, 10.0), ("beta", 1e-2, 1e3), ("gamma", 0.1, 100.0))
        point = tuple(trial.suggest_float(name, low, high, log=True) for name, low, high in ranges)
        return search_cost(args, point)

    study.optimize(cost, timeout=budget)
    best = study.best_params
    return (best["alpha"], best["beta"], best["gamma"]), len(study.trials)


def compare(args: Args, directory: Path, settings: dict[str, Setting]) -> list[str]:
    """Every setting on the held-out MDPs, in every environment."""
    rows: list[dict[str, Any]] = []
    places = (STOCHASTIC, CORRUPTED, SWITCHING, GREEDY)
    for place in places:
        for name, setting in settings.items():
            curves = torch.stack(
                [simulated(args, seed, setting, place, args.seeds).regret[:, -1] for seed in range(args.seed, args.seed + args.test)]
            )
            means = curves.mean(1)  # (MDPs,)
            error = float((curves.std(1) / curves.shape[1] ** 0.5).square().sum().sqrt()) / len(means)
            rows.append({"environment": place, "setting": name, "regret": float(means.mean()), "standard_error": error})
    write_csv(directory / "environments.csv", rows)
    write_figure(directory / "environments.png", draw_environments(args, rows, places))
    value = {(row["environment"], row["setting"]): row for row in rows}
    cells = [
        [name, *(f"{setting:.3g}" for setting in settings[name])]
        + [f"{value[place, name]['regret']:.0f} ± {1.96 * value[place, name]['standard_error']:.0f}" for place in places]
        for name in settings
    ]
    lines = [table(["setting", "α", "β", "γ", *places], cells), ""]
    for place in places:
        paper, own = value[place, PAPER]["regret"], value[place, TUNED]["regret"]
        ratio = f"{paper / own:.2f} times the regret of the tuned ones" if own > 0 else f"{paper:.0f}, the tuned ones nothing"
        lines.append(f"{place}: the paper's constants cost {ratio}, on {args.test} held-out MDPs")
    return lines


def draw_environments(args: Args, rows: list[dict[str, Any]], places: tuple[str, ...]) -> Any:
    """Bars: regret of every setting in every environment."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["setting"] for row in rows))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        kept = [row for row in rows if row["setting"] == name]
        x = np.arange(len(places)) + (i - (len(names) - 1) / 2) * width
        heights = [row["regret"] for row in kept]
        axes.bar(
            x,
            heights,
            width * 0.92,
            color=COLOURS[i],
            label=name,
            yerr=[1.96 * row["standard_error"] for row in kept],
            error_kw={"linewidth": 0.8},
        )
        for at, height in zip(x, heights, strict=True):
            axes.text(at, max(height, 0.0) * 1.08, f"{height:.0f}", ha="center", va="bottom", fontsize=7)
    axes.set_yscale("symlog", linthresh=math.sqrt(args.episodes))  # a regret may be negative
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set(ylabel=f"regret at T = {args.episodes:,}", title=f"{args.test} held-out MDPs, {args.seeds} seeds, 95 % intervals")
    axes.set_xticks(range(len(places)), places)
    axes.legend(frameon=False, fontsize="small", ncols=2)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_landscape(args: Args, tuned: occ.Tuned, refined: occ.Refined | None) -> Any:
    """The forecast over (beta, gamma) on the first training MDP, where it may be believed, and the tuner's paths on it."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    mdp, mean = problem(args, args.seed - args.train)
    betas, gammas = (torch.logspace(low, high, 33, dtype=torch.float64) for low, high in ((-2, 2.5), (-0.9, 1.3)))
    alpha = _setting(tuned)[0]
    psi = occ.jin_luo(mdp, alpha, betas[None, :].expand(33, 33), gammas[:, None].expand(33, 33))
    with torch.no_grad():
        path = occ.forecast(mdp, psi, mean, args.episodes)
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    levels = np.geomspace(float(path.final.min()), float(path.final.max()), 25)
    shades = axes.contourf(betas, gammas, path.final, levels=levels, norm=LogNorm(), cmap="viridis_r")
    axes.contour(betas, gammas, path.noise_share, levels=[1 / 3], colors="white", linewidths=1.2, linestyles="--")
    axes.contourf(betas, gammas, path.noise_share, levels=[1 / 3, 1.0], colors="none", hatches=["///"])
    order = {name.rpartition(".")[2]: i for i, name in enumerate(tuned.names)}
    for start in range(tuned.path.shape[1]):
        walk = tuned.path[:, start]
        axes.plot(walk[:, order["beta"]], walk[:, order["gamma"]], color="#D55E00", linewidth=1.2, marker=".", markersize=3)
        axes.plot(*walk[0, [order["beta"], order["gamma"]]], color="#D55E00", marker="o", markerfacecolor="white")
    if refined is not None:
        alpha, beta, gamma = _setting(refined.tuned)
        axes.scatter(
            refined.points[:, order["beta"]], refined.points[:, order["gamma"]], s=12, color="black", label="refinement: points tried"
        )
        axes.plot([beta], [gamma], color="#E69F00", marker="*", markersize=15, markeredgecolor="black", linestyle="none", label="result")
        axes.legend(frameon=True, fontsize="small", loc="lower left")
    axes.set(
        xscale="log", yscale="log", xlabel="β", ylabel="γ", title=f"forecast regret at T = {args.episodes:,} (hatched: not to be believed)"
    )
    axes.set(xlim=(float(betas[0]), float(betas[-1])), ylim=(float(gammas[0]), float(gammas[-1])))
    bar = figure.colorbar(shades, ax=axes, label="regret")
    ticks = [x for x in (100, 200, 500, 1000, 2000, 5000, 10000, 20000) if levels[0] <= x <= levels[-1]]
    bar.set_ticks(ticks, labels=[f"{x:,}" for x in ticks])
    return figure


# -- one world against the other -------------------------------------------------------------------------------------------


def tradeoff(args: Args, directory: Path) -> list[str]:
    """Regret in the stochastic world and against the adversary, over beta for several gamma, on the last training MDP."""
    seed, paper = args.seed - 1, (args.actions**-0.5, 64.0 * args.horizon, 1.0)
    settings = [paper] + [(args.tradeoff_alpha, beta, gamma) for gamma in args.tradeoff_gammas for beta in args.tradeoff_betas]
    rows: list[dict[str, Any]] = []
    for setting in settings:
        row: dict[str, Any] = dict(zip(("alpha", "beta", "gamma"), setting, strict=True))
        for place in (STOCHASTIC, GREEDY):
            regret = simulated(args, seed, setting, place, args.search_seeds).regret[:, -1]
            row |= {place: float(regret.mean()), f"{place}, standard error": float(regret.std()) / len(regret) ** 0.5}
        rows.append(row)
    write_csv(directory / "tradeoff.csv", rows)
    write_figure(directory / "tradeoff.png", draw_tradeoff(args, rows))
    best = min((row for row in rows[1:] if row[GREEDY] <= rows[0][GREEDY]), key=lambda row: row[STOCHASTIC], default=rows[0])
    name = ", ".join(f"{key} = {best[key]:.3g}" for key in ("alpha", "beta", "gamma"))
    return [
        f"MDP {seed}, of {len(rows)} settings no worse than the paper's against the adversary ({rows[0][GREEDY]:.0f}), the best: {name}",
        f"  {best[GREEDY]:.0f} against the adversary; stochastic {best[STOCHASTIC]:.0f}, the paper's constants {rows[0][STOCHASTIC]:.0f}",
    ]


def draw_tradeoff(args: Args, rows: list[dict[str, Any]]) -> Any:
    """Left: both regrets over beta. Right: one over the other; below the line is no worse than the paper's constants."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    paper, others = rows[0], rows[1:]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    for gamma, colour in zip(args.tradeoff_gammas, COLOURS, strict=False):
        kept = [row for row in others if row["gamma"] == gamma]
        for place, style in ((STOCHASTIC, "-"), (GREEDY, "--")):
            errors = [1.96 * row[f"{place}, standard error"] for row in kept]
            left.errorbar(
                [row["beta"] for row in kept],
                [row[place] for row in kept],
                errors,
                color=colour,
                linestyle=style,
                marker="o" if place == STOCHASTIC else "^",
                markersize=4,
                linewidth=1.3,
                elinewidth=0.7,
                label=f"γ = {gamma:g}" if place == STOCHASTIC else None,
            )
        right.plot([row[STOCHASTIC] for row in kept], [row[GREEDY] for row in kept], color=colour, marker="o", markersize=4, linewidth=1.0)
    left.plot([], [], color="0.3", linestyle="-", marker="o", markersize=4, label=STOCHASTIC)
    left.plot([], [], color="0.3", linestyle="--", marker="^", markersize=4, label=GREEDY)
    left.axhline(paper[GREEDY], color="black", linestyle=":", linewidth=1.0)
    right.axhline(paper[GREEDY], color="black", linestyle=":", linewidth=1.0)
    right.plot([paper[STOCHASTIC]], [paper[GREEDY]], color="black", marker="*", markersize=12, linestyle="none", label="paper's constants")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="β",
        ylabel=f"regret at T = {args.episodes:,}",
        title=f"MDP {args.seed - 1}, α = {args.tradeoff_alpha:g} (dotted: paper, adversary)",
    )
    right.set(
        xscale="log",
        xlabel="regret, stochastic",
        ylabel="regret, greedy adversary",
        title="one against the other, a line for each γ",
    )
    left.legend(frameon=False, fontsize="small", ncols=2)
    right.legend(frameon=False, fontsize="small")
    for axis in (left.yaxis, right.xaxis):
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_locator(LogLocator(subs=(2.0, 3.0, 5.0)))
        axis.set_minor_formatter("{x:,.0f}")
    for axes in (left, right):
        axes.grid(visible=True, which="major", color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(args: Args) -> Path:
    """All parts."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "meta_tune", args.seed)
    write_configuration(directory, args)
    lines: list[str] = []
    if "accuracy" in args.parts:
        lines += ["Forecast against simulation", *accuracy(args, directory), ""]
        print("\n".join(lines), flush=True)
    if "tune" in args.parts:
        begun = time.monotonic()
        setting, tuned, refined = train(args, directory)
        spent = time.monotonic() - begun
        write_figure(directory / "landscape.png", draw_landscape(args, tuned, refined))
        appendix = occ.theory.tune_stochastic(problem(args, args.seed)[0])
        settings: dict[str, Setting] = {
            PAPER: (args.actions**-0.5, 64.0 * args.horizon, 1.0),
            APPENDIX: (appendix.alpha, 64.0 * args.horizon, appendix.gamma),
            TUNED: setting,
        }
        budget = args.budget or spent
        fresh = replace(args, cache=directory / "searches")  # a search that finds its points in a cache would be given time
        searches: dict[str, Callable[[Args, float], tuple[Setting, int] | None]] = {RANDOM: random_search, OPTUNA: optuna_search}
        more = [f"tuning took {seconds(spent)}: {tuned.seconds:.0f} s by gradients, the rest by leaping; each search got {seconds(budget)}"]
        for name, search in searches.items():
            answer = search(fresh, budget)
            if answer is not None:
                settings[name] = answer[0]
                more.append(f"{name}: {answer[1]} points of {args.search_seeds} seeds")
        more += compare(args, directory, settings)
        lines += ["Tuning", *more]
        print("\n".join(more), flush=True)
    if "tradeoff" in args.parts:
        more = tradeoff(args, directory)
        lines += ["One world against the other", *more]
        print("\n".join(more), flush=True)
    write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
