"""Is a certified step ever wrong, and how often is a step not certified? Random FTRL steps.

Random MDPs, losses and parameters, cold and warm starts, for every family of regularizers. Every
certified answer is judged by code that shares nothing with the solver (experiments/fuzz_judge.py),
with 32 or 60 digits. It is wrong if a q(s,a) has a relative error above 1e-10 and ten
times its dual residual. The judge has to find some answers that are falsified on purpose.

The exit code is 1 if not all is right. `problems/` keeps failures for `--replay <file>`.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

import torch_occ as occ
from experiments import common
from experiments.fuzz_judge import Floats
from experiments.fuzz_problems import (
    FAMILIES,
    KINDS,
    SLOW,
    Backend,
    Batch,
    Generator,
    draw,
    neighbours,
)

FAILURES = tuple(status for status in occ.Status if status != occ.Status.CONVERGED)


@dataclass(frozen=True)
class Args:
    """Which steps are tried, and how many."""

    steps: int = 1_000_000
    """of all families and kinds together"""
    seed: int = 0
    """of the campaign"""
    regularizers: tuple[str, ...] = ()
    """families to try; all of them if none is named"""
    kinds: tuple[str, ...] = tuple(KINDS)
    """what is special about the problems; see `KINDS` in experiments/fuzz_problems.py"""
    backends: tuple[Backend, ...] = ("auto", "torch")
    """which solvers are tried"""
    seconds: float = 0.0
    """stop after this many seconds; 0 for no limit"""
    batch: int = 1024
    """cold starts over one MDP, fewer where they are slow; warm starts follow where they succeed"""
    processes: int = 2
    """processes that work at the same time"""
    replay: Path | None = None
    """solve and judge the problem in this file, and nothing else"""
    root: Path = Path("runs")
    """where the run's directory goes"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "regularizers", self.regularizers or tuple(FAMILIES))
        known: tuple[tuple[str, Iterable[str]], ...] = ("regularizers", FAMILIES), ("kinds", KINDS)
        for argument, names in known:
            for name in getattr(self, argument):
                if name not in names:
                    raise ValueError(f"{argument}: {name} is not one of {', '.join(names)}")
        for count in ("steps", "batch", "processes"):
            if getattr(self, count) < 1:
                raise ValueError(f"{count}: expected at least 1, got {getattr(self, count)}")


# -- one batch ------------------------------------------------------------------------------------


#: Relative errors of q up to here are never held against a certificate, in double and single.
HARMLESS = 1e-10, 1e-4
#: How many times the dual residual an error may be.
SLACK = 10.0
#: The size of errors made on purpose, in double and single, and how many of them in a batch.
PLANTED, PLANTS = (1e-6, 1e-2), 2
#: Problems that are kept for each sort of failure.
KEPT = 3
#: Answers of a batch that are judged with 60 digits; the others count as unjudged.
MOST = 64
#: The fewest cold starts of a batch, and how many times fewer there are in torch.
LEAST, TORCH = 8, 16


class Failure(NamedTuple):
    """A step worth a look."""

    sort: str  # "wrong", "unjudged", or the name of its status
    what: str
    problem: Batch  # of one element


@dataclass
class Tally:
    """The results of some batches, added up."""

    statuses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(occ.Status), np.int64))
    judged: int = 0
    unjudged: int = 0  # certified, but nothing settled
    wrong: int = 0
    largest: float = 0.0  # error
    rechecked: int = 0  # judged with 60 digits
    planted: int = 0  # errors made on purpose
    missed: int = 0  # and not found
    solving: float = 0.0  # seconds of processor time
    judging: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count the other one too."""
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "largest" else mine + theirs)

    @property
    def steps(self) -> int:
        return int(self.statuses.sum())

    @property
    def certified(self) -> int:
        return int(self.statuses[occ.Status.CONVERGED])


def examine(
    batch: Batch, q: Floats, allowed: Floats, multipliers: Floats | None = None
) -> tuple[Floats, int]:
    """The errors of answers `(B,)`, NaN if they do not settle, and how many needed 60 digits.

    Who is accused is judged so, too.
    """
    errors = batch.errors(q, multipliers)
    left = np.flatnonzero(~(errors <= allowed))[:MOST]
    if len(left):
        prices = None if multipliers is None else multipliers[left]
        errors[left] = batch.take(left).errors(q[left], prices, exact=True)
    return errors, len(left)


def try_batch(random: Generator, batch: Batch, backend: Backend) -> tuple[Tally, occ.Solution]:
    """Solve a batch, and judge what was certified; a few answers once more, falsified."""
    begin = time.process_time()
    solution = batch.solve(backend)
    found = Tally(solving=time.process_time() - begin)
    status, q = solution.status.numpy(), solution.q.double().numpy()
    found.statuses = np.bincount(status, minlength=len(occ.Status))
    certified = np.flatnonzero(status == occ.Status.CONVERGED)
    errors = allowed = np.zeros(0)
    begin = time.process_time()
    if len(certified):
        plants = certified[:PLANTS]
        noise = PLANTED[batch.single] * random.uniform(-1, 1, q[plants].shape)
        sizes = np.where(q[plants] > batch.floor, abs(np.log1p(noise)), 0.0).max((1, 2))
        both = np.concatenate([certified, plants])
        prices = None if solution.multipliers is None else solution.multipliers.numpy()[both]
        answers = np.concatenate([q[certified], q[plants] * (1 + noise)])
        claims = solution.dual_residual.double().numpy()[certified]
        allowed = np.maximum(HARMLESS[batch.single], SLACK * claims)
        most = np.append(allowed, np.full(len(plants), np.inf))
        errors, found.rechecked = examine(batch.take(both), answers, most, prices)
        errors, seen = np.split(errors, [len(certified)])
        found.unjudged, found.wrong = int(np.isnan(errors).sum()), int((errors > allowed).sum())
        found.judged = len(errors) - found.unjudged
        found.largest = float(np.nanmax(errors, initial=0.0))
        own = errors[: len(plants)]
        judged = ~np.isnan(own)
        hit = abs(seen - sizes) <= 0.01 * sizes + own  # the judge returned to the same solution
        found.planted, found.missed = int(judged.sum()), int((judged & ~hit).sum())
    found.judging = time.process_time() - begin
    failures = found.failures
    wrong = np.flatnonzero(errors > allowed)
    for i in wrong[np.argsort(-errors[wrong])][:1]:
        what = f"error {errors[i]:.1e}, allowed {allowed[i]:.1e}"
        failures.append(Failure("wrong", what, batch.take(certified[i : i + 1])))
    for i in np.flatnonzero(np.isnan(errors))[:1]:
        failures.append(Failure("unjudged", "not settled", batch.take(certified[i : i + 1])))
    for reason in FAILURES:
        for i in np.flatnonzero(status == reason)[:1]:
            what = f"after {int(solution.steps[i])} steps, residual {solution.dual_residual[i]:.1e}"
            failures.append(Failure(reason.name.lower(), what, batch.take(np.array([i]))))
    return found, solution


# -- the campaign ---------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A family, a kind of problem and a backend, which are counted together."""

    family: str
    kind: str
    backend: Backend


Tallies = dict[Cell, Tally]


class Task(NamedTuple):
    """A batch of cold starts, and the warm starts that follow."""

    args: Args
    cell: Cell
    number: int


def play(task: Task) -> Tallies:
    """Everything about one random MDP."""
    args, cell = task.args, task.cell
    family, kind = list(FAMILIES).index(cell.family), list(KINDS).index(cell.kind)
    random = np.random.default_rng([args.seed, family, kind, task.number])
    cold = draw(random, cell.family, cell.kind, size_of(args, cell)[0])
    found, solution = try_batch(random, cold, cell.backend)
    q = solution.q.double().numpy()
    warm = neighbours(random, cold, q, solution.converged.numpy())
    if len(warm.t):
        found.add(try_batch(random, warm, cell.backend)[0])
    return {cell: found}


def size_of(args: Args, cell: Cell) -> tuple[int, int]:
    """The cold starts of a task, fewer where a step takes longer; it is one in so many rounds."""
    slow = KINDS[cell.kind] * max(SLOW.get(cell[:2], 1), SLOW.get((cell.family, ""), 1))
    share = args.batch / (slow * (TORCH if cell.backend == "torch" else 1))
    size = max(min(LEAST, args.batch), int(share))
    return size, max(1, round(size / share))


def rounds(args: Args) -> Iterator[list[Task]]:
    """All batches: one of every cell in a round, of the slowest in some rounds."""
    names = product(args.regularizers, args.kinds, args.backends)
    cells = [(Cell(*x), *size_of(args, Cell(*x))) for x in names]
    each = sum(2 * size / period for _, size, period in cells)
    for number in range(max(1, round(args.steps / each))):
        yield [Task(args, cell, number) for cell, _, period in cells if number % period == 0]


def results(args: Args) -> Iterator[Tallies]:
    """The tallies of all batches, from several processes, until the time is up."""
    begin, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    torch.set_num_threads(1)  # the processes share the cores
    with ProcessPoolExecutor(args.processes, spawn, torch.set_num_threads, (1,)) as pool:
        for tasks in rounds(args):
            yield from pool.map(play, tasks) if args.processes > 1 else map(play, tasks)
            if 0 < args.seconds < time.monotonic() - begin:
                return


def campaign(args: Args, directory: Path) -> Tallies:
    """Play everything; problems are written as they come."""
    total: Tallies = {}
    kept: dict[tuple[Cell, str], int] = {}
    last = time.monotonic()
    for tallies in results(args):
        for cell, found in tallies.items():
            failures, found.failures = found.failures, []
            total.setdefault(cell, Tally()).add(found)
            for sort, what, problem in failures:
                count = kept[cell, sort] = kept.get((cell, sort), 0) + 1
                if count <= KEPT:
                    name = "_".join([*cell, sort, f"{count}.npz"])
                    problem.save(directory / "problems" / name, what=what)
        if time.monotonic() - last > 30:
            last = time.monotonic()
            print(f"  {write(args, total, directory)[0].splitlines()[-2]}", flush=True)
    return total


# -- the report -----------------------------------------------------------------------------------


def summary(args: Args, tallies: Tallies) -> str:
    """The table of what is not as it should be: family by kind, a share or a number of steps."""
    rows = []
    for backend in args.backends:
        for family in args.regularizers:
            row = [f"{FAMILIES[family].label} ({backend})"]
            for kind in args.kinds:
                x = tallies.get(Cell(family, kind, backend), Tally())
                failed = [status for status in FAILURES if x.statuses[status]]
                parts = [
                    f"{x.statuses[status] / x.steps:.2g} {status.name.lower()}" for status in failed
                ]
                parts += [f"{x.wrong} wrong"] if x.wrong else []
                parts += [f"{x.unjudged} unjudged"] if x.unjudged else []
                row.append(", ".join(parts) or "0")
            rows.append(row)
    return common.table(["family", *args.kinds], rows, range(len(args.kinds) + 1))


def details(tallies: Tallies) -> list[dict[str, str | int | float]]:
    """All figures, one row for each cell."""
    rows: list[dict[str, str | int | float]] = []
    for cell, x in tallies.items():
        row: dict[str, str | int | float] = {**cell._asdict(), "steps": x.steps}
        row |= {status.name.lower(): int(x.statuses[status]) for status in FAILURES}
        row |= {"certified": x.certified, "judged": x.judged}
        row |= {"unjudged": x.unjudged, "wrong": x.wrong, "rechecked": x.rechecked}
        row |= {"largest_error": float(f"{x.largest:.2g}")}
        row |= {"planted": x.planted, "missed": x.missed}
        rows.append(row | {"solving": round(x.solving, 2), "judging": round(x.judging, 2)})
    return rows


def conclude(tallies: Iterable[Tally]) -> tuple[str, int]:
    """The verdict in a sentence, and the exit code."""
    x = Tally()
    for other in tallies:
        x.add(other)
    text = (
        f"{x.steps:,} steps, {x.certified:,} certified, {x.judged:,} of them "
        f"judged ({x.rechecked} with 60 digits): {x.wrong} wrong, {x.unjudged} unjudged; "
        f"{x.planted - x.missed:,} of {x.planted:,} planted errors found.\n"
        f"Solving took {common.seconds(x.solving)} of one core, "
        f"judging {common.seconds(x.judging)}."
    )
    return text, int(x.wrong > 0 or x.unjudged > 0 or x.missed > 0)


def replay(args: Args, path: Path) -> int:
    """One problem again: what each backend says, and what is true. 1 if a certificate is wrong."""
    batch, failed = Batch.load(path), False
    parameters = ", ".join(f"{name} = {x[0]}" for name, x in batch.parameters.items())
    print(f"{path}: {FAMILIES[batch.family].label}, {batch.mdp}")
    print(f"  t = {batch.t[0]:g}, {parameters}, {'cold' if batch.start is None else 'warm'} start")
    for backend in args.backends:
        found, solution = try_batch(np.random.default_rng(0), batch, backend)
        status, claim = occ.Status(int(solution.status[0])), float(solution.dual_residual[0])
        print(f"  {backend}: {status.name} after {int(solution.steps[0])} steps,", end=" ")
        print(f"dual residual {claim:.1e}, error of q if certified {found.largest:.1e}")
        failed = failed or found.wrong > 0 or found.unjudged > 0
    return int(failed)


def write(args: Args, tallies: Tallies, directory: Path) -> tuple[str, int]:
    """Write the report and all figures so far; returns the report and the exit code."""
    sentence, code = conclude(tallies.values())
    report = f"{summary(args, tallies)}\n\n{sentence}"
    common.write_text(directory / "fuzz.md", report)
    common.write_csv(directory / "fuzz.csv", details(tallies))
    return report, code


def main(args: Args) -> int:
    """Play, judge, write, and return the exit code."""
    if args.replay is not None:
        return replay(args, args.replay)
    directory = common.begin("fuzz", args, args.seed)
    print(f"{args.steps:,} steps; {common.machine()}", flush=True)
    report, code = write(args, campaign(args, directory), directory)
    print(f"\n{report}\n\nProblems worth a look are in {directory / 'problems'}.")
    return code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
