"""The frontier of experiments/both_worlds.py: gain in one world over cost in the other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import torch_occ as occ
from experiments.both_worlds_figures import draw_frontier
from experiments.both_worlds_play import Contestant, Ratio, entropy, regrets
from experiments.common import table, write_csv, write_figure
from experiments.tuning_worlds import GREEDY, STOCHASTIC

if TYPE_CHECKING:
    from experiments.both_worlds import Args


def frontier(args: Args, directory: Path, tuned: occ.Regularizer) -> list[str]:
    """Regret in both worlds over the learning rate, relative to the paper's, on training MDPs."""
    plain, beta = occ.ImportanceWeighted(), 1.0
    mdp, _ = args.family.problem(args.seed - 1)
    paper = Contestant(occ.jin_luo(mdp), plain)
    families = {
        "conditional entropy, with a baseline": lambda gamma: Contestant(
            entropy(beta, gamma), args.baseline
        ),
        "conditional entropy": lambda gamma: Contestant(entropy(beta, gamma), plain),
        "the paper's hybrid, with a baseline": lambda gamma: Contestant(
            occ.jin_luo(mdp, 0.2, beta, gamma), args.baseline
        ),
    }

    world, seeds = args.family.stochastic(args.training), range(1, args.frontier_seeds + 1)
    rows: list[dict[str, Any]] = []

    def played(who: Contestant, place: str) -> list[np.ndarray]:
        return [
            regrets(args.family, args.cache, who, number, place, seeds) for number in args.training
        ]

    def note(name: str, gamma: float | None, player: Contestant) -> None:
        mine = played(player, STOCHASTIC)
        gained = Ratio.mean(list(map(Ratio.of, played(paper, STOCHASTIC), mine)))
        paid = Ratio.mean(list(map(Ratio.of, played(player, GREEDY), played(paper, GREEDY))))
        with torch.no_grad():
            path = occ.forecast(
                world.mdp,
                player.regularizer,
                world.losses,
                args.episodes,
                estimator=player.estimator,
            )
        row: dict[str, Any] = {"family": name, "gamma": gamma}
        row |= {"stochastic": gained.value, "stochastic, standard error": gained.error}
        row |= {"adversary": paid.value, "adversary, standard error": paid.error}
        row["noise share"] = float(path.noise_share.max())
        row["forecast error"] = float(path.final.mean()) / float(np.mean(mine)) - 1
        rows.append(row)
        print(f"  {name}, {gamma}: {gained} times less, {paid}", flush=True)

    for name, contestant in families.items():
        for gamma in args.frontier:
            note(name, gamma, contestant(gamma))
    note("tuned", None, Contestant(tuned, args.baseline))
    write_csv(directory / "frontier.csv", rows)
    figure = draw_frontier(rows, args.episodes, len(args.training), args.frontier_seeds)
    write_figure(directory / "frontier.png", figure)
    cells = []
    for row in rows:
        cell = [row["family"], f"{row['gamma']:g}" if row["gamma"] else ""]
        for key in ("stochastic", "adversary"):
            cell.append(str(Ratio(row[key], row[f"{key}, standard error"])))
        cells.append([*cell, f"{row['forecast error']:+.1%}", f"{row['noise share']:.2f}"])
    header = ["", "γ", "stochastic: times less regret than the paper's"]
    header += ["adversary: regret relative to the paper's"]
    header += ["error of the forecast, stochastic", "its share of noise, at most"]
    which = f"training MDPs {args.training[0]} to {args.training[-1]}, {args.frontier_seeds} seeds"
    return [f"means over {which}, ± 95 %:", table(header, cells)]
