"""How does a step grow with the MDP, up to a million pairs?

    python -m experiments.wide                                   everything; about ten minutes
    python -m experiments.wide --sections growth --patience 0    without Clarabel
    python -m experiments.wide --sections crossover              CG against factorization

The MDP is a robot on a slippery grid, in layers: every state of the grid at every step, five
actions, at most five successors, stored sparsely. The learner is FTRL with the paper's constants in
the middle of a run. The script times its next step after an episode with bandit feedback. Each size
runs in its own process, so that its peak memory can be measured. Most of the time is Clarabel's.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.wide_crossover import measure_crossover
from experiments.wide_models import grid, losses, taxi
from torch_occ import FTRL, FTRLStep, LayeredMDP, jin_luo, policy_of
from torch_occ._support.choices import Backend
from torch_occ._support.streams import invert
from torch_occ.game.estimators import Feedback
from torch_occ.reference import solve_cvxpy
from torch_occ.step.system import ConjugateGradients


@dataclass
class Args:
    """The measurements."""

    sides: tuple[int, ...] = (3, 5, 10, 16, 22, 32, 46, 71, 100)
    """sides of the grids; a layer has side * side states"""
    horizon: int = 20
    """layers"""
    sections: tuple[Literal["growth", "taxi", "crossover"], ...] = ("growth", "taxi", "crossover")
    """step time over size; Gymnasium's taxi; where factorization and iterations meet"""
    backend: Backend = "auto"
    """the solver; iterations are counted on the torch path only"""
    episodes: int = 5
    """warm steps of which the median is taken"""
    patience: float = 120.0
    """Clarabel is left out where a step would take more seconds than this"""
    t: float = 1000.0
    """the episode of the learner"""
    threads: int = 1
    """threads of torch; two help from about 100,000 pairs on, if both cores are free"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts processor time of all threads, for a busy machine"""
    seed: int = 0
    """seed of the losses and the episodes"""
    root: Path = Path("runs")
    """where the run's directory is made"""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# -- a learner in the middle of its run -----------------------------------------------------------


@contextmanager
def counting() -> Iterator[list[int]]:
    """Collect the iterations of every system that conjugate gradients solve in this context."""
    counts: list[int] = []
    original = ConjugateGradients.solve

    def counted(self: ConjugateGradients, *arguments: Any) -> tuple[Tensor, Tensor]:
        solution = original(self, *arguments)
        counts.append(self.iterations)
        return solution

    ConjugateGradients.solve = counted  # type: ignore[assignment, method-assign]
    try:
        yield counts
    finally:
        ConjugateGradients.solve = original  # type: ignore[method-assign]


def play(mdp: LayeredMDP, q: Tensor, mean: Tensor, generator: torch.Generator) -> Feedback:
    """One episode of the policy of q `(1, S, A)` against Bernoulli losses."""
    policy = policy_of(mdp, q[0])

    def uniform() -> Tensor:
        return torch.rand(1, dtype=torch.float64, generator=generator)

    seen, local = [], invert(mdp.initial.cumsum(0).unsqueeze(0), uniform())
    for here, layer in zip(mdp.layer_slices, mdp.layers, strict=True):
        state = here.start + local
        action = invert(policy[state].cumsum(-1), uniform())
        seen.append((state, action, (uniform() < mean[state, action]).double()))
        local = layer.draw(local, action, uniform())
    states, actions, losses = (torch.stack(parts, -1) for parts in zip(*seen, strict=True))
    return Feedback(states, actions, losses, None)


@dataclass
class Row:
    """One model. Times in seconds, memory in GiB."""

    model: str
    pairs: int
    entries: int
    build: float
    cold: float
    warm: float
    newton: float  # Newton steps of a warm step, on average
    iterations: float  # of conjugate gradients in a warm step, on average
    dual_residual: float
    memory: float  # peak of the process, less its peak before the model was built
    clarabel: float | None = None
    clarabel_error: float | None = None  # the largest relative difference of its q

    def cells(self) -> list[str]:
        """As printed."""
        rival = "-"
        if self.clarabel is not None:
            rival = f"{seconds(self.clarabel)} ({self.clarabel_error:.0e})"
        times = [seconds(x) for x in (self.build, self.cold, self.warm)]
        counts = [
            f"{self.newton:.1f}",
            f"{self.iterations:.0f}" if self.iterations else "-",
            f"{self.dual_residual:.0e}",
            f"{1024 * self.memory:.0f} MiB",
        ]
        return [self.model, f"{self.pairs:,}", f"{self.entries:,}", *times, *counts, rival]


HEADER = ["model", "pairs", "nnz(P)", "build", "cold", "warm", "Newton", "CG", "residual", "memory"]
HEADER += ["Clarabel (error)"]


def measure(args: Args, side: int | None) -> Row:
    """One grid, or the taxi for None. It should run in its own process."""
    torch.set_num_threads(args.threads)
    clock = CLOCKS[args.clock]
    small = FTRLStep(
        tiny := LayeredMDP.random(2, 2, 2).to_sparse(), jin_luo(tiny), backend=args.backend
    )
    small(torch.zeros_like(small.interior))  # torch and the engine load their parts here
    before, begun = _peak(), clock()
    mdp = taxi(args.horizon) if side is None else grid(side, args.horizon)
    learner = FTRL(mdp, jin_luo(mdp))
    learner.step.use(args.backend)
    built = clock() - begun
    mean, generator = losses(mdp, args.seed), torch.Generator().manual_seed(args.seed)
    learner.start(1)
    learner.state["cumulative_loss"] += args.t * mean
    with counting() as counts:
        begun = clock()
        q = learner.propose(int(args.t))
        cold = clock() - begun
        counts.clear()
        warm, newton, residual = [], [], 0.0
        for i in range(args.episodes):
            learner.observe(int(args.t) + i, q, play(mdp, q, mean, generator))
            begun = clock()
            q = learner.propose(int(args.t) + i + 1)
            warm.append(clock() - begun)
            newton.append(float(learner.state["newton_steps"]))
            residual = max(residual, float(learner.state["dual_residual"]))
            if bool(learner.state["uncertified"]):
                raise RuntimeError(f"a step of {mdp} was not certified")
    return Row(
        model="taxi" if side is None else f"grid {side} x {side}",
        pairs=mdp.num_pairs,
        entries=sum(len(p) for p in mdp.probabilities[1:-1]),
        build=built,
        cold=cold,
        warm=statistics.median(warm),
        newton=statistics.mean(newton),
        iterations=sum(counts) / args.episodes,
        dual_residual=residual,
        memory=_peak() - before,
    )


def _peak() -> float:
    """The peak memory of this process so far, in GiB.

    `ru_maxrss` would include the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_new_process(function: Callable[..., Row], *arguments: Any) -> Row:
    """The result of a call in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# -- growth ---------------------------------------------------------------------------------------


def measure_growth(args: Args, directory: Path) -> list[Row]:
    """Every size, and Clarabel on the same cold step while it takes less than `patience`."""
    rows: list[Row] = []
    if args.patience:
        solve_cvxpy(
            tiny := grid(2, 2), jin_luo(tiny), losses(tiny, 0)
        )  # cvxpy loads its parts here
    for side in args.sides:
        rows.append(row := in_new_process(measure, args, side))
        known = [(before.pairs, before.clarabel) for before in rows[:-1] if before.clarabel]
        expected = known[-1][1] * row.pairs / known[-1][0] if known else args.patience / 10
        if len(known) == len(rows) - 1 and expected < args.patience:
            mdp = grid(side, args.horizon)
            psi, loss = jin_luo(mdp), args.t * losses(mdp, args.seed)
            clock = CLOCKS[args.clock]
            begun = clock()
            theirs, _ = solve_cvxpy(
                mdp, psi, loss, args.t, tol_gap_abs=1e-8, tol_gap_rel=1e-8, tol_feas=1e-8
            )
            row.clarabel = clock() - begun
            q = FTRLStep(mdp, psi)(loss, args.t).detach()
            row.clarabel_error = float(((theirs - q) / q).abs().max())
        print("  ".join(row.cells()), flush=True)
        write_csv(directory / "wide.csv", [asdict(row) for row in rows])
    return rows


def exponent(rows: list[Row], least: int = 40_000) -> float:
    """The slope of log warm time over log nnz(P), for MDPs with at least `least` pairs.

    NaN for fewer than two sizes.
    """
    points = [(math.log(row.entries), math.log(row.warm)) for row in rows if row.pairs >= least]
    if len(points) < 2:
        return math.nan
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def draw_growth(rows: list[Row], horizon: int) -> Figure:
    """Time and memory over pairs."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    pairs = [row.pairs for row in rows]
    slope = exponent(rows)
    left.plot(
        pairs,
        [row.warm for row in rows],
        "o-",
        color="C0",
        linewidth=2.4,
        label=f"warm step (slope {slope:.2f} from 40,000 pairs on)",
    )
    left.plot(
        pairs,
        [row.cold for row in rows],
        "s--",
        color="C0",
        alpha=0.5,
        label="first step, cold",
    )
    rival = [row for row in rows if row.clarabel]
    if rival:
        left.plot(
            [row.pairs for row in rival],
            [row.clarabel for row in rival],
            "D-",
            color="C3",
            label="cvxpy + Clarabel, cold",
        )
    last = rows[-1]
    left.plot(pairs, [last.warm * n / last.pairs for n in pairs], ":", color="gray", label="linear")
    left.set(ylabel="seconds", title=f"One FTRL step, horizon {horizon}")
    size = [row.entries + row.pairs for row in rows]
    right.plot(
        pairs,
        [1024 * row.memory for row in rows],
        "o-",
        color="C2",
        linewidth=2.4,
        label="peak, above the bare process",
    )
    right.plot(
        pairs,
        [n * 8 / 2**20 for n in size],
        ":",
        color="gray",
        label="nnz(P) + pairs, 8 bytes each",
    )
    dense = [(row.pairs, row.pairs * row.pairs / horizon / 5 * 8 / 2**20) for row in rows]
    right.plot(*zip(*dense, strict=True), "--", color="C1", label="P alone, if it were dense")
    right.set(ylabel="MiB", title="Memory")
    for panel in (left, right):
        panel.set(xscale="log", yscale="log", xlabel="state-action pairs")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(
            frameon=False, fontsize=9, loc="lower right" if panel is left else "upper left"
        )
    left.set_ylim(bottom=last.warm / 2e5)  # room for the legend
    right.set_ylim(bottom=1, top=1024 * 64)
    return figure


def main(args: Args) -> Path:
    """Run the sections, print their tables, write them as CSV and PNG."""
    directory = run_directory(args.root, "wide", args.seed)
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{machine()}; torch uses {threads}; {args.clock} time\n", flush=True)
    if "growth" in args.sections:
        rows = measure_growth(args, directory)
        print(f"\n{table(HEADER, [row.cells() for row in rows])}\n")
        print(f"warm time ~ nnz(P)^{exponent(rows):.2f} from 40,000 pairs on\n")
        write_figure(directory / "wide.png", draw_growth(rows, args.horizon))
    if "taxi" in args.sections:
        print(f"{table(HEADER, [in_new_process(measure, args, None).cells()])}\n", flush=True)
    if "crossover" in args.sections:
        torch.set_num_threads(1)
        crossover = measure_crossover(args.seed, args.t)
        write_csv(directory / "crossover.csv", crossover)
        lines = []
        for x in crossover:
            times = [seconds(x["factorization"]), seconds(x["CG"])]
            lost = f"{100 * x['lost']:.0f} %"
            lines.append([f"{x['size']}", f"{x['batch']}", *times, x["chosen"], lost])
        print(table(["size", "batch", "factorization", "CG", "chosen", "lost"], lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
