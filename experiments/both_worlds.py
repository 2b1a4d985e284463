"""One setting that is good in both worlds: tuned by forecasts for the stochastic one, under a guard that plays against an adversary.

The adversary charges every state's likeliest action, so it punishes whoever prefers anything; nobody can forecast it. The family is the
conditional entropy with a learning rate and a log-barrier, and the loss estimates have a baseline (`ReducedVariance`). `tune` follows the
gradients of the forecast on the training MDPs, without regard to the adversary; `refine` goes on under a `Guard` that demands of every
training MDP by itself that the paper's algorithm do no better there. Then it is played on held-out MDPs in all environments, against the
paper's constants with the paper's estimates, the paper's constants with the same estimates, and the tuned constants with the paper's
estimates. `frontier`, of a few families on the training MDPs: what is gained in one world, and lost in the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro

import torch_occ as occ
from experiments import both_worlds_figures as figures
from experiments.common import run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from experiments.tuning_worlds import ENVIRONMENTS, GREEDY, STOCHASTIC, Family
from torch_occ._support.fingerprints import fingerprint

PAPER, PAPER_CENTRED, TUNED, TUNED_PLAIN = "paper", "paper, with a baseline", "tuned", "tuned, without baseline"
#: Below beta = 1/2 a single visit without loss may overturn all that was learnt, which the mean path does not see; docs/meta_tuning.md.
BOUNDS = {"beta": (1.0, 100.0), "gamma": (0.05, 0.5)}


@dataclass(frozen=True)
class Args:
    """How much of everything."""

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
    """of the estimator: its baseline is 1/2 where q is at least (4 rate)^2 / t, which is practically everywhere"""
    steps: int = 20
    """of the optimizer"""
    rounds: int = 2
    """of the refinement under the guard"""
    points: int = 4
    """of each round"""
    particles: int = 32
    """of leaping, which judges the stochastic world there"""
    radius: float = 1.2
    """of the first region, in logarithms"""
    guard_seeds: int = 12
    """runs of the guard on every training MDP"""
    margin: float = 0.03
    """how much less regret than the paper's the guard demands on every one of them, as a share"""
    frontier: tuple[float, ...] = (0.2, 0.3, 0.4, 0.6)
    """learning rates of the frontier, beside the tuned one"""
    frontier_seeds: int = 4
    """its runs on every training MDP"""
    setting: tuple[float, float] | None = None
    """beta and gamma of the tuned setting, if they are known already; nothing is tuned then"""
    parts: tuple[str, ...] = ("tune", "training", "frontier", "held_out")
    """which parts to run"""
    cache: Path = Path("runs/both_worlds_cache")
    """where simulations are kept, so that none is ever repeated"""
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


class Contestant(NamedTuple):
    """What is played."""

    regularizer: occ.Regularizer
    estimator: occ.Estimator


def entropy(beta: float, gamma: float) -> occ.Regularizer:
    """The family that is tuned."""
    return occ.ConditionalEntropy() / occ.InverseSqrt(gamma) + occ.LogBarrier(beta)


def regrets(args: Args, player: Contestant, number: int, place: str, seeds: range) -> np.ndarray:
    """The final regret of every seed, from the cache if it was ever played."""
    family, kind = args.family, fingerprint(psi=player.regularizer, estimator=player.estimator)[:16]
    path = args.cache / f"{family.sizes}_mdp{number}_{place.replace(' ', '-')}_{kind}_T{family.episodes}_seeds{seeds[0]}-{seeds[-1]}.npz"
    if not path.exists():
        mdp, _ = family.problem(number)
        learner = occ.FTRL(mdp, player.regularizer, player.estimator)
        losses = family.environment(number, place)
        history = occ.simulate(mdp, learner, losses, family.episodes, seeds, checkpoints=[family.episodes])
        if bool(history.uncertified.any()):
            raise RuntimeError(f"MDP {number}, {place}: {int(history.uncertified.sum())} steps without certificate")
        history.save(path)
    return occ.History.load(path).regret[:, -1].numpy()


class Ratio(NamedTuple):
    """Of two mean regrets, with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, above: np.ndarray, below: np.ndarray) -> Ratio:
        """Of the means over seeds."""
        value = float(above.mean() / below.mean())
        return cls(value, abs(value) * float(np.hypot(_error(above) / above.mean(), _error(below) / below.mean())))

    @classmethod
    def mean(cls, ratios: Sequence[Ratio]) -> Ratio:
        """Over MDPs."""
        values, errors = np.array(ratios).T
        return cls(float(values.mean()), float(np.linalg.norm(errors)) / len(errors))

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {1.96 * self.error:.2f}" if self.value < 3 else f"{self.value:.1f} ± {1.96 * self.error:.1f}"


def _error(x: np.ndarray) -> float:
    """Standard error of a mean."""
    return float(x.std(ddof=1)) / len(x) ** 0.5


# -- tuning ---------------------------------------------------------------------------------------------------------------


def tune(args: Args, directory: Path, psi: occ.Regularizer) -> list[str]:
    """Both parameters by gradients of the forecast, then gamma under the guard, where leaping judges the stochastic world.

    psi becomes the result.
    """
    problems = [(number, args.family.problem(number)[0]) for number in args.training]
    paper = occ.jin_luo(problems[0][1])
    objective = occ.ForecastObjective([args.family.stochastic(args.training)], args.episodes, reference=paper, estimator=args.baseline)
    begun = time.process_time()
    free = occ.tune(objective, psi, steps=args.steps, starts=1, rate=0.2, bounds=BOUNDS, directory=directory / "tuning")
    by_gradients = time.process_time() - begun
    worlds = [occ.World(f"{GREEDY}, MDP {number}", mdp, occ.GreedyAdversary()) for number, mdp in problems]
    guard = occ.Guard(worlds, args.episodes, paper, estimator=args.baseline, seeds=range(1, args.guard_seeds + 1), margin=args.margin)
    free.load_into(psi)
    centre = occ.tune(objective, psi, steps=0, starts=1, only=["gamma"], bounds=BOUNDS)
    options: dict[str, Any] = {"rounds": args.rounds, "points": args.points, "radius": args.radius}
    refined = occ.refine(objective, psi, centre, particles=args.particles, accuracy=0.25, guard=guard, **options)
    refined.tuned.load_into(psi)
    spent = time.process_time() - begun
    print(f"{free}\nunder the guard: {refined.tuned}", flush=True)
    gained = torch.exp(-refined.values + guard.penalty(refined.excess))  # without the penalty
    rows: list[dict[str, Any]] = [
        {"gamma": float(gamma), "times less": float(g), "excess": float(e), "chosen": i == refined.chosen}
        for i, (gamma, g, e) in enumerate(zip(refined.points[:, 0], gained, refined.excess, strict=True))
    ]
    write_csv(directory / "points.csv", rows)
    rows.sort(key=lambda row: row["gamma"])
    cells = [[f"{row['gamma']:.4g}{' (chosen)' * row['chosen']}", f"{row['times less']:.1f}", f"{row['excess']:+.1%}"] for row in rows]
    return [
        f"by gradients alone, {seconds(by_gradients)} of processor time: {_parameters(free)}, {np.exp(-free.value):.1f} times less regret "
        f"than the paper's in the stochastic world by forecast, at its bounds: {', '.join(free.at_bounds)}",
        f"under the guard, {len(rows)} points, {seconds(spent - by_gradients)} more: {_parameters(refined.tuned)}",
        table(["γ", "stochastic, by leaping: times less regret than the paper's", "adversary: excess on the worst MDP"], cells),
    ]


def _parameters(tuned: occ.Tuned) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} = {value:.4g}" for name, value in tuned.parameters.items())


# -- what it is worth, with other seeds and elsewhere ---------------------------------------------------------------------


def play_training(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """The tuned setting on the training MDPs, with seeds that the guard has not seen."""
    paper = Contestant(occ.jin_luo(args.family.problem(args.training[0])[0]), occ.ImportanceWeighted())
    seeds, cells = range(1001, 1001 + args.seeds), []
    for place in (STOCHASTIC, GREEDY):
        runs = [[regrets(args, who, number, place, seeds) for number in args.training] for who in (paper, Contestant(tuned, args.baseline))]
        above, below = runs if place == STOCHASTIC else reversed(runs)
        kind = "stochastic: times less" if place == STOCHASTIC else f"{place}: relative"
        each = [Ratio.of(x, y) for x, y in zip(above, below, strict=True)]
        cells.append([kind, *map(str, each), str(Ratio.mean(each))])
    header = ["", *(f"MDP {number}" for number in args.training), "mean"]
    return [f"regret on the training MDPs against the paper's, {args.seeds} other seeds, ± 95 %:", table(header, cells)]


def judge(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """All contestants in every environment of the held-out MDPs."""
    paper, plain = occ.jin_luo(args.family.problem(args.seed)[0]), occ.ImportanceWeighted()
    players = {
        PAPER: Contestant(paper, plain),
        PAPER_CENTRED: Contestant(paper, args.baseline),
        TUNED: Contestant(tuned, args.baseline),
        TUNED_PLAIN: Contestant(tuned, plain),
    }
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for place in ENVIRONMENTS:
        for name, player in players.items():
            found[place, name] = [regrets(args, player, number, place, range(1, args.seeds + 1)) for number in args.held_out]
            print(f"  {place}, {name}: {np.mean(found[place, name]):.0f}", flush=True)
    rows: list[dict[str, Any]] = []
    for (place, name), runs in found.items():
        error = float(np.linalg.norm([_error(x) for x in runs])) / len(runs)
        row: dict[str, Any] = {"environment": place, "setting": name, "regret": float(np.mean(runs)), "standard_error": error}
        for number, x in zip(args.held_out, runs, strict=True):
            row |= {f"MDP {number}": float(x.mean()), f"MDP {number}, standard error": _error(x)}
        rows.append(row)
    write_csv(directory / "held_out.csv", rows)
    write_figure(directory / "environments.png", figures.draw_environments(rows, args.episodes, args.seeds, args.test))
    lines = [f"mean regret over {args.test} held-out MDPs, T = {args.episodes:,}, {args.seeds} seeds, ± 95 %:"]
    by_place = {(row["environment"], row["setting"]): row for row in rows}
    cells = [
        [name, *(f"{by_place[place, name]['regret']:.0f} ± {1.96 * by_place[place, name]['standard_error']:.0f}" for place in ENVIRONMENTS)]
        for name in players
    ]
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
        lines += [table(header, [[name, *map(str, ratios[place, name])] for name in list(players)[1:]]), ""]
    picture = figures.draw_held_out(ratios, args.held_out, args.episodes, args.seeds)
    write_figure(directory / "held_out.png", picture)
    return lines


# -- one world against the other ------------------------------------------------------------------------------------------


def frontier(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """Over the learning rate: stochastic regret and that against the adversary, both relative to the paper's, on the training MDPs."""
    plain, beta = occ.ImportanceWeighted(), 1.0
    mdp, _ = args.family.problem(args.seed - 1)
    paper = Contestant(occ.jin_luo(mdp), plain)
    families = {
        "conditional entropy, with a baseline": lambda gamma: Contestant(entropy(beta, gamma), args.baseline),
        "conditional entropy": lambda gamma: Contestant(entropy(beta, gamma), plain),
        "the paper's hybrid, with a baseline": lambda gamma: Contestant(occ.jin_luo(mdp, 0.2, beta, gamma), args.baseline),
    }

    world, seeds, rows = args.family.stochastic(args.training), range(1, args.frontier_seeds + 1), []

    def note(name: str, gamma: float | None, player: Contestant) -> None:
        mine, papers = (
            {place: [regrets(args, who, number, place, seeds) for number in args.training] for place in (STOCHASTIC, GREEDY)}
            for who in (player, paper)
        )
        gained = Ratio.mean([Ratio.of(x, y) for x, y in zip(papers[STOCHASTIC], mine[STOCHASTIC], strict=True)])
        paid = Ratio.mean([Ratio.of(x, y) for x, y in zip(mine[GREEDY], papers[GREEDY], strict=True)])
        with torch.no_grad():
            path = occ.forecast(world.mdp, player.regularizer, world.losses, args.episodes, estimator=player.estimator)
        row: dict[str, Any] = {"family": name, "gamma": gamma, "stochastic": gained.value, "stochastic, standard error": gained.error}
        row |= {"adversary": paid.value, "adversary, standard error": paid.error, "noise share": float(path.noise_share.max())}
        row["forecast error"] = float(path.final.mean()) / float(np.mean(mine[STOCHASTIC])) - 1
        rows.append(row)
        print(f"  {name}, {gamma}: {gained} times less, {paid}", flush=True)

    for name, contestant in families.items():
        for gamma in args.frontier:
            note(name, gamma, contestant(gamma))
    note(TUNED, None, Contestant(tuned, args.baseline))
    write_csv(directory / "frontier.csv", rows)
    write_figure(directory / "frontier.png", figures.draw_frontier(rows, args.episodes, len(args.training), args.frontier_seeds))
    cells = [
        [row["family"], f"{row['gamma']:g}" if row["gamma"] else ""]
        + [str(Ratio(row[key], row[f"{key}, standard error"])) for key in ("stochastic", "adversary")]
        + [f"{row['forecast error']:+.1%}", f"{row['noise share']:.2f}"]
        for row in rows
    ]
    header = ["", "γ", "stochastic: times less regret than the paper's", "adversary: regret relative to the paper's"]
    header += ["error of the forecast, stochastic", "its share of noise, at most"]
    which = f"training MDPs {args.training[0]} to {args.training[-1]}, {args.frontier_seeds} seeds"
    return [f"means over {which}, ± 95 %:", table(header, cells)]


PARTS = {"training": play_training, "frontier": frontier, "held_out": judge}


def main(args: Args) -> Path:
    """All parts."""
    unknown = [part for part in args.parts if part not in ("tune", *PARTS)]
    if unknown:
        raise SystemExit(f"parts: there is no {unknown[0]!r}; there are tune, {', '.join(PARTS)}")
    if "tune" not in args.parts[:1] and args.setting is None:
        raise SystemExit("parts: the others play what was tuned; begin with the part tune, or give its --setting")
    torch.set_num_threads(1)
    directory = run_directory(args.root, "both_worlds", args.seed)
    write_configuration(directory, args)
    lines: list[str] = []
    tuned = entropy(*args.setting) if args.setting else entropy(1.0, 0.2)
    for part in args.parts:
        if part == "tune" and args.setting:
            continue
        found = tune(args, directory, tuned) if part == "tune" else PARTS[part](args, directory, tuned)
        print("\n".join([part, *found, ""]), flush=True)
        lines += [part, *found, ""]
    write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
