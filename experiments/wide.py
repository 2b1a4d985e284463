"""How does a step grow with the MDP, up to a million pairs?

    python -m experiments.wide                                   everything; about ten minutes, most of them Clarabel's
    python -m experiments.wide --sections growth --patience 0    only torch_occ
    python -m experiments.wide --sections crossover              conjugate gradients against factorization, for dense transitions

A robot on a slippery grid, in layers: every state of the grid at every step, five actions, at most five successors, stored sparsely.
The learner is FTRL with the paper's constants in the middle of a run; what is timed is its next step after an episode with bandit
feedback. Each size runs in a process of its own, so that its peak memory is its own.
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
from torch_occ import FTRL, FTRLStep, LayeredMDP, jin_luo, policy_of
from torch_occ._support.backends import Backend
from torch_occ._support.streams import invert
from torch_occ.game.estimators import Feedback
from torch_occ.reference import solve_cvxpy
from torch_occ.step import kkt
from torch_occ.step.iterative import ConjugateGradients


@dataclass
class Args:
    """What to measure."""

    sides: tuple[int, ...] = (3, 5, 10, 16, 22, 32, 46, 71, 100)
    """sides of the grids; a layer has side * side states"""
    horizon: int = 20
    """layers"""
    sections: tuple[Literal["growth", "taxi", "crossover"], ...] = ("growth", "taxi", "crossover")
    """step time over size; Gymnasium's taxi; where factorization and iterations meet"""
    backend: Backend = "auto"
    """who solves: torch or engine; only torch tells its iterations"""
    episodes: int = 5
    """warm steps of which the median is taken"""
    patience: float = 120.0
    """Clarabel is not asked for a step that is expected to take longer than this many seconds"""
    t: float = 1000.0
    """the episode in whose place the learner stands"""
    threads: int = 1
    """threads of torch; two help from about 100,000 pairs on, if both cores are free"""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu counts the processor's time of all threads: for a machine that is busy with other things"""
    seed: int = 0
    """seed of the losses and the episodes"""
    root: Path = Path("runs")
    """where the run's directory is made"""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# -- models ---------------------------------------------------------------------------------------------------------------


def grid(side: int, horizon: int, slip: float = 0.2) -> LayeredMDP:
    """Stay or go to a neighbour; with probability `slip` one of the five at random. The start is anywhere."""
    x, y = torch.arange(side * side) // side, torch.arange(side * side) % side
    moves = torch.tensor([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    goal = (x[:, None] + moves[:, 0]).clamp(0, side - 1) * side + (y[:, None] + moves[:, 1]).clamp(0, side - 1)  # (S, 5)
    chance = torch.full((5, 5), slip / 5, dtype=torch.float64) + (1 - slip) * torch.eye(5, dtype=torch.float64)  # meant, done
    return unrolled(goal.unsqueeze(1).expand(-1, 5, -1), chance.expand(side * side, -1, -1), horizon)


def taxi(horizon: int) -> LayeredMDP:
    """Gymnasium's: 500 states, of which some cannot be reached so soon, and 6 actions, all deterministic."""
    return LayeredMDP.from_gymnasium("Taxi-v4", horizon=horizon)


def unrolled(successors: Tensor, chances: Tensor, horizon: int) -> LayeredMDP:
    """Every state at every step: successors and their chances `(S, A, m)` -> an MDP of `horizon` equal, sparse layers."""
    num_states, num_actions, most = successors.shape
    pair = torch.arange(num_states * num_actions).repeat_interleave(most)
    index, shape = torch.stack([pair, successors.flatten()]), (num_states * num_actions, num_states)
    step = torch.sparse_coo_tensor(index, chances.flatten(), shape, check_invariants=False).coalesce()
    end = torch.ones(num_states * num_actions, 1, dtype=torch.float64).to_sparse()
    initial = torch.full((num_states,), 1 / num_states, dtype=torch.float64)
    return LayeredMDP([*[step] * (horizon - 1), end], initial=initial)


# -- a learner in the middle of its run -----------------------------------------------------------------------------------


@contextmanager
def counting() -> Iterator[list[int]]:
    """The iterations of every system that conjugate gradients solve inside."""
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
    memory: float  # what the process took at most, beyond what it took before the model was built
    clarabel: float | None = None
    clarabel_error: float | None = None  # the largest relative difference of its q

    def cells(self) -> list[str]:
        """As printed."""
        rival = "-" if self.clarabel is None else f"{seconds(self.clarabel)} ({self.clarabel_error:.0e})"
        times = [seconds(x) for x in (self.build, self.cold, self.warm)]
        counts = [
            f"{self.newton:.1f}",
            f"{self.iterations:.0f}" if self.iterations else "-",
            f"{self.dual_residual:.0e}",
            f"{1024 * self.memory:.0f} MiB",
        ]
        return [self.model, f"{self.pairs:,}", f"{self.entries:,}", *times, *counts, rival]


HEADER = ["model", "pairs", "nnz(P)", "build", "cold", "warm", "Newton", "CG", "residual", "memory", "Clarabel (error)"]


def measure(args: Args, side: int | None) -> Row:
    """One model, in a process of its own; None is the taxi."""
    torch.set_num_threads(args.threads)
    clock = CLOCKS[args.clock]
    small = FTRLStep(tiny := LayeredMDP.random(2, 2, 2).to_sparse(), jin_luo(tiny), backend=args.backend)
    small(torch.zeros_like(small.interior))  # what torch and the engine load once
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


def losses(mdp: LayeredMDP, seed: int) -> Tensor:
    """Mean losses, uniform in [0, 1]."""
    return torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _peak() -> float:
    """The most memory that this process has had so far; `ru_maxrss` would count the process that started it too."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_new_process(function: Callable[..., Row], *arguments: Any) -> Row:
    """Called in a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# -- growth ---------------------------------------------------------------------------------------------------------------


def measure_growth(args: Args, directory: Path) -> list[Row]:
    """Every size, and Clarabel on the same cold step as far as the patience goes."""
    rows: list[Row] = []
    if args.patience:
        solve_cvxpy(tiny := grid(2, 2), jin_luo(tiny), losses(tiny, 0))  # what cvxpy loads once
    for side in args.sides:
        rows.append(row := in_new_process(measure, args, side))
        known = [(before.pairs, before.clarabel) for before in rows[:-1] if before.clarabel]
        expected = known[-1][1] * row.pairs / known[-1][0] if known else args.patience / 10
        if len(known) == len(rows) - 1 and expected < args.patience:
            mdp = grid(side, args.horizon)
            psi, loss = jin_luo(mdp), args.t * losses(mdp, args.seed)
            clock = CLOCKS[args.clock]
            begun = clock()
            theirs, _ = solve_cvxpy(mdp, psi, loss, args.t, tol_gap_abs=1e-8, tol_gap_rel=1e-8, tol_feas=1e-8)
            row.clarabel = clock() - begun
            q = FTRLStep(mdp, psi)(loss, args.t).detach()
            row.clarabel_error = float(((theirs - q) / q).abs().max())
        print("  ".join(row.cells()), flush=True)
        write_csv(directory / "wide.csv", [asdict(row) for row in rows])
    return rows


def exponent(rows: list[Row], least: int = 40_000) -> float:
    """The slope of log warm time over log nnz(P), from so many pairs on; NaN for fewer than two sizes."""
    points = [(math.log(row.entries), math.log(row.warm)) for row in rows if row.pairs >= least]
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else math.nan


def draw_growth(rows: list[Row], horizon: int) -> Figure:
    """Time and memory over pairs."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    pairs = [row.pairs for row in rows]
    slope = exponent(rows)
    left.plot(
        pairs, [row.warm for row in rows], "o-", color="C0", linewidth=2.4, label=f"warm step (slope {slope:.2f} from 40,000 pairs on)"
    )
    left.plot(pairs, [row.cold for row in rows], "s--", color="C0", alpha=0.5, label="first step, cold")
    rival = [row for row in rows if row.clarabel]
    if rival:
        left.plot([row.pairs for row in rival], [row.clarabel for row in rival], "D-", color="C3", label="cvxpy + Clarabel, cold")
    last = rows[-1]
    left.plot(pairs, [last.warm * n / last.pairs for n in pairs], ":", color="gray", label="linear")
    left.set(ylabel="seconds", title=f"One FTRL step, horizon {horizon}")
    size = [row.entries + row.pairs for row in rows]
    right.plot(pairs, [1024 * row.memory for row in rows], "o-", color="C2", linewidth=2.4, label="peak, above the bare process")
    right.plot(pairs, [n * 8 / 2**20 for n in size], ":", color="gray", label="nnz(P) + pairs, 8 bytes each")
    dense = [(row.pairs, row.pairs * row.pairs / horizon / 5 * 8 / 2**20) for row in rows]
    right.plot(*zip(*dense, strict=True), "--", color="C1", label="P alone, if it were dense")
    right.set(ylabel="MiB", title="Memory")
    for panel in (left, right):
        panel.set(xscale="log", yscale="log", xlabel="state-action pairs")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=9, loc="lower right" if panel is left else "upper left")
    left.set_ylim(bottom=last.warm / 2e5)  # room for the legend
    right.set_ylim(bottom=1, top=1024 * 64)
    return figure


# -- factorization or iterations ------------------------------------------------------------------------------------------

CROSSOVER: tuple[tuple[int, int, int, int], ...] = (
    (10, 20, 5, 1),
    (40, 20, 3, 1),
    (10, 40, 5, 1),
    (10, 80, 3, 1),
    (10, 100, 10, 1),
    (10, 150, 5, 1),
    (10, 200, 5, 1),
)
CROSSOVER += ((5, 300, 3, 1), (10, 20, 5, 32), (10, 40, 5, 8), (10, 80, 4, 8), (5, 20, 3, 128))


def measure_crossover(args: Args) -> list[dict[str, Any]]:
    """Processor time of a warm solve per Newton step on the torch path, both ways, for dense random MDPs; and which way is chosen."""
    rows, chooser = [], kkt.prefers_iterations
    for horizon, width, actions, batch in CROSSOVER:
        mdp = LayeredMDP.random(horizon, width, actions, seed=args.seed)
        step = FTRLStep(mdp, jin_luo(mdp), backend="torch")
        generator = torch.Generator().manual_seed(args.seed)
        loss = args.t * torch.rand(batch, mdp.num_states, actions, dtype=torch.float64, generator=generator)
        times = []
        with torch.no_grad():
            q = step(loss, args.t)
            later = loss.clone()
            later[:, ::7, 0] += 1 / q[:, ::7, 0]
            for iterate in (False, True):
                kkt.prefers_iterations = lambda *_, choice=iterate: choice
                trials = []
                for _ in range(5):
                    begun = time.process_time()
                    solution = step.solve(later, args.t + 1, warm_start=q)
                    trials.append((time.process_time() - begun) / int(solution.steps.max()))
                times.append(min(trials))
        kkt.prefers_iterations = chooser
        chosen = "CG" if chooser(mdp, batch, False) else "factorization"
        row = {"size": (horizon, width, actions), "batch": batch, "factorization": times[0], "CG": times[1], "chosen": chosen}
        rows.append(row | {"lost": times[chosen == "CG"] / min(times) - 1})
    return rows


def main(args: Args) -> Path:
    """Run the sections, print their tables, write them as CSV and PNG."""
    directory = run_directory(args.root, "wide", args.seed)
    print(f"{machine()}; torch uses {args.threads} thread{'s' * (args.threads > 1)}; {args.clock} time\n", flush=True)
    if "growth" in args.sections:
        rows = measure_growth(args, directory)
        print(f"\n{table(HEADER, [row.cells() for row in rows])}\n\nwarm time ~ nnz(P)^{exponent(rows):.2f} from 40,000 pairs on\n")
        write_figure(directory / "wide.png", draw_growth(rows, args.horizon))
    if "taxi" in args.sections:
        print(f"{table(HEADER, [in_new_process(measure, args, None).cells()])}\n", flush=True)
    if "crossover" in args.sections:
        torch.set_num_threads(1)
        crossover = measure_crossover(args)
        write_csv(directory / "crossover.csv", crossover)
        lines = [
            [f"{r['size']}", f"{r['batch']}", seconds(r["factorization"]), seconds(r["CG"]), r["chosen"], f"{100 * r['lost']:.0f} %"]
            for r in crossover
        ]
        print(table(["size", "batch", "factorization", "CG", "chosen", "lost"], lines))
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
