"""Constants that are good in both worlds: tuned by forecasts, under a guard against an adversary.

The adversary charges every state's likeliest action, so it punishes every preference. It cannot be
forecast. The family is the conditional entropy with a learning rate and a log-barrier, and the loss
estimates have a baseline (`ReducedVariance`). `tune` follows the gradients of the forecast on the
training MDPs and ignores the adversary. `refine` continues under a `Guard`: on every training MDP,
the setting must not be worse against the adversary than the paper's algorithm.

The result is played on held-out MDPs in all environments. It is compared with the paper's constants
and estimates, with the paper's constants and the same estimates, with the tuned constants and the
paper's estimates, and with the untuned Tsallis entropy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS, CORRUPTED, GREEDY, STOCHASTIC, SWITCHING, Ratio, Tuning

ENVIRONMENTS = (STOCHASTIC, CORRUPTED, SWITCHING, GREEDY)
PAPER, PAPER_CENTRED = "paper", "paper, with a baseline"
TSALLIS = "Tsallis, untuned"
TUNED, TUNED_PLAIN = "tuned", "tuned, without baseline"
#: Below beta = 1/2 a single visit without loss may overturn what was learned. The mean path does
#: not see this; docs/tuning_results.md.
BOUNDS = {"beta": (1.0, 100.0), "gamma": (0.05, 0.5)}


@dataclass(frozen=True)
class Args(Tuning):
    """How much is tuned, played and compared."""

    episodes: int = 100_000
    """T"""
    train: int = 8
    """MDPs to tune on"""
    test: int = 5
    """held-out MDPs"""
    rate: float = 1e-3
    """of the estimator: its baseline is 1/2 where q >= (4 rate)^2 / t, that is nearly everywhere"""
    steps: int = 20
    """of the optimizer"""
    rounds: int = 2
    """of the refinement under the guard"""
    points: int = 4
    """of each round"""
    particles: int = 32
    """of leaping, which judges the stochastic world in the refinement"""
    radius: float = 1.2
    """of the first region, in logarithms"""
    guard_seeds: int = 12
    """runs of the guard on every training MDP"""
    margin: float = 0.03
    """the guard demands this share less regret than the paper's on every training MDP"""
    setting: tuple[float, float] | None = None
    """beta and gamma of a setting that is known already; then nothing is tuned"""

    @property
    def baseline(self) -> occ.Estimator:
        """The estimator with a baseline."""
        return occ.ReducedVariance(occ.InverseSqrt(self.rate))


def entropy(beta: float, gamma: float) -> occ.Regularizer:
    """The regularizer that is tuned."""
    return occ.ConditionalEntropy() / occ.InverseSqrt(gamma) + occ.LogBarrier(beta)


def tune(args: Args, directory: Path, psi: occ.Regularizer) -> list[str]:
    """Tune both parameters by gradients of the forecast, then gamma under the guard.

    Under the guard, leaping judges the stochastic world. psi is changed to the result.
    """
    problems = [(number, args.family.problem(number)[0]) for number in args.training]
    paper = occ.jin_luo(problems[0][1])
    worlds = [args.family.stochastic(args.training)]
    objective = occ.tuning.ForecastObjective(
        worlds, args.episodes, reference=paper, estimator=args.baseline
    )
    begun = time.process_time()
    board = directory / "tuning"
    free = occ.tune(
        objective, psi, steps=args.steps, starts=1, rate=0.2, bounds=BOUNDS, directory=board
    )
    by_gradients = time.process_time() - begun
    worlds = [
        occ.tuning.World(f"{GREEDY}, MDP {number}", mdp, occ.GreedyAdversary())
        for number, mdp in problems
    ]
    seeds = range(1, args.guard_seeds + 1)
    guard = occ.tuning.Guard(
        worlds, args.episodes, paper, seeds=seeds, margin=args.margin, estimator=args.baseline
    )
    free.load_into(psi)
    centre = occ.tune(objective, psi, steps=0, starts=1, only=["gamma"], bounds=BOUNDS)
    options: dict[str, Any] = {"rounds": args.rounds, "points": args.points, "radius": args.radius}
    options |= {"particles": args.particles, "accuracy": 0.25, "guard": guard}
    refined = occ.refine(objective, psi, centre, **options)
    refined.tuned.load_into(psi)
    more = common.seconds(time.process_time() - begun - by_gradients)
    print(f"{free}\nunder the guard: {refined.tuned}", flush=True)
    gained = torch.exp(-refined.values + guard.penalty(refined.excess))  # without the penalty
    rows: list[dict[str, Any]] = [
        {"gamma": float(gamma), "times less": float(g), "excess": float(e), "chosen": False}
        for gamma, g, e in zip(refined.points[:, 0], gained, refined.excess, strict=True)
    ]
    rows[refined.chosen]["chosen"] = True
    common.write_csv(directory / "points.csv", rows)
    cells = []
    for row in sorted(rows, key=lambda row: row["gamma"]):
        gamma_cell = f"{row['gamma']:.4g}{' (chosen)' * row['chosen']}"
        cells.append([gamma_cell, f"{row['times less']:.1f}", f"{row['excess']:+.1%}"])
    times = f"{np.exp(-free.value):.1f} times less regret than the paper's"
    alone = (
        f"by gradients alone, {common.seconds(by_gradients)} of processor time: {_parameters(free)}"
    )
    header = ["γ", "stochastic, by leaping: times less regret than the paper's"]
    return [
        f"{alone}, {times} in the stochastic world by forecast",
        f"parameters at their bounds: {', '.join(free.at_bounds) or 'none'}",
        f"under the guard, {len(rows)} points, {more} more: {_parameters(refined.tuned)}",
        common.table([*header, "adversary: excess on the worst MDP"], cells),
    ]


def _parameters(tuned: occ.tuning.Tuned) -> str:
    return ", ".join(
        f"{name.rpartition('.')[2]} = {value:.4g}" for name, value in tuned.parameters.items()
    )


def judge(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """All contestants in every environment of the held-out MDPs."""
    family, paper = args.family, occ.jin_luo(args.family.problem(args.seed)[0])
    plain, seeds = occ.ImportanceWeighted(), range(1, args.seeds + 1)
    players: dict[str, tuple[occ.Regularizer, occ.Estimator]] = {
        PAPER: (paper, plain),
        PAPER_CENTRED: (paper, args.baseline),
        TUNED: (tuned, args.baseline),
        TUNED_PLAIN: (tuned, plain),
        TSALLIS: (occ.Tsallis() / occ.InverseSqrt(1.0), plain),
    }
    found: dict[tuple[str, str], Tensor] = {}  # (MDPs, seeds)
    rows: list[dict[str, Any]] = []
    for place in ENVIRONMENTS:
        for name, player in players.items():
            runs = []
            for number in args.held_out:
                learner = occ.FTRL(family.problem(number)[0], *player)
                losses = family.environment(number, place)
                runs.append(common.final_regret(learner, losses, args.episodes, seeds))
            found[place, name] = torch.stack(runs)
            mean = occ.game.Mean.of(found[place, name].mean(0))
            row: dict[str, Any] = {"environment": place, "setting": name, "regret": mean.mean}
            row |= {"standard_error": mean.standard_error}
            means = found[place, name].mean(1).tolist()
            rows.append(row | {f"MDP {args.seed + i}": x for i, x in enumerate(means)})
            print(f"  {place}, {name}: {mean}", flush=True)
    common.write_csv(directory / "held_out.csv", rows)
    lines = [
        f"mean regret over {args.test} held-out MDPs, T = {args.episodes:,}, {args.seeds} seeds:"
    ]
    cells = [
        [name, *(str(occ.game.Mean.of(found[place, name].mean(0))) for place in ENVIRONMENTS)]
        for name in players
    ]
    lines += [common.table(["", *ENVIRONMENTS], cells), ""]
    ratios: dict[tuple[str, str], list[Ratio]] = {}
    header = ["", *(f"MDP {number}" for number in args.held_out), "mean"]
    for place in ENVIRONMENTS:
        for name in list(players)[1:]:
            pairs = zip(found[place, name], found[place, PAPER], strict=True)
            each = [
                Ratio.of(other, own) if place == STOCHASTIC else Ratio.of(own, other)
                for own, other in pairs
            ]
            ratios[place, name] = [*each, Ratio.mean(each)]
        kind = "times less regret than" if place == STOCHASTIC else "regret relative to"
        body = [[name, *map(str, ratios[place, name])] for name in list(players)[1:]]
        lines += [f"{place}: {kind} the paper's, ± 95 %:", common.table(header, body), ""]
    common.write_figure(directory / "held_out.png", draw(args, ratios))
    return lines


def draw(args: Args, ratios: dict[tuple[str, str], list[Ratio]]) -> Figure:
    """Regret on each MDP and on average, relative to the paper's.

    The stochastic world is on the left, the adversary on the right.
    """
    figure = common.new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for _, name in ratios))
    for place, axes in ((STOCHASTIC, left), (GREEDY, right)):
        for i, name in enumerate(names):
            values, errors = np.array(ratios[place, name]).T
            x = np.arange(len(values)) + 0.16 * (i - (len(names) - 1) / 2)
            look = {"color": COLOURS[i], "marker": "s*o^"[i], "linestyle": "none", "capsize": 2}
            axes.errorbar(x, values, 1.96 * errors, label=name, **look)
        axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.axvline(args.test - 0.5, color="0.85", linewidth=0.8)
        ticks = [*(f"MDP {number}" for number in args.held_out), "mean"]
        axes.set_xticks(range(args.test + 1), ticks)
    left.axhline(8.0, color=COLOURS[1], linewidth=0.9, linestyle="--")
    title = f"stochastic, T = {args.episodes:,} (dashed: eight times)"
    common.tidy(left, yscale="log", ylabel="times less regret than the paper's", title=title)
    title = f"greedy adversary (dotted: as good), {args.seeds} seeds, 95 %"
    common.tidy(right, ylim=(0, None), ylabel="regret relative to the paper's", title=title)
    right.legend(frameon=False, fontsize="small", loc="lower left")
    return figure


def main(args: Args) -> Path:
    """Tune, then play on held-out MDPs."""
    directory = common.begin("both_worlds", args, args.seed)
    tuned = entropy(*(args.setting or (1.0, 0.2)))
    lines = [] if args.setting else [*tune(args, directory, tuned), ""]
    print("\n".join(lines), flush=True)
    found = judge(args, directory, tuned)
    print("\n".join(found), flush=True)
    common.write_text(directory / "report.txt", "\n".join([*lines, *found]))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
