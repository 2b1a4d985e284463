"""Gradients of the regret through the run itself: bias, standard error and cost of each estimator against T, and where each stops being
usable.

The reference is a central difference of simulated regret with common random numbers, on seeds of its own. The pathwise estimator holds the
sampled actions fixed and is biased; adding the score makes it unbiased; both explode with T, the sooner the less the learner is
regularized. The gradient of the forecast stands beside them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from torch_occ.game.figures import COLOURS

REFERENCE, PATHWISE, UNBIASED, FORECAST = "finite differences", "pathwise", "pathwise + score", "forecast"
STYLES = {
    REFERENCE: (COLOURS[6], "-", "o"),
    PATHWISE: (COLOURS[1], "--", "s"),
    UNBIASED: (COLOURS[0], "-", "D"),
    FORECAST: (COLOURS[2], ":", "^"),
}

YEAR = 365 * 86400.0

#: Seeds of the reference begin here, so that its error is independent of the others'.
FAR = 1_000_000


@dataclass(frozen=True)
class Args:
    """Which runs are differentiated."""

    episodes: tuple[int, ...] = (100, 300, 1000, 3000, 10000)
    """T, each with runs of its own"""
    betas: tuple[float, ...] = (192.0, 10.0, 1.0)
    """log-barrier; the paper's is 64 L"""
    budget: int = 250_000
    """episodes to play for each T by each estimator, from which the number of seeds follows"""
    seeds: int = 10_000
    """at most"""
    step: float = 0.1
    """of the differences, in the logarithm of a parameter"""
    seed: int = 0
    """of the MDP and the losses"""
    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gamma: float = 1.0
    """eta_t = gamma / sqrt(t)"""
    shown: str = "gamma"
    """the parameter that is drawn, and by which an estimator is usable or not"""
    root: Path = Path("runs")
    """where the run's directory goes"""


class Answer(NamedTuple):
    """What an estimator says at one T."""

    gradient: Tensor  # (P,)
    error: Tensor  # (P,)
    heaviest: Tensor  # (P,), the share of one seed in the variance over all
    seconds: float  # of one core


def summarize(estimate: occ.Estimate, took: float) -> Answer:
    """The estimate at its last checkpoint."""
    return Answer(estimate.mean[-1], estimate.standard_error[-1], estimate.heaviest[-1], took)


def forecast_gradient(mdp: occ.LayeredMDP, psi: occ.Regularizer, mean: Tensor, episodes: int) -> Tensor:
    """In the logarithms of the parameters."""
    parameters = list(psi.parameters())
    found = torch.autograd.grad(occ.forecast(mdp, psi, mean, episodes).final, parameters)
    return torch.stack([g * p.detach() for g, p in zip(found, parameters, strict=True)])


def estimate(args: Args, mdp: occ.LayeredMDP, mean: Tensor, beta: float, T: int) -> tuple[dict[str, Answer], list[str], int, str]:
    """All estimators at one setting and one T; the names of the parameters, the number of seeds, and who played."""
    psi, losses = occ.jin_luo(mdp, beta=beta, gamma=args.gamma), occ.BernoulliLosses(mean)
    count = max(2, min(args.seeds, args.budget // T))
    clock = [time.process_time()]  # the processor's: others may be at work here
    run = occ.run_gradients(mdp, psi, losses, T, range(1, count + 1), checkpoints=[T])
    clock.append(time.process_time())
    reference = occ.finite_differences(mdp, psi, losses, T, range(FAR + 1, FAR + count + 1), step=args.step, checkpoints=[T])
    clock.append(time.process_time())
    predicted = forecast_gradient(mdp, psi, mean, T)
    clock.append(time.process_time())
    took, nothing = np.diff(clock).tolist(), torch.zeros_like(predicted)
    answers = {
        REFERENCE: summarize(reference, took[1]),
        PATHWISE: summarize(run.pathwise, took[0]),
        UNBIASED: summarize(run.unbiased, took[0]),
        FORECAST: Answer(predicted, nothing, nothing, took[2]),
    }
    return answers, [name.rpartition(".")[2] for name in run.names], count, run.backend


def rows_of(answers: dict[str, Answer], names: list[str], beta: float, T: int, count: int) -> list[dict[str, Any]]:
    """One row an estimator and parameter, with its bias and its cost."""
    reference, rows = answers[REFERENCE], []
    for estimator, answer in answers.items():
        for i, name in enumerate(names):
            truth, own = float(reference.gradient[i]), float(answer.gradient[i])
            error, theirs = float(answer.error[i]), float(reference.error[i])
            rows.append(
                {
                    "beta": beta,
                    "episodes": T,
                    "estimator": estimator,
                    "parameter": name,
                    "seeds": 0 if estimator == FORECAST else count,
                    "gradient": own,
                    "standard_error": error,
                    "reference": truth,
                    "reference_error": theirs,
                    "relative_bias": own / truth - 1,
                    "distance": 0.0 if estimator == REFERENCE else abs(own - truth) / (error**2 + theirs**2) ** 0.5,
                    "heaviest_seed": float(answer.heaviest[i]),
                    "seconds": answer.seconds,
                    # A standard error falls with the square root of the seeds.
                    "seconds_to_10_percent": answer.seconds * max((error / (0.1 * abs(truth))) ** 2, 1 / max(count, 1)),
                }
            )
    return rows


def verdicts(rows: list[dict[str, Any]], shown: str) -> list[str]:
    """What the numbers say, decided by them alone."""
    lines = []
    for key in dict.fromkeys((row["beta"], row["episodes"]) for row in rows):
        for estimator in (PATHWISE, UNBIASED, FORECAST):
            kept = {row["parameter"]: row for row in rows if (row["beta"], row["episodes"], row["estimator"]) == (*key, estimator)}
            own, apart = kept[shown], max(row["distance"] for row in kept.values())
            noise = own["standard_error"] / abs(own["reference"])
            if not np.isfinite(apart):
                note = "not a number"
            elif noise > 1:
                note = f"not usable, its standard error is {noise:.3g} times the gradient"
            elif apart > 3:
                note = f"biased, by {own['relative_bias']:+.1%}; up to {apart:.1f} standard errors away from the differences"
            else:
                note = f"within three standard errors of the differences (up to {apart:.1f})"
                note += f"; its own is {noise:.1%} of the gradient" if own["seeds"] else ""
            note += f"; one seed makes {own['heaviest_seed']:.0%} of its variance" if own["heaviest_seed"] > 0.25 else ""
            lines.append(f"beta = {key[0]:g}, T = {key[1]}, {estimator}: {note}")
    return lines


def tabulate(rows: list[dict[str, Any]], shown: str) -> str:
    """A row for every setting, T and estimator."""
    names, cells = list(dict.fromkeys(row["parameter"] for row in rows)), []
    for key in dict.fromkeys((row["beta"], row["episodes"], row["estimator"]) for row in rows):
        kept = {row["parameter"]: row for row in rows if (row["beta"], row["episodes"], row["estimator"]) == key}
        own = kept[shown]
        found = [f"{kept[name]['gradient']:.4g}" + (f" ± {kept[name]['standard_error']:.2g}" if own["seeds"] else "") for name in names]
        price = "" if not own["seeds"] else seconds(own["seconds_to_10_percent"]) if own["seconds_to_10_percent"] < YEAR else "> a year"
        cells.append([f"{key[0]:g}", str(key[1]), key[2], str(own["seeds"] or ""), *found, seconds(own["seconds"]), price])
    header = ["beta", "T", "estimator", "seeds", *(f"d / d log {name}" for name in names), "core time", f"for 10 % in {shown}"]
    return table(header, cells, left=(2,))


def draw(rows: list[dict[str, Any]], shown: str) -> Any:
    """A column for every setting: above, the gradient over its reference; below, what 1,000 seeds leave of uncertainty."""
    from matplotlib.figure import Figure

    rows, low, high = [row for row in rows if row["parameter"] == shown], -1.0, 4.0
    betas = list(dict.fromkeys(row["beta"] for row in rows))
    figure = Figure(figsize=(3.4 * len(betas) + 0.8, 6.2), layout="constrained")
    grid = figure.subplots(2, len(betas), squeeze=False, sharex=True, sharey="row")
    for beta, (above, below) in zip(betas, grid.T, strict=True):
        for i, (estimator, (colour, style, marker)) in enumerate(STYLES.items()):
            kept = [row for row in rows if row["beta"] == beta and row["estimator"] == estimator]
            t, unit = np.array([row["episodes"] for row in kept]), np.array([row["reference"] for row in kept])
            values = np.array([row["gradient"] for row in kept]) / unit
            errors = np.array([row["standard_error"] for row in kept]) / abs(unit)
            look = {"color": colour, "linestyle": style, "linewidth": 1.3, "marker": marker, "markersize": 4, "label": estimator}
            beside = t * 1.08 ** (i - 1.5)
            usable = errors < 1
            above.errorbar(beside[usable], values[usable], yerr=1.96 * errors[usable], capsize=2.5, elinewidth=1, **look)
            if not usable.all():  # pale, and not connected: noise
                pale = {**look, "linestyle": "none", "alpha": 0.3, "label": None}
                above.errorbar(beside[~usable], values[~usable], yerr=1.96 * errors[~usable], elinewidth=1, **pale)
            for edge, outside in ((low, values < low), (high, values > high)):  # arrows for what is not in the picture
                for x, solid in zip(beside[outside], usable[outside], strict=True):
                    arrow = above.plot(x, edge, "v" if edge < 0 else "^", color=colour, alpha=1 if solid else 0.3, clip_on=False)
                    arrow[0].set_in_layout(False)
            if estimator != FORECAST:
                below.plot(t, errors * np.sqrt(np.array([row["seeds"] for row in kept]) / 1000), **look)
        above.axhline(1, color="0.75", linewidth=0.8, zorder=0)
        above.set(title=f"β = {beta:g}", ylim=(low, high))
        below.axhspan(1, 1e30, color="0.94", zorder=0, linewidth=0)
        below.set(xscale="log", yscale="log", xlabel="episodes T", ylim=(1e-3, 1e8))
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
    grid[0, 0].set_ylabel("estimate / reference (95 %)")
    grid[1, 0].set_ylabel("standard error of 1,000 seeds\n/ |gradient|")
    grid[1, 0].text(0.04, 0.95, "error larger than the gradient", transform=grid[1, 0].transAxes, fontsize="small", color="0.35", va="top")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(STYLES), frameon=False)
    figure.suptitle(f"The gradient of the regret in log {shown}, through the run", fontsize="medium")
    return figure


def main(args: Args) -> Path:
    """Estimate, compare, draw."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "meta_gradients", args.seed)
    write_configuration(directory, args)
    if args.shown not in ("alpha", "gamma", "beta"):
        raise ValueError(f"shown: expected alpha, gamma or beta, got {args.shown}")
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=torch.Generator().manual_seed(args.seed))
    estimate(replace(args, seeds=2), mdp, mean, 1.0, 1)  # compiled before anything is timed
    rows: list[dict[str, Any]] = []
    for beta in args.betas:
        for T in args.episodes:
            answers, names, count, backend = estimate(args, mdp, mean, beta, T)
            rows += rows_of(answers, names, beta, T, count)
            spent = seconds(sum(answer.seconds for answer in answers.values()))
            print(f"beta = {beta:g}, T = {T}: {count} seeds, played by {backend}, {spent}", flush=True)
            write_csv(directory / "gradients.csv", rows)
    write_figure(directory / "gradients.png", draw(rows, args.shown))
    text = "\n".join([tabulate(rows, args.shown), "", *verdicts(rows, args.shown), "", machine()])
    write_text(directory / "report.txt", text)
    print(f"\n{text}\n\nwritten to {directory}: gradients.png, gradients.csv, report.txt")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
