"""The regret of the paper's algorithm with its terms and bounds, and the statements on random MDPs.

First the algorithm plays with the paper's parameters, against stochastic losses and against an
adversary, and `torch_occ.theory.Certificate` evaluates the regret bound. Then the statements of the
paper are evaluated on some hundred random MDPs. Half of these are nearly deterministic, and the
policies are between uniform and deterministic. docs/theory.md explains the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS, RunsOnMDP
from experiments.statements import survey
from torch_occ import theory

STOCHASTIC, ADVERSARIAL = "stochastic", "adversarial"
BLUE, RED, GREEN, PINK, ORANGE, SKY, BLACK = COLOURS


@dataclass(frozen=True)
class Args(RunsOnMDP):
    """How long is played, and on how many MDPs the statements are evaluated."""

    episodes: int = 10000
    """T"""
    seeds: int = 16
    """independent runs of each game"""
    adversary: Literal["walk", "greedy", "switching"] = "walk"
    """walk: every loss is a random walk in [0, 1]; greedy: each state's most likely action costs 1;
    switching: two tables take turns"""
    mdps: int = 40
    """random MDPs of each size, and as many nearly deterministic ones"""
    sizes: tuple[tuple[int, int, int], ...] = ((1, 1, 4), (2, 3, 2), (3, 3, 3), (5, 2, 3))
    """horizon, width and actions of these MDPs"""


def environments(args: Args) -> dict[str, occ.LossProcess]:
    """The two loss processes."""
    _, mean = args.problem()
    adversaries: dict[str, occ.LossProcess] = {
        "walk": occ.RandomWalkLosses(step=0.02),
        "greedy": occ.GreedyAdversary(),
        "switching": occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 100, noise="bernoulli"),
    }
    return {STOCHASTIC: occ.BernoulliLosses(mean), ADVERSARIAL: adversaries[args.adversary]}


def play(args: Args, losses: occ.LossProcess, directory: Path) -> dict[str, Tensor]:
    """One game of `alg:main_alg` under the certificate; its curves, `(seeds, C)` each."""
    mdp, _ = args.problem()
    certificate = theory.Certificate()
    learner, seeds = occ.FTRL(mdp, occ.jin_luo(mdp)), range(args.seed, args.seed + args.seeds)
    board = [occ.TensorBoard(directory, images_per_decade=0)] if args.tensorboard else []
    callbacks = [certificate, *board]
    occ.simulate(mdp, learner, losses, args.episodes, seeds, callbacks=callbacks)
    return certificate.curves


def add_stochastic_bound(args: Args, curves: dict[str, Tensor]) -> None:
    """`col:stochastic_bound` with its constants, for the game in which it holds (C = 0)."""
    mdp, mean = args.problem()
    plan, t = occ.optimal_policy(mdp, mean), curves["episodes"].to(mdp.dtype)
    bound = theory.stochastic_bound(mdp, theory.Parameters.paper(mdp), plan.gaps, plan.policy, t)
    curves["bound_stochastic"] = bound.expand_as(curves["regret"])


TERMS = {
    "regret": "regret against each seed's best policy",
    "regret_shared": "regret against one best policy for all seeds",
    "penalty": "sum of (1/eta_t - 1/eta_(t-1)) (phi_H(q_opt) - phi_H(q_t))",
    "penalty_bound": "the same, lem:key_lemma_bound_penalty",
    "stability": "8 sum of eta_t E|estimate_t|^2, inverse Hessian of phi_H",
    "stability_first_step": "the same, lem:stability_first_step",
    "stability_bound": "the same, lem:key_lemma_bound_stability",
    "lower_order": "2L + beta |S||A| log T + ..., lem:proper_comparator",
    "bound_terms": "penalty + stability + lower order, lem:key_lemma_ftrl",
    "bound_lemmas": "with both lemmas in place of both terms",
    "bound_adversarial": "col:adversarial_bound, explicit",
    "bound_stochastic": "col:stochastic_bound, explicit",
}


def run_rows(place: str, curves: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Means over seeds, one row per checkpoint."""
    names = [name for name in (*TERMS, "smoothness_min", "smoothness_max") if name in curves]
    means = torch.stack([curves[name].mean(0) for name in names], -1).tolist()
    return [
        {"game": place, "episode": t} | dict(zip(names, row, strict=True))
        for t, row in zip(curves["episodes"].tolist(), means, strict=True)
    ]


#: Curve, colour, style, words: the bounds on the regret, and the terms with theirs.
REGRET = (
    ("bound_stochastic", PINK, "--", "col:stochastic_bound, explicit"),
    ("bound_adversarial", BLACK, "--", "col:adversarial_bound, explicit"),
    ("bound_lemmas", RED, "--", "both lemmas + lower order"),
    ("bound_terms", RED, "-", "penalty + stability + lower order (lem:key_lemma_ftrl)"),
    ("lower_order", "0.6", "-", "lower order"),
    ("regret", BLUE, "-", "regret, 95 % band"),
)
PARTS = (
    ("stability_first_step", GREEN, ":", "stability, after lem:stability_first_step"),
    ("stability_bound", GREEN, "--", "stability, lem:key_lemma_bound_stability"),
    ("stability", GREEN, "-", "stability"),
    ("penalty_bound", ORANGE, "--", "penalty, lem:key_lemma_bound_penalty"),
    ("penalty", ORANGE, "-", "penalty"),
    ("regret", BLUE, "-", "regret"),
)


def draw_runs(games: Mapping[str, Mapping[str, Tensor]], mdp: occ.LayeredMDP) -> Figure:
    """One column per game: regret and its bounds, terms and theirs, smoothness of the update."""
    figure = common.new_figure(4.7 * len(games) + 3.6, 10.4)
    shape = {"squeeze": False, "sharex": "col", "sharey": "row"}
    panels = figure.subplots(3, len(games), **shape, height_ratios=[5, 5, 2.6])
    for column, (place, curves) in zip(panels.T, games.items(), strict=True):
        t = curves["episodes"].numpy()
        for axes, lines in zip(column, (REGRET, PARTS), strict=False):
            for name, colour, style, words in lines:
                if name in curves:
                    mean, lower, upper = (x.numpy() for x in common.band(curves[name]))
                    mean = np.where(mean > 0, mean, np.nan)  # a logarithmic axis has no other place
                    look = {"color": colour, "linewidth": 1.9 if name == "regret" else 1.5}
                    axes.plot(t, mean, linestyle=style, label=words, **look)
                    if name == "regret":
                        lower = np.where(lower > 0, lower, mean)
                        axes.fill_between(t, lower, upper, color=colour, alpha=0.2, linewidth=0)
            axes.set(xscale="log", yscale="log")
            axes.set_ylim(bottom=max(axes.get_ylim()[0], 0.3))
        label, look = "L T, the largest regret possible", {"color": "0.75", "linestyle": "-."}
        column[0].plot(t, mdp.horizon * t, linewidth=1.0, label=label, **look)
        column[0].set_title(place, fontsize=13)
        low, high = (curves[f"smoothness_{end}"].numpy() for end in ("min", "max"))
        column[2].fill_between(t, low.min(0), high.max(0), color=SKY, alpha=0.45, linewidth=0)
        column[2].set(xscale="log", xlabel="episodes T")
    labels = ["regret and bounds on it", "terms of the bound, and bounds on them"]
    labels += [r"extremes of $\tilde{q}_t\,/\,q_t$" + "\n(lem:smooth_update: [1/2, 2])"]
    for row, label in zip(panels, labels, strict=True):
        row[0].set_ylabel(label)
        for axes in row:
            common.tidy(axes)
    for row in panels[:2]:
        beside = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "handlelength": 2.6}
        row[-1].legend(*row[0].get_legend_handles_labels(), frameon=False, fontsize=9, **beside)
    size = f"{mdp.horizon} layers, {mdp.num_states} states, {mdp.num_actions} actions"
    figure.suptitle(f"The regret bound of Jin and Luo, taken apart: {size}")
    return figure


class Summary(NamedTuple):
    """A statement over all its instances."""

    label: str
    relation: str
    instances: int
    violations: int
    left: float  # both sides where they are closest, relative to the right one
    right: float
    ratios: list[float]

    def row(self) -> dict[str, Any]:
        """For a CSV file."""
        row = self._asdict() | {"slack": self.right - self.left}
        return {name: x for name, x in row.items() if name != "ratios"}

    def cells(self) -> list[str]:
        """One line of the table."""
        ratio = f"{self.left / self.right:.3g}" if self.right > 0 and self.relation == "<=" else ""
        verdict = "holds" if not self.violations else f"FAILS in {self.violations}"
        sides = [f"{self.left:.4g}", self.relation, f"{self.right:.4g}"]
        numbers = [f"{self.instances}", *sides, f"{self.right - self.left:.3g}", ratio]
        return [self.label, *numbers, verdict]


def summarize(found: Sequence[theory.Statement]) -> Summary:
    """All instances of one label."""
    left, right, holds = (
        torch.cat([getattr(x, name).flatten() for x in found])
        for name in ("left", "right", "holds")
    )
    if found[0].relation == "=":  # show the worst instance of an equality
        at = int((right - left).abs().argmax())
    elif bool((right > 0).any()):  # the tightest instance; two sides that vanish say nothing
        at = int(torch.where(right > 0, left / right, -torch.inf).argmax())
    else:
        at = int(left.argmax())
    positive = right > 0
    ratios = (left[positive] / right[positive]).tolist() if found[0].relation == "<=" else []
    counts, sides = (len(left), int((~holds).sum())), (float(left[at]), float(right[at]))
    return Summary(found[0].label, found[0].relation, *counts, *sides, ratios)


def evaluate(args: Args) -> list[Summary]:
    """Every statement on every MDP, by label."""
    found: dict[str, list[theory.Statement]] = {}
    for i, size in enumerate(args.sizes):
        for concentration in (1.0, 0.05):
            seeds = range(args.seed + 1000 * i, args.seed + 1000 * i + args.mdps)
            mdp = occ.tuning.stack(
                [occ.LayeredMDP.random(*size, seed=x, concentration=concentration) for x in seeds]
            )
            generator = torch.Generator().manual_seed(args.seed + i)
            for statement in survey(mdp, generator):
                found.setdefault(statement.label, []).append(statement)
    return [summarize(statements) for statements in found.values()]


def draw_tightness(ratios: Mapping[str, list[float]], mdps: int) -> Figure:
    """left / right of every inequality, one dot per instance; 1 is tight."""
    order = sorted(ratios, key=lambda label: max(ratios[label]))
    figure = common.new_figure(9.4, 0.27 * len(order) + 1.5)
    axes = figure.subplots()
    jitter = np.random.default_rng(0)
    for row, label in enumerate(order):
        values = np.sort(np.clip(ratios[label], 1e-4, None))
        shown = values[np.linspace(0, len(values) - 1, min(len(values), 800)).astype(int)]
        heights = row + jitter.uniform(-0.28, 0.28, len(shown))
        axes.scatter(shown, heights, s=5, color=BLUE, alpha=0.16, linewidths=0)
        axes.scatter([np.median(values)], [row], s=26, marker="|", color=BLACK, zorder=3)
        axes.scatter([values[-1]], [row], s=20, color=RED, zorder=4, linewidths=0)
    axes.axvline(1, color=RED, linewidth=0.9)
    label = "left side / right side (smaller or negative ones at the edge)"
    limits = {"xlim": (0.9e-4, 1.25), "ylim": (-0.7, len(order) - 0.3)}
    common.tidy(axes, xscale="log", xlabel=label, **limits)
    axes.set_yticks(range(len(order)), order, fontsize=8)
    axes.tick_params(axis="y", length=0)
    what = "every instance, median (bar) and tightest (large dot)"
    axes.set_title(f"How tight the statements are on {mdps} random MDPs: {what}", fontsize=11)
    return figure


def main(args: Args) -> Path:
    """Play, evaluate, draw, print."""
    directory = common.begin("theory", args, args.seed)
    mdp, _ = args.problem()
    size = f"{args.episodes:,} episodes, {args.seeds} seeds"
    print(f"alg:main_alg with the paper's parameters, {size}; {common.machine()}\n", flush=True)
    games = {
        place: play(args, losses, directory / place) for place, losses in environments(args).items()
    }
    add_stochastic_bound(args, games[STOCHASTIC])
    rows = [row for place, curves in games.items() for row in run_rows(place, curves)]
    common.write_csv(directory / "runs.csv", rows)
    common.write_figure(directory / "theory.png", draw_runs(games, mdp))

    def at_end(curves: dict[str, Tensor], name: str) -> str:
        return f"{float(curves[name][:, -1].mean()):,.0f}" if name in curves else ""

    lines = [
        [words, name, *(at_end(curves, name) for curves in games.values())]
        for name, words in TERMS.items()
    ]
    runs = common.table(["term or bound at T", "theory/*", *games], lines, left=(0, 1))
    print(f"{runs}\n\ntilde q_t / q_t over all checkpoints, seeds and pairs", end=" ")
    print("(lem:smooth_update: [0.5, 2]):")
    for place, curves in games.items():
        low, high = curves["smoothness_min"].min(), curves["smoothness_max"].max()
        print(f"  {place} [{float(low):.4f}, {float(high):.4f}]\n", flush=True)

    summaries, count = evaluate(args), 2 * args.mdps * len(args.sizes)
    header = ["label", "instances", "left", "", "right", "slack", "left/right", ""]
    statements = common.table(header, [summary.cells() for summary in summaries], left=(0, 3, 7))
    broken = [summary.label for summary in summaries if summary.violations]
    held = f"{len(summaries) - len(broken)} of {len(summaries)} statements"
    verdict = f"{held} hold in every instance." + "".join(f" FAILS: {x}." for x in broken)
    print(f"Every statement on {count} random MDPs, half of them nearly deterministic; both sides")
    print(f"where they are closest:\n\n{statements}\n\n{verdict}")
    common.write_csv(directory / "statements.csv", [summary.row() for summary in summaries])
    ratios = {x.label: x.ratios for x in summaries if x.ratios}
    common.write_figure(directory / "tightness.png", draw_tightness(ratios, count))
    common.write_text(directory / "report.txt", f"{runs}\n\n{statements}\n\n{verdict}")
    names = "theory.png, tightness.png, runs.csv, statements.csv, report.txt"
    print(f"\nwritten to {directory}: {names}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
