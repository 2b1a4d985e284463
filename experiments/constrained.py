"""A learner with a budget: what it costs to respect one, and that it is respected.

Taking an action costs something that is known, and an episode may cost at most h in expectation.
The losses are random and unknown. FTRL with `occ.Budgets` is played beside FTRL without budgets.
Regret is measured against the best policy within the budget, which a linear program finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import RunsOnMDP
from torch_occ.reference import flow_constraints, on_pairs


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """The game."""

    episodes: int = 10_000
    """T"""
    share: float = 0.5
    """the limit: 0 is the least possible cost, 1 that of the best policy without budgets"""
    beta: float = 1.0
    """weight of the log-barrier"""


def best_within(mdp: occ.LayeredMDP, mean: Tensor, budgets: occ.Budgets) -> float:
    """The least expected loss of a policy that meets the budgets, by a linear program."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    E, b = flow_constraints(mdp)
    flows = csr_array((E.values().numpy(), tuple(E.indices().numpy())), shape=tuple(E.shape))
    most = {"A_ub": on_pairs(mdp, budgets.costs).numpy(), "b_ub": budgets.limits.numpy()}
    found = linprog(on_pairs(mdp, mean).numpy(), A_eq=flows, b_eq=b.numpy(), **most)
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
    least = torch.stack([occ.game.comparator(mdp, row) for row in costs])
    return occ.Budgets(costs, least + share * (spent - least))


class Spending(occ.Callback):
    """Keeps the average cost at every checkpoint, and the largest excess over all episodes."""

    def __init__(self, costs: Tensor) -> None:
        self.costs, self.averages = costs, list[Tensor]()
        self.largest: Tensor | None = None

    def on_checkpoint(self, run: Any) -> None:
        spent = (self.costs * run.sums["cumulative_occupancy"]).sum((-2, -1))
        self.averages.append(spent / run.t)

    def on_end(self, run: Any, history: occ.History) -> None:
        self.largest = run.learner.state.get("budget_excess")


def play(args: Args, directory: Path) -> list[list[str]]:
    """Play both learners; returns the lines of the table."""
    mdp, mean = args.problem()
    budgets = random_budgets(mdp, mean, args.share, 1, args.seed)
    best, limit = best_within(mdp, mean, budgets), float(budgets.limits)
    psi, losses = occ.jin_luo(mdp, beta=args.beta), occ.BernoulliLosses(mean)
    learners = {
        "with the budget": occ.FTRL(mdp, psi, constraints=budgets),
        "without a budget": occ.FTRL(mdp, psi),
    }
    lines, curves = [], {}
    seeds = range(args.seed, args.seed + args.seeds)
    for name, learner in learners.items():
        spending = Spending(budgets.costs[0])
        boards = [occ.TensorBoard(directory / common.slug(name))] if args.tensorboard else []
        callbacks: list[occ.Callback] = [spending, *boards]
        history = occ.simulate(mdp, learner, losses, args.episodes, seeds, callbacks=callbacks)
        # Against the best policy within the budget, in place of the best policy.
        regret = history.regret + history.comparator - best * history.episodes
        averages, largest = torch.stack(spending.averages, -1), spending.largest  # (N, C)
        curves[name] = history.episodes, regret, averages
        line = [name, str(occ.game.Mean.of(regret[:, -1])), f"{float(averages[:, -1].mean()):.4f}"]
        line += [f"{limit:.4f}", "-" if largest is None else f"{float(largest.max()):.1e}"]
        lines.append([*line, f"{int(history.uncertified[:, -1].sum())}"])
        print(f"  {name}: {line[1]}", flush=True)
    common.write_figure(directory / "constrained.png", draw(curves, limit, args))
    return lines


def draw(curves: dict[str, tuple[Tensor, Tensor, Tensor]], limit: float, args: Args) -> Figure:
    """Left: regret within the budget. Right: average cost so far. Mean and range over seeds."""
    figure = common.new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    for i, (name, (episodes, regret, averages)) in enumerate(curves.items()):
        colour = ("C0", "C3")[i]
        for axes, y in ((right, averages), (left, regret))[: 2 - i]:
            axes.plot(episodes, y.mean(0), color=colour, label=name)
            axes.fill_between(episodes, y.amin(0), y.amax(0), color=colour, alpha=0.2, linewidth=0)
    right.axhline(limit, color="0.3", linestyle="--", label="limit")
    common.tidy(left, title="regret against the best policy within the budget")
    common.tidy(right, title="expected cost of an episode, average so far")
    for axes in (left, right):
        axes.set(xscale="log", xlabel="episode")
        axes.legend()
    figure.suptitle(f"FTRL with a budget on expected costs; {args.seeds} seeds, mean and range")
    return figure


def main(args: Args) -> Path:
    """Play with and without a budget."""
    directory = common.begin("constrained", args, args.seed)
    print(f"{args.episodes:,} episodes, {args.seeds} seeds; {common.machine()}", flush=True)
    header = ["learner", "regret at T", "mean cost", "limit", "largest excess", "uncertified"]
    lines = play(args, directory)
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    common.write_csv(directory / "constrained.csv", rows)
    print(f"\n{common.table(header, lines)}\n")
    print(
        "Regret is measured against the best policy within the budget. Without a budget it is\n"
        "negative, because the learner finds a better policy that costs too much. The largest\n"
        "excess is the maximum of ⟨G, q_t⟩ - h over all episodes and seeds."
    )
    print(f"\nwritten to {directory}; constrained.png shows the regret")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
