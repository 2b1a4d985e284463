"""Playing many games at once, on a problem with known gaps; tables of how regret grows."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_occ as occ
from experiments.common import machine, seconds
from experiments.growth import Growth
from torch_occ._support.files import write_atomically


def loss_with_gap(mdp: occ.LayeredMDP, gap: float, seed: int, shaping: float = 0.1) -> Tensor:
    """Mean losses `(S, A)` in which every suboptimal action has exactly this gap.

    In each state one action is cheaper by the gap. A random potential v(s) - E v(s') is added. It
    moves losses between layers and changes no gap, so it misleads a learner that does not plan
    ahead. With equal gaps, bounds can be worked out by hand.
    """
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(mdp.num_actions, (mdp.num_states, 1), generator=generator)
    potential = shaping * (2 * torch.rand(mdp.num_states, dtype=mdp.dtype, generator=generator) - 1)
    suboptimal = (torch.arange(mdp.num_actions) != best).to(mdp.dtype)
    return 0.5 - gap / 2 + gap * suboptimal + occ.flow_adjoint(mdp, potential)


# -- playing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Game:
    """One learner in one environment."""

    environment: str
    name: str
    learner: occ.Learner
    losses: occ.LossProcess
    pictures: bool = False  # heat maps of q in TensorBoard; drawing them takes longer than playing
    mdp: occ.LayeredMDP | None = None  # the true one, if the learner's is blind


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
    """Play all games, several at a time.

    Each game leaves its history and its TensorBoard log in `<directory>/<environment>/<learner>/`.
    """
    found: Histories = {}
    width = max(len(game.environment) + len(game.name) for game in games) + 2

    def done(game: Game, history: occ.History) -> None:
        found[game.environment, game.name] = history
        regret = history.regret[:, -1]
        label = f"{game.environment}, {game.name}".ljust(width)
        took = seconds(float(history.wall_time[-1]))
        print(f"  {label}  regret {regret.mean():9.1f}   {took:>7}", flush=True)

    size = f"{len(games)} games of {settings.episodes:,} episodes, {settings.seeds} seeds each"
    print(f"{size}; {machine()}", flush=True)
    if settings.processes < 2:
        for game in games:
            done(game, play(game, settings, directory))
    else:
        # Fresh interpreters: a forked one would inherit torch's locked threads.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(settings.processes, mp_context=spawn) as pool:
            futures = {pool.submit(play, game, settings, directory): game for game in games}
            for future in as_completed(futures):
                done(futures[future], future.result())
    return {(game.environment, game.name): found[game.environment, game.name] for game in games}


def play(game: Game, settings: Settings, directory: Path) -> occ.History:
    """Play one game on one thread."""
    torch.set_num_threads(1)
    place = directory / slug(game.environment) / slug(game.name)
    board = occ.TensorBoard(place, images_per_decade=int(game.pictures))
    history = occ.simulate(
        game.learner.mdp if game.mdp is None else game.mdp,
        game.learner,
        game.losses,
        settings.episodes,
        range(settings.first_seed, settings.first_seed + settings.seeds),
        callbacks=[board] if settings.tensorboard else [],
        config={"environment": game.environment, "learner": game.name},
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


# -- reporting ------------------------------------------------------------------------------------

GROWTH_HEADER = (
    "environment",
    "learner",
    "regret at T",
    "d log R / d log T",
    "d R / d log T",
    "log T fits better",
)


def growth_cells(environment: str, name: str, growth: Growth) -> list[str]:
    """One line of the table of fits."""
    fits = [growth.final.text(1), growth.exponent.text(), growth.per_log.text(1)]
    return [environment, name, *fits, f"{growth.log_share:.0%}"]


def growth_row(environment: str, name: str, growth: Growth) -> dict[str, Any]:
    """The same for a CSV file."""
    row: dict[str, Any] = {"environment": environment, "learner": name}
    for field in ("final", "exponent", "per_log"):
        fit = getattr(growth, field)
        row |= {field: fit.value, f"{field}_lower": fit.lower, f"{field}_upper": fit.upper}
    return row | {"log_share": growth.log_share}
