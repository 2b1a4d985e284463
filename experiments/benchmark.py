"""How fast is the engine, and compared with what?

    python -m experiments.benchmark                                      the engine; a few minutes
    python -m experiments.benchmark --sections loop                      whole simulations only
    python -m experiments.benchmark --sections long                      64 million episodes
    python -m experiments.benchmark --sections rivals                    other solvers; minutes
    python -m experiments.benchmark --sections rivals --rivals engine JAX --sizes 3 3 3
    python -m experiments.benchmark --record docs/speed                  the numbers of a release

All contestants do the same in turns. The ratios of their times are compared, since they change
little when the machine is busy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from matplotlib.figure import Figure

import torch_occ as occ
from experiments import common
from experiments.contestants import NAMES, cases, measure_rivals, rivals_table
from torch_occ._support.version import VERSION
from torch_occ.game.figures import COLOURS

Shape = tuple[int, int, int]


@dataclass
class Args:
    """The measurements."""

    sizes: tuple[tuple[int, int, int], ...] = ((3, 3, 3), (5, 5, 4))
    """of the rivals: horizon, width and actions of each MDP"""
    batch: int = 32
    """of the rivals: how many steps at once"""
    rivals: tuple[str, ...] = NAMES
    """which ones; those whose packages are missing (jax, pounce-solver, moreau) are left out"""
    sections: tuple[Literal["loop", "engine", "long", "rivals"], ...] = ("loop", "engine")
    """loop: whole simulations. engine: threads, one call, batches, compiling. long: a million
    episodes of 64 seeds. rivals: steps against other solvers"""
    repeats: int = 7
    """runs of which the quickest counts, as far as the budget goes"""
    budget: float = 2.0
    """seconds for one run of a rival; a batch that would take longer is measured in part"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts processor time of all threads, for a busy machine"""
    threads: int = 1
    """threads of torch; the rivals choose their own"""
    seed: int = 0
    """seed of the MDPs and the losses"""
    root: Path = Path("runs")
    """where the run's directory is made"""
    record: Path | None = None
    """only measure what every release keeps, write it to <version>.json in this folder, and draw
    all files of the folder"""


#: Episodes of each of many seeds. One seed alone plays eight times as many.
LOOPS = {(3, 3, 3): 4096, (5, 5, 4): 1024, (10, 10, 5): 256, (10, 20, 10): 64}


def game(shape: Shape) -> tuple[occ.LayeredMDP, torch.Tensor]:
    """An MDP and mean losses."""
    mdp = occ.LayeredMDP.random(*shape, seed=0)
    return mdp, common.random_means(mdp, 1)


def simulate(shape: Shape, episodes: int, seeds: int, beta: float | None = None) -> occ.History:
    """A game of FTRL with the paper's constants, or another beta, in the engine."""
    mdp, mean = game(shape)
    learner, losses = occ.FTRL(mdp, occ.jin_luo(mdp, beta=beta)), occ.BernoulliLosses(mean)
    options: dict[str, Any] = {"backend": "engine", "checkpoints": [episodes]}
    return occ.simulate(mdp, learner, losses, episodes, range(seeds), **options)


def measure_loop(
    repeats: int, shapes: Mapping[Shape, int] = LOOPS, seeds: int = 64, budget: float = 10.0
) -> dict[str, float]:
    """Microseconds per episode and seed of whole simulations, with all that Python does for them.

    All sizes, with the paper's beta and a small one, with many seeds and with one. The budget is in
    seconds, for one row.
    """
    found = {}
    for shape, episodes in shapes.items():
        for beta in (64.0 * shape[0], 1.0):
            for count, T in ((seeds, episodes), (1, 8 * episodes)):
                play = partial(simulate, shape, T, count, beta)
                took = common.in_turns({"": play}, repeats, budget)[""]
                name = f"{shape}, beta {beta:g}, {count} seed{'s' * (count > 1)}, us"
                found[name] = 1e6 * took / (T * count)
                print(f"{name}: {found[name]:.4g}", flush=True)
    return found


def measure_threads(episodes: int = 4_096, seeds: int = 64, repeats: int = 5) -> dict[str, float]:
    """Wall time of the same game in one thread and in two, in turns."""

    def play(threads: int) -> None:
        torch.set_num_threads(threads)
        simulate((3, 3, 3), episodes, seeds)

    before = torch.get_num_threads()
    contestants = {"one": lambda: play(1), "two": lambda: play(2)}
    found = common.in_turns(contestants, repeats, clock=time.perf_counter)
    torch.set_num_threads(before)
    return {
        "one thread, episodes/s": episodes * seeds / found["one"],
        "two threads, episodes/s": episodes * seeds / found["two"],
        "two threads against one": found["one"] / found["two"],
    }


def measure_calls(
    shape: Shape = (3, 3, 3),
    repeats: int = 2_000,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """One step through `FTRLStep`, with all that Python does.

    Warm-started, and forward plus backward through autograd.
    """
    mdp, mean = game(shape)
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp), backend="engine")
    loss = 100 * mean
    q = step(loss, 100.0).detach()
    later, leaf, parameters = loss + mean, loss.clone().requires_grad_(), list(step.parameters())

    def solve() -> torch.Tensor:
        return step.solve(later, 101.0, warm_start=q).q

    def gradients(of: torch.Tensor) -> None:
        torch.autograd.grad(of, [leaf, *parameters], mean)

    def microseconds(function: Callable[[], Any]) -> float:
        return 1e6 * common.in_turns({"": function}, repeats, clock=clock)[""]

    with torch.no_grad():
        found = {"warm solve, us": microseconds(solve)}
    later = leaf
    found["forward and backward, us"] = microseconds(lambda: gradients(solve()))
    found["of a function that does nothing, us"] = microseconds(
        lambda: gradients(_Nothing.apply(leaf, *parameters))
    )
    return found | {"one torch addition, us": microseconds(lambda: mean + mean)}


class _Nothing(torch.autograd.Function):
    """A function that does nothing: the overhead of torch for a function and its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *rest)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, bar: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, *rest = ctx.saved_tensors
        return bar, *rest


def measure_batches(
    shapes: Sequence[Shape] = ((3, 3, 3), (5, 5, 4), (10, 10, 5)),
    batch: int = 256,
    repeats: int = 10,
) -> dict[str, float]:
    """A batch of steps: forward, and with the gradients in the losses and all parameters.

    Processor time in microseconds per element, from a cold start and from q one episode before.
    """
    return {
        f"{shape}, batch of {batch}, {name}, us": 1e6 * duration / batch
        for shape in shapes
        for name, duration in _time_batch(shape, batch, repeats).items()
    }


def _time_batch(shape: Shape, batch: int, repeats: int) -> dict[str, float]:
    mdp, mean = game(shape)
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp), backend="engine")
    generator = torch.Generator().manual_seed(2)
    noise = torch.rand((batch, *mean.shape), dtype=mean.dtype, generator=generator)
    loss = 100 * mean + 10 * noise
    q, leaf = step(loss, 100.0).detach(), (loss + noise).requires_grad_()
    inputs = [leaf, *step.parameters()]

    def forward(start: torch.Tensor | None) -> None:
        with torch.no_grad():
            step.solve(leaf, 101.0, warm_start=start)

    def both(start: torch.Tensor | None) -> None:
        torch.autograd.grad(step.solve(leaf, 101.0, warm_start=start).q, inputs, noise)

    contestants = {
        "cold, forward": lambda: forward(None),
        "cold, forward and backward": lambda: both(None),
        "warm, forward": lambda: forward(q),
        "warm, forward and backward": lambda: both(q),
    }
    return common.in_turns(contestants, repeats)


def measure_long(
    episodes: int = 1_000_000, seeds: int = 64, shape: Shape = (3, 3, 3)
) -> dict[str, float]:
    """One long run of many seeds: wall time, processor time, and the regret."""
    wall, cpu = time.perf_counter(), time.process_time()
    history = simulate(shape, episodes, seeds)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        f"{episodes:,} episodes of {seeds} seeds at {shape}, wall s": wall,
        "processor s": cpu,
        "us per episode and seed": 1e6 * cpu / (episodes * seeds),
        "Newton steps": float(history.newton_steps[:, -1].mean()),
        "mean regret": float(history.regret[:, -1].mean()),
    }


_FIRST_CALL = """
import time, torch, torch_occ as occ
mdp = occ.LayeredMDP.random(3, 3, 3)
learner = occ.FTRL(mdp, occ.jin_luo(mdp))
losses = occ.BernoulliLosses(torch.full((7, 3), 0.5, dtype=torch.float64))
begun = time.process_time()
occ.simulate(mdp, learner, losses, 1, backend="engine")
simulated = time.process_time() - begun
begun = time.process_time()
step = occ.FTRLStep(mdp, occ.jin_luo(mdp), backend="engine")
step(torch.zeros(7, 3, dtype=torch.float64), 1.0).sum().backward()
print(simulated, time.process_time() - begun)
"""


def measure_compiling() -> dict[str, float]:
    """CPU seconds of the first call on a machine, and of the first call of a process after that."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        places = {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
        for name in ("compiling", "from the cache"):
            command = [sys.executable, "-c", _FIRST_CALL]
            done = subprocess.run(command, env=os.environ | places, **options)
            simulated, stepped = map(float, done.stdout.split())
            found[f"simulate, {name}, s"] = simulated
            found[f"step and backward, {name}, s"] = stepped
    return found


def record(folder: Path) -> Path:
    """Measure what every release keeps, in processor time, and write it to `<version>.json`."""
    measured = measure_calls(clock=time.process_time)
    measured |= measure_batches(((5, 5, 4),))
    measured |= measure_loop(5, {(3, 3, 3): 4096, (10, 10, 5): 256}, budget=5.0)
    measured |= measure_compiling()
    about = {"version": VERSION, "date": str(date.today()), "machine": common.machine()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{VERSION}.json"
    rounded = {name: float(f"{value:.3g}") for name, value in measured.items()}
    path.write_text(json.dumps(about | {"measured": rounded}, indent=1) + "\n", encoding="utf-8")
    return path


#: What the figure of the releases shows, by the names of the measurements.
SHOWN = {
    "warm solve, us": "warm step, (3,3,3)",
    "forward and backward, us": "step and gradients, (3,3,3)",
    "(5, 5, 4), batch of 256, cold, forward and backward, us": "batch of 256, gradients, (5,5,4)",
    "(3, 3, 3), beta 192, 64 seeds, us": "an episode, 64 seeds, (3,3,3)",
    "(10, 10, 5), beta 640, 64 seeds, us": "an episode, 64 seeds, (10,10,5)",
    "simulate, compiling, s": "compiling the first game",
    "step and backward, compiling, s": "compiling the first step after it",
}


def draw_releases(folder: Path) -> Figure:
    """The recorded times of all releases, as multiples of those of the first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in releases(folder)]
    figure = common.new_figure(8, 4)
    axes = figure.subplots()
    for i, (name, label) in enumerate(SHOWN.items()):
        times = [release["measured"][name] for release in found]
        style = {"color": COLOURS[i % len(COLOURS)], "marker": "osD^vPX"[i], "linewidth": 1.6}
        axes.plot([time / times[0] for time in times], label=label, **style)
    axes.set_xticks(range(len(found)), [release["version"] for release in found])
    axes.set(xlim=(-0.2, len(found) - 0.8), yscale="log", ylabel="time / time of the first release")
    axes.set_yticks((ticks := (0.1, 0.2, 0.5, 1, 2, 5)), [f"{x:g}" for x in ticks], minor=False)
    axes.minorticks_off()
    common.tidy(axes, xlabel="release")
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def releases(folder: Path) -> list[Path]:
    """The recorded files of a folder, by version."""
    return sorted(folder.glob("*.json"), key=lambda x: [int(n) for n in x.stem.split(".")])


def show_numbers(path: Path, numbers: dict[str, float]) -> None:
    """Print named numbers as a table, and write them as CSV."""
    common.write_csv(path, [{"what": name, "measured": value} for name, value in numbers.items()])
    rows = [[name, f"{value:.4g}"] for name, value in numbers.items()]
    print(f"\n{common.table(['what', 'measured'], rows)}\n", flush=True)


def main(args: Args) -> Path:
    """Run the sections, print their tables, write them as CSV and PNG."""
    if args.record is not None:
        torch.set_num_threads(args.threads)
        written = record(args.record)
        common.write_figure(written.parent / "releases.png", draw_releases(written.parent))
        print(f"written to {written}")
        return written
    directory = common.begin("benchmark", args, args.seed)
    torch.set_num_threads(args.threads)
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{common.machine()}; torch uses {threads}; {args.clock} time\n", flush=True)
    if "rivals" in args.sections:
        clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
        given, path = cases(args.sizes, args.batch, clock), directory / "benchmark.csv"
        rows = measure_rivals(args.rivals, given, args.repeats, args.budget, path)
        print(f"\n{rivals_table(rows)}\n", flush=True)
        for note in sorted({f"{row.contestant}: {row.note}" for row in rows if row.note}):
            print(note)
    if "loop" in args.sections:
        show_numbers(directory / "loop.csv", measure_loop(args.repeats))
    if "engine" in args.sections:
        numbers = measure_threads() | measure_calls() | measure_batches() | measure_compiling()
        show_numbers(directory / "engine.csv", numbers)
    if "long" in args.sections:
        show_numbers(directory / "long.csv", measure_long())
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
