"""How does a step grow with the MDP, up to a million pairs?

    python -m experiments.wide                    everything; about ten minutes

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
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from torch_occ.reference import solve_cvxpy


@dataclass(frozen=True)
class Args:
    """The measurements."""

    sides: tuple[int, ...] = (3, 5, 10, 16, 22, 32, 46, 71, 100)
    """sides of the grids; a layer has side * side states"""
    horizon: int = 20
    """layers"""
    sections: tuple[Literal["growth", "taxi", "seeds"], ...] = ("growth", "taxi", "seeds")
    """step time over size; Gymnasium's taxi; what it gains to play many seeds at once"""
    backend: Literal["auto", "engine", "torch"] = "auto"
    """the solver"""
    episodes: int = 5
    """warm steps of which the median is taken"""
    patience: float = 120.0
    """Clarabel is left out where a step would take more seconds than this"""
    seeds: int = 64
    """of the section seeds"""
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


def grid(side: int, horizon: int, slip: float = 0.2) -> occ.LayeredMDP:
    """A robot on a grid: it stays or goes to a neighbour, from a uniformly random start.

    With probability `slip` it does one of the five moves at random.
    """
    x, y = torch.arange(side * side) // side, torch.arange(side * side) % side
    moves = torch.tensor([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])
    rows = (x[:, None] + moves[:, 0]).clamp(0, side - 1)
    columns = (y[:, None] + moves[:, 1]).clamp(0, side - 1)
    goal = rows * side + columns  # (S, 5)
    stay = torch.eye(5, dtype=torch.float64)
    chance = torch.full((5, 5), slip / 5, dtype=torch.float64) + (1 - slip) * stay  # meant, done
    successors, chances = goal.unsqueeze(1).expand(-1, 5, -1), chance.expand(side * side, -1, -1)
    # All layers are equal and sparse.
    pair = torch.arange(5 * side * side).repeat_interleave(5)
    index, shape = torch.stack([pair, successors.flatten()]), (5 * side * side, side * side)
    table = torch.sparse_coo_tensor(index, chances.flatten(), shape, check_invariants=False)
    step = table.coalesce()
    end = torch.ones(5 * side * side, 1, dtype=torch.float64).to_sparse()
    initial = torch.full((side * side,), side**-2, dtype=torch.float64)
    return occ.LayeredMDP([*[step] * (horizon - 1), end], initial=initial)


def taxi(horizon: int) -> occ.LayeredMDP:
    """Gymnasium's taxi: at most 500 reachable states per layer, 6 deterministic actions."""
    return occ.LayeredMDP.from_gymnasium("Taxi-v4", horizon=horizon)


def play(mdp: occ.LayeredMDP, q: Tensor, mean: Tensor, generator: torch.Generator) -> occ.Feedback:
    """One episode of the policy of q `(1, S, A)` against Bernoulli losses."""
    policy = occ.policy_of(mdp, q[0])

    def draw(probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    seen, local = [], draw(mdp.initial.unsqueeze(0))
    for here, layer in zip(mdp.layer_slices, mdp.layers, strict=True):
        state = here.start + local
        action = draw(policy[state])
        seen.append((state, action, torch.bernoulli(mean[state, action], generator=generator)))
        local = layer.draw(local, action, torch.rand(1, dtype=mean.dtype, generator=generator))
    states, actions, losses = (torch.stack(parts, -1) for parts in zip(*seen, strict=True))
    return occ.Feedback(states, actions, losses, None)


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
    dual_residual: float
    memory: float  # peak of the process, less its peak before the model was built
    clarabel: float | None = None
    clarabel_error: float | None = None  # the largest relative difference of its q

    def cells(self) -> list[str]:
        """As printed."""
        times = [common.seconds(x) for x in (self.build, self.cold, self.warm)]
        numbers = [f"{self.newton:.1f}", f"{self.dual_residual:.0e}"]
        numbers += [f"{1024 * self.memory:.0f} MiB"]
        took, error = self.clarabel, self.clarabel_error
        rival = f"{common.seconds(took)} ({error:.0e})" if took else "-"
        return [self.model, f"{self.pairs:,}", f"{self.entries:,}", *times, *numbers, rival]


HEADER = ["model", "pairs", "nnz(P)", "build", "cold", "warm", "Newton", "residual", "memory"]
HEADER += ["Clarabel (error)"]


def measure(args: Args, side: int | None) -> Row:
    """One grid, or the taxi for None. It should run in its own process."""
    torch.set_num_threads(args.threads)
    clock = CLOCKS[args.clock]
    tiny = occ.LayeredMDP.random(2, 2, 2).to_sparse()
    small = occ.FTRLStep(tiny, occ.jin_luo(tiny), backend=args.backend)
    small(torch.zeros_like(small.interior), 1)  # torch and the engine load their parts here
    before, begun = _peak(), clock()
    mdp = taxi(args.horizon) if side is None else grid(side, args.horizon)
    learner = occ.FTRL(mdp, occ.jin_luo(mdp))
    learner.step.use(args.backend)
    built = clock() - begun
    mean, generator = common.random_means(mdp, args.seed), torch.Generator().manual_seed(args.seed)
    learner.start(1)
    learner.state["cumulative_loss"] += args.t * mean
    begun = clock()
    q = learner.propose(int(args.t))
    cold, warm, newton, residual = clock() - begun, [], [], 0.0
    for i in range(args.episodes):
        learner.observe(int(args.t) + i, q, play(mdp, q, mean, generator))
        begun = clock()
        q = learner.propose(int(args.t) + i + 1)
        warm.append(clock() - begun)
        newton.append(float(learner.state["newton_steps"]))
        residual = max(residual, float(learner.state["dual_residual"]))
        if bool(learner.state["uncertified"]):
            raise RuntimeError(f"a step of {mdp} was not certified")
    name = "taxi" if side is None else f"grid {side} x {side}"
    times = (built, cold, statistics.median(warm))
    size = (mdp.num_pairs, sum(len(p) for p in mdp.probabilities[1:-1]))
    return Row(name, *size, *times, statistics.mean(newton), residual, _peak() - before)


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


def measure_growth(args: Args, directory: Path) -> list[Row]:
    """Every size, and Clarabel on the same cold step while it takes less than `patience`."""
    rows: list[Row] = []
    clock = CLOCKS[args.clock]
    tolerances: dict[str, Any] = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-8)
    if args.patience:
        tiny = grid(2, 2)
        solve_cvxpy(
            tiny, occ.jin_luo(tiny), common.random_means(tiny, 0)
        )  # cvxpy loads its parts here
    for side in args.sides:
        rows.append(row := in_new_process(measure, args, side))
        known = [(before.pairs, before.clarabel) for before in rows[:-1] if before.clarabel]
        expected = known[-1][1] * row.pairs / known[-1][0] if known else args.patience / 10
        if len(known) == len(rows) - 1 and expected < args.patience:
            mdp = grid(side, args.horizon)
            psi, loss = occ.jin_luo(mdp), args.t * common.random_means(mdp, args.seed)
            begun = clock()
            theirs, _ = solve_cvxpy(mdp, psi, loss, args.t, **tolerances)
            row.clarabel = clock() - begun
            q = occ.FTRLStep(mdp, psi)(loss, args.t).detach()
            row.clarabel_error = float(((theirs - q) / q).abs().max())
        print("  ".join(row.cells()), flush=True)
        common.write_csv(directory / "wide.csv", [asdict(row) for row in rows])
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
    figure = common.new_figure(10.5, 4.4)
    left, right = figure.subplots(1, 2)
    pairs, last = [row.pairs for row in rows], rows[-1]
    label = f"warm step (slope {exponent(rows):.2f} from 40,000 pairs on)"
    left.plot(pairs, [row.warm for row in rows], "o-", color="C0", linewidth=2.4, label=label)
    label = "first step, cold"
    left.plot(pairs, [row.cold for row in rows], "s--", color="C0", alpha=0.5, label=label)
    if rival := [(row.pairs, row.clarabel) for row in rows if row.clarabel]:
        label = "cvxpy + Clarabel, cold"
        left.plot(*zip(*rival, strict=True), "D-", color="C3", label=label)
    left.plot(pairs, [last.warm * n / last.pairs for n in pairs], ":", color="gray", label="linear")
    peak, label = [1024 * row.memory for row in rows], "peak, above the bare process"
    right.plot(pairs, peak, "o-", color="C2", linewidth=2.4, label=label)
    size = [(row.entries + row.pairs) * 8 / 2**20 for row in rows]
    right.plot(pairs, size, ":", color="gray", label="nnz(P) + pairs, 8 bytes each")
    dense = [n * n / horizon / 5 * 8 / 2**20 for n in pairs]
    right.plot(pairs, dense, "--", color="C1", label="P alone, if it were dense")
    scales = {"xscale": "log", "yscale": "log", "xlabel": "state-action pairs"}
    common.tidy(left, ylabel="seconds", title=f"One FTRL step, horizon {horizon}", **scales)
    common.tidy(right, ylabel="MiB", title="Memory", ylim=(1, 1024 * 64), **scales)
    left.set_ylim(bottom=last.warm / 2e5)  # room for the legend
    left.legend(frameon=False, fontsize=9, loc="lower right")
    right.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def measure_seeds(args: Args) -> str:
    """Microseconds per episode and seed of whole games, with one seed and with many."""
    worlds = {
        "FrozenLake": occ.LayeredMDP.from_gymnasium("FrozenLake-v1", horizon=args.horizon),
        "CliffWalking": occ.LayeredMDP.from_gymnasium("CliffWalking-v1", horizon=args.horizon),
    } | {f"grid {side} x {side}": grid(side, args.horizon) for side in args.sides[:3]}
    cells = []
    for name, mdp in worlds.items():
        losses = occ.BernoulliLosses(common.random_means(mdp, 1))
        episodes = max(8, 200_000 // mdp.num_pairs)
        for beta in (64.0 * args.horizon, 0.01):
            learner = occ.FTRL(mdp, occ.jin_luo(mdp, beta=beta))
            games = {
                str(n): partial(occ.simulate, mdp, learner, losses, episodes, range(n))
                for n in (1, args.seeds)
            }
            times = common.in_turns(games, 3)
            one, many = (1e6 * took / episodes / int(n) for n, took in times.items())
            line = [name, f"{mdp.num_pairs:,}", f"{beta:g}", f"{one:,.0f}", f"{many:,.0f}"]
            cells.append([*line, f"{one / many:.1f}"])
            print("  ".join(cells[-1]), flush=True)
    return common.table(["MDP", "pairs", "beta", "one seed", f"{args.seeds} seeds", "ratio"], cells)


def main(args: Args) -> Path:
    """Run the sections, print their tables, write them as CSV and PNG."""
    directory = common.begin("wide", args, args.seed)
    threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
    print(f"{common.machine()}; torch uses {threads}; {args.clock} time\n", flush=True)
    if "growth" in args.sections:
        rows = measure_growth(args, directory)
        print(f"\n{common.table(HEADER, [row.cells() for row in rows])}\n")
        print(f"warm time ~ nnz(P)^{exponent(rows):.2f} from 40,000 pairs on\n")
        common.write_figure(directory / "wide.png", draw_growth(rows, args.horizon))
    if "taxi" in args.sections:
        row = in_new_process(measure, args, None)
        print(f"{common.table(HEADER, [row.cells()])}\n", flush=True)
    if "seeds" in args.sections:
        print("Microseconds per episode and seed, processor time of one thread")
        print(f"\n{measure_seeds(args)}")
    print(f"\nwritten to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
