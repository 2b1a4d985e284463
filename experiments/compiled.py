"""The compiled engine: against a C loop of the same algorithm, in threads, one call, compiling.

Part of experiments/benchmark.py. Whole simulations are timed, with all that Python does for them.
Times are processor times, because the machine may be shared, and the smallest of a few runs.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import torch_occ as occ
from experiments.common import seconds, table
from torch_occ._support.spacing import CHUNK
from torch_occ._support.streams import Purpose, uniforms

Shape = tuple[int, int, int]

#: Episodes that take about a second, so that the start of a run does not count.
SHAPES: dict[Shape, int] = {
    (3, 3, 3): 200_000,
    (5, 5, 4): 40_000,
    (10, 10, 5): 4_000,
    (10, 20, 10): 800,
}


def game(shape: Shape) -> tuple[occ.LayeredMDP, torch.Tensor]:
    """An MDP and mean losses."""
    mdp = occ.LayeredMDP.random(*shape, seed=0)
    generator = torch.Generator().manual_seed(1)
    return mdp, torch.rand(
        mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator
    )


def smallest(
    function: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Seconds of the quickest call, after a first one that does not count."""
    function()
    durations = []
    for _ in range(repeats):
        begun = clock()
        function()
        durations.append(clock() - begun)
    return min(durations)


# -- against C ------------------------------------------------------------------------------------


def compile_yardstick(shape: Shape, directory: Path) -> ctypes.CDLL | None:
    """experiments/yardstick.c for one size, with -O3 for this machine; None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    names = ("LAYERS", "WIDTH", "ACTIONS")
    sizes = [f"-D{name}={value}" for name, value in zip(names, shape, strict=True)]
    library = directory / f"yardstick_{'_'.join(map(str, shape))}.so"
    source = Path(__file__).with_name("yardstick.c")
    command: list[str | Path] = [compiler, "-O3", "-march=native", "-shared", "-fPIC", *sizes]
    subprocess.run([*command, "-o", library, source, "-lm"], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.play.restype = ctypes.c_double
    return loaded


def play_in_c(
    library: ctypes.CDLL, mdp: occ.LayeredMDP, mean: torch.Tensor, beta: float, episodes: int
) -> tuple[float, float]:
    """Newton iterations per episode and total expected loss, with the random numbers of seed 0."""
    width = max(mdp.layer_sizes)
    transitions = np.zeros((mdp.num_states, mdp.num_actions, width))
    for here, p in zip(mdp.layer_slices[:-1], mdp.transitions[:-1], strict=True):
        transitions[here] = p.numpy()
    chunks = range(-(-episodes // CHUNK))
    numbers = uniforms((0,), Purpose.EPISODES, chunks, (mdp.horizon, 3)).numpy()
    q, loss, expected = (
        occ.interior_point(mdp).numpy().copy(),
        np.zeros(tuple(mean.shape)),
        np.zeros(1),
    )
    arrays = [x.ctypes.data_as(ctypes.c_void_p) for x in (transitions, mean.numpy(), numbers)]
    results = [x.ctypes.data_as(ctypes.c_void_p) for x in (q, loss, expected)]
    constants = [ctypes.c_double(x) for x in (mdp.num_actions**-0.5, beta, 1.0)]
    steps = library.play(*arrays, ctypes.c_long(0), ctypes.c_long(episodes), *constants, *results)
    return float(steps), float(expected[0])


def measure_loop(repeats: int, directory: Path) -> list[dict[str, Any]]:
    """Whole simulations beside the C loop, on one thread, with the paper's beta and a small one."""
    rows = []
    for shape, episodes in SHAPES.items():
        mdp, mean = game(shape)
        library = compile_yardstick(shape, directory)
        for beta in (64.0 * mdp.horizon, 1.0):
            learner = occ.FTRL(mdp, occ.jin_luo(mdp, beta=beta))

            def simulate(
                learner: occ.FTRL = learner, episodes: int = episodes, mean: torch.Tensor = mean
            ) -> occ.History:
                return occ.simulate(
                    learner.mdp,
                    learner,
                    occ.BernoulliLosses(mean),
                    episodes,
                    backend="engine",
                    checkpoints=[episodes],
                )

            history, engine = simulate(), smallest(simulate, repeats)
            row: dict[str, Any] = {
                "size": str(shape),
                "beta": beta,
                "engine, us": 1e6 * engine / episodes,
                "C, us": None,
                "ratio": None,
            }
            row["Newton steps"] = float(history.newton_steps[0, -1])
            if library is not None:
                own = smallest(lambda: play_in_c(library, mdp, mean, beta, episodes), repeats)  # noqa: B023
                expected = play_in_c(library, mdp, mean, beta, episodes)[1]
                incurred = float(history.regret[0, -1] + history.comparator[0, -1])
                row |= {
                    "C, us": 1e6 * own / episodes,
                    "ratio": engine / own,
                    "expected loss, relative difference": incurred / expected - 1,
                }
            rows.append(row)
            print("  ".join(f"{key} {_short(value)}" for key, value in row.items()), flush=True)
    return rows


# -- threads, calls, compiling --------------------------------------------------------------------


def measure_threads(episodes: int = 4_000, seeds: int = 64, repeats: int = 5) -> dict[str, float]:
    """Wall time of the same game in one thread and in two, in turns."""
    mdp, mean = game((3, 3, 3))
    learner = occ.FTRL(mdp, occ.jin_luo(mdp))
    before, walls = torch.get_num_threads(), {1: np.inf, 2: np.inf}
    for _ in range(repeats):
        for threads in walls:
            torch.set_num_threads(threads)
            begun = time.perf_counter()
            occ.simulate(
                mdp,
                learner,
                occ.BernoulliLosses(mean),
                episodes,
                range(seeds),
                backend="engine",
                checkpoints=[episodes],
            )
            walls[threads] = min(walls[threads], time.perf_counter() - begun)
    torch.set_num_threads(before)
    throughput = {threads: episodes * seeds / wall for threads, wall in walls.items()}
    return {
        "one thread, episodes/s": throughput[1],
        "two threads, episodes/s": throughput[2],
        "ratio": throughput[2] / throughput[1],
    }


def measure_calls(shape: Shape = (3, 3, 3), repeats: int = 2_000) -> dict[str, float]:
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
        return 1e6 * smallest(function, repeats, time.perf_counter)

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
step(torch.zeros(7, 3, dtype=torch.float64)).sum().backward()
print(simulated, time.process_time() - begun)
"""


def measure_compiling() -> dict[str, float]:
    """CPU seconds of the first call on a machine, and of the first call of a process after that."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("compiling", "from the cache"):
            environment = os.environ | {
                "NUMBA_CACHE_DIR": cache,
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_CALL],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            found[f"simulate, {name}, s"], found[f"step and backward, {name}, s"] = map(
                float, done.stdout.split()
            )
    return found


# -- growth ---------------------------------------------------------------------------------------


WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 5000)


def measure_growth(widths: tuple[int, ...] = WIDTHS) -> list[dict[str, Any]]:
    """A warm step of dense random MDPs with horizon 3 and 10 actions, over their width.

    `FTRLStep` chooses the backend.
    """
    rows = []
    for width in widths:
        mdp, mean = game((3, width, 10))
        step = occ.FTRLStep(mdp, occ.jin_luo(mdp))
        with torch.no_grad():
            q = step(100 * mean, 100.0)
            solution, duration = step.solve(101 * mean, 101.0, warm_start=q), np.inf
            for _ in range(1 if width > 1000 else 3 if width > 100 else 20):
                begun = time.perf_counter()
                step.solve(101 * mean, 101.0, warm_start=q)
                duration = min(duration, time.perf_counter() - begun)
        found = {
            "width": width,
            "seconds": duration,
            "steps": int(solution.steps),
            "backend": solution.backend,
        }
        rows.append({"pairs": mdp.num_pairs} | found)
        print(f"{mdp.num_pairs:>7} pairs: {seconds(duration)} on {solution.backend}", flush=True)
    return rows


def draw_growth(rows: list[dict[str, Any]]) -> tuple[Figure, float]:
    """Step time over pairs, log-log, and the exponent fitted to the larger half."""
    pairs, durations = (
        np.array([row["pairs"] for row in rows]),
        np.array([row["seconds"] for row in rows]),
    )
    late = pairs >= np.median(pairs)
    slope, offset = np.polyfit(np.log(pairs[late]), np.log(durations[late]), 1)
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for backend, color in (("engine", "C0"), ("torch", "C1")):
        here = np.array([row["backend"] == backend for row in rows])
        axes.loglog(pairs[here], durations[here], "o", color=color, label=backend)
    axes.loglog(pairs, durations, color="0.6", linewidth=1, zorder=1)
    axes.loglog(
        pairs[late],
        np.exp(offset) * pairs[late] ** slope,
        "--",
        color="0.3",
        label=f"pairs$^{{{slope:.2f}}}$",
    )
    axes.set(
        xlabel="state-action pairs",
        ylabel="seconds",
        title="A warm FTRL step, dense transitions, horizon 3, 10 actions",
    )
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure, float(slope)


def report(rows: list[dict[str, Any]], numbers: dict[str, float]) -> str:
    """Both as tables."""
    keys = ("engine, us", "C, us", "ratio", "Newton steps")
    lines = [[row["size"], f"{row['beta']:g}", *(_short(row[key]) for key in keys)] for row in rows]
    first = table(
        ["size", "beta", "engine, us per episode", "C, us per episode", "ratio", "Newton steps"],
        lines,
    )
    return f"{first}\n\n" + table(
        ["what", "measured"], [[name, f"{value:.4g}"] for name, value in numbers.items()]
    )


def _short(value: float | str | None) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
