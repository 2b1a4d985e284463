"""The compiled engine: in threads, one call, a batch of steps, a long run, compiling, growth.

Part of experiments/benchmark.py; experiments/loop.py compares whole simulations with a C loop.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import torch_occ as occ
from experiments.common import seconds
from experiments.timing import Shape, game, in_turns, smallest

# -- threads, calls, compiling --------------------------------------------------------------------


def measure_threads(episodes: int = 4_096, seeds: int = 64, repeats: int = 5) -> dict[str, float]:
    """Wall time of the same game in one thread and in two, in turns."""
    mdp, mean = game((3, 3, 3))
    learner = occ.FTRL(mdp, occ.jin_luo(mdp))

    def simulate(threads: int) -> None:
        torch.set_num_threads(threads)
        occ.simulate(
            mdp,
            learner,
            occ.BernoulliLosses(mean),
            episodes,
            range(seeds),
            backend="engine",
            checkpoints=[episodes],
        )

    before = torch.get_num_threads()
    contestants = {"one": lambda: simulate(1), "two": lambda: simulate(2)}
    found = in_turns(contestants, repeats, clock=time.perf_counter)
    torch.set_num_threads(before)
    return {
        "one thread, episodes/s": episodes * seeds / found["one"],
        "two threads, episodes/s": episodes * seeds / found["two"],
        "two threads against one": found["one"] / found["two"],
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
    return in_turns(contestants, repeats)


def measure_long(
    episodes: int = 1_000_000, seeds: int = 64, shape: Shape = (3, 3, 3)
) -> dict[str, float]:
    """One long run of many seeds: wall time, processor time, and the largest residuals."""
    mdp, mean = game(shape)
    learner = occ.FTRL(mdp, occ.jin_luo(mdp))
    wall, cpu = time.perf_counter(), time.process_time()
    history = occ.simulate(
        mdp,
        learner,
        occ.BernoulliLosses(mean),
        episodes,
        range(seeds),
        backend="engine",
        checkpoints=[episodes],
    )
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
