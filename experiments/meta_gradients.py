"""Gradients of the regret through the run itself: bias, standard error and cost of each estimator against T, and where each stops being
usable.

The reference is a central difference of simulated regret with common random numbers. The pathwise estimator holds the sampled actions
fixed and is biased; adding the score makes it unbiased; both explode with T. The gradient of the forecast stands beside them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments.common import run_directory, seconds, table, write_csv, write_figure
from experiments.games import write_configuration, write_text
from torch_occ.figures import COLOURS

REFERENCE, PATHWISE, UNBIASED, FORECAST = "finite differences", "pathwise", "pathwise + score", "forecast"


@dataclass(frozen=True)
class Args:
    """Which run is differentiated."""

    episodes: int = 300
    """T"""
    seeds: int = 256
    """runs of the estimators"""
    reference_seeds: int = 1000
    """runs of each side of a difference"""
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
    beta: float = 10.0
    """log-barrier"""
    gamma: float = 1.0
    """eta_t = gamma / sqrt(t)"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def forecast_gradient(mdp: occ.LayeredMDP, psi: occ.Regularizer, mean: Tensor, episodes: int) -> Tensor:
    """In the logarithms of the parameters."""
    parameters = list(psi.parameters())
    found = torch.autograd.grad(occ.forecast(mdp, psi, mean, episodes).final, parameters)
    return torch.stack([g * p.detach() for g, p in zip(found, parameters, strict=True)])


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What the numbers say, decided by them alone."""
    lines = []
    for name in (PATHWISE, UNBIASED, FORECAST):
        for row in (row for row in rows if row["estimator"] == name):
            distance = abs(row["gradient"] - row["reference"])
            error = (row["standard_error"] ** 2 + row["reference_error"] ** 2) ** 0.5
            usable = row["standard_error"] < abs(row["reference"])
            note = "within three standard errors" if distance <= 3 * error else f"off by {distance / error:.1f} standard errors"
            note += "" if usable else "; its error is larger than the gradient, not usable"
            own = f"{row['gradient']:.4g} ± {row['standard_error']:.2g}"
            theirs = f"{row['reference']:.4g} ± {row['reference_error']:.2g}"
            lines.append(f"{name}, T = {row['episodes']}, d / d log {row['parameter']}: {own}, differences say {theirs}: {note}")
    return lines


def draw(rows: list[dict[str, Any]], names: list[str]) -> Any:
    """One panel a parameter for the values, relative to the reference, and one for the standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * (len(names) + 1), 3.6), layout="constrained")
    *panels, last = figure.subplots(1, len(names) + 1)
    styles = {REFERENCE: (COLOURS[6], "-"), PATHWISE: (COLOURS[1], "--"), UNBIASED: (COLOURS[0], "-"), FORECAST: (COLOURS[2], ":")}
    for name, axes in zip(names, panels, strict=True):
        for i, (estimator, (colour, style)) in enumerate(styles.items()):
            kept = [row for row in rows if row["parameter"] == name and row["estimator"] == estimator]
            t = np.array([row["episodes"] for row in kept]) * 1.06 ** (i - 1)
            errors = [1.96 * row["standard_error"] / abs(row["reference"]) for row in kept]
            values = [row["gradient"] / row["reference"] for row in kept]
            axes.errorbar(t, values, yerr=errors, color=colour, linestyle=style, marker=".", capsize=2, linewidth=1.2, label=estimator)
        axes.set(xscale="log", title=f"d regret / d log {name}, over its reference", xlabel="T", ylim=(-1, 4))
        axes.axhline(1, color="0.8", linewidth=0.8)
    for estimator in (PATHWISE, UNBIASED):
        colour, style = styles[estimator]
        kept = [row for row in rows if row["parameter"] == names[-1] and row["estimator"] == estimator]
        ratio = [row["standard_error"] / max(abs(row["reference"]), 1e-12) for row in kept]
        last.plot([row["episodes"] for row in kept], ratio, color=colour, linestyle=style, marker=".", label=estimator)
    last.axhline(1, color="0.5", linewidth=0.8)
    last.set(xscale="log", yscale="log", xlabel="T", title=f"standard error / |gradient|, {names[-1]}")
    panels[0].legend(frameon=False, fontsize="small")
    for axes in (*panels, last):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(args: Args) -> Path:
    """Estimate, compare, draw."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "meta_gradients", args.seed)
    write_configuration(directory, args)
    mdp = occ.LayeredMDP.random(args.horizon, args.width, args.actions, seed=args.seed)
    mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=torch.Generator().manual_seed(args.seed))
    psi, losses = occ.jin_luo(mdp, beta=args.beta, gamma=args.gamma), occ.BernoulliLosses(mean)
    checkpoints = [t for t in (10, 30, 100, 300, 1000, 3000, 10000) if t < args.episodes] + [args.episodes]
    clock = {}
    begun = time.monotonic()
    run = occ.run_gradients(mdp, psi, losses, args.episodes, range(1, args.seeds + 1), checkpoints=checkpoints)
    clock[PATHWISE] = clock[UNBIASED] = time.monotonic() - begun
    begun = time.monotonic()
    reference = occ.finite_differences(
        mdp, psi, losses, args.episodes, range(1, args.reference_seeds + 1), step=args.step, checkpoints=checkpoints
    )
    clock[REFERENCE] = time.monotonic() - begun
    begun = time.monotonic()
    predicted = torch.stack([forecast_gradient(mdp, psi, mean, t) for t in checkpoints])
    clock[FORECAST] = time.monotonic() - begun
    names = [name.rpartition(".")[2] for name in run.names]
    nothing = torch.zeros_like(predicted)
    answers = {
        REFERENCE: (reference.mean, reference.standard_error),
        PATHWISE: (run.pathwise.mean, run.pathwise.standard_error),
        UNBIASED: (run.unbiased.mean, run.unbiased.standard_error),
        FORECAST: (predicted, nothing),
    }
    rows = [
        {
            "estimator": estimator,
            "episodes": t,
            "parameter": name,
            "gradient": float(value[i, j]),
            "standard_error": float(error[i, j]),
            "reference": float(reference.mean[i, j]),
            "reference_error": float(reference.standard_error[i, j]),
            "seconds_for_all": clock[estimator],
        }
        for estimator, (value, error) in answers.items()
        for i, t in enumerate(checkpoints)
        for j, name in enumerate(names)
    ]
    write_csv(directory / "gradients.csv", rows)
    write_figure(directory / "gradients.png", draw(rows, names))
    by_key = {(row["estimator"], row["episodes"], row["parameter"]): row for row in rows}
    cells = []
    for t in checkpoints:
        for estimator in answers:
            found = [by_key[estimator, t, name] for name in names]
            cells.append([str(t), estimator, *(f"{row['gradient']:.3g} ± {row['standard_error']:.2g}" for row in found)])
    header = ["T", "estimator", *(f"d / d log {name}" for name in names)]
    lines = [table(header, cells, left=(1,)), "", *verdicts(rows), ""]
    lines += [f"{name}: {seconds(clock[name])} for all T" for name in (REFERENCE, PATHWISE, FORECAST)]
    lines.append(f"{int((~run.certified).sum())} of {args.seeds} runs had a step without certificate and are not numbers")
    write_text(directory / "report.txt", "\n".join(lines))
    print("\n".join(lines))
    print(f"\nwritten to {directory}: gradients.png, gradients.csv, report.txt")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
