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
from torch import Tensor

import torch_occ as occ
from experiments.all_worlds_figure import draw_frontier
from experiments.common import machine, run_directory, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from experiments.tuning_worlds import CORRUPTED, GREEDY, STOCHASTIC, SWITCHING, Family
from torch_occ.game.history import student

CONSTRAINED = "constrained"
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


def candidates(args: Args) -> list[Candidate]:
    """All settings among which one is chosen."""
    centred = occ.ReducedVariance(occ.InverseSqrt(0.001))
    plain = occ.ImportanceWeighted()
    found = [
        Candidate(TSALLIS, g, occ.Tsallis() / occ.InverseSqrt(g), plain) for g in (0.5, 0.7, 1.0)
    ]
    found += [
        Candidate(
            TSALLIS_CENTRED,
            g,
            occ.Tsallis() / occ.InverseSqrt(g) + occ.LogBarrier(args.beta),
            centred,
        )
        for g in args.rates
    ]
    found += [
        Candidate(CORRECTED, g, occ.Tsallis() / occ.InverseSqrt(g), None) for g in args.corrected
    ]
    return found + [
        Candidate(
            ENTROPY_CENTRED,
            g,
            occ.ConditionalEntropy() / occ.InverseSqrt(g) + occ.LogBarrier(1.0),
            centred,
        )
        for g in (0.2, 0.2663, 0.4)
    ]


def environment(family: Family, number: int, world: str) -> occ.LossProcess:
    """The losses of one MDP in one world."""
    if world == CONSTRAINED:
        return occ.StochasticallyConstrained(family.problem(number)[1])
    return family.environment(number, world)


def play(
    family: Family, number: int, world: str, learner: occ.Learner, seeds: int
) -> tuple[Tensor, Tensor]:
    """Mean regret and its squared standard error, by playing."""
    history = occ.simulate(
        learner.mdp,
        learner,
        environment(family, number, world),
        family.episodes,
        range(1, 1 + seeds),
        checkpoints=[family.episodes],
    )
    final = history.regret[:, -1]
    error = final.var() / seeds if seeds > 1 else torch.zeros_like(final[0])
    return final.mean(), error


def regret_of(
    args: Args, family: Family, number: int, world: str, candidate: Candidate, seeds: int
) -> tuple[Tensor, Tensor]:
    """The same for a candidate, by leaping if it can."""
    mdp, _ = family.problem(number)
    if world == GREEDY or candidate.estimator is None:
        return play(family, number, world, candidate.learner(mdp), seeds)
    found = occ.leap(
        mdp,
        candidate.regularizer,
        environment(family, number, world),
        family.episodes,
        estimator=candidate.estimator,
        particles=args.particles,
    )
    return found.final, found.standard_error[-1] ** 2


class Regret(NamedTuple):
    """A mean over MDPs, with its standard error over runs."""

    mean: float
    error: float
    each: Tensor  # (MDPs,)

    @classmethod
    def over(cls, numbers: range, one: Callable[[int], tuple[Tensor, Tensor]]) -> Regret:
        means, errors = zip(*map(one, numbers), strict=True)
        total = float(torch.stack(errors).sum().sqrt())
        each = torch.stack(means)
        return cls(float(each.mean()), total / len(numbers), each)

    def relative_to(self, other: Regret) -> str:
        """The ratio of two means over the same MDPs, with a 95 % interval over MDPs."""
        value, count = self.mean / other.mean, len(self.each)
        if count < 2:
            return f"{value:.2f}"
        error = (self.each - value * other.each).std() / count**0.5 / other.mean
        return f"{value:.2f} ± {student(count - 1) * float(error):.2f}"

    def __str__(self) -> str:
        if not self.error:  # one run of each MDP
            return f"{self.mean:,.0f}"
        return f"{self.mean:,.0f} ± {1.96 * self.error:,.0f}"


def choose(args: Args, directory: Path) -> tuple[Candidate, list[str]]:
    """The candidate with the least stochastic regret within `limit` of the best elsewhere."""
    family = Family(args.choose_episodes, *args.shape)
    numbers = range(80, 80 + args.validation)
    best = Regret.over(
        numbers,
        lambda n: play(
            family, n, STOCHASTIC, occ.Thompson(family.problem(n)[0]), 4 * args.choose_seeds
        ),
    )
    rows: list[dict[str, Any]] = []
    for each in candidates(args):
        row: dict[str, Any] = {"family": each.family, "gamma": each.gamma}
        for world in (STOCHASTIC, GREEDY):
            found = Regret.over(
                numbers,
                lambda n, each=each, world=world: regret_of(  # type: ignore[misc]
                    args, family, n, world, each, args.choose_seeds
                ),
            )
            row |= {world: found.mean, f"{world}, standard error": found.error}
        rows.append(row)
        print(f"  {each.name}: {row[STOCHASTIC]:.0f}, {row[GREEDY]:.0f}", flush=True)
    floor = min(row[GREEDY] for row in rows)
    for row in rows:
        row |= {"to Thompson": row[STOCHASTIC] / best.mean, "to the best": row[GREEDY] / floor}
    write_csv(directory / "frontier.csv", rows)
    write_figure(directory / "frontier.png", draw_frontier(rows, args.choose_episodes))
    within = [i for i, row in enumerate(rows) if row["to the best"] <= args.limit]
    chosen = min(within, key=lambda i: rows[i][STOCHASTIC])
    header = ["candidate", STOCHASTIC, "to Thompson", GREEDY, "to the best"]
    cells = [
        [
            f"{row['family']}, γ = {row['gamma']:g}",
            f"{row[STOCHASTIC]:.0f}",
            f"{row['to Thompson']:.2f}",
            f"{row[GREEDY]:.0f}",
            f"{row['to the best']:.2f}",
        ]
        for row in rows
    ]
    lines = [
        f"{args.validation} validation MDPs, T = {args.choose_episodes:,}; "
        f"{THOMPSON}: {best}; chosen: {candidates(args)[chosen].name}",
        table(header, cells),
    ]
    return candidates(args)[chosen], lines


def judge(args: Args, directory: Path, chosen: Candidate) -> list[str]:
    """The chosen candidate and the specialists in all worlds, on the held-out MDPs."""
    family, numbers = Family(args.episodes, *args.shape), range(400, 400 + args.held_out)
    every = {each.name: each for each in candidates(args)}
    paper = Candidate(
        PAPER_CENTRED,
        1.0,
        occ.jin_luo(family.problem(400)[0]),
        occ.ReducedVariance(occ.InverseSqrt(0.001)),
    )
    players: dict[str, Candidate | Callable[[occ.LayeredMDP], occ.Learner]] = {
        chosen.name: chosen,
        f"{TSALLIS_CENTRED}, γ = 1": every[f"{TSALLIS_CENTRED}, γ = 1"],
        f"{TSALLIS}, untuned": every[f"{TSALLIS}, γ = 1"],
        ENTROPY_CENTRED: every[f"{ENTROPY_CENTRED}, γ = 0.2663"],
        PAPER_CENTRED: paper,
        THOMPSON: occ.Thompson,
        OPTIMISTIC: occ.OptimisticValueIteration,
    }
    found: dict[tuple[str, str], Regret] = {}
    for world in WORLDS:
        for name, player in players.items():

            def one(n: int, player: Any = player, world: str = world) -> tuple[Tensor, Tensor]:
                if isinstance(player, Candidate):
                    return regret_of(args, family, n, world, player, args.seeds)
                return play(family, n, world, player(family.problem(n)[0]), args.seeds)

            found[world, name] = Regret.over(numbers, one)
            print(f"  {world}, {name}: {found[world, name]}", flush=True)
        # After every world, so that an interruption costs only the last one.
        rows = [
            {"world": world, "learner": name, "regret": r.mean, "standard error": r.error}
            for (world, name), r in found.items()
        ]
        write_csv(directory / "held_out.csv", rows)
    cells = [[name, *(str(found[world, name]) for world in WORLDS)] for name in players]
    lines = [
        f"mean regret on {args.held_out} held-out MDPs, T = {args.episodes:,}, ± 95 %:",
        table(["learner", *WORLDS], cells),
    ]
    for world in WORLDS:
        best = min(players, key=lambda name, world=world: found[world, name].mean)  # type: ignore[misc]
        own, least = found[world, chosen.name], found[world, best]
        relative = f"{own.mean - least.mean:,.0f} more than"
        if least.mean > 0:
            relative = f"{own.relative_to(least)} times"
        lines.append(f"{world}: {relative} the least regret, {least.mean:,.0f} of {best}")
    return lines


def main(args: Args) -> Path:
    """Choose, then play."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "all_worlds", args.held_out)
    write_configuration(directory, args)
    lines = [machine(), ""]
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
    write_text(directory / "report.txt", "\n".join(lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
