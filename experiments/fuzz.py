"""Is a certified step ever wrong, and how often is a step not certified? A campaign of random FTRL steps.

Random MDPs, losses and parameters, cold and warm starts, for every family of regularizers. Every certified answer is judged in extended
precision by code that shares nothing with the solver (experiments/fuzz_judge.py). The certificate claims that q is right up to a relative
error of about its dual residual. An answer is *wrong* if the largest relative error of a q(s,a) exceeds 1e-10 and ten times that claim:
ten, because the residual is measured pair by pair, and the pairs of an MDP add up. What the judge cannot settle in long double
is judged with 60 digits; what is not settled there either is counted as `unjudged`. In every batch some right answers are falsified by
1e-6 on purpose, and the judge has to find them.

The exit code is 1 if an answer is wrong or unjudged, or if a falsified one was not found. Problems worth a look are kept in `problems/`;
`--replay <file>` solves and judges one again.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

import torch_occ as occ
from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.fuzz_figures import draw_errors
from experiments.fuzz_judge import CAREFUL, EXACT, FAST, FLOOR, Floats, extended
from experiments.fuzz_newton import judge
from experiments.fuzz_problems import FAMILIES, Backend, Batch, Kind, draw, neighbours
from experiments.games import write_configuration, write_text

KINDS: tuple[Kind, ...] = ("reasonable", "extreme")
#: Relative errors of q up to here are never held against a certificate.
HARMLESS = 1e-10
#: How many times the dual residual an error may be.
SLACK = 10.0
#: The size of errors made on purpose, and how many of them in a batch.
PLANTED, PLANTS = 1e-6, 2


@dataclass(frozen=True)
class Args:
    """How long, and over what."""

    steps: int = 1_000_000
    """of all families and kinds together"""
    seed: int = 0
    """of the campaign; the same steps whatever the number of processes is"""
    regularizers: tuple[str, ...] = tuple(FAMILIES)
    """families to try"""
    kind: Literal["reasonable", "extreme", "both"] = "both"
    """losses of t * mean, or up to 1e12 in size"""
    backend: Literal["engine", "torch", "both"] = "engine"
    """who solves"""
    seconds: float = 0.0
    """stop after so long; 0 is never"""
    batch: int = 256
    """cold starts over one MDP; as many warm starts follow where they succeed"""
    processes: int = 2
    """that work at the same time"""
    sample: int = 4
    """answers judged in each batch where long double is no longer than double (with 60 digits then)"""
    keep: int = 3
    """problems kept of each sort of failure"""
    replay: Path | None = None
    """solve and judge the problem in this file, and nothing else"""
    root: Path = Path("runs")
    """where the run's directory goes"""

    def __post_init__(self) -> None:
        unknown = [name for name in self.regularizers if name not in FAMILIES]
        if unknown:
            raise ValueError(f"regularizers: {unknown[0]} is none of {', '.join(FAMILIES)}")
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps and batch: expected at least 1, got {self.steps} and {self.batch}")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return KINDS if self.kind == "both" else (self.kind,)

    @property
    def backends(self) -> tuple[Backend, ...]:
        return ("engine", "torch") if self.backend == "both" else (self.backend,)


class Cell(NamedTuple):
    """What is counted together."""

    family: str
    kind: Kind
    backend: Backend


@dataclass
class Tally:
    """What happened in a cell."""

    statuses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(occ.Status), np.int64))
    errors: Floats = field(default_factory=lambda: np.zeros(0))  # of certified answers that were judged; NaN if unjudged
    claims: Floats = field(default_factory=lambda: np.zeros(0))  # their dual residuals
    rechecked: int = 0  # judged with 60 digits
    planted: int = 0
    missed: int = 0  # of the planted errors
    solving: float = 0.0  # seconds
    judging: float = 0.0
    problems: list[tuple[str, str, Batch]] = field(default_factory=list)  # (sort, what is known, one step)

    def add(self, other: Tally) -> None:
        """Both together; the problems stay with the other."""
        self.statuses = self.statuses + other.statuses
        self.errors, self.claims = np.concatenate([self.errors, other.errors]), np.concatenate([self.claims, other.claims])
        for name in ("rechecked", "planted", "missed", "solving", "judging"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def steps(self) -> int:
        return int(self.statuses.sum())

    @property
    def wrong(self) -> NDArray[np.bool_]:
        return is_wrong(self.errors, self.claims)

    @property
    def unjudged(self) -> int:
        return int(np.isnan(self.errors).sum())

    def share(self, status: occ.Status) -> float:
        """Of the steps."""
        return float(self.statuses[status] / max(self.steps, 1))


Tallies = dict[Cell, Tally]


def is_wrong(error: Floats, claim: Floats) -> NDArray[np.bool_]:
    """The rule of this experiment; see above."""
    return error > np.maximum(HARMLESS, SLACK * claim)


# -- one batch ------------------------------------------------------------------------------------------------------------


def examine(batch: Batch, q: Floats) -> tuple[Floats, int]:
    """The errors of answers, and how many needed 60 digits."""
    errors, open_, rechecked = np.full(len(q), np.nan), np.arange(len(q)), 0
    for arithmetic in (FAST, CAREFUL, EXACT) if extended() else (EXACT,):
        if len(open_):
            part = batch.take(open_)
            rechecked += len(open_) if arithmetic is EXACT else 0
            verdict = judge(part.model(arithmetic), part.terms(arithmetic), part.loss, q[open_])
            errors[open_] = verdict.error
            open_ = open_[~verdict.settled]
    return errors, rechecked


def plant(random: np.random.Generator, q: Floats) -> tuple[Floats, Floats]:
    """Wrong answers, and by how much."""
    noise = PLANTED * random.uniform(-1, 1, q.shape)
    counts = q > FLOOR
    return q * (1 + noise), np.where(counts, abs(np.log1p(noise)), 0.0).max((1, 2))


def tally(args: Args, random: np.random.Generator, batch: Batch, backend: Backend) -> tuple[Tally, occ.Solution]:
    """Solve a batch, and judge what was certified."""
    begin = time.perf_counter()
    solution = batch.solve(backend)
    found = Tally(solving=time.perf_counter() - begin)
    status, q, claims = solution.status.numpy(), solution.q.numpy(), solution.dual_residual.numpy()
    found.statuses = np.bincount(status, minlength=len(occ.Status))
    certified = np.flatnonzero(status == occ.Status.CONVERGED)
    if not extended():
        certified = certified[:: max(1, len(certified) // args.sample)]
    begin = time.perf_counter()
    truly, falsified = certified[:PLANTS], certified[:0]
    if len(certified):
        falsified = truly
        wrong_q, planted = plant(random, q[truly])
        errors, found.rechecked = examine(batch.take(np.concatenate([certified, falsified])), np.concatenate([q[certified], wrong_q]))
        found.errors, found.claims = errors[: len(certified)], claims[certified]
        own = found.errors[: len(truly)]
        judged = ~np.isnan(own)
        off = abs(errors[len(certified) :] - planted)
        found.planted, found.missed = int(judged.sum()), int((judged & ~(off <= 0.01 * planted + own)).sum())
    found.judging = time.perf_counter() - begin

    def keep(sort: str, index: NDArray[np.intp], what: list[str]) -> None:
        found.problems += [(sort, text, batch.take(index[i : i + 1])) for i, text in enumerate(what[: args.keep])]

    bad = np.flatnonzero(found.wrong | np.isnan(found.errors))
    bad = bad[np.argsort(-np.nan_to_num(found.errors[bad], nan=np.inf))]
    keep("wrong", certified[bad], [f"error {found.errors[i]:.1e}, claimed {found.claims[i]:.1e}" for i in bad])
    for reason in occ.Status:
        where = np.flatnonzero(status == reason)
        if reason != occ.Status.CONVERGED:
            keep(reason.name.lower(), where, [f"after {int(solution.steps[i])} steps, dual residual {claims[i]:.1e}" for i in where])
    return found, solution


class Task(NamedTuple):
    """A batch of cold starts, and the warm starts that follow."""

    args: Args
    family: str
    kind: Kind
    number: int


def play(task: Task) -> Tallies:
    """Everything about one random MDP."""
    torch.set_num_threads(1)
    args, tallies = task.args, {}
    for backend in args.backends:
        random = np.random.default_rng([args.seed, list(FAMILIES).index(task.family), KINDS.index(task.kind), task.number])
        cold = draw(random, task.family, task.kind, args.batch)
        found, solution = tally(args, random, cold, backend)
        warm = neighbours(random, cold, solution.q.numpy(), solution.converged.numpy())
        if len(warm.t):
            more, _ = tally(args, random, warm, backend)
            found.add(more)
            found.problems += more.problems
        tallies[Cell(task.family, task.kind, backend)] = found
    return tallies


# -- the campaign ---------------------------------------------------------------------------------------------------------


def tasks(args: Args) -> Iterator[Task]:
    """All batches, the families in turns."""
    each = args.steps / (len(args.regularizers) * len(args.kinds) * len(args.backends) * 2 * args.batch)
    for number in range(max(1, round(each))):
        for family in args.regularizers:
            for kind in args.kinds:
                yield Task(args, family, kind, number)


def results(args: Args) -> Iterator[Tallies]:
    """Of all batches, from several processes, until the time is up."""
    end = time.monotonic() + args.seconds if args.seconds > 0 else float("inf")
    waiting = tasks(args)
    if args.processes < 2:
        for task in waiting:
            if time.monotonic() > end:
                return
            yield play(task)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, spawn) as pool:
        running: set[Future[Tallies]] = {pool.submit(play, task) for task in islice(waiting, 2 * args.processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if time.monotonic() <= end:
                running |= {pool.submit(play, task) for task in islice(waiting, len(done))}
            for future in done:
                yield future.result()


def campaign(args: Args, directory: Path) -> Tallies:
    """Play everything; problems are kept as they come."""
    total: Tallies = {}
    kept: dict[tuple[Cell, str], int] = {}
    last = time.monotonic()
    for tallies in results(args):
        for cell, found in tallies.items():
            total.setdefault(cell, Tally()).add(found)
            for sort, what, problem in found.problems:
                count = kept[cell, sort] = kept.get((cell, sort), 0) + 1
                if count <= args.keep:
                    name = f"{cell.family}_{cell.kind}_{cell.backend}_{sort}_{count}.npz"
                    problem.save(directory / "problems" / name, backend=cell.backend, what=what)
        if time.monotonic() - last > 30:
            last = time.monotonic()
            steps, wrong = sum(x.steps for x in total.values()), sum(int(x.wrong.sum()) for x in total.values())
            print(f"  {steps:,} steps, {wrong} certified answers wrong", flush=True)
    return total


# -- the report -----------------------------------------------------------------------------------------------------------

FAILURES = tuple(status for status in occ.Status if status != occ.Status.CONVERGED)


def name_of(args: Args, cell: Cell) -> str:
    """The row of a table."""
    return FAMILIES[cell.family].label + (f" ({cell.backend})" if len(args.backends) > 1 else "")


def summary(args: Args, tallies: Tallies) -> str:
    """What is not as it should be, family by kind."""

    def text(x: Tally) -> str:
        parts = [f"{x.share(status):.2g} {status.name.lower().replace('_', ' ')}" for status in FAILURES if x.statuses[status]]
        parts += [f"{int(x.wrong.sum())} wrong"] if x.wrong.any() else []
        parts += [f"{x.unjudged} unjudged"] if x.unjudged else []
        return ", ".join(parts) or "0"

    rows: dict[str, list[str]] = {}
    for cell, found in sorted(tallies.items(), key=lambda item: _order(item[0])):
        rows.setdefault(name_of(args, cell), []).append(text(found))
    return table(["family", *args.kinds], [[name, *cells] for name, cells in rows.items()], left=range(1 + len(args.kinds)))


def _order(cell: Cell) -> tuple[int, str, int]:
    return list(FAMILIES).index(cell.family), cell.backend, KINDS.index(cell.kind)


def details(tallies: Tallies) -> list[dict[str, str | int | float]]:
    """All figures, one row a cell."""
    rows: list[dict[str, str | int | float]] = []
    for cell, x in sorted(tallies.items(), key=lambda item: _order(item[0])):
        row: dict[str, str | int | float] = {"family": cell.family, "kind": cell.kind, "backend": cell.backend, "steps": x.steps}
        row |= {status.name.lower(): float(f"{x.share(status):.3g}") for status in FAILURES}
        largest = float(np.nanmax(x.errors)) if np.isfinite(x.errors).any() else float("nan")
        row |= {"certified": int(x.statuses[occ.Status.CONVERGED]), "judged": len(x.errors) - x.unjudged, "unjudged": x.unjudged}
        row |= {"wrong": int(x.wrong.sum()), "largest_error": float(f"{largest:.2g}"), "rechecked": x.rechecked}
        row |= {"planted": x.planted, "missed": x.missed}
        rows.append(row | {"steps_per_second": round(x.steps / x.solving), "judged_per_second": round(len(x.errors) / x.judging)})
    return rows


def conclude(tallies: Iterable[Tally]) -> tuple[str, int]:
    """The verdict in a sentence, and the exit code."""
    x = Tally()
    for other in tallies:
        x.add(other)
    certified, wrong = int(x.statuses[occ.Status.CONVERGED]), int(x.wrong.sum())
    judged = len(x.errors) - x.unjudged
    text = (
        f"{x.steps:,} steps, {certified:,} certified, {judged:,} of them judged ({x.rechecked} with 60 digits): {wrong} wrong, "
        f"{x.unjudged} unjudged; {x.planted - x.missed:,} of {x.planted:,} planted errors found.\n"
        f"Solving took {seconds(x.solving)} of one core, judging {seconds(x.judging)}."
    )
    return text, int(wrong > 0 or x.unjudged > 0 or x.missed > 0)


def replay(args: Args, path: Path) -> int:
    """One problem again: who says what, and what is true."""
    batch, failed = Batch.load(path), 0
    print(f"{path}: {FAMILIES[batch.family].label}, {batch.mdp}, t = {batch.t[0]:g}")
    print(f"  {', '.join(f'{name} = {x[0]:g}' for name, x in batch.parameters.items())}, {'cold' if batch.start is None else 'warm'} start")
    for backend in args.backends:
        solution = batch.solve(backend)
        status, claim = occ.Status(int(solution.status[0])), float(solution.dual_residual[0])
        print(f"  {backend}: {status.name} after {int(solution.steps[0])} steps, dual residual {claim:.1e}, smallest q {_smallest(batch, solution):.1e}")
        for arithmetic in (FAST, EXACT) if extended() else (EXACT,):
            verdict = judge(batch.model(arithmetic), batch.terms(arithmetic), batch.loss, solution.q.numpy())
            wrong = bool(is_wrong(verdict.error, np.array([claim]))[0])
            print(f"    error of q {verdict.error[0]:.2e} in {arithmetic.name}{': wrong' if wrong else ''}")
        failed |= status == occ.Status.CONVERGED and (wrong or not verdict.settled[0])
    return int(failed)


def _smallest(batch: Batch, solution: occ.Solution) -> float:
    return float(solution.q[:, batch.mdp.actions].min())


def main(args: Args) -> int:
    """Play, judge, write, and say whether all is well."""
    if args.replay is not None:
        return replay(args, args.replay)
    directory = run_directory(args.root, "fuzz", args.seed)
    write_configuration(directory, args)
    print(f"{args.steps:,} steps; {machine()}", flush=True)
    if not extended():
        print(f"long double is no longer than double here: {args.sample} answers of each batch are judged, with 60 digits, the others are not")
    tallies = campaign(args, directory)
    rows = details(tallies)
    sentence, code = conclude(tallies.values())
    full = table(list(rows[0]), [[str(x) for x in row.values()] for row in rows], left=(0, 1, 2))
    report = f"{summary(args, tallies)}\n\n{sentence}\n\n{full}"
    write_text(directory / "fuzz.md", report)
    write_csv(directory / "fuzz.csv", rows)
    write_figure(directory / "fuzz.png", draw_errors({(name_of(args, c), c.kind): (x.errors, x.claims) for c, x in tallies.items()}, HARMLESS, SLACK))
    print(f"\n{report}\n\nThe figure is {directory / 'fuzz.png'}; problems worth a look are in {directory / 'problems'}.")
    return code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
