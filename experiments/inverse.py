"""Which rewards explain demonstrations? Maximum-entropy IRL as one regularizer of the step.

1. The same data, the same reward, the same optimizer: the step with `ConditionalEntropy`, the
   published recursions in NumPy, and the package `imitation` (where it is installed). Visits are
   matched as published; the likelihood is maximized as well. In deterministic worlds both are the
   same. The table shows the negative log-likelihood of other demonstrations, and processor time.
2. Experts of three kinds, each fitted with three regularizers, on the slippery lake.
3. Transitions fitted with a goal downstream, against maximum likelihood.

imitation 1.0.1 asks for an older Gymnasium than this package. `pip install --no-deps --target
<folder> imitation==1.0.1 seals==0.2.1 stable-baselines3` and PYTHONPATH=<folder> run its code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import tyro
from torch import Tensor

import torch_occ as occ
from experiments import inverse_transitions
from experiments.common import machine, run_directory, seconds, table, write_csv, write_figure
from experiments.inverse_worlds import (
    WORLDS,
    Demonstrations,
    Fitted,
    World,
    demonstrate,
    expert,
    fit,
    imitation,
    inputs_of,
    likelihood,
    linear_reward,
    match_visits,
    neural_reward,
    reference,
)
from torch_occ._support.files import write_atomically
from torch_occ.game.figures import COLOURS
from torch_occ.game.history import Mean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Args:
    """What is run."""

    worlds: tuple[str, ...] = ("lake", "cliff", "taxi")
    """Of lake, big-lake, cliff and taxi."""
    demonstrations: int = 200
    held_out: int = 1000
    updates: int = 200
    """Of Adam, for every fit of a reward."""
    episodes: tuple[int, ...] = (20, 200)
    """Of random play, to fit transitions to."""
    transition_seeds: int = 10
    transition_updates: int = 40
    seed: int = 0
    root: Path = Path("runs")


REWARDS: dict[str, Callable[[World, int], torch.nn.Module]] = {
    "linear": linear_reward,
    "neural": neural_reward,
}


def negative_log_likelihood(world: World, reward: Tensor, shown: Demonstrations) -> float:
    """Of demonstrations under the soft-optimal policy of a reward."""
    step = occ.FTRLStep(world.mdp, occ.ConditionalEntropy())
    return float(occ.negative_log_likelihood(step, world.losses(reward), *shown))


def compare_programs(args: Args, name: str) -> list[dict[str, Any]]:
    """Fit a linear and a neural reward with every program; one row each."""
    world = WORLDS[name]
    policy = expert(world)
    shown = demonstrate(world.mdp, policy, args.demonstrations, args.seed)
    other = demonstrate(world.mdp, policy, args.held_out, args.seed + 1)
    rows = []
    for kind, make in REWARDS.items():
        x = inputs_of(world, kind)
        losses = {
            "torch_occ, visits": match_visits(world, shown),
            "torch_occ, likelihood": likelihood(world, shown, occ.ConditionalEntropy()),
            "published, NumPy": reference(world, shown),
        }
        found: dict[str, Fitted | None] = {
            program: fit(make(world, args.seed), x, loss, args.updates)
            for program, loss in losses.items()
        }
        network = make(world, args.seed)
        found["imitation"] = imitation(world, shown, network, x, args.updates)
        for program, fitted in found.items():
            if fitted is not None:
                rows.append(
                    {
                        "world": f"{name}:{world.horizon}",
                        "reward": kind,
                        "program": program,
                        "demonstrations": negative_log_likelihood(world, fitted.reward, shown),
                        "held out": negative_log_likelihood(world, fitted.reward, other),
                        "seconds": fitted.seconds,
                    }
                )
    return rows


# -- other regularizers ----------------------------------------------------------------------------

REGULARIZERS: dict[str, Callable[[], occ.Regularizer]] = {
    "ConditionalEntropy": occ.ConditionalEntropy,
    "Tsallis": occ.Tsallis,
    "LogBarrier": lambda: occ.LogBarrier(0.1),
}


@torch.no_grad()
def experts(world: World) -> dict[str, Tensor]:
    """Policies of three kinds for the true rewards, `(S, A)` each."""
    losses = -world.sharpness * world.mdp.lift(world.tables[1])
    best = occ.optimal_policy(world.mdp, losses).policy
    tsallis = occ.FTRLStep(world.mdp, occ.Tsallis() / occ.Constant(2.0))
    return {
        "softmax": expert(world),
        "epsilon-greedy": 0.8 * best + 0.2 * occ.uniform_policy(world.mdp),
        "Tsallis": occ.policy_of(world.mdp, tsallis(losses)),
    }


def compare_regularizers(args: Args) -> list[dict[str, Any]]:
    """The likelihood of held-out demonstrations, by expert and regularizer of the fit."""
    world, rows = WORLDS["lake"], []
    for kind, policy in experts(world).items():
        shown = demonstrate(world.mdp, policy, args.demonstrations, args.seed)
        other = demonstrate(world.mdp, policy, args.held_out, args.seed + 1)
        chances = policy[other.states, other.actions].log().sum(-1)
        row: dict[str, Any] = {"expert": kind, "itself": -float(chances.mean())}
        for name, make in REGULARIZERS.items():
            loss = likelihood(world, shown, make())
            x = inputs_of(world, "linear")
            fitted = fit(linear_reward(world, args.seed), x, loss, args.updates)
            step = occ.FTRLStep(world.mdp, make())
            value = occ.negative_log_likelihood(step, world.losses(fitted.reward), *other)
            row[name] = value.item()
        rows.append(row)
    return rows


# -- transitions -----------------------------------------------------------------------------------


def compare_transitions(args: Args) -> list[dict[str, Any]]:
    """True costs of plans, by the way in which the transitions were fitted."""
    rows = []
    best = inverse_transitions.best_cost()
    for episodes in args.episodes:
        found = inverse_transitions.compare(
            episodes, args.transition_seeds, args.transition_updates
        )
        rows.append(
            {
                "episodes": episodes,
                "likelihood": Mean.of(found.likelihood),
                "downstream": Mean.of(found.downstream),
                "table": Mean.of(found.table),
                "true transitions": best,
            }
        )
    return rows


# -- the report ------------------------------------------------------------------------------------


def tabulate(rows: list[dict[str, Any]]) -> str:
    """A table of rows with the same keys."""

    def cell(key: str, x: Any) -> str:
        if key == "seconds":
            return seconds(x)
        return f"{x:.3f}" if isinstance(x, float) else str(x)

    names = list(rows[0])
    return table(names, [[cell(name, row[name]) for name in names] for row in rows])


def draw(
    programs: list[dict[str, Any]],
    regularizers: list[dict[str, Any]],
    transitions: list[dict[str, Any]],
) -> Figure:
    """Time per update, excess of the likelihood by regularizer, and costs by fit of P."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["program"] for row in programs))
    cases = list(dict.fromkeys((row["world"], row["reward"]) for row in programs))
    for n, name in enumerate(names):
        mine = {(r["world"], r["reward"]): r["seconds"] for r in programs if r["program"] == name}
        x = [cases.index(case) + 0.8 * (n + 0.5) / len(names) - 0.4 for case in mine]
        height = [1e3 * y for y in mine.values()]
        left.bar(x, height, 0.8 / len(names), color=COLOURS[n], label=name)
    left.set(yscale="log", ylabel="milliseconds per update", title="the same fit, by program")
    left.set_xticks(range(len(cases)), [f"{w}\n{r}" for w, r in cases], fontsize=8)
    left.legend(frameon=False, fontsize=8)
    for n, name in enumerate(REGULARIZERS):
        x = [i + 0.26 * (n - 1) for i in range(len(regularizers))]
        excess = [row[name] - row["itself"] for row in regularizers]
        middle.bar(x, excess, 0.26, color=COLOURS[n], label=f"fit: {name}")
    middle.set_xticks(range(len(regularizers)), [row["expert"] for row in regularizers])
    middle.set(xlabel="expert", ylabel="nats per trajectory", title="held out, minus the expert's")
    middle.legend(frameon=False, fontsize=8)
    labels = {
        "likelihood": "maximum likelihood",
        "downstream": "downstream",
        "table": "observed frequencies",
    }
    for n, (name, label) in enumerate(labels.items()):
        x = [i + 0.26 * (n - 1) for i in range(len(transitions))]
        means = [row[name].mean for row in transitions]
        errors = [1.96 * row[name].standard_error for row in transitions]
        label = {"likelihood": "maximum likelihood", "table": "observed frequencies"}.get(
            name, name
        )
        right.errorbar(x, means, errors, fmt="o", capsize=3, color=COLOURS[n], label=label)
    right.axhline(transitions[0]["true transitions"], color="black", linewidth=0.8, linestyle=":")
    right.set_xticks(
        range(len(transitions)), [f"{row['episodes']} episodes" for row in transitions]
    )
    right.set(ylabel="true cost of the plan", title="fits of P (dotted: P is known)")
    right.legend(frameon=False, fontsize=8)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure


def main(args: Args) -> Path:
    """Run all three parts, and write the tables and the figure."""
    torch.set_num_threads(1)
    directory = run_directory(args.root, "inverse", args.seed)
    programs = [row for name in args.worlds for row in compare_programs(args, name)]
    regularizers = compare_regularizers(args)
    transitions = compare_transitions(args)
    write_csv(directory / "programs.csv", programs)
    parts = [tabulate(programs), tabulate(regularizers), tabulate(transitions), machine()]
    text = "\n\n".join(parts) + "\n"
    print(text)
    write_atomically(directory / "inverse.md", lambda file: file.write(text.encode()))
    write_figure(directory / "inverse.png", draw(programs, regularizers, transitions))
    print(f"written to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
