"""Self-play in games with imperfect information: what regularizer, rate and feedback do.

With full information, FTRL with five regularizers and three rates each plays beside fictitious
play, CFR and CFR+ of OpenSpiel: the exploitability of average strategies over rounds. With bandit
feedback, six learners play Kuhn poker. Their factors are chosen beforehand on another game, Liar's
Dice with one die of two sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspiel  # type: ignore[import-not-found]
import tyro

import torch_occ as occ
from experiments import common
from torch_occ.game.history import Mean
from torch_occ.rivals import adaptive_ftrl, balanced_ftrl, ixomd

Learners = dict[str, Callable[[occ.games.Treeplex], occ.Learner]]

#: Five regularizers, and the middle of three rates: eta_t = gamma / sqrt(t), a factor of 10 apart.
PSI: dict[str, tuple[Callable[[occ.games.Treeplex], occ.Regularizer], float]] = {
    "conditional": (lambda plex: occ.ConditionalEntropy(), 1.0),
    "dilated": (occ.dilated_entropy, 1.0),
    "Shannon": (lambda plex: occ.Shannon(), 1.0),
    "Tsallis": (lambda plex: occ.Tsallis(), 1.0),
    "log-barrier": (lambda plex: occ.LogBarrier(), 300.0),
}


@dataclass(frozen=True)
class Args:
    """Which games are played, and how long."""

    games: tuple[str, ...] = ("kuhn_poker", "leduc_poker", "liars_dice(numdice=1,dice_sides=3)")
    """games of OpenSpiel, with full information"""
    rounds: int = 1000
    """with full information"""
    episodes: int = 10_000_000
    """of Kuhn poker, with bandit feedback"""
    trial: int = 100_000
    """episodes of the game on which factors are chosen"""
    factors: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    """that are tried there"""
    seeds: int = 4
    """independent runs with bandit feedback"""
    root: Path = Path("runs")
    """where the run's directory goes"""


def ftrl(name: str, rate: float, kind: Any = occ.FTRL) -> Any:
    """FTRL with a regularizer at eta_t = rate / sqrt(t)."""
    return lambda plex: kind(plex.mdp, PSI[name][0](plex) / occ.InverseSqrt(rate))


def full_information() -> Learners:
    """FTRL with every regularizer and rate, and fictitious play."""
    found: Learners = {"fictitious play": lambda plex: occ.FollowTheLeader(plex.mdp)}
    for name, (_, rate) in PSI.items():
        found |= {f"{name}, {r:g}": ftrl(name, r) for r in (rate / 10, rate, rate * 10)}
    return found


def bandit(episodes: int, factor: float) -> Learners:
    """Learners for bandit feedback; a factor multiplies the rate."""
    return {
        "conditional": ftrl("conditional", factor),
        "Tsallis": ftrl("Tsallis", factor),
        "Shifted FTRL": ftrl("Tsallis", 0.85 * factor, occ.ShiftedFTRL),
        "IXOMD": lambda plex: ixomd(plex, episodes, factor),
        "Balanced FTRL": lambda plex: balanced_ftrl(plex, episodes, factor),
        "Adaptive FTRL": lambda plex: adaptive_ftrl(plex, episodes, factor),
    }


def play_rounds(args: Args, name: str) -> dict[str, tuple[list[int], list[float]]]:
    """The curves of a game with full information."""
    game = occ.ExtensiveGame.from_openspiel(name)
    found, points = {}, [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500) if t < args.rounds]
    points.append(args.rounds)
    for label, make in full_information().items():
        history = occ.self_play(game, make, args.rounds, checkpoints=points)
        found[label] = (points, history.exploitability[0].tolist())
    for label, kind in (("CFR", pyspiel.CFRSolver), ("CFR+", pyspiel.CFRPlusSolver)):
        solver, curve = kind(game.openspiel), []
        for t in range(1, args.rounds + 1):
            solver.evaluate_and_update_policy()
            if t in points:
                curve.append(pyspiel.exploitability(game.openspiel, solver.average_policy()))
        found[label] = (points, curve)
    return found


def play_episodes(args: Args) -> dict[str, tuple[float, occ.games.GameHistory]]:
    """The factor of each learner, chosen on another game, and its history on Kuhn poker."""
    other = occ.ExtensiveGame.from_openspiel("liars_dice(numdice=1,dice_sides=2)")
    kuhn, seeds, found = occ.ExtensiveGame.from_openspiel("kuhn_poker"), range(args.seeds), {}
    for label in bandit(1, 1.0):
        trials = {}
        for factor in args.factors:
            make = bandit(args.trial, factor)[label]
            trials[factor] = occ.self_play(other, make, args.trial, seeds, feedback="bandit")
        best = min(trials, key=lambda factor: trials[factor].final().mean)
        make = bandit(args.episodes, best)[label]
        history = occ.self_play(kuhn, make, args.episodes, seeds, feedback="bandit")
        found[label] = (best, history)
    return found


def draw(curves: dict[str, Any], histories: dict[str, Any]) -> Any:
    """A panel for each game with the middle rates, and one for bandit feedback."""
    shown = ["fictitious play", "CFR", "CFR+", *(f"{x}, {rate:g}" for x, (_, rate) in PSI.items())]
    figure = common.new_figure(3.4 * (len(curves) + 1), 3.4)
    panels = figure.subplots(1, len(curves) + 1)
    for axes, (name, rows) in zip(panels, curves.items(), strict=False):
        for label, (points, curve) in rows.items():
            if label in shown:
                axes.loglog(points, curve, label=label, lw=1.2)
        common.tidy(axes, title=name.split("(")[0], xlabel="rounds", ylabel="exploitability")
    for label, (factor, history) in histories.items():
        x, y = history.episodes, history.exploitability.mean(0)
        panels[-1].loglog(x, y, label=f"{label}, {factor:g}", lw=1.2)
    common.tidy(panels[-1], title="Kuhn poker, bandit feedback", xlabel="episodes")
    for axes in panels:
        axes.legend(fontsize="x-small")
    return figure


def main(args: Args) -> None:
    """Play, and write curves, tables and the figure."""
    directory = common.begin("games", args)
    curves = {name: play_rounds(args, name) for name in args.games}
    labels = [*full_information(), "CFR", "CFR+"]
    lines = [[x, *(f"{curves[name][x][1][-1]:.2g}" for name in args.games)] for x in labels]
    text = common.table([f"after {args.rounds} rounds", *args.games], lines)
    histories = play_episodes(args)
    times = [t for t in (10**4, 10**5, 10**6, 10**7) if t <= args.episodes]
    lines = []
    for label, (factor, history) in histories.items():
        places = [int((history.episodes - t).abs().argmin()) for t in times]
        means = [str(Mean.of(history.exploitability[:, i])) for i in places]
        lines.append([f"{label}, factor {factor:g}", *means])
        history.save(directory / common.slug(label) / "history.npz")
    text += "\n\n" + common.table(["bandit, Kuhn", *(f"{t:.0e}" for t in times)], lines)
    common.write_text(directory / "table.md", text)
    common.write_figure(directory / "games.png", draw(curves, histories))
    common.write_findings(directory, [text], ["large games, alternating updates, tuned rates"])


if __name__ == "__main__":
    main(tyro.cli(Args))
