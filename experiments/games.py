"""What the experiments that play games share: a problem with known gaps, playing many games at once, and how curves are drawn."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, seconds
from experiments.growth import Growth, late, slope
from torch_occ._support.files import write_atomically
from torch_occ.game.figures import COLOURS, plot_references, plot_regret


def loss_with_gap(mdp: occ.LayeredMDP, gap: float, seed: int, shaping: float = 0.1) -> Tensor:
    """Mean losses `(S, A)` in which every suboptimal action has exactly this gap, so that bounds can be worked out by hand.

    One action a state is cheaper by the gap; then a random potential v(s) - E v(s') is added, which moves losses between layers and
    changes no gap, so that a learner which does not plan ahead is misled.
    """
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(mdp.num_actions, (mdp.num_states, 1), generator=generator)
    potential = shaping * (2 * torch.rand(mdp.num_states, dtype=mdp.dtype, generator=generator) - 1)
    suboptimal = (torch.arange(mdp.num_actions) != best).to(mdp.dtype)
    return 0.5 - gap / 2 + gap * suboptimal + occ.flow_adjoint(mdp, potential)


# -- playing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Game:
    """One learner in one environment."""

    environment: str
    name: str
    learner: occ.Learner
    losses: occ.LossProcess
    pictures: bool = False  # heat maps of q in TensorBoard, which take longer to draw than a short game to play


@dataclass(frozen=True)
class Settings:
    """How games are played."""

    episodes: int
    seeds: int
    processes: int = 2
    tensorboard: bool = True
    first_seed: int = 1


Histories = dict[tuple[str, str], occ.History]  # by environment and learner


def play_all(games: Sequence[Game], settings: Settings, directory: Path) -> Histories:
    """Play all games, several at a time. Each leaves its history and its TensorBoard log in `<directory>/<environment>/<learner>/`."""
    found: Histories = {}
    width = max(len(game.environment) + len(game.name) for game in games) + 2

    def done(game: Game, history: occ.History) -> None:
        found[game.environment, game.name] = history
        regret = history.regret[:, -1]
        label = f"{game.environment}, {game.name}".ljust(width)
        print(f"  {label}  regret {regret.mean():9.1f}   {seconds(float(history.wall_time[-1])):>7}", flush=True)

    print(f"{len(games)} games of {settings.episodes:,} episodes, {settings.seeds} seeds each; {machine()}", flush=True)
    if settings.processes < 2:
        for game in games:
            done(game, play(game, settings, directory))
    else:
        # Fresh interpreters: a forked one would inherit torch's locked threads.
        with ProcessPoolExecutor(settings.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(play, game, settings, directory): game for game in games}
            for future in as_completed(futures):
                done(futures[future], future.result())
    return {(game.environment, game.name): found[game.environment, game.name] for game in games}


def play(game: Game, settings: Settings, directory: Path) -> occ.History:
    """Play one game on one thread."""
    torch.set_num_threads(1)
    place = directory / slug(game.environment) / slug(game.name)
    callbacks = [occ.TensorBoard(place, images_per_decade=int(game.pictures))] if settings.tensorboard else []
    history = occ.simulate(
        game.learner.mdp,
        game.learner,
        game.losses,
        settings.episodes,
        range(settings.first_seed, settings.first_seed + settings.seeds),
        callbacks=callbacks,
        config={"environment": game.environment, "learner": game.name, **asdict(settings)},
    )
    history.save(place / "history.npz")
    return history


def slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^A-Za-z0-9.=]+", "-", name.replace("β", "beta").replace(" = ", "=")).strip("-")


def write_configuration(directory: Path, args: Any) -> None:
    """The arguments of the script as JSON."""
    write_text(directory / "config.json", json.dumps(asdict(args), indent=2, default=str))


def write_text(path: Path, text: str) -> None:
    """A text file, atomically."""
    write_atomically(path, lambda file: file.write(f"{text}\n".encode()))


# -- reporting ------------------------------------------------------------------------------------------------------------

GROWTH_HEADER = ("environment", "learner", "regret at T", "d log R / d log T", "d R / d log T", "log T fits better")


def growth_cells(environment: str, name: str, growth: Growth) -> list[str]:
    """One line of the table of fits."""
    return [environment, name, growth.final.text(1), growth.exponent.text(), growth.per_log.text(1), f"{growth.log_share:.0%}"]


def growth_row(environment: str, name: str, growth: Growth) -> dict[str, Any]:
    """The same for a CSV file."""
    row: dict[str, Any] = {"environment": environment, "learner": name}
    for field in ("final", "exponent", "per_log"):
        fit = getattr(growth, field)
        row |= {field: fit.value, f"{field}_lower": fit.lower, f"{field}_upper": fit.upper}
    return row | {"log_share": growth.log_share}


def draw_panels(histories: Histories, environments: Sequence[str], anchor: str, title: str, columns: int = 2) -> Any:
    """Regret over episodes, a doubly logarithmic panel an environment; log T and sqrt T start on the learner `anchor`, at a tenth of T."""
    from matplotlib.figure import Figure

    rows = -(-len(environments) // columns)
    figure = Figure(figsize=(4.9 * columns, 3.5 * rows + 0.9), layout="constrained")
    fill_panels(figure, figure.subplots(rows, columns, squeeze=False).ravel(), histories, environments, anchor)
    figure.suptitle(title)
    return figure


def fill_panels(figure: Any, panels: Any, histories: Histories, environments: Sequence[str], anchor: str) -> None:
    """Those panels, on axes that are there already, and their legend below the figure."""
    names = list(dict.fromkeys(name for _, name in histories))
    for axes, environment in zip(panels, environments, strict=True):
        axes.set(xscale="log", yscale="log", title=environment, xlabel="episodes T", ylabel="pseudo-regret")
        top = 0.0
        for i, name in enumerate(names):
            history = histories[environment, name]
            plot_regret(axes, history, label=name, colour=COLOURS[i % len(COLOURS)])
            axes.lines[-1].set_linewidth(2.4 if name == anchor else 1.3)
            top = max(top, float(history.regret.mean(0).max()))
        history = histories[environment, anchor]
        mean, start = history.regret.mean(0), int((history.episodes < history.episodes[-1] / 10).sum())
        bottom = float(mean.where((history.episodes >= 3) & (mean > 0), torch.inf).min())
        if float(mean[start]) > 0:
            plot_references(axes, float(history.episodes[start]), float(mean[start]), float(history.episodes[-1]))
        axes.set(xlim=(3, float(history.episodes[-1])), ylim=(min(bottom, top / 30) / 2, 2 * top))
        tidy(axes)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)


def draw_growth(axes: Any, curves: dict[str, occ.History], scale: Literal["log", "sqrt"], window: float, colours: Sequence[str]) -> None:
    """Regret over T on an axis on which log T (or sqrt T) is straight, with the best a + b log T and a + b sqrt T on the last part.

    Both are fitted to the checkpoints from `window` * T on and drawn from a tenth of that on: the right one keeps to the curve there.
    """
    if scale == "log":
        axes.set_xscale("log")
    else:
        axes.set_xscale("function", functions=(lambda t: np.sqrt(np.maximum(t, 0)), np.square))
    end = max(float(history.episodes[-1]) for history in curves.values())
    for colour, (name, history) in zip(colours, curves.items(), strict=True):
        plot_regret(axes, history, label=name, colour=colour)
        axes.lines[-1].set_linewidth(2.4)
        t, y = late(history.episodes, history.regret.mean(0, keepdim=True), window)
        x = torch.from_numpy(np.geomspace(max(window * end / 10, 2), end, 200))
        for function, style in ((torch.log, ":"), (torch.sqrt, "-.")):
            line = y.mean() + slope(function(t), y) * (function(x) - function(t).mean())
            axes.plot(x, line, color="0.25" if style == ":" else "0.5", linestyle=style, linewidth=1.3)
    if scale == "log":
        axes.set_xlim(max(end / 1e4, 1), end)
    else:
        axes.set_xlim(0, end)
        axes.set_xticks(
            [end * share for share in (0, 0.01, 0.1, 0.25, 0.5, 1)], [f"{end * share:,.0f}" for share in (0, 0.01, 0.1, 0.25, 0.5, 1)]
        )
    axes.set(ylim=(0, None), xlabel="episodes T", ylabel="pseudo-regret")
    tidy(axes)


def tidy(axes: Any) -> None:
    """A faint grid, and only the spines that carry numbers."""
    axes.grid(visible=True, which="major", color="0.9", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
