"""Constants that are good in both worlds: tuned by forecasts, under a guard against an adversary.

The adversary charges every state's likeliest action, so it punishes every preference. It cannot be
forecast. The family is the conditional entropy with a learning rate and a log-barrier, and the loss
estimates have a baseline (`ReducedVariance`). `tune` follows the gradients of the forecast on the
training MDPs and ignores the adversary. `refine` continues under a `Guard`: on every training MDP,
the setting must not be worse against the adversary than the paper's algorithm.

The result is played on held-out MDPs in all environments. It is compared with the paper's constants
and estimates, with the paper's constants and the same estimates, and with the tuned constants and
the paper's estimates. `frontier` shows the gain in one world and the cost in the other, for a few
families on the training MDPs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

import torch_occ as occ
from experiments import both_worlds_figures as figures
from experiments.both_worlds_frontier import frontier
from experiments.both_worlds_play import Contestant, Ratio, entropy, regrets, standard_error
from experiments.common import run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from experiments.tuning_worlds import ENVIRONMENTS, GREEDY, STOCHASTIC, Family

PAPER, PAPER_CENTRED = "paper", "paper, with a baseline"
TSALLIS = "Tsallis, untuned"
TUNED, TUNED_PLAIN = "tuned", "tuned, without baseline"
#: Below beta = 1/2 a single visit without loss may overturn what was learned. The mean path does
#: not see this; docs/tuning_results.md.
BOUNDS = {"beta": (1.0, 100.0), "gamma": (0.05, 0.5)}


@dataclass(frozen=True)
class Args:
    """How much is tuned, played and compared."""

    episodes: int = 100_000
    """T"""
    train: int = 8
    """MDPs to tune on"""
    test: int = 5
    """held-out MDPs"""
    seed: int = 100
    """of the first held-out MDP; the training MDPs come before it"""
    seeds: int = 20
    """runs of every simulation on held-out MDPs"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
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
    frontier: tuple[float, ...] = (0.2, 0.3, 0.4, 0.6)
    """learning rates of the frontier, beside the tuned one"""
    frontier_seeds: int = 4
    """its runs on every training MDP"""
    setting: tuple[float, float] | None = None
    """beta and gamma of a setting that is known already; then nothing is tuned"""
    parts: tuple[str, ...] = ("tune", "training", "frontier", "held_out")
    """which parts to run"""
    cache: Path = Path("runs/both_worlds_cache")
    """where simulations are kept, so that none is repeated"""
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
    def held_out(self) -> range:
        """Numbers of the held-out MDPs."""
        return range(self.seed, self.seed + self.test)

    @property
    def baseline(self) -> occ.Estimator:
        """The estimator with a baseline."""
        return occ.ReducedVariance(occ.InverseSqrt(self.rate))


# -- tuning ---------------------------------------------------------------------------------------


def tune(args: Args, directory: Path, psi: occ.Regularizer) -> list[str]:
    """Tune both parameters by gradients of the forecast, then gamma under the guard.

    Under the guard, leaping judges the stochastic world. psi is changed to the result.
    """
    problems = [(number, args.family.problem(number)[0]) for number in args.training]
    paper = occ.jin_luo(problems[0][1])
    objective = occ.ForecastObjective(
        [args.family.stochastic(args.training)],
        args.episodes,
        reference=paper,
        estimator=args.baseline,
    )
    begun = time.process_time()
    free = occ.tune(
        objective,
        psi,
        steps=args.steps,
        starts=1,
        rate=0.2,
        bounds=BOUNDS,
        directory=directory / "tuning",
    )
    by_gradients = time.process_time() - begun
    worlds = [
        occ.World(f"{GREEDY}, MDP {number}", mdp, occ.GreedyAdversary()) for number, mdp in problems
    ]
    guard = occ.Guard(
        worlds,
        args.episodes,
        paper,
        estimator=args.baseline,
        seeds=range(1, args.guard_seeds + 1),
        margin=args.margin,
    )
    free.load_into(psi)
    centre = occ.tune(objective, psi, steps=0, starts=1, only=["gamma"], bounds=BOUNDS)
    options: dict[str, Any] = {"rounds": args.rounds, "points": args.points, "radius": args.radius}
    refined = occ.refine(
        objective, psi, centre, particles=args.particles, accuracy=0.25, guard=guard, **options
    )
    refined.tuned.load_into(psi)
    spent = time.process_time() - begun
    print(f"{free}\nunder the guard: {refined.tuned}", flush=True)
    gained = torch.exp(-refined.values + guard.penalty(refined.excess))  # without the penalty
    rows: list[dict[str, Any]] = []
    for i, (gamma, g, e) in enumerate(
        zip(refined.points[:, 0], gained, refined.excess, strict=True)
    ):
        row = {"gamma": float(gamma), "times less": float(g), "excess": float(e)}
        rows.append(row | {"chosen": i == refined.chosen})
    write_csv(directory / "points.csv", rows)
    rows.sort(key=lambda row: row["gamma"])
    cells = []
    for point in rows:
        gamma_cell = f"{point['gamma']:.4g}{' (chosen)' * point['chosen']}"
        cells.append([gamma_cell, f"{point['times less']:.1f}", f"{point['excess']:+.1%}"])
    times = f"{np.exp(-free.value):.1f} times less regret than the paper's"
    alone = f"by gradients alone, {seconds(by_gradients)} of processor time: {_parameters(free)}"
    more = f"{len(rows)} points, {seconds(spent - by_gradients)} more"
    header = ["γ", "stochastic, by leaping: times less regret than the paper's"]
    return [
        f"{alone}, {times} in the stochastic world by forecast",
        f"parameters at their bounds: {', '.join(free.at_bounds) or 'none'}",
        f"under the guard, {more}: {_parameters(refined.tuned)}",
        table([*header, "adversary: excess on the worst MDP"], cells),
    ]


def _parameters(tuned: occ.Tuned) -> str:
    return ", ".join(
        f"{name.rpartition('.')[2]} = {value:.4g}" for name, value in tuned.parameters.items()
    )


# -- on training MDPs with other seeds, and on held-out MDPs --------------------------------------


def play_training(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """The tuned setting on the training MDPs, with seeds that the guard has not seen."""
    paper = Contestant(
        occ.jin_luo(args.family.problem(args.training[0])[0]), occ.ImportanceWeighted()
    )
    seeds, cells = range(1001, 1001 + args.seeds), []
    for place in (STOCHASTIC, GREEDY):
        runs = [
            [
                regrets(args.family, args.cache, who, number, place, seeds)
                for number in args.training
            ]
            for who in (paper, Contestant(tuned, args.baseline))
        ]
        above, below = runs if place == STOCHASTIC else reversed(runs)
        kind = "stochastic: times less" if place == STOCHASTIC else f"{place}: relative"
        each = [Ratio.of(x, y) for x, y in zip(above, below, strict=True)]
        cells.append([kind, *map(str, each), str(Ratio.mean(each))])
    header = ["", *(f"MDP {number}" for number in args.training), "mean"]
    return [
        f"regret on the training MDPs against the paper's, {args.seeds} other seeds, ± 95 %:",
        table(header, cells),
    ]


def judge(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """All contestants in every environment of the held-out MDPs."""
    paper, plain = occ.jin_luo(args.family.problem(args.seed)[0]), occ.ImportanceWeighted()
    players = {
        PAPER: Contestant(paper, plain),
        PAPER_CENTRED: Contestant(paper, args.baseline),
        TUNED: Contestant(tuned, args.baseline),
        TUNED_PLAIN: Contestant(tuned, plain),
        TSALLIS: Contestant(occ.Tsallis() / occ.InverseSqrt(1.0), plain),
    }
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for place in ENVIRONMENTS:
        for name, player in players.items():
            seeds = range(1, args.seeds + 1)
            found[place, name] = [
                regrets(args.family, args.cache, player, number, place, seeds)
                for number in args.held_out
            ]
            print(f"  {place}, {name}: {np.mean(found[place, name]):.0f}", flush=True)
    rows: list[dict[str, Any]] = []
    for (place, name), runs in found.items():
        error = float(np.linalg.norm([standard_error(x) for x in runs])) / len(runs)
        row: dict[str, Any] = {"environment": place, "setting": name}
        row |= {"regret": float(np.mean(runs)), "standard_error": error}
        for number, x in zip(args.held_out, runs, strict=True):
            row[f"MDP {number}"] = float(x.mean())
            row[f"MDP {number}, standard error"] = standard_error(x)
        rows.append(row)
    write_csv(directory / "held_out.csv", rows)
    picture = figures.draw_environments(rows, args.episodes, args.seeds, args.test)
    write_figure(directory / "environments.png", picture)
    size = f"T = {args.episodes:,}, {args.seeds} seeds"
    lines = [f"mean regret over {args.test} held-out MDPs, {size}, ± 95 %:"]
    means = {
        (row["environment"], row["setting"]): f"{row['regret']:.0f} ± "
        f"{1.96 * row['standard_error']:.0f}"
        for row in rows
    }
    cells = [[name, *(means[place, name] for place in ENVIRONMENTS)] for name in players]
    lines += [table(["", *ENVIRONMENTS], cells), ""]
    ratios: dict[tuple[str, str], list[Ratio]] = {}
    header = ["", *(f"MDP {number}" for number in args.held_out), "mean"]
    for place in ENVIRONMENTS:
        for name in list(players)[1:]:
            pairs = list(zip(found[place, name], found[place, PAPER], strict=True))
            if place == STOCHASTIC:
                pairs = [(before, after) for after, before in pairs]
            each = [Ratio.of(x, y) for x, y in pairs]
            ratios[place, name] = [*each, Ratio.mean(each)]
        kind = "times less regret than" if place == STOCHASTIC else "regret relative to"
        lines += [f"{place}: {kind} the paper's, ± 95 %:"]
        lines += [
            table(header, [[name, *map(str, ratios[place, name])] for name in list(players)[1:]]),
            "",
        ]
    picture = figures.draw_held_out(ratios, args.held_out, args.episodes, args.seeds)
    write_figure(directory / "held_out.png", picture)
    return lines


PARTS = {"training": play_training, "frontier": frontier, "held_out": judge}


def main(args: Args) -> Path:
    """All parts."""
    unknown = [part for part in args.parts if part not in ("tune", *PARTS)]
    if unknown:
        raise SystemExit(f"parts: there is no {unknown[0]!r}; there are tune, {', '.join(PARTS)}")
    if "tune" not in args.parts[:1] and args.setting is None:
        raise SystemExit("parts: begin with the part tune, or give a --setting to play")
    torch.set_num_threads(1)
    directory = run_directory(args.root, "both_worlds", args.seed)
    write_configuration(directory, args)
    lines: list[str] = []
    tuned = entropy(*args.setting) if args.setting else entropy(1.0, 0.2)
    for part in args.parts:
        if part == "tune" and args.setting:
            continue
        found = (
            tune(args, directory, tuned) if part == "tune" else PARTS[part](args, directory, tuned)
        )
        print("\n".join([part, *found, ""]), flush=True)
        lines += [part, *found, ""]
    write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
