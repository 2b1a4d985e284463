"""A learner with a budget: what it costs to respect one, and that it is respected.

Taking an action costs something that is known, and an episode may cost at most h in expectation.
The losses are random and unknown. FTRL with `occ.Budgets` is played beside FTRL without budgets.
Regret is measured against the best policy within the budget, which a linear program finds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.games import loss_with_gap, write_configuration
from torch_occ.reference.cvxpy_step import flow_constraints, gather, solve_cvxpy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Args:
    """The game, and the sizes at which a step is timed."""

    episodes: int = 10_000
    """T"""
    seeds: int = 8
    """independent runs of each learner"""
    seed: int = 1
    """of the MDP, the losses, the costs and the first run"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gap: float = 0.4
    """of every suboptimal action, without budgets"""
    share: float = 0.5
    """the limit: 0 is the least possible cost, 1 that of the best policy without budgets"""
    beta: float = 1.0
    """weight of the log-barrier"""
    budgets: tuple[int, ...] = (1, 4)
    """numbers of budgets for which a step is timed; () to leave this out"""
    sizes: tuple[tuple[int, int, int], ...] = ((3, 3, 3), (5, 5, 4), (10, 10, 5))
    """horizon, width and actions of the timed steps"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def best_within(mdp: occ.LayeredMDP, mean: Tensor, budgets: occ.Budgets) -> float:
    """The least expected loss of a policy that meets the budgets, by a linear program."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    E, b = flow_constraints(mdp)
    flows = csr_array((E.values().numpy(), tuple(E.indices().numpy())), shape=tuple(E.shape))
    found = linprog(
        gather(mdp, mean).numpy(),
        A_eq=flows,
        b_eq=b.numpy(),
        A_ub=gather(mdp, budgets.costs).numpy(),
        b_ub=budgets.limits.numpy(),
        method="highs",
    )
    if found.fun is None:
        raise ValueError(f"share: the budget cannot be met; {found.message}")
    return float(found.fun)


def random_budgets(mdp: occ.LayeredMDP, mean: Tensor, share: float, m: int, seed: int) -> Any:
    """Budgets on random costs, between the least cost and that of the best policy."""
    generator = torch.Generator().manual_seed(seed)
    shape = (m, mdp.num_states, mdp.num_actions)
    costs = torch.rand(shape, dtype=mdp.dtype, generator=generator) * mdp.actions
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, mean).policy)
    spent = (costs * best).sum((-2, -1))
    least = torch.stack([occ.comparator(mdp, row) for row in costs])
    return occ.Budgets(costs, least + share * (spent - least))


class Spending(occ.Callback):
    """Keeps the average cost at every checkpoint, and the largest excess over all episodes."""

    def __init__(self, costs: Tensor) -> None:
        self.costs = costs
        self.averages: list[Tensor] = []
        self.largest: Tensor | None = None

    def on_checkpoint(self, run: Any) -> None:
        spent = (self.costs * run.sums["cumulative_occupancy"]).sum((-2, -1))
        self.averages.append(spent / run.t)

    def on_end(self, run: Any, history: occ.History) -> None:
        self.largest = run.learner.state.get("budget_excess")


def play(args: Args, directory: Path) -> list[list[str]]:
    """Play both learners; returns the lines of the table."""
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = loss_with_gap(mdp, args.gap, args.seed)
    budgets = random_budgets(mdp, mean, args.share, 1, args.seed)
    best = best_within(mdp, mean, budgets)
    psi = occ.jin_luo(mdp, beta=args.beta)
    learners = {
        "with the budget": occ.FTRL(mdp, psi, constraints=budgets),
        "without a budget": occ.FTRL(mdp, psi),
    }
    lines, curves = [], {}
    for name, learner in learners.items():
        spending = Spending(budgets.costs[0])
        callbacks: list[occ.Callback] = [spending]
        if args.tensorboard:
            callbacks.append(occ.TensorBoard(directory / name.replace(" ", "-")))
        history = occ.simulate(
            mdp,
            learner,
            occ.BernoulliLosses(mean),
            args.episodes,
            range(args.seed, args.seed + args.seeds),
            callbacks=callbacks,
        )
        # Against the best policy within the budget, in place of the best policy.
        regret = history.regret + history.comparator - best * history.episodes
        averages = torch.stack(spending.averages, -1)  # (N, C)
        curves[name] = history.episodes, regret, averages
        final = occ.Mean.of(regret[:, -1])
        largest = spending.largest
        lines.append(
            [
                name,
                str(final),
                f"{float(averages[:, -1].mean()):.4f}",
                f"{float(budgets.limits):.4f}",
                "-" if largest is None else f"{float(largest.max()):.1e}",
                f"{int(history.uncertified[:, -1].sum())}",
            ]
        )
        print(f"  {name}: {lines[-1][1]}", flush=True)
    write_figure(directory / "constrained.png", draw(curves, float(budgets.limits), args))
    return lines


def draw(curves: dict[str, tuple[Tensor, Tensor, Tensor]], limit: float, args: Args) -> Figure:
    """Left: regret within the budget. Right: average cost so far. Mean and range over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, (episodes, regret, averages)), color in zip(
        curves.items(), ("C0", "C3"), strict=True
    ):
        panels = [(right, averages)] if color == "C3" else [(left, regret), (right, averages)]
        for axes, y in panels:
            axes.plot(episodes, y.mean(0), color=color, label=name)
            axes.fill_between(episodes, y.amin(0), y.amax(0), color=color, alpha=0.2, linewidth=0)
            axes.set_xscale("log")
            axes.set_xlabel("episode")
    right.axhline(limit, color="0.3", linestyle="--", label="limit")
    left.set_title("regret against the best policy within the budget")
    right.set_title("expected cost of an episode, average so far")
    right.legend()
    left.legend()
    figure.suptitle(f"FTRL with a budget on expected costs; {args.seeds} seeds, mean and range")
    return figure


def time_of(function: Callable[[], object], repeats: int) -> float:
    """The shortest of several times."""
    function()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return min(times)


def time_steps(args: Args) -> list[list[str]]:
    """One step with budgets here and in cvxpy with Clarabel; returns the lines of the table."""
    lines = []
    for horizon, width, actions in args.sizes:
        mdp = occ.LayeredMDP.random(horizon, width, actions, seed=args.seed)
        mean = loss_with_gap(mdp, args.gap, args.seed)
        step, loss, t = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=args.beta)), 100 * mean, 100.0
        for m in args.budgets:
            budgets = random_budgets(mdp, mean, 0.9, m, args.seed)
            with torch.no_grad():
                q = step(loss, t, constraints=budgets)
                plain = time_of(lambda: step(loss, t), 20)  # noqa: B023
                ours = time_of(lambda: step(loss, t, constraints=budgets), 20)  # noqa: B023

            def cvxpy(mdp: Any = mdp, step: Any = step, loss: Any = loss, m: Any = budgets) -> Any:
                return solve_cvxpy(mdp, step.regularizer, loss, 100.0, constraints=m)[0]

            other, theirs = cvxpy(), time_of(cvxpy, 2)
            tracked = loss.clone().requires_grad_()

            def both(tracked: Tensor = tracked, budgets: Any = budgets, t: float = t) -> None:
                step(tracked, t, constraints=budgets).square().sum().backward()  # noqa: B023

            lines.append(
                [
                    f"({horizon},{width},{actions})",
                    str(m),
                    seconds(plain),
                    seconds(ours),
                    seconds(time_of(both, 5)),
                    seconds(theirs),
                    f"{theirs / ours:,.0f}",
                    f"{float((q - other).abs().max()):.0e}",
                ]
            )
    return lines


def main(args: Args) -> Path:
    """Play with and without a budget, and time the step."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "constrained", args.seed)
    write_configuration(directory, args)
    print(f"{args.episodes:,} episodes, {args.seeds} seeds; {machine()}", flush=True)
    header = ["learner", "regret at T", "mean cost", "limit", "largest excess", "uncertified"]
    lines = play(args, directory)
    write_csv(directory / "constrained.csv", [dict(zip(header, x, strict=True)) for x in lines])
    print(f"\n{table(header, lines)}\n")
    print(
        "Regret is measured against the best policy within the budget. Without a budget it is\n"
        "negative, because the learner finds a better policy that costs too much. The largest\n"
        "excess is the maximum of ⟨G, q_t⟩ - h over all episodes and seeds."
    )
    if args.budgets:
        header = ["size", "budgets", "no budget", "with budgets", "and gradients", "cvxpy"]
        header += ["cvxpy / ours", "difference of q"]
        print(f"\nOne step, from a cold start:\n\n{table(header, time_steps(args))}")
    print(f"\nwritten to {directory}; constrained.png shows the regret")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
