"""One learner for all worlds: how close is it to the best learner of each?

The candidates are FTRL with few parameters. On validation MDPs, the regret of each is divided by
that of Thompson sampling in the stochastic world and by that of the best candidate against the
greedy adversary. Of those close enough to the best against the adversary, the one with the least
stochastic regret is chosen. Then it plays held-out MDPs once, in five worlds, beside the
specialists. FTRL with a fixed regularizer leaps where the means are fixed beforehand, and plays
where they are not; `CorrectedFTRL` and all other learners play.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import (
    COLOURS,
    CONSTRAINED,
    CORRUPTED,
    GREEDY,
    STOCHASTIC,
    SWITCHING,
    Family,
    Ratio,
)

WORLDS = (STOCHASTIC, GREEDY, CONSTRAINED, CORRUPTED, SWITCHING)
THOMPSON, OPTIMISTIC = "Thompson sampling", "UCB"
TSALLIS, TSALLIS_CENTRED = "Tsallis", "Tsallis, baseline"
CORRECTED = "corrected means"
ENTROPY_CENTRED, PAPER_CENTRED = "conditional entropy, baseline", "paper, baseline"


@dataclass(frozen=True)
class Args:
    """Which MDPs, and for how long."""

    shape: tuple[int, int, int] = (3, 3, 3)
    """horizon, width, actions"""
    validation: int = 3
    """MDPs that choose the candidate: 80, 81, ..."""
    held_out: int = 5
    """MDPs that are played once: 400, 401, ..."""
    choose_episodes: int = 100_000
    """T on the validation MDPs"""
    episodes: int = 1_000_000
    """T on the held-out MDPs"""
    choose_seeds: int = 2
    """runs on each validation MDP"""
    seeds: int = 2
    """runs on each held-out MDP"""
    particles: int = 32
    """of leaping, on each MDP"""
    limit: float = 1.75
    """the largest ratio to the best candidate against the adversary; below 2, because the ratio may
    grow with T"""
    beta: float = 0.5
    """of the log-barrier under the Tsallis entropy"""
    rates: tuple[float, ...] = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2)
    """gamma of the Tsallis entropy with a baseline"""
    corrected: tuple[float, ...] = (0.55, 0.7, 0.85, 1.0)
    """gamma of `CorrectedFTRL`"""
    setting: float | None = None
    """gamma of `CorrectedFTRL` as the chosen candidate; None chooses on the validation MDPs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


class Candidate(NamedTuple):
    """FTRL with one regularizer and one estimator; without an estimator, `CorrectedFTRL`."""

    family: str
    gamma: float
    regularizer: occ.Regularizer
    estimator: occ.Estimator | None

    def learner(self, mdp: occ.LayeredMDP) -> occ.Learner:
        if self.estimator is None:
            return occ.CorrectedFTRL(mdp, self.regularizer)
        return occ.FTRL(mdp, self.regularizer, self.estimator)

    @property
    def name(self) -> str:
        return f"{self.family}, γ = {self.gamma:g}"


Player = Candidate | Callable[[occ.LayeredMDP], occ.Learner]


def candidates(args: Args) -> list[Candidate]:
    """All settings among which one is chosen."""
    centred, plain = occ.ReducedVariance(occ.InverseSqrt(0.001)), occ.ImportanceWeighted()

    def tsallis(gamma: float) -> occ.Regularizer:
        return occ.Tsallis() / occ.InverseSqrt(gamma)

    found = [Candidate(TSALLIS, g, tsallis(g), plain) for g in (0.5, 0.7, 1.0)]
    barrier = occ.LogBarrier(args.beta)
    found += [Candidate(TSALLIS_CENTRED, g, tsallis(g) + barrier, centred) for g in args.rates]
    found += [Candidate(CORRECTED, g, tsallis(g), None) for g in args.corrected]
    for g in (0.2, 0.2663, 0.4):
        entropy = occ.ConditionalEntropy() / occ.InverseSqrt(g) + occ.LogBarrier(1.0)
        found.append(Candidate(ENTROPY_CENTRED, g, entropy, centred))
    return found


def regret_of(
    args: Args, family: Family, number: int, world: str, player: Player, seeds: int
) -> tuple[Tensor, Tensor]:
    """Mean regret and its squared standard error: by leaping if that is possible, or by playing."""
    mdp, losses = family.problem(number)[0], family.environment(number, world)
    if isinstance(player, Candidate) and world != GREEDY and player.estimator is not None:
        options: dict[str, Any] = {"estimator": player.estimator, "particles": args.particles}
        found = occ.leap(mdp, player.regularizer, losses, family.episodes, **options)
        return found.final, found.standard_error[-1] ** 2
    learner = player.learner(mdp) if isinstance(player, Candidate) else player(mdp)
    final = common.final_regret(learner, losses, family.episodes, range(1, 1 + seeds))
    return final.mean(), final.var() / seeds if seeds > 1 else torch.zeros_like(final[0])


class Regret(NamedTuple):
    """A mean over MDPs, with its standard error over runs."""

    mean: float
    error: float
    each: Tensor  # (MDPs,)

    @classmethod
    def over(
        cls, args: Args, family: Family, numbers: range, world: str, player: Player, seeds: int
    ) -> Regret:
        found = [regret_of(args, family, number, world, player, seeds) for number in numbers]
        each, errors = (torch.stack(x) for x in zip(*found, strict=True))
        return cls(float(each.mean()), float(errors.sum().sqrt()) / len(numbers), each)

    def __str__(self) -> str:
        # Without an error there was one run of each MDP.
        return f"{self.mean:,.0f}" + (f" ± {1.96 * self.error:,.0f}" if self.error else "")


def choose(args: Args, directory: Path) -> tuple[Candidate, list[str]]:
    """The candidate with the least stochastic regret within `limit` of the best elsewhere."""
    family = Family(args.choose_episodes, *args.shape)
    numbers, seeds = range(80, 80 + args.validation), args.choose_seeds
    best = Regret.over(args, family, numbers, STOCHASTIC, occ.rivals.Thompson, 4 * seeds)
    rows: list[dict[str, Any]] = []
    for each in candidates(args):
        row: dict[str, Any] = {"family": each.family, "gamma": each.gamma}
        for world in (STOCHASTIC, GREEDY):
            found = Regret.over(args, family, numbers, world, each, seeds)
            row |= {world: found.mean, f"{world}, standard error": found.error}
        rows.append(row)
        print(f"  {each.name}: {row[STOCHASTIC]:.0f}, {row[GREEDY]:.0f}", flush=True)
    floor = min(row[GREEDY] for row in rows)
    for row in rows:
        row |= {"to Thompson": row[STOCHASTIC] / best.mean, "to the best": row[GREEDY] / floor}
    common.write_csv(directory / "frontier.csv", rows)
    common.write_figure(directory / "frontier.png", draw_frontier(rows, args.choose_episodes))
    within = [i for i, row in enumerate(rows) if row["to the best"] <= args.limit]
    chosen = candidates(args)[min(within, key=lambda i: rows[i][STOCHASTIC])]
    cells = []
    for row in rows:
        numbers_of = [f"{row[STOCHASTIC]:.0f}", f"{row['to Thompson']:.2f}"]
        numbers_of += [f"{row[GREEDY]:.0f}", f"{row['to the best']:.2f}"]
        cells.append([f"{row['family']}, γ = {row['gamma']:g}", *numbers_of])
    size = f"{args.validation} validation MDPs, T = {args.choose_episodes:,}"
    header = ["candidate", STOCHASTIC, "to Thompson", GREEDY, "to the best"]
    return chosen, [
        f"{size}; {THOMPSON}: {best}; chosen: {chosen.name}",
        common.table(header, cells),
    ]


def judge(args: Args, directory: Path, chosen: Candidate) -> list[str]:
    """The chosen candidate and the specialists in all worlds, on the held-out MDPs."""
    family, numbers = Family(args.episodes, *args.shape), range(400, 400 + args.held_out)
    every = {each.name: each for each in candidates(args)}
    centred = occ.ReducedVariance(occ.InverseSqrt(0.001))
    players: dict[str, Player] = {
        chosen.name: chosen,
        f"{TSALLIS_CENTRED}, γ = 1": every[f"{TSALLIS_CENTRED}, γ = 1"],
        f"{TSALLIS}, untuned": every[f"{TSALLIS}, γ = 1"],
        ENTROPY_CENTRED: every[f"{ENTROPY_CENTRED}, γ = 0.2663"],
        PAPER_CENTRED: Candidate(PAPER_CENTRED, 1.0, occ.jin_luo(family.problem(400)[0]), centred),
        THOMPSON: occ.rivals.Thompson,
        OPTIMISTIC: occ.OptimisticValueIteration,
    }
    found: dict[tuple[str, str], Regret] = {}
    for world in WORLDS:
        for name, player in players.items():
            found[world, name] = Regret.over(args, family, numbers, world, player, args.seeds)
            print(f"  {world}, {name}: {found[world, name]}", flush=True)
        # After every world, so that an interruption costs only the last one.
        rows = [
            {"world": place, "learner": name, "regret": r.mean, "standard error": r.error}
            for (place, name), r in found.items()
        ]
        common.write_csv(directory / "held_out.csv", rows)
    cells = [[name, *(str(found[world, name]) for world in WORLDS)] for name in players]
    lines = [
        f"mean regret on {args.held_out} held-out MDPs, T = {args.episodes:,}, ± 95 %:",
        common.table(["learner", *WORLDS], cells),
    ]
    for world in WORLDS:
        least, best = min((found[world, name].mean, name) for name in players)
        own = found[world, chosen.name]
        relative = f"{own.mean - least:,.0f} more than"
        if least > 0:
            relative = f"{Ratio.paired(own.each, found[world, best].each)} times"
        lines.append(f"{world}: {relative} the least regret, {least:,.0f} of {best}")
    return lines


def draw_frontier(rows: list[dict[str, Any]], episodes: int) -> Figure:
    """One world over the other: each candidate's distance to the specialists."""
    figure = common.new_figure(7, 4.6)
    axes = figure.subplots()
    for i, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        kept = [row for row in rows if row["family"] == family]
        points = [(row["to Thompson"], row["to the best"]) for row in kept]
        axes.plot(*zip(*points, strict=True), color=COLOURS[i], marker="os^D"[i], label=family)
        for row, point in zip(kept, points, strict=True):
            place = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 8}
            axes.annotate(f"{row['gamma']:g}", point, color=COLOURS[i], **place)
    axes.axhline(2.0, color="0.5", linewidth=0.8, linestyle="--")
    axes.axvline(2.0, color="0.5", linewidth=0.8, linestyle="--")
    title = f"validation MDPs, T = {episodes:,}; numbers are γ, dashed: twice"
    label = "stochastic: regret over that of Thompson sampling"
    common.tidy(axes, xlim=(1, None), ylim=(0.9, None), xlabel=label, title=title)
    axes.set_ylabel("greedy adversary: regret over the least")
    axes.legend(frameon=False)
    return figure


def main(args: Args) -> Path:
    """Choose, then play."""
    directory = common.begin("all_worlds", args, args.held_out)
    lines = [common.machine(), ""]
    if args.setting is None:
        chosen, report = choose(args, directory)
    else:
        names = {(each.family, each.gamma): each for each in candidates(args)}
        if (CORRECTED, args.setting) not in names:
            raise SystemExit(
                f"setting: expected one of the rates {args.corrected}, got {args.setting}"
            )
        chosen, report = names[CORRECTED, args.setting], [f"given: γ = {args.setting:g}"]
    print("\n".join(report), flush=True)
    lines += [*report, ""]
    if args.held_out:
        report = judge(args, directory, chosen)
        print("\n".join(report), flush=True)
        lines += report
    common.write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
