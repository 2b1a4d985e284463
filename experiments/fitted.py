"""Does a regularizer that is fitted to the transitions pay on losses that it has never seen?

The transitions are known before the first episode, so the learning rate and the log-barrier may
have one value per state. They are fitted by gradients of the forecast to many draws of random
losses, with a penalty on differences between states. The penalty is chosen on other draws, by
leaping. Then all settings play held-out draws and the greedy adversary, once, beside the Tsallis
entropy with nothing tuned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS, GREEDY, STOCHASTIC, Ratio

TSALLIS, PLAIN = "Tsallis, untuned", "with a baseline, untuned"
SCALARS, STATES = "fitted, two numbers", "fitted, two numbers per state"

#: gamma and beta of the setting with a baseline and nothing tuned.
START = (1.0, 0.3)


@dataclass(frozen=True)
class Args:
    """Which MDPs, how many draws of losses, and how long the fit takes."""

    shapes: tuple[str, ...] = ("3x3x3", "5x3x2", "4x4x3", "2x8x3")
    """horizon x width x actions of each MDP"""
    episodes: int = 100_000
    """T"""
    train: int = 12
    """draws of losses for the fit"""
    validation: int = 6
    """draws of losses that choose the penalty"""
    held_out: int = 8
    """draws of losses that are played once"""
    judge: Literal["play", "leap"] = "play"
    """how regret on held-out draws is measured: real runs, or leaping with many particles"""
    seeds: int = 1
    """runs (or 24 times as many particles) on each held-out draw"""
    adversary_seeds: int = 4
    """runs against the adversary"""
    steps: int = 20
    """of the optimizer"""
    penalties: tuple[float, ...] = (0.03, 0.3)
    """weights of the variance between states"""
    particles: int = 8
    """of leaping, on each draw of validation"""
    seed: int = 7
    """of the MDPs"""
    root: Path = Path("runs")
    """where the run's directory goes"""

    @property
    def box(self) -> dict[str, tuple[float, float]]:
        """The bounds of every method.

        Beyond them, rare visits ruin a learner with a baseline of 1/2, and no forecast shows it.
        """
        return {"gamma": (0.25, 1.2), "beta": (0.3, 4.0)}


class Setting(NamedTuple):
    """A regularizer with its estimator, and what it took to find it."""

    name: str
    regularizer: occ.Regularizer
    estimator: occ.Estimator
    seconds: float = 0.0
    evaluations: int = 0


def baseline() -> occ.Estimator:
    """A baseline of 1/2 everywhere."""
    return occ.ReducedVariance(occ.InverseSqrt(0.001))


def entropy(mdp: occ.LayeredMDP, gamma: float, beta: float, per_state: bool) -> occ.Regularizer:
    """The regularizer that is fitted."""
    if not per_state:
        return occ.Tsallis() / occ.InverseSqrt(gamma) + occ.LogBarrier(beta)
    rates, weights = occ.PerState(mdp, gamma), occ.PerState(mdp, beta)
    return occ.Tsallis() / occ.InverseSqrt(rates) + occ.LogBarrier(weights)


def draw_losses(mdp: occ.LayeredMDP, seeds: range) -> Tensor:
    """Tables of uniformly random means, `(len(seeds), S, A)`."""
    return torch.stack([common.random_means(mdp, seed) for seed in seeds])


def fit(
    args: Args, objective: occ.tuning.ForecastObjective, mdp: occ.LayeredMDP, per_state: bool
) -> tuple[occ.Regularizer, occ.tuning.Tuned, float]:
    """A fit by gradients, and its processor time."""
    begun = time.process_time()
    psi = entropy(mdp, *START, per_state)
    tuned = occ.tune(
        objective, psi, steps=args.steps, starts=1, only=("gamma", "beta"), bounds=args.box
    )
    tuned.load_into(psi)
    return psi, tuned, time.process_time() - begun


def leaped(args: Args, mdp: occ.LayeredMDP, setting: Setting, mean: Tensor, count: int) -> Tensor:
    """Final regrets of some particles on one draw, by leaping."""
    options: dict[str, Any] = {"estimator": setting.estimator, "particles": count}
    return occ.leap(mdp, setting.regularizer, mean, args.episodes, **options).regret[:, -1]


def validated(args: Args, mdp: occ.LayeredMDP, setting: Setting) -> float:
    """The geometric mean of the regrets over the validation draws, by leaping."""
    draws = draw_losses(mdp, range(1000, 1000 + args.validation))
    runs = [leaped(args, mdp, setting, mean, args.particles).mean() for mean in draws]
    return float(torch.stack(runs).log().mean().exp())


def settings_of(args: Args, mdp: occ.LayeredMDP) -> tuple[list[Setting], list[str]]:
    """All settings for one MDP. Only training and validation draws are used."""
    train = draw_losses(mdp, range(args.train))
    untuned = occ.Tsallis() / occ.InverseSqrt(1.0)

    def objective(penalty: float) -> occ.tuning.ForecastObjective:
        options: dict[str, Any] = {"estimator": baseline(), "trust": 0.5, "shrinkage": penalty}
        worlds = [occ.tuning.World(STOCHASTIC, mdp, train)]
        return occ.tuning.ForecastObjective(worlds, args.episodes, reference=untuned, **options)

    plain = objective(0.0)
    plain(entropy(mdp, *START, per_state=True))  # compiles, which does not count
    psi, _, spent = fit(args, plain, mdp, per_state=False)
    found = [
        Setting(TSALLIS, untuned, occ.ImportanceWeighted()),
        Setting(PLAIN, entropy(mdp, *START, False), baseline()),
        Setting(SCALARS, psi, baseline(), spent, args.steps + 1),
    ]
    lines, candidates, total = [], [], 0.0
    for penalty in args.penalties:
        psi, tuned, spent = fit(args, objective(penalty), mdp, per_state=True)
        total += spent
        candidate = Setting(STATES, psi, baseline(), 0.0, (args.steps + 1) * len(args.penalties))
        value = validated(args, mdp, candidate)
        candidates.append((value, candidate))
        lines.append(
            f"penalty {penalty:g}: training {tuned.value:.3f} (log, relative to {TSALLIS}), "
            f"validation {value:.0f} by leaping, {spent:.1f} s"
        )
    found.append(min(candidates, key=lambda pair: pair[0])[1]._replace(seconds=total))
    lines += [
        f"validation, {each.name}: {validated(args, mdp, each):.0f}"
        for each in found
        if each.name != STATES
    ]
    return found, lines


def play(args: Args, mdp: occ.LayeredMDP, setting: Setting) -> dict[str, Tensor]:
    """Final regrets: means over runs on the held-out draws, and of the runs of the adversary."""
    learner = occ.FTRL(mdp, setting.regularizer, setting.estimator)

    def final(losses: occ.LossProcess, seeds: int) -> Tensor:
        return common.final_regret(learner, losses, args.episodes, range(1, 1 + seeds))

    held_out = draw_losses(mdp, range(2000, 2000 + args.held_out))
    stochastic = [
        leaped(args, mdp, setting, mean, 24 * args.seeds)
        if args.judge == "leap"
        else final(occ.BernoulliLosses(mean), args.seeds)
        for mean in held_out
    ]
    adversary = final(occ.GreedyAdversary(), args.adversary_seeds)
    return {STOCHASTIC: torch.stack(stochastic).mean(1), GREEDY: adversary}


def draw(rows: list[dict[str, Any]], episodes: int) -> Figure:
    """Regret relative to the untuned Tsallis entropy, on every MDP, in both worlds."""
    figure = common.new_figure(11, 4.2)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row["setting"] for row in rows))
    for axes, world in zip(figure.subplots(1, 2), (STOCHASTIC, GREEDY), strict=True):
        for i, name in enumerate(names):
            kept = [row[f"{world}, relative"] for row in rows if row["setting"] == name]
            values, errors = np.array(kept).T
            x = np.arange(len(kept)) + 0.13 * (i - (len(names) - 1) / 2)
            look = {"color": COLOURS[i], "marker": "os^Dvp"[i], "linestyle": "none", "capsize": 2}
            axes.errorbar(x, values, 1.96 * errors, label=name, **look)
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(shapes)), shapes)
        title = f"{world}, T = {episodes:,}"
        common.tidy(axes, ylim=(0, None), ylabel="regret relative to Tsallis, untuned", title=title)
    figure.axes[0].legend(frameon=False, fontsize="small", loc="lower left")
    return figure


def main(args: Args) -> Path:
    """Fit and play on every shape."""
    directory = common.begin("fitted", args, args.seed)
    lines, rows = [common.machine(), ""], []
    for shape in args.shapes:
        mdp = occ.LayeredMDP.random(*map(int, shape.split("x")), seed=args.seed)
        settings, report = settings_of(args, mdp)
        lines += [shape, *report]
        print("\n".join([shape, *report]), flush=True)
        played = {}
        for setting in settings:
            played[setting.name] = found = play(args, mdp, setting)
            row: dict[str, Any] = {"shape": shape, "setting": setting.name}
            row |= {"seconds": setting.seconds, "evaluations": setting.evaluations}
            for world, regrets in found.items():
                relative = Ratio.paired(regrets, played[TSALLIS][world])
                row |= {world: float(regrets.mean()), f"{world}, relative": relative}
            rows.append(row)
            print(f"  {setting.name}: {row[STOCHASTIC]:.0f}, {row[GREEDY]:.0f}", flush=True)
        # After every shape, so that an interruption costs only the last one.
        common.write_csv(directory / "fitted.csv", rows)
        common.write_figure(directory / "fitted.png", draw(rows, args.episodes))
    header, cells = ["MDP", "setting", STOCHASTIC, "relative", GREEDY, "relative"], []
    for row in rows:
        line = [row["shape"], row["setting"]]
        for world in (STOCHASTIC, GREEDY):
            line += [f"{row[world]:.0f}", str(row[f"{world}, relative"])]
        cells.append([*line, f"{row['seconds']:.0f} s" if row["seconds"] else ""])
    lines += ["", f"T = {args.episodes:,}; relative to {TSALLIS}, ± 95 %:"]
    lines += [common.table([*header, "processor time"], cells)]
    print("\n".join(lines[-2:]), flush=True)
    common.write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
