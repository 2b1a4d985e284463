"""Self-play in games with imperfect information: what regularizer, rate and feedback do.

With full information, FTRL with five regularizers and three rates each plays beside fictitious
play, CFR and CFR+ of OpenSpiel: the exploitability of average strategies over rounds. With bandit
feedback, five learners play Kuhn poker. Their factors are chosen beforehand on another game, Liar's
Dice with one die of two sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspiel
import torch
import tyro

import torch_occ as occ
from experiments import common
from torch_occ.game.history import Mean, band
from torch_occ.rivals import adaptive_ftrl, balanced_ftrl, ixomd

Learners = dict[str, Callable[[occ.games.Treeplex], occ.Learner]]

#: The middle of three rates: eta_t = gamma / sqrt(t), a factor of 10 apart.
RATES = {"conditional": 1.0, "dilated": 1.0, "Shannon": 1.0, "Tsallis": 1.0, "log-barrier": 300.0}


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


def regularizer(name: str, plex: occ.games.Treeplex) -> occ.Regularizer:
    """The five regularizers."""
    if name == "dilated":
        return occ.dilated_entropy(plex)
    kinds: dict[str, Any] = {
        "conditional": occ.ConditionalEntropy,
        "Shannon": occ.Shannon,
        "Tsallis": occ.Tsallis,
        "log-barrier": occ.LogBarrier,
    }
    return kinds[name]()  # type: ignore[no-any-return]


def full_information() -> Learners:
    """FTRL with every regularizer and rate, and fictitious play."""
    found: Learners = {"fictitious play": lambda plex: occ.FollowTheLeader(plex.mdp)}
    for name, middle in RATES.items():
        for rate in (middle / 10, middle, middle * 10):

            def make(plex: occ.games.Treeplex, name: str = name, rate: float = rate) -> occ.Learner:
                return occ.FTRL(plex.mdp, regularizer(name, plex) / occ.InverseSqrt(rate))

            found[f"{name}, {rate:g}"] = make
    return found


def bandit(episodes: int, factor: float) -> Learners:
    """Learners for bandit feedback; a factor multiplies the rate."""

    def ftrl(psi: occ.Regularizer) -> Callable[[occ.games.Treeplex], occ.Learner]:
        return lambda plex: occ.FTRL(plex.mdp, psi / occ.InverseSqrt(factor))

    return {
        "conditional": ftrl(occ.ConditionalEntropy()),
        "Tsallis": ftrl(occ.Tsallis()),
        "IXOMD": lambda plex: ixomd(plex, episodes, factor),
        "Balanced FTRL": lambda plex: balanced_ftrl(plex, episodes, factor),
        "Adaptive FTRL": lambda plex: adaptive_ftrl(plex, episodes, factor),
    }


def counterfactual(name: str, rounds: int, points: list[int]) -> dict[str, list[float]]:
    """The exploitability of CFR and CFR+, by OpenSpiel."""
    game, found = pyspiel.load_game(name), {}
    for label, kind in (("CFR", pyspiel.CFRSolver), ("CFR+", pyspiel.CFRPlusSolver)):
        solver, curve = kind(game), []
        for t in range(1, rounds + 1):
            solver.evaluate_and_update_policy()
            if t in points:
                curve.append(pyspiel.exploitability(game, solver.average_policy()))
        found[label] = curve
    return found


def play_rounds(args: Args, name: str) -> dict[str, tuple[list[int], list[float]]]:
    """The curves of a game with full information."""
    game = occ.ExtensiveGame.from_openspiel(name)
    found, points = {}, [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500) if t < args.rounds]
    points.append(args.rounds)
    for label, make in full_information().items():
        history = occ.self_play(game, make, args.rounds, checkpoints=points)
        found[label] = (points, history.exploitability[0].tolist())
        uncertified = int(history.uncertified[0, -1])
        note = f", {uncertified} steps not certified" if uncertified else ""
        print(f"{name}: {label}: {history.final()}{note}", flush=True)
    for label, curve in counterfactual(name, args.rounds, points).items():
        found[label] = (points, curve)
        print(f"{name}: {label}: {curve[-1]:.4g}", flush=True)
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
        print(f"bandit: {label}, factor {best:g}: {history.final()}", flush=True)
    return found


def draw(
    curves: dict[str, dict[str, tuple[list[int], list[float]]]],
    histories: dict[str, tuple[float, occ.games.GameHistory]],
) -> Any:
    """A panel for each game with the best rate of each regularizer, and one for bandit feedback."""
    figure = common.new_figure(3.4 * (len(curves) + 1), 3.4)
    panels = figure.subplots(1, len(curves) + 1)
    for axes, (name, rows) in zip(panels, curves.items(), strict=False):
        for i, (label, (points, curve)) in enumerate(best_rates(rows).items()):
            axes.loglog(points, curve, label=label, color=f"C{i}", lw=1.2)
        common.tidy(axes, title=name.split("(")[0], xlabel="rounds", ylabel="exploitability")
        axes.legend(fontsize="x-small")
    for label, (factor, history) in histories.items():
        mean, lower, upper = band(history.exploitability)
        (line,) = panels[-1].loglog(history.episodes, mean, label=f"{label}, {factor:g}", lw=1.2)
        panels[-1].fill_between(
            history.episodes, lower.clamp(min=1e-5), upper, color=line.get_color(), alpha=0.2, lw=0
        )
    common.tidy(panels[-1], title="Kuhn poker, bandit feedback", xlabel="episodes")
    panels[-1].legend(fontsize="x-small")
    return figure


def best_rates(rows: dict[str, tuple[list[int], list[float]]]) -> dict[str, Any]:
    """The curves of the rate with the least last value for each regularizer, and the others."""
    found: dict[str, Any] = {}
    for kind in RATES:
        mine = {label: x for label, x in rows.items() if label.startswith(f"{kind}, ")}
        label = min(mine, key=lambda label: mine[label][1][-1])
        found[label] = mine[label]
    return found | {x: rows[x] for x in ("fictitious play", "CFR", "CFR+")}


def at(history: occ.games.GameHistory, t: int) -> str:
    """The exploitability at the checkpoint closest to t."""
    place = int((history.episodes - t).abs().argmin())
    return str(Mean.of(history.exploitability[:, place]))


def main(args: Args) -> None:
    """Play, and write curves, tables and the figure."""
    directory = common.begin("games", args)
    curves = {name: play_rounds(args, name) for name in args.games}
    rows = [
        {"game": name, "learner": label, "round": t, "exploitability": y}
        for name, found in curves.items()
        for label, (points, values) in found.items()
        for t, y in zip(points, values, strict=True)
    ]
    common.write_csv(directory / "rounds.csv", rows)
    labels = [*full_information(), "CFR", "CFR+"]
    names = [name.split("(")[0] for name in args.games]
    lines = [[x, *(f"{curves[name][x][1][-1]:.2g}" for name in args.games)] for x in labels]
    text = common.table([f"after {args.rounds} rounds", *names], lines)
    histories = play_episodes(args)
    times = [t for t in (10**4, 10**5, 10**6, 10**7) if t <= args.episodes]
    lines = [
        [f"{label}, factor {factor:g}", *(at(history, t) for t in times)]
        for label, (factor, history) in histories.items()
    ]
    text += "\n\n" + common.table(["bandit, Kuhn", *(f"{t:.0e}" for t in times)], lines)
    common.write_text(directory / "table.md", text)
    for label, (_, history) in histories.items():
        history.save(directory / common.slug(label) / "history.npz")
    common.write_figure(directory / "games.png", draw(curves, histories))
    common.write_findings(
        directory,
        ["what regularizer, rate and feedback do to the exploitability of averages: table.md"],
        [
            "an equilibrium solver: CFR and CFR+ are beside FTRL, and ahead of it",
            "rates tuned for each game with bandit feedback: they come from another game",
            "games with more than a thousand information sets, or alternating updates",
        ],
    )
    print(text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args))
