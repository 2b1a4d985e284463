"""Is a certified step ever wrong, and how often is a step not certified? Random FTRL steps.

Random MDPs, losses and parameters, cold and warm starts, for every family of regularizers. Every
certified answer is judged in extended precision by code that shares nothing with the solver
(experiments/fuzz_judge.py). The certificate claims that q is right up to a relative error of
about its dual residual. An answer is wrong if the largest relative error of a q(s,a) exceeds 1e-10
and ten times that claim. The factor is ten because the residual is measured for each pair, and the
errors of pairs add up along an episode. Answers that the judge cannot settle in long double are
judged with 60 digits; answers that are not settled there either are counted as unjudged. In every
batch some answers are falsified by 1e-6 on purpose, and the judge has to find them.

The exit code is 1 if an answer is wrong or unjudged, or if a falsified one was not found. Failures
are kept in `problems/`; `--replay <file>` solves and judges one of them again.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
import tyro
from matplotlib import colormaps
from matplotlib.figure import Figure
from numpy.typing import NDArray

import torch_occ as occ
from experiments import common
from experiments.fuzz_judge import CAREFUL, EXACT, FAST, FLOOR, Floats, extended, judge
from experiments.fuzz_problems import (
    FAMILIES,
    Backend,
    Batch,
    FamilyName,
    Generator,
    Kind,
    draw,
    neighbours,
)

KINDS: tuple[Kind, ...] = ("reasonable", "extreme")
FAILURES = tuple(status for status in occ.Status if status != occ.Status.CONVERGED)


@dataclass(frozen=True)
class Args:
    """Which steps are tried, and how many."""

    steps: int = 1_000_000
    """of all families and kinds together"""
    seed: int = 0
    """of the campaign; the same steps whatever the number of processes is"""
    regularizers: tuple[FamilyName, ...] = get_args(FamilyName)
    """families to try"""
    kind: Literal["reasonable", "extreme", "both"] = "both"
    """losses like t * mean, or up to 1e12 in size"""
    backend: Literal["engine", "torch", "both"] = "engine"
    """which solver is tried"""
    seconds: float = 0.0
    """stop after this many seconds; 0 for no limit"""
    batch: int = 256
    """cold starts over one MDP; as many warm starts follow where they succeed"""
    processes: int = 2
    """processes that work at the same time"""
    keep: int = 3
    """how many problems are kept for each sort of failure"""
    replay: Path | None = None
    """solve and judge the problem in this file, and nothing else"""
    root: Path = Path("runs")
    """where the run's directory goes"""

    def __post_init__(self) -> None:
        for name in self.regularizers:
            if name not in FAMILIES:
                known = ", ".join(FAMILIES)
                raise ValueError(f"regularizers: {name} is not a family; choose among {known}")
        for count in ("steps", "batch", "processes"):
            if getattr(self, count) < 1:
                raise ValueError(f"{count}: expected at least 1, got {getattr(self, count)}")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return KINDS if self.kind == "both" else (self.kind,)

    @property
    def backends(self) -> tuple[Backend, ...]:
        return ("engine", "torch") if self.backend == "both" else (self.backend,)


# -- one batch ------------------------------------------------------------------------------------


#: Relative errors of q up to here are never held against a certificate.
HARMLESS = 1e-10
#: How many times the dual residual an error may be.
SLACK = 10.0
#: The size of errors made on purpose, and how many of them in a batch.
PLANTED, PLANTS = 1e-6, 2
#: Answers judged in a batch where long double is no longer than double, with 60 digits then.
SAMPLE = 4
#: Problems of one sort that a batch hands back.
KEPT = 3


class Failure(NamedTuple):
    """A step worth a look."""

    sort: str  # "wrong", "unjudged", or the name of its status
    what: str
    problem: Batch  # of one element


def _none() -> Floats:
    return np.zeros(0)


@dataclass
class Tally:
    """The results of some batches, added up."""

    statuses: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(occ.Status), np.int64))
    errors: Floats = field(default_factory=_none)  # of judged answers; NaN where nothing settled
    claims: Floats = field(default_factory=_none)  # their dual residuals
    rechecked: int = 0  # judged with 60 digits
    planted: int = 0  # errors made on purpose
    missed: int = 0  # and not found
    solving: float = 0.0  # seconds of processor time
    judging: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count the other one too; its failures stay with it."""
        self.errors = np.concatenate([self.errors, other.errors])
        self.claims = np.concatenate([self.claims, other.claims])
        for name in ("statuses", "rechecked", "planted", "missed", "solving", "judging"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def steps(self) -> int:
        return int(self.statuses.sum())

    @property
    def certified(self) -> int:
        return int(self.statuses[occ.Status.CONVERGED])

    @property
    def wrong(self) -> int:
        return int(is_wrong(self.errors, self.claims).sum())

    @property
    def unjudged(self) -> int:
        return int(np.isnan(self.errors).sum())

    @property
    def largest(self) -> float:
        """The largest error of a certified answer."""
        return float(np.nanmax(self.errors, initial=0.0))

    def share(self, status: occ.Status) -> float:
        """The share of steps with this status."""
        return float(self.statuses[status] / max(self.steps, 1))


def is_wrong(error: Floats, claim: Floats) -> NDArray[np.bool_]:
    """The rule: an error above 1e-10 and above ten times the dual residual."""
    return error > np.maximum(HARMLESS, SLACK * claim)


def examine(batch: Batch, q: Floats) -> tuple[Floats, int]:
    """The errors of answers `(B,)`, NaN if they do not settle, and how many needed 60 digits."""
    errors, left, rechecked = np.full(len(q), np.nan), np.arange(len(q)), 0
    for arithmetic in (FAST, CAREFUL, EXACT) if extended() else (EXACT,):
        if len(left):
            part = batch.take(left)
            rechecked += len(left) if arithmetic is EXACT else 0
            model, terms = part.model(arithmetic), part.terms(arithmetic)
            errors[left] = judge(model, terms, part.loss, q[left])
            left = left[np.isnan(errors[left])]
    return errors, rechecked


def plant(random: Generator, q: Floats) -> tuple[Floats, Floats]:
    """Wrong answers, and by how much they are wrong `(B,)`."""
    noise = PLANTED * random.uniform(-1, 1, q.shape)
    sizes = np.where(q > FLOOR, abs(np.log1p(noise)), 0.0)
    return q * (1 + noise), sizes.max((1, 2))


def try_batch(random: Generator, batch: Batch, backend: Backend) -> tuple[Tally, occ.Solution]:
    """Solve a batch, and judge what was certified."""
    begin = time.process_time()
    solution = batch.solve(backend)
    found = Tally(solving=time.process_time() - begin)
    status, q = solution.status.numpy(), solution.q.numpy()
    found.statuses = np.bincount(status, minlength=len(occ.Status))
    certified = np.flatnonzero(status == occ.Status.CONVERGED)
    if not extended():
        certified = certified[:: max(1, len(certified) // SAMPLE)]
    begin = time.process_time()
    if len(certified):
        _judge(random, batch, q, certified, found)
        found.claims = solution.dual_residual.numpy()[certified]
    found.judging = time.process_time() - begin
    found.failures = _failures(batch, solution, certified, found)
    return found, solution


def _judge(
    random: Generator,
    batch: Batch,
    q: Floats,
    certified: NDArray[np.intp],
    found: Tally,
) -> None:
    """Errors of certified answers; a few are judged once more, with an error planted in them."""
    plants = certified[:PLANTS]
    falsified, sizes = plant(random, q[plants])
    both = batch.take(np.concatenate([certified, plants]))
    errors, found.rechecked = examine(both, np.concatenate([q[certified], falsified]))
    found.errors, seen = np.split(errors, [len(certified)])
    own = found.errors[: len(plants)]
    judged = ~np.isnan(own)
    hit = abs(seen - sizes) <= 0.01 * sizes + own  # the judge returned to the same solution
    found.planted, found.missed = int(judged.sum()), int((judged & ~hit).sum())


def _failures(
    batch: Batch,
    solution: occ.Solution,
    certified: NDArray[np.intp],
    found: Tally,
) -> list[Failure]:
    """The worst wrong answers, and the first ones of every other sort."""
    failures = []
    status, claims = solution.status.numpy(), solution.dual_residual.numpy()
    wrong = np.flatnonzero(is_wrong(found.errors, found.claims))
    for i in wrong[np.argsort(-found.errors[wrong])][:KEPT]:
        what = f"error {found.errors[i]:.1e}, claimed {found.claims[i]:.1e}"
        failures.append(Failure("wrong", what, batch.take(certified[i : i + 1])))
    for i in np.flatnonzero(np.isnan(found.errors))[:KEPT]:
        failures.append(Failure("unjudged", "not settled", batch.take(certified[i : i + 1])))
    for reason in occ.Status:
        where = np.flatnonzero(status == reason)
        for i in where[: 0 if reason == occ.Status.CONVERGED else KEPT]:
            what = f"after {int(solution.steps[i])} steps, dual residual {claims[i]:.1e}"
            failures.append(Failure(reason.name.lower(), what, batch.take(np.array([i]))))
    return failures


# -- the campaign ---------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A family, a kind of problem and a backend, which are counted together."""

    family: str
    kind: Kind
    backend: Backend

    @property
    def order(self) -> tuple[int, str, int]:
        """Where it stands in tables."""
        return list(FAMILIES).index(self.family), self.backend, KINDS.index(self.kind)


Tallies = dict[Cell, Tally]


class Task(NamedTuple):
    """A batch of cold starts, and the warm starts that follow."""

    args: Args
    family: str
    kind: Kind
    number: int


def warm_up(args: Args) -> None:
    """Compile before the clock runs."""
    torch.set_num_threads(1)  # the processes share the cores
    random = np.random.default_rng(0)
    batch = draw(random, "tsallis", "reasonable", 2)
    for mdp in (batch.mdp.to_dense(), batch.mdp.to_sparse()):
        for backend in args.backends:
            replace(batch, mdp=mdp).solve(backend)


def play(task: Task) -> Tallies:
    """Everything about one random MDP."""
    args, tallies = task.args, {}
    family, kind = list(FAMILIES).index(task.family), KINDS.index(task.kind)
    for backend in args.backends:
        random = np.random.default_rng([args.seed, family, kind, task.number])
        cold = draw(random, task.family, task.kind, args.batch)
        found, solution = try_batch(random, cold, backend)
        warm = neighbours(random, cold, solution.q.numpy(), solution.converged.numpy())
        if len(warm.t):
            more, _ = try_batch(random, warm, backend)
            found.add(more)
            found.failures += more.failures
        tallies[Cell(task.family, task.kind, backend)] = found
    return tallies


def tasks(args: Args) -> Iterator[Task]:
    """All batches, the families in turns."""
    cells = len(args.regularizers) * len(args.kinds) * len(args.backends)
    for number in range(max(1, round(args.steps / (cells * 2 * args.batch)))):
        for family in args.regularizers:
            for kind in args.kinds:
                yield Task(args, family, kind, number)


def results(args: Args) -> Iterator[Tallies]:
    """The tallies of all batches, from several processes, until the time is up."""
    end = time.monotonic() + args.seconds if args.seconds > 0 else float("inf")
    waiting = tasks(args)
    if args.processes < 2:
        warm_up(args)
        for task in waiting:
            yield play(task)
            if time.monotonic() > end:
                return
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, spawn, warm_up, (args,)) as pool:
        running: set[Future[Tallies]] = set()
        running |= {pool.submit(play, task) for task in islice(waiting, 2 * args.processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            if time.monotonic() <= end:
                running |= {pool.submit(play, task) for task in islice(waiting, len(done))}
            for future in done:
                yield future.result()


def campaign(args: Args, directory: Path) -> Tallies:
    """Play everything; problems are written as they come."""
    total: Tallies = {}
    kept: dict[tuple[Cell, str], int] = {}
    last = time.monotonic()
    for tallies in results(args):
        for cell, found in tallies.items():
            total.setdefault(cell, Tally()).add(found)
            for sort, what, problem in found.failures:
                count = kept[cell, sort] = kept.get((cell, sort), 0) + 1
                if count <= args.keep:
                    name = "_".join([*cell, sort, f"{count}.npz"])
                    problem.save(directory / "problems" / name, what=what)
        if time.monotonic() - last > 30:
            last = time.monotonic()
            steps = sum(x.steps for x in total.values())
            wrong = sum(x.wrong for x in total.values())
            print(f"  {steps:,} steps, {wrong} certified answers wrong", flush=True)
    return dict(sorted(total.items(), key=lambda item: item[0].order))


# -- the report -----------------------------------------------------------------------------------


def label(args: Args, cell: Cell) -> str:
    """The row of a cell."""
    return FAMILIES[cell.family].label + (f" ({cell.backend})" if len(args.backends) > 1 else "")


def summary(args: Args, tallies: Tallies) -> str:
    """The table of what is not as it should be, family by kind."""
    rows: dict[str, list[str]] = {}
    for cell, found in tallies.items():
        failed = [status for status in FAILURES if found.statuses[status]]
        names = [status.name.lower().replace("_", " ") for status in failed]
        parts = [f"{found.share(x):.2g} {name}" for x, name in zip(failed, names, strict=True)]
        parts += [f"{found.wrong} wrong"] if found.wrong else []
        parts += [f"{found.unjudged} unjudged"] if found.unjudged else []
        rows.setdefault(label(args, cell), []).append(", ".join(parts) or "0")
    header = ["family", *args.kinds]
    return common.table(
        header, [[name, *cells] for name, cells in rows.items()], range(len(header))
    )


def details(tallies: Tallies) -> list[dict[str, str | int | float]]:
    """All figures, one row for each cell."""
    rows: list[dict[str, str | int | float]] = []
    for cell, x in tallies.items():
        row: dict[str, str | int | float] = {**cell._asdict(), "steps": x.steps}
        row |= {status.name.lower(): float(f"{x.share(status):.3g}") for status in FAILURES}
        row |= {"certified": x.certified, "judged": len(x.errors) - x.unjudged}
        row |= {"unjudged": x.unjudged, "wrong": x.wrong}
        row |= {"largest_error": float(f"{x.largest:.2g}"), "rechecked": x.rechecked}
        row |= {"planted": x.planted, "missed": x.missed}
        row |= {"steps_per_second": round(x.steps / x.solving)}
        rows.append(row | {"judged_per_second": round(len(x.errors) / max(x.judging, 1e-9))})
    return rows


def conclude(tallies: Iterable[Tally]) -> tuple[str, int]:
    """The verdict in a sentence, and the exit code."""
    x = Tally()
    for other in tallies:
        x.add(other)
    text = (
        f"{x.steps:,} steps, {x.certified:,} certified, {len(x.errors) - x.unjudged:,} of them "
        f"judged ({x.rechecked} with 60 digits): {x.wrong} wrong, {x.unjudged} unjudged; "
        f"{x.planted - x.missed:,} of {x.planted:,} planted errors found.\n"
        f"Solving took {common.seconds(x.solving)} of one core, "
        f"judging {common.seconds(x.judging)}."
    )
    return text, int(x.wrong > 0 or x.unjudged > 0 or x.missed > 0)


def replay(args: Args, path: Path) -> int:
    """One problem again: what each backend says, and what is true. 1 if a certificate is wrong."""
    batch, failed = Batch.load(path), False
    parameters = ", ".join(f"{name} = {x[0]:g}" for name, x in batch.parameters.items())
    print(f"{path}: {FAMILIES[batch.family].label}, {batch.mdp}")
    print(f"  t = {batch.t[0]:g}, {parameters}, {'cold' if batch.start is None else 'warm'} start")
    for backend in args.backends:
        solution = batch.solve(backend)
        status, claim = occ.Status(int(solution.status[0])), solution.dual_residual.numpy()
        smallest = float(solution.q[:, batch.mdp.actions].min())
        print(f"  {backend}: {status.name} after {int(solution.steps[0])} steps,", end=" ")
        print(f"dual residual {claim[0]:.1e}, smallest q {smallest:.1e}")
        for arithmetic in (FAST, EXACT) if extended() else (EXACT,):
            model, terms = batch.model(arithmetic), batch.terms(arithmetic)
            error = judge(model, terms, batch.loss, solution.q.numpy())
            wrong = status == occ.Status.CONVERGED and bool(is_wrong(error, claim)[0])
            verdict = ": certified and wrong" if wrong else ""
            print(f"    error of q {error[0]:.2e} in {arithmetic.name}{verdict}")
        failed = failed or wrong or (status == occ.Status.CONVERGED and bool(np.isnan(error[0])))
    return int(failed)


#: Errors and claims below this are drawn at it.
LEAST = 1e-18
#: Points of a family in a scatter plot; the largest errors are always among them.
POINTS = 1500
#: Errors and dual residuals of certified answers, by family and kind.
Points = dict[tuple[str, str], tuple[Floats, Floats]]


def draw_errors(found: Points, harmless: float, slack: float) -> Figure:
    """Above, the share of answers with a larger error; below, error over claim; kinds in columns.

    Answers in the shaded region are wrong: their error exceeds both `harmless` and `slack` times
    the claim.
    """
    kinds = list(dict.fromkeys(kind for _, kind in found))
    families = list(dict.fromkeys(family for family, _ in found))
    figure = common.new_figure(6.2 * len(kinds) + 2.6, 8.5)
    axes = figure.subplots(2, len(kinds), squeeze=False, sharey="row")
    colours = {family: colormaps["tab20"](i % 20) for i, family in enumerate(families)}
    random = np.random.default_rng(0)
    largest = max([1e-9, *(float(3 * claims.max(initial=0)) for _, claims in found.values())])
    for column, kind in enumerate(kinds):
        above, below = axes[:, column]
        for family in families:
            errors, claims = found.get((family, kind), (np.zeros(0), np.zeros(0)))
            judged = np.isfinite(errors)
            errors, claims = np.maximum(errors[judged], LEAST), np.maximum(claims[judged], LEAST)
            if not len(errors):
                continue
            order = np.argsort(errors)
            share = 1 - np.arange(len(errors)) / len(errors)
            above.step(errors[order], share, where="pre", color=colours[family], label=family)
            some = random.permutation(len(errors))[: 2 * POINTS // 3]
            chosen = np.union1d(order[-POINTS // 3 :], some)
            look = {"markersize": 2.5, "color": colours[family], "alpha": 0.6}
            below.plot(claims[chosen], errors[chosen], ".", **look)
        above.axvline(harmless, color="0.4", linewidth=1, linestyle="--")
        common.tidy(above, xscale="log", yscale="log", title=kind, xlabel="relative error of q")
        claim = np.geomspace(LEAST, largest, 200)
        limit = np.maximum(harmless, slack * claim)
        below.fill_between(claim, limit, 1e3, color="C3", alpha=0.08, linewidth=0)
        below.plot(claim, limit, "--", color="0.4", linewidth=1)
        below.plot(claim, claim, ":", color="0.4", linewidth=1)
        limits = {"xlim": (LEAST, largest), "ylim": (LEAST, 1e3)}
        common.tidy(below, xscale="log", yscale="log", xlabel="claimed: dual residual", **limits)
    axes[0, 0].set_ylabel("share of certified answers with a larger error")
    axes[1, 0].set_ylabel("relative error of q\n(shaded: wrong; dotted: as claimed)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def main(args: Args) -> int:
    """Play, judge, write, and return the exit code."""
    if args.replay is not None:
        return replay(args, args.replay)
    directory = common.begin("fuzz", args, args.seed)
    print(f"{args.steps:,} steps; {common.machine()}", flush=True)
    if not extended():
        print(f"Long double is no longer than double here: only {SAMPLE} certified answers of")
        print("each batch are judged, with 60 digits.", flush=True)
    tallies = campaign(args, directory)
    rows = details(tallies)
    sentence, code = conclude(tallies.values())
    lines = [[str(x) for x in row.values()] for row in rows]
    report = (
        f"{summary(args, tallies)}\n\n{sentence}\n\n{common.table(list(rows[0]), lines, range(3))}"
    )
    common.write_text(directory / "fuzz.md", report)
    common.write_csv(directory / "fuzz.csv", rows)
    points: Points = {}
    for cell, x in tallies.items():
        points[label(args, cell), cell.kind] = x.errors, x.claims
    common.write_figure(directory / "fuzz.png", draw_errors(points, HARMLESS, SLACK))
    print(f"\n{report}\n\nThe figure is {directory / 'fuzz.png'};", end=" ")
    print(f"problems worth a look are in {directory / 'problems'}.")
    return code


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
