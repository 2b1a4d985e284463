"""The figures of the experiment about tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import torch_occ as occ
from experiments.tuning_worlds import Family, Setting
from torch_occ.game.figures import COLOURS
from torch_occ.game.history import band

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Rows = Sequence[dict[str, Any]]


def setting_of(tuned: occ.Tuned) -> Setting:
    """alpha, beta and gamma of what was tuned."""
    by_name = {name.rpartition(".")[2]: value for name, value in tuned.parameters.items()}
    return by_name["alpha"], by_name["beta"], by_name["gamma"]


def draw_accuracy(
    family: Family,
    rows: Rows,
    number: int,
    curves: dict[tuple[float, float], occ.History],
    particles: int,
) -> Figure:
    """Left: forecast over simulated regret. Right: `curves` of one MDP, by (beta, gamma)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = np.array(
        [0.8 * min(row["simulated"] for row in rows), 1.25 * max(row["simulated"] for row in rows)]
    )
    left.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", label="within 10 %")
    left.plot(ends, ends, color="0.5", linewidth=0.8)
    for method, key, colour, marker in (
        ("mean path", "mean_path", COLOURS[0], "o"),
        ("leaping", "leaping", COLOURS[1], "^"),
    ):
        for taken in (True, False):
            kept = [row for row in rows if (row["method"] == method) == taken]
            style: dict[str, Any] = (
                {"color": colour}
                if taken
                else {"facecolors": "none", "edgecolors": colour, "alpha": 0.45}
            )
            label = f"{method}, {'chosen by the rule' if taken else 'not chosen'}"
            left.scatter(
                [row["simulated"] for row in kept],
                [row[key] for row in kept],
                s=22,
                marker=marker,
                label=label,
                linewidths=0.8,
                **style,
            )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="simulated regret",
        ylabel="forecast regret",
        title=f"{len(rows)} settings, T = {family.episodes:,}",
    )
    left.legend(frameon=False, fontsize="small")
    mdp, mean = family.problem(number)
    for ((beta, gamma), history), colour in zip(curves.items(), COLOURS, strict=False):
        mean_curve, lower, upper = (x.numpy() for x in band(history.regret))
        t = history.episodes.numpy()
        right.fill_between(t, np.maximum(lower, 0.1), upper, color=colour, alpha=0.25, linewidth=0)
        right.plot(t, mean_curve, color=colour, linewidth=1.0, label=f"β = {beta:g}, γ = {gamma:g}")
        psi = occ.jin_luo(mdp, family.paper[0], beta, gamma)
        with torch.no_grad():
            path = occ.forecast(mdp, psi, mean, family.episodes)
        leaps = occ.leap(mdp, psi, mean, family.episodes, particles=particles, seed=number)
        right.plot(path.episodes, path.regret, color=colour, linestyle="--", linewidth=1.3)
        right.plot(leaps.episodes, leaps.mean, color=colour, linestyle=":", linewidth=1.6)
    right.plot([], [], color="0.3", linestyle="--", label="mean path")
    right.plot([], [], color="0.3", linestyle=":", label="leaping")
    right.set(
        xscale="log",
        yscale="log",
        xlim=(3, family.episodes),
        xlabel="episodes",
        ylabel="regret",
        title=f"MDP {number}: simulated (95 % band) and forecast",
    )
    right.set_ylim(bottom=1)
    right.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.grid(visible=True, which="major", color="0.92", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_landscape(
    objective: occ.ForecastObjective, tuned: occ.Tuned, refined: occ.Refined
) -> Figure:
    """The forecast over (beta, gamma) at the alpha found, the tuner's paths, and all trials.

    A point that was tried has the colour of its trial.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    (world,) = objective.worlds
    betas, gammas = (
        torch.logspace(*ends, dtype=torch.float64) for ends in ((-2, 2.5, 25), (-0.9, 0.9, 17))
    )
    alpha, beta, gamma = setting_of(refined.tuned)
    ratios, shares = [], []
    for row in gammas:  # one after the other, since a batch of all of them would take much memory
        psi = occ.jin_luo(world.mdp, alpha, betas[:, None], row.expand(len(betas), 1))
        with torch.no_grad():
            path = occ.forecast(world.mdp, psi, world.losses, objective.episodes)
            ratios.append(objective.combine([path.final], [path.certified]).value.exp())
            shares.append(path.noise_share.mean(-1))
    values, share = torch.stack(ratios), torch.stack(shares)
    tried = refined.values.exp()
    levels = np.geomspace(min(float(values.min()), float(tried.min())), float(values.max()), 25)
    shading: dict[str, Any] = {"norm": LogNorm(levels[0], levels[-1]), "cmap": "viridis_r"}
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    shades = axes.contourf(betas, gammas, values, levels=levels, **shading)
    axes.contourf(
        betas, gammas, share, levels=[1 / 3, 1.0], colors="none", hatches=["//"]
    ).set_edgecolor("0.5")
    axes.contour(
        betas, gammas, share, levels=[1 / 3], colors="white", linewidths=1.2, linestyles="--"
    )
    order = {name.rpartition(".")[2]: i for i, name in enumerate(tuned.names)}
    for start in range(tuned.path.shape[1]):
        walk = tuned.path[:, start]
        axes.plot(
            walk[:, order["beta"]],
            walk[:, order["gamma"]],
            color="#D55E00",
            linewidth=1.2,
            marker=".",
            markersize=3,
        )
        axes.plot(
            *walk[0, [order["beta"], order["gamma"]]],
            color="#D55E00",
            marker="o",
            markerfacecolor="white",
        )
    x, y = refined.points[:, order["beta"]], refined.points[:, order["gamma"]]
    axes.scatter(
        x,
        y,
        c=tried,
        s=30,
        edgecolors="black",
        linewidths=0.7,
        zorder=3,
        label="tried, in the colour of the trial",
        **shading,
    )
    axes.plot(
        [beta],
        [gamma],
        color="#E69F00",
        marker="*",
        markersize=16,
        markeredgecolor="black",
        linestyle="none",
        zorder=4,
        label="result",
    )
    axes.legend(frameon=True, fontsize="small", loc="lower left")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="β",
        ylabel="γ",
        title=f"forecast at T = {objective.episodes:,}, α = {alpha:.2g} (hatched: not reliable)",
    )
    axes.set(xlim=(float(betas[0]), float(betas[-1])), ylim=(float(gammas[0]), float(gammas[-1])))
    axes.set_yticks((0.25, 0.5, 1, 2, 4), labels=("0.25", "0.5", "1", "2", "4"), minor=False)
    axes.set_yticks((), minor=True)
    bar = figure.colorbar(shades, ax=axes, label="regret, relative to the paper's constants")
    ticks = [x for x in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0) if levels[0] <= x <= levels[-1]]
    bar.set_ticks(ticks, labels=[f"{x:g}" for x in ticks])
    return figure


def draw_rivals(family: Family, rows: Rows, seeds: int) -> Figure:
    """Left: mean regret on held-out MDPs over the time of the search. Right: each MDP.

    On the right, regret is relative to that of the tuned setting.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = [key for key in rows[0] if key.startswith("MDP ") and "," not in key]
    tuned = next(row for row in rows if row["setting"].startswith("tuned"))
    found = [row for row in rows if row["seconds"] > 0]
    for row, colour in zip(found, COLOURS[1:], strict=False):
        style: dict[str, Any] = {
            "color": colour,
            "marker": "*" if row is tuned else "o",
            "markersize": 13 if row is tuned else 7,
        }
        left.errorbar(
            [row["seconds"]],
            [row["regret"]],
            [1.96 * row["standard_error"]],
            label=row["setting"],
            capsize=3,
            linestyle="none",
            **style,
        )
        ratios = [row[key] / tuned[key] for key in numbers]
        errors = [1.96 * row[f"{key}, standard error"] / tuned[key] for key in numbers]
        x = np.arange(len(numbers)) + 0.12 * (found.index(row) - (len(found) - 1) / 2)
        right.errorbar(x, ratios, errors, capsize=2, linestyle="none", **style)
    right.axhspan(0.95, 1.05, color="0.92", zorder=0)
    right.axhline(1.0, color="0.5", linewidth=0.8, zorder=0)
    right.set_xticks(range(len(numbers)), numbers)
    left.set(
        xscale="log",
        xlabel="processor time spent on the search, s",
        ylabel=f"regret at T = {family.episodes:,}",
        title="mean over held-out MDPs",
    )
    left.set_ylim(bottom=0)
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    left.xaxis.set_minor_formatter("{x:g}")
    right.set(
        ylabel="regret relative to the tuned setting",
        title=f"each held-out MDP, {seeds} seeds, 95 % (grey: within 5 %)",
    )
    left.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.grid(visible=True, which="major", color="0.94", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
