"""Regret against the corruption C at a fixed number of episodes.

The paper promises O(U + sqrt(U C)), `col:stochastic_bound`. Bernoulli losses are corrupted from
the first episode on until the budget is spent. Regret is measured on the corrupted losses, as in
the paper, and C is the amount that was really spent. The script fits the exponent of C in the
excess R(C) - R(0). For each seed, R(C) and R(0) use the same random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS, Fit, Game, Histories, RunsOnMDP


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """Which games are played, and how long."""

    budgets: tuple[float, ...] = (500.0, 1000.0, 2000.0, 4000.0, 8000.0)
    """C, besides 0; an episode can cost up to 2 L"""
    strategy: Literal["front", "targeted", "uniform"] = "targeted"
    """front: l becomes 1 - l; targeted: optimal actions cost 1; uniform: front, in small parts"""
    episodes: int = 20_000
    """T"""
    seeds: int = 24
    """independent runs of each game"""
    beta: float = 1.0
    """weight of the log-barrier; the paper has 64 L"""


def learners(args: Args, mdp: occ.LayeredMDP) -> dict[str, occ.Learner]:
    """The algorithm, two other regularizers, and a learner that relies on averages."""
    return {
        f"Jin-Luo, β = {args.beta:g}": occ.FTRL(mdp, occ.jin_luo(mdp, beta=args.beta)),
        "Tsallis": occ.FTRL.tsallis(mdp),
        "O-REPS (knows T)": occ.FTRL.o_reps(mdp, args.episodes),
        "UCB value iteration": occ.OptimisticValueIteration(mdp),
    }


def finals(histories: Histories, places: list[str], name: str) -> tuple[Tensor, Tensor]:
    """The corruption spent, `(C,)`, and the regret at T, `(N, C)`, for every budget."""
    spent = torch.stack([histories[place, name].corruption[:, -1].mean() for place in places])
    return spent, torch.stack([histories[place, name].regret[:, -1] for place in places], -1)


def anchor(spent: Tensor, regret: Tensor) -> tuple[float, float] | None:
    """Where the references sqrt C and C meet: the largest mean excess R(C) - R(0), and its C.

    None if corruption does not raise the mean regret for any C.
    """
    excess = (regret - regret[:, :1]).mean(0)
    i = int(excess.argmax())
    return (float(spent[i]), float(excess[i])) if float(excess[i]) > 0 else None


def draw(curves: dict[str, tuple[Tensor, Tensor]], title: str) -> Figure:
    """Regret at T and the part that is due to corruption, over C on an axis with straight sqrt C.

    The references sqrt C and C go through the point of the first learner with the largest excess.
    """
    figure = common.new_figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    for i, (name, (spent, regret)) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": COLOURS[i], "marker": "osD^"[i % 4], "markersize": 4.5}
        for axes, y in ((left, regret), (right, regret - regret[:, :1])):
            mean, lower, upper = common.band(y)
            axes.plot(spent, mean, label=name, linewidth=1.6, **style)
            axes.fill_between(spent, lower, upper, color=COLOURS[i], alpha=0.15, linewidth=0)
    spent, regret = next(iter(curves.values()))
    if (point := anchor(spent, regret)) is not None:
        share = torch.linspace(0, float(spent[-1]), 100) / point[0]
        lines = ((share.sqrt(), "0.35", ":", r"\sqrt{C}"), (share, "0.55", "-.", "C"))
        for shape, colour, dash, label in lines:
            style = {"color": colour, "linestyle": dash, "label": rf"$\propto {label}$"}
            right.plot(share * point[0], point[1] * shape, **style)
    left.set(ylabel="regret at T", title="regret")
    right.set(ylabel="R(C) - R(0)", title="regret that corruption adds")
    for axes in (left, right):
        axes.set_xscale("function", functions=(lambda c: np.sqrt(np.maximum(c, 0)), np.square))
        axes.set_xticks(spent.tolist(), [f"{c:.0f}" for c in spent.tolist()])
        axes.axhline(0, color="0.6", linewidth=0.8)
        common.tidy(axes, xlabel="corruption C that was spent", xlim=(0, float(spent[-1]) * 1.05))
    common.legend_below(figure, right, 6)
    figure.suptitle(title)
    return figure


def note(name: str, excess: Tensor, fit: Fit) -> str:
    """The exponent of C beside the 1/2 of the bound, or why there is none."""
    if fit.exists:
        below, above = fit.upper < 0.5, fit.lower > 0.5
        place = "below" if below else "above" if above else "compatible with"
        return f"{name}: the excess grows like C^{fit.text()}, {place} the 1/2 of the bound."
    if excess.shape[-1] < 4:
        return f"{name}: no exponent, because a fit needs three budgets."
    flat = float((common.resampled_means(excess[:, 1:]) <= 0).any(-1).double().mean())
    reason = f"in {flat:.1%} of the resamples some C does not raise the regret"
    return f"{name}: no exponent, because {reason}."


def main(args: Args) -> Path:
    """Play with every budget, fit the exponent of C, draw."""
    directory = common.begin("corruption", args, args.seed)
    mdp, mean = args.problem()
    base, players = occ.BernoulliLosses(mean), learners(args, mdp)
    budgets = {f"C={budget:g}": budget for budget in (0.0, *args.budgets)}
    processes = {
        place: occ.Corrupted(base, budget, args.strategy, episodes=args.episodes, target=mean)
        for place, budget in budgets.items()
    }
    games = [
        Game(place, name, player, losses)
        for place, losses in processes.items()
        for name, player in players.items()
    ]
    histories = common.play_all(games, args, directory)
    curves = {name: finals(histories, list(budgets), name) for name in players}
    rows, cells, notes = [], [], []
    for name, (spent, regret) in curves.items():
        excess = regret - regret[:, :1]
        fit = Fit(torch.nan, torch.nan, torch.nan)
        if len(spent) > 3:
            fit = common.bootstrap(common.power_slope, spent[1:], excess[:, 1:])
        at_zero, at_most = (
            common.bootstrap(common.last, spent[:1], regret[:, i : i + 1])
            for i in (0, -1 + len(spent))
        )
        cells.append([name, at_zero.text(1), at_most.text(1), fit.text()])
        rows += [
            {"learner": name, "spent": float(c), "regret": float(r), "excess": float(e)}
            for c, r, e in zip(spent, regret.mean(0), excess.mean(0), strict=True)
        ]
        notes.append(note(name, excess, fit))
    common.write_csv(directory / "corruption.csv", rows)
    title = f"{args.strategy} corruption, T = {args.episodes:,}, {args.seeds} seeds, 95 % bands"
    common.write_figure(directory / "corruption.png", draw(curves, title))
    header = ["learner", "R(0)", f"R({max(args.budgets):g})", "exponent of C"]
    print(f"\n{common.table(header, cells)}\n\n" + "\n".join(notes))
    print("The paper's bound is an upper bound, so a smaller exponent agrees with it.")
    print("This says nothing about other attacks or other gaps.")
    print(f"\nwritten to {directory}: corruption.png, corruption.csv and config.json;")
    print("every game has its own directory with a history and a TensorBoard log")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
