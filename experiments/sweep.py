"""A grid of MDPs x losses x learners x parameters x seeds, on local processes or on a Dask cluster.

Every cell is one game with one seed. `--directory` continues a sweep that was stopped, and
`--cluster tcp://host:8786` plays on a cluster (docs/results.md), with the same results to the bit.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import torch_occ as occ
from experiments import common

LearnerName = Literal[
    "jin-luo", "tsallis", "log-barrier", "o-reps", "ucb", "follow-the-leader", "uniform"
]
LossName = Literal["bernoulli", "constrained", "corrupted", "greedy"]
PARAMETERS: dict[str, tuple[str, ...]] = {
    "jin-luo": ("alpha", "beta", "gamma"),
    "tsallis": ("gamma",),
    "log-barrier": ("gamma",),
}


@dataclass(frozen=True)
class Args:
    """The grid. Parameters multiply only the learners that have them."""

    mdps: tuple[str, ...] = ("random:3x3x3", "random:5x5x4")
    """random:<horizon>x<width>x<actions>, or gym:<id>:<horizon>"""
    losses: tuple[LossName, ...] = ("bernoulli",)
    """of a random MDP; an environment has its own"""
    learners: tuple[LearnerName, ...] = ("jin-luo", "tsallis", "ucb")
    """learners to play"""
    alphas: tuple[float, ...] = (0.5,)
    """of jin-luo"""
    betas: tuple[float, ...] = (0.1, 1.0)
    """of jin-luo"""
    gammas: tuple[float, ...] = (0.5, 1.0, 2.0)
    """of jin-luo, tsallis and log-barrier"""
    seeds: int = 4
    """runs of every game, from seed 0 on"""
    episodes: int = 1000
    """T"""
    processes: int = 2
    """local processes, if there is no cluster"""
    cluster: str | None = None
    """address of a Dask scheduler, tcp://host:port"""
    directory: Path | None = None
    """of an earlier sweep, to continue it; a new one by default"""
    tensorboard: bool = True
    """log hparams"""
    root: Path = Path("runs")
    """where a new directory goes"""


def cells(args: Args) -> list[dict[str, Any]]:
    """The grid as configurations."""
    found = []
    for mdp, learner in itertools.product(args.mdps, args.learners):
        make_mdp(mdp)  # errors before the first cell runs
        axes = {"alpha": args.alphas, "beta": args.betas, "gamma": args.gammas}
        own: dict[str, Any] = {name: axes[name] for name in PARAMETERS.get(learner, ())}
        losses = args.losses if mdp.startswith("random:") else ("rewards",)
        own |= {"episodes": (args.episodes,), "seed": range(args.seeds)}
        found += occ.grid(mdp=[mdp], losses=losses, learner=[learner], **own)
    return found


def make_mdp(name: str) -> occ.LayeredMDP:
    """An MDP by its name on the command line."""
    kind, _, rest = name.partition(":")
    try:
        if kind == "random":
            horizon, width, actions = (int(x) for x in rest.split("x"))
            return occ.LayeredMDP.random(horizon, width, actions, seed=0)
        if kind == "gym":
            id_, _, steps = rest.rpartition(":")
            return occ.LayeredMDP.from_gymnasium(id_, int(steps))
    except ValueError as error:
        raise ValueError(f"mdps: {name!r}: {error}") from error
    raise ValueError(
        f"mdps: expected random:<horizon>x<width>x<actions> or gym:<id>:<horizon>, got {name!r}"
    )


def make_losses(name: str, mdp: occ.LayeredMDP) -> occ.LossProcess:
    """A loss process by its name; all are built on one table of means with a gap of 0.4."""
    if isinstance(mdp, occ.mdp.RewardMDP):
        return occ.BernoulliLosses(mdp.loss)
    mean = common.loss_with_gap(mdp, 0.4, seed=0)
    if name == "constrained":
        return occ.StochasticallyConstrained(mean)
    if name == "corrupted":
        return occ.Corrupted(occ.BernoulliLosses(mean), 100.0, "targeted", target=mean)
    return occ.GreedyAdversary() if name == "greedy" else occ.BernoulliLosses(mean)


def make_learner(config: dict[str, Any], mdp: occ.LayeredMDP) -> occ.Learner:
    """A learner by its name and parameters."""
    makers = {
        "jin-luo": lambda: occ.FTRL(
            mdp, occ.jin_luo(mdp, config["alpha"], config["beta"], config["gamma"])
        ),
        "tsallis": lambda: occ.FTRL.tsallis(mdp, config["gamma"]),
        "log-barrier": lambda: occ.FTRL.log_barrier(mdp, config["gamma"]),
        "o-reps": lambda: occ.FTRL.o_reps(mdp, config["episodes"]),
        "ucb": lambda: occ.OptimisticValueIteration(mdp),
        "follow-the-leader": lambda: occ.FollowTheLeader(mdp),
        "uniform": lambda: occ.FixedPolicy(mdp),
    }
    return makers[config["learner"]]()


def play(config: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """One cell. The result depends on the configuration only; a killed cell continues."""
    mdp = make_mdp(config["mdp"])
    learner = make_learner(config, mdp)
    losses, count = make_losses(config["losses"], mdp), config["episodes"]
    saved = checkpoint / "run"
    history = occ.simulate(mdp, learner, losses, count, seeds=[config["seed"]], save_to=saved)
    last = {
        name: float(getattr(history, name)[0, -1])
        for name in ("regret", "realised_regret", "comparator", "uncertified")
    }
    # Named so that the regret comes first in the HParams dashboard, which sorts by name.
    result = {"regret": last["regret"], "regret_realised": last["realised_regret"]}
    result |= {"total_loss_of_best": last["comparator"], "uncertified": last["uncertified"]}
    if isinstance(mdp, occ.mdp.RewardMDP):
        result["regret_in_rewards"] = float(mdp.regret_in_rewards(history.regret[0, -1]))
    return result


def summary(rows: list[dict[str, Any]]) -> str:
    """Mean regret over seeds, a line for every game."""
    games: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        own = [name for name in ("alpha", "beta", "gamma") if name in row]
        parameters = ", ".join(f"{name} = {row[name]:g}" for name in own)
        game = (row["mdp"], row["losses"], row["learner"], parameters)
        games.setdefault(game, []).append(row["regret"])
    lines = [
        [*game, str(occ.game.Mean.of(torch.tensor(regrets).double())), str(len(regrets))]
        for game, regrets in games.items()
    ]
    header = ["mdp", "losses", "learner", "parameters", "regret at T (standard error)", "seeds"]
    return common.table(header, lines, left=(0, 1, 2, 3))


def main(args: Args) -> Path:
    """Run the missing cells, and summarize."""
    grid = cells(args)
    directory = common.begin("sweep", args) if args.directory is None else args.directory
    where = args.cluster or f"{args.processes} local processes"
    print(f"{len(grid)} cells on {where}; {common.machine()}\n{directory}", flush=True)
    executor = import_module("distributed").Client(args.cluster) if args.cluster else None
    options: dict[str, Any] = {"executor": executor, "tensorboard": args.tensorboard}
    try:
        done = occ.sweep(play, grid, directory, processes=args.processes, **options)
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; finished cells are stored. Continue with --directory {directory}")
    print(f"\n{summary(done.rows)}\n\nwritten to {directory}: results.csv, cells/, tensorboard/")
    if done.failures:
        shown = "\n".join(f"  {failure}" for failure in done.failures[:10])
        hint = f"failures.json has the tracebacks; --directory {directory} tries them again"
        sys.exit(f"{len(done.failures)} cells failed ({hint}):\n{shown}")
    return directory


if __name__ == "__main__":
    # `play` must have the same name here and on the workers; `__main__.play` would differ.
    from experiments import sweep

    sweep.main(tyro.cli(Args, description=__doc__))
