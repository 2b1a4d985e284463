"""How fast is the engine, and compared with what?

    python -m experiments.benchmark                                      the engine; a few minutes
    python -m experiments.benchmark --sections loop                      against a C loop only
    python -m experiments.benchmark --sections long                      64 million episodes
    python -m experiments.benchmark --sections rivals flows profile      half an hour
    python -m experiments.benchmark --sections rivals --rivals moreau    one rival
    python -m experiments.benchmark --sections rivals --sizes 3 3 3 5 5 4 --batches 1

All contestants do the same in turns. The ratios of their times are compared, since they change
little when the machine is busy. Rivals differ in accuracy, so each row has the residuals of q and
of the gradient, computed by torch_occ.reference.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from experiments.anatomy import Anatomy, draw_flows, measure_flows, measure_profile
from experiments.benchmark_report import HEADER, Row, draw_rivals, summary, verdict
from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.compiled import (
    draw_growth,
    measure_batches,
    measure_calls,
    measure_compiling,
    measure_growth,
    measure_long,
    measure_threads,
)
from experiments.contestants import CONTESTANTS, Case, Contestant, Trial
from experiments.loop import measure_loop, report_loop
from torch_occ.reference import Equations


@dataclass
class Args:
    """The measurements."""

    sizes: tuple[tuple[int, int, int], ...] = ((3, 3, 3), (5, 5, 4), (10, 10, 5), (10, 100, 10))
    """horizon, width and actions of each MDP"""
    batches: tuple[int, ...] = (1, 32, 256)
    """how many steps at once"""
    rivals: tuple[Literal["cvxpy", "scs", "clarabel", "moreau"], ...] = (
        "cvxpy",
        "scs",
        "clarabel",
        "moreau",
    )
    """cvxpy with Clarabel; cvxpylayers with diffcp and SCS, diffcp and Clarabel, or Moreau"""
    sections: tuple[
        Literal["loop", "engine", "long", "rivals", "flows", "profile", "growth"], ...
    ] = ("loop", "engine")
    """loop: simulations against a C loop and the floor of its arithmetic. engine: threads, one
    call, batches, compiling. long: a million episodes of 64 seeds. rivals: steps against cvxpy and
    cvxpylayers. flows: dense against layered linear algebra. profile: a Newton iteration by part.
    growth: step time up to 1e5 pairs, which takes minutes and 4 GiB"""
    repeats: int = 7
    """runs of which the median is taken, as far as the budget goes"""
    budget: float = 60.0
    """seconds for one contestant in one cell; a batch that would take longer is measured in part"""
    patience: float = 600.0
    """a contestant that would need more seconds than this for one step is skipped"""
    t: float = 1000.0
    """the episode"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts processor time of all threads, for a busy machine"""
    threads: int = 1
    """threads of torch; the rivals choose their own"""
    seed: int = 0
    """seed of the MDPs and the losses"""
    root: Path = Path("runs")
    """where the run's directory is made"""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# -- one cell -------------------------------------------------------------------------------------


def measure_cell(
    args: Args, case: Case, contestants: list[Contestant], single: dict[str, Trial]
) -> list[Row]:
    """All contestants on one size and batch, in turns.

    `single` holds the trials on one element of this size.
    """
    rows, running, trials = {}, {}, {contestant.label: list[Trial]() for contestant in contestants}
    for contestant in contestants:
        rows[contestant.label] = row = Row(
            *case.shape,
            case.mdp.num_pairs,
            case.batch,
            contestant.label,
            contestant.accurate,
            note=contestant.missing,
        )
        expected = contestant.predict(case.mdp.num_pairs)
        if not row.note and expected > args.patience:
            row.note = (
                f"skipped: a step would take {seconds(expected)}, by pairs^{contestant.growth:g}"
            )
        if row.note:
            continue
        count = (
            case.batch if contestant.whole else min(case.batch, max(1, int(args.budget / expected)))
        )
        if count < case.batch:
            row.note = f"{count} of {case.batch} measured"
        if count == 1 and contestant.label in single:  # slow, and known already
            trials[contestant.label] = [single[contestant.label]]
        else:
            run = contestant.prepare(case)
            if expected < args.budget / 10:
                run(1)
            running[contestant.label] = (run, count)

    for _ in range(args.repeats):
        for contestant in contestants:
            done = trials[contestant.label]
            if (
                contestant.label in running
                and sum(trial.total for trial in done) * (1 + 1 / max(len(done), 1)) <= args.budget
            ):
                run, count = running[contestant.label]
                done.append(run(count))

    for contestant in contestants:
        if done := trials[contestant.label]:
            if done[-1].count == 1:
                single[contestant.label] = done[-1]
            contestant.learn(case.mdp.num_pairs, done[-1])
            _summarize(rows[contestant.label], case, done)
    ours = rows[contestants[0].label]
    for row in rows.values():
        _compare(row, ours)
    return list(rows.values())


def _summarize(row: Row, case: Case, trials: list[Trial]) -> None:
    row.measured, row.repeats = trials[0].count, len(trials)

    def median(times: list[float | None]) -> float | None:
        known = [x for x in times if x is not None]
        return statistics.median(known) * row.batch / row.measured if known else None

    row.forward = median([trial.forward for trial in trials])
    row.backward = median([trial.backward for trial in trials])
    row.warm = median([trial.warm for trial in trials])
    judge = Equations(
        case.mdp, case.regularizer, case.loss[0], torch.tensor(case.t, dtype=torch.float64)
    )
    row.residual_q = judge.residual_of_q(trials[0].q[0])
    if trials[0].gradient is not None:
        if case.mdp.num_pairs <= 2000:
            row.residual_gradient = judge.residual_of_gradient(
                trials[0].q[0], case.direction, trials[0].gradient[0]
            )
        else:
            row.note = "; ".join(filter(None, [row.note, "gradient not judged: too large"]))


def _compare(row: Row, ours: Row) -> None:
    def ratio(theirs: float | None, own: float | None) -> float | None:
        return theirs / own if theirs and own else None

    row.ratio_forward, row.ratio_backward = (
        ratio(row.forward, ours.forward),
        ratio(row.backward, ours.backward),
    )
    if row.forward and row.backward and ours.forward and ours.backward:
        row.ratio_total = (row.forward + row.backward) / (ours.forward + ours.backward)
    row.ratio_warm = ratio(row.warm or row.forward, ours.warm)  # without a warm start: a cold one


# -- all cells ------------------------------------------------------------------------------------


def measure_rivals(args: Args, directory: Path) -> list[Row]:
    """Every size and batch; the CSV grows with every cell."""
    contestants = [CONTESTANTS[name]() for name in ("torch_occ", *args.rivals)]
    rows: list[Row] = []
    for shape in args.sizes:
        single: dict[str, Trial] = {}
        for batch in args.batches:
            cell = measure_cell(
                args, Case(shape, batch, args.seed, args.t, CLOCKS[args.clock]), contestants, single
            )
            for row in cell:
                print(
                    "  ".join(
                        f"{name} {cell}".strip()
                        for name, cell in zip(HEADER, row.cells(), strict=True)
                        if cell not in ("", "-")
                    )
                )
            rows += cell
            write_csv(directory / "benchmark.csv", [asdict(row) for row in rows])
    return rows


def show_numbers(path: Path, numbers: dict[str, float]) -> None:
    """Print named numbers as a table, and write them as CSV."""
    write_csv(path, [{"what": name, "measured": value} for name, value in numbers.items()])
    rows = [[name, f"{value:.4g}"] for name, value in numbers.items()]
    print(f"\n{table(['what', 'measured'], rows)}\n", flush=True)


def main(args: Args) -> Path:
    """Run the sections, print their tables, write them as CSV and PNG."""
    torch.set_num_threads(args.threads)
    directory = run_directory(args.root, "benchmark", args.seed)
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{machine()}; torch uses {threads}; {args.clock} time\n", flush=True)
    if "rivals" in args.sections:
        rows = measure_rivals(args, directory)
        print(
            f"\n{table(HEADER, [row.cells() for row in rows], left=(0, 2, 12))}\n\n"
            + f"{summary(rows)}\n\n"
            + "\n".join(verdict(rows))
            + "\n",
            flush=True,
        )
        write_figure(directory / "benchmark.png", draw_rivals(rows))
    anatomy = Anatomy(
        args.batches, args.repeats, args.budget, args.t, args.seed, CLOCKS[args.clock]
    )
    if "flows" in args.sections:
        flows = measure_flows(anatomy)
        write_csv(directory / "flows.csv", flows)
        write_figure(directory / "flows.png", draw_flows(flows))
    if "profile" in args.sections:
        write_csv(directory / "profile.csv", measure_profile(anatomy, args.sizes))
    if "loop" in args.sections:
        loops, throughput = measure_loop(args.repeats)
        write_csv(directory / "loop.csv", loops)
        print(f"\n{report_loop(loops, throughput)}\n", flush=True)
    if "engine" in args.sections:
        numbers = measure_threads() | measure_calls() | measure_batches() | measure_compiling()
        show_numbers(directory / "engine.csv", numbers)
    if "long" in args.sections:
        show_numbers(directory / "long.csv", measure_long())
    if "growth" in args.sections:
        torch.set_num_threads(2)
        grown = measure_growth()
        figure, slope = draw_growth(grown)
        write_csv(directory / "growth.csv", grown)
        write_figure(directory / "growth.png", figure)
        print(f"step time grows like pairs^{slope:.2f} over the larger half", flush=True)
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
