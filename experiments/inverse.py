"""Which rewards explain demonstrations? Maximum-entropy IRL as one regularizer of the step.

1. The same data, the same reward, the same optimizer: the step with `ConditionalEntropy`, and the
   published recursions in NumPy. Visits are matched as published; the likelihood is maximized as
   well. In deterministic worlds both are the same. The table shows the negative log-likelihood of
   other demonstrations, and processor time.
2. Experts of three kinds, each fitted with three regularizers, on the slippery lake.
3. Transitions fitted with a goal downstream, against maximum likelihood.

The reward is a function r(s) of the environment's state. An episode that has terminated stays in
its last state until the horizon. All programs see the same finite MDP. The gradient of
maximum-causal-entropy IRL (Ziebart, 2010) in r(s) is

    visits of the demonstrations - visits of the soft-optimal policy of r.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from experiments.common import COLOURS

F64 = torch.float64
RATE = 0.02  # of Adam


@dataclass(frozen=True)
class Args:
    """What is run."""

    worlds: tuple[str, ...] = ("lake", "cliff", "taxi")
    """of lake, big-lake, cliff and taxi"""
    demonstrations: int = 200
    """to which rewards are fitted"""
    held_out: int = 1000
    """demonstrations whose likelihood is shown"""
    updates: int = 200
    """of Adam, for every fit of a reward"""
    episodes: tuple[int, ...] = (20, 200)
    """of random play, to fit transitions to"""
    transition_seeds: int = 10
    """runs of each fit of transitions"""
    transition_updates: int = 40
    """of Adam, for every fit of transitions"""
    seed: int = 0
    """of the demonstrations and of the first weights"""
    root: Path = Path("runs")
    """where the run's directory goes"""


@dataclass(frozen=True)
class World:
    """A map, a horizon, and how sharply its expert prefers rewards."""

    id: str
    horizon: int
    sharpness: float

    @cached_property
    def env(self) -> Any:
        return gymnasium.make(self.id).unwrapped

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """P `(S, A, S)`, rewards `(S, A)` and the first distribution `(S,)`."""
        published = self.env.P
        size, num_actions = len(published), len(published[0])
        outcomes = [
            (s, a, *outcome)
            for s, a in np.ndindex(size, num_actions)
            for outcome in published[s][a]
        ]
        last = {following for *_, following, _, done in outcomes if done}
        transition = torch.zeros(size, num_actions, size, dtype=F64)
        reward = torch.zeros(size, num_actions, dtype=F64)
        for s, a, p, following, r, _ in outcomes:
            if s in last:
                transition[s, a, s] = 1.0
            else:
                transition[s, a, following] += p
                reward[s, a] += p * r
        return transition, reward, torch.from_numpy(self.env.initial_state_distrib.astype(float))

    @cached_property
    def mdp(self) -> occ.LayeredMDP:
        transition, _, first = self.tables
        if len(first) > 100:
            transition = transition.flatten(0, 1).to_sparse()
        return occ.LayeredMDP.from_tables(transition, self.horizon, first)

    @cached_property
    def features(self) -> Tensor:
        """One-hot coordinates of each state `(S, F)`: row, column and tile, or those of a taxi."""
        count = len(self.env.P)
        if hasattr(self.env, "decode"):
            places = [list(self.env.decode(s)) for s in range(count)]
        else:
            columns = self.env.ncol if hasattr(self.env, "ncol") else self.env.shape[1]
            places = [[s // columns, s % columns, self._tile(s)] for s in range(count)]
        index = torch.tensor(places)
        parts = [torch.nn.functional.one_hot(x).to(F64) for x in index.T]
        return torch.cat(parts, -1)

    def _tile(self, s: int) -> int:
        if hasattr(self.env, "desc"):
            return int(b"SFHG".index(self.env.desc.flatten()[s]))
        return 1 + int(self.env._cliff.flatten()[s]) if s != 47 else 0

    def losses(self, reward: Tensor) -> Tensor:
        """-r(s) for every pair of the layered MDP: `(S,)` -> `(S', A)`."""
        table = reward.unsqueeze(-1).expand(-1, self.mdp.num_actions)
        return -self.mdp.lift(table)

    def visits(self, q: Tensor) -> Tensor:
        """The expected number of visits of each state of the environment, `(S', A)` -> `(S,)`."""
        total = torch.zeros(len(self.tables[2]), dtype=q.dtype)
        return total.index_add(0, self.mdp.origin, q.sum(-1))


WORLDS = {
    "lake": World("FrozenLake-v1", 20, 10.0),
    "big-lake": World("FrozenLake8x8-v1", 40, 10.0),
    "cliff": World("CliffWalking-v1", 20, 0.3),
    "taxi": World("Taxi-v4", 15, 0.5),
}


class Demonstrations(NamedTuple):
    """Trajectories: states, numbered over all layers, and actions, `(N, L)` each."""

    states: Tensor
    actions: Tensor

    def visits(self, world: World) -> Tensor:
        """The mean number of visits of each state of the environment, `(S,)`."""
        origin = world.mdp.origin[self.states.flatten()]
        counts = torch.bincount(origin, minlength=len(world.tables[2]))
        return counts.to(F64) / len(self.states)


def demonstrate(mdp: occ.LayeredMDP, policy: Tensor, count: int, seed: int) -> Demonstrations:
    """Draw trajectories of a policy `(S, A)`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    here = draw(mdp.initial.expand(count, -1))
    states, actions = [], []
    for k, layer in enumerate(mdp.layers):
        states.append(here + mdp.layer_slices[k].start)
        actions.append(draw(policy[states[-1]]))
        here = layer.draw(here, actions[-1], torch.rand(count, dtype=F64, generator=generator))
    return Demonstrations(torch.stack(states, -1), torch.stack(actions, -1))


def expert(world: World) -> Tensor:
    """The soft-optimal policy of the true rewards, `(S, A)`."""
    losses = -world.sharpness * world.mdp.lift(world.tables[1])
    step = occ.FTRLStep(world.mdp, occ.ConditionalEntropy())
    return occ.policy_of(world.mdp, step(losses))


def reward_network(world: World, kind: str, seed: int) -> torch.nn.Module:
    """A linear function of one-hot states, or a network of two layers of their coordinates.

    It maps `(S, F)` to `(S,)`, and its weights come from a generator of their own.
    """
    layers: list[torch.nn.Module] = [torch.nn.Linear(len(world.tables[2]), 1, False, dtype=F64)]
    if kind == "neural":
        width = world.features.shape[1]
        layers = [torch.nn.Linear(width, 32, dtype=F64), torch.nn.Tanh()]
        layers += [torch.nn.Linear(32, 1, dtype=F64)]
    network = torch.nn.Sequential(*layers, torch.nn.Flatten(0))
    generator = torch.Generator().manual_seed(seed)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=generator)
    return network


def inputs_of(world: World, kind: str) -> Tensor:
    """What the reward sees of every state, `(S, F)`."""
    return torch.eye(len(world.tables[2]), dtype=F64) if kind == "linear" else world.features


class Fitted(NamedTuple):
    """The reward that was found, and the processor time per update in seconds."""

    reward: Tensor  # (S,)
    seconds: float


def fit(
    network: torch.nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor], updates: int
) -> Fitted:
    """Minimize a loss of the rewards with Adam."""
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE)
    loss(network(x)).backward()  # compiles
    begin = time.process_time()
    for _ in range(updates):
        optimizer.zero_grad()
        loss(network(x)).backward()
        optimizer.step()
    seconds = (time.process_time() - begin) / updates
    return Fitted(network(x).detach(), seconds)


def match_visits(world: World, shown: Demonstrations) -> Callable[[Tensor], Tensor]:
    """The published gradient: visits of the plan minus visits of the demonstrations."""
    step, target = occ.FTRLStep(world.mdp, occ.ConditionalEntropy()), shown.visits(world)

    def loss(reward: Tensor) -> Tensor:
        with torch.no_grad():
            difference = world.visits(step(world.losses(reward))) - target
        return (difference * reward).sum()

    return loss


def likelihood(
    world: World, shown: Demonstrations, psi: occ.Regularizer
) -> Callable[[Tensor], Tensor]:
    """The negative log-likelihood of the demonstrated actions, for any regularizer."""
    step = occ.FTRLStep(world.mdp, psi)
    return lambda reward: occ.negative_log_likelihood(step, world.losses(reward), *shown)


def reference(world: World, shown: Demonstrations) -> Callable[[Tensor], Tensor]:
    """The recursions (9.1) to (9.3) of Ziebart's thesis in NumPy, without torch_occ."""
    transition, _, first = (x.numpy() for x in world.tables)
    target, horizon = shown.visits(world), world.horizon

    def visits(reward: Any) -> Any:
        policies, value = [], np.zeros(len(reward))
        for _ in range(horizon):
            Q = reward[:, None] + transition @ value
            largest = Q.max(1, keepdims=True)
            value = np.log(np.exp(Q - largest).sum(1)) + largest[:, 0]
            policies.append(np.exp(Q - value[:, None]))
        here, total = first, np.zeros_like(reward)
        for policy in reversed(policies):
            total = total + here
            here = np.einsum("s,sa,sat->t", here, policy, transition, optimize=True)
        return total

    def loss(reward: Tensor) -> Tensor:
        difference = torch.from_numpy(visits(reward.detach().numpy())) - target
        return (difference * reward).sum()

    return loss


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
    for kind in ("linear", "neural"):
        x = inputs_of(world, kind)
        losses = {
            "torch_occ, visits": match_visits(world, shown),
            "torch_occ, likelihood": likelihood(world, shown, occ.ConditionalEntropy()),
            "published, NumPy": reference(world, shown),
        }
        for program, loss in losses.items():
            fitted = fit(reward_network(world, kind, args.seed), x, loss, args.updates)
            row: dict[str, Any] = {"world": f"{name}:{world.horizon}", "reward": kind}
            row |= {"program": program}
            for title, data in (("demonstrations", shown), ("held out", other)):
                row[title] = negative_log_likelihood(world, fitted.reward, data)
            rows.append(row | {"seconds": fitted.seconds})
    return rows


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
            network = reward_network(world, "linear", args.seed)
            fitted = fit(network, x, loss, args.updates)
            step = occ.FTRLStep(world.mdp, make())
            value = occ.negative_log_likelihood(step, world.losses(fitted.reward), *other)
            row[name] = value.item()
        rows.append(row)
    return rows


# -- 3. transitions -------------------------------------------------------------------------------
# A frozen lake is slippery in its lower half and not in its upper half. The model has one number
# per column: the probability theta of going where one wants. It cannot be right everywhere, so it
# matters where it is wrong. Maximum likelihood fits all observed moves alike. The other fit
# minimizes what the plan of the model costs, and differentiates through the step in the
# transitions. That cost is estimated on the table of observed frequencies. The plan of this table
# itself is a third way.

HORIZON = 14
TEMPERATURE = 0.1
TRUTH = torch.tensor([0.95] * 8 + [0.4] * 8, dtype=F64)


class Lake(NamedTuple):
    """Deterministic moves of the 4 x 4 lake `(S, A, S)`; holes and the goal keep what enters."""

    moves: Tensor
    loss: Tensor  # (S,): 0 on the goal, 1 elsewhere

    def by_column(self, theta: Tensor) -> Tensor:
        """The model: transitions `(*batch, S, A, S)` for one theta per column, `(*batch, 4)`."""
        return self.slippery(theta.repeat(*(1,) * (theta.dim() - 1), 4))

    def slippery(self, theta: Tensor) -> Tensor:
        """Go as intended with probability theta `(*batch, S)`, else to one of the two sides."""
        sides = (self.moves.roll(1, 1) + self.moves.roll(-1, 1)) / 2
        theta = theta[..., None, None]
        return theta * self.moves + (1 - theta) * sides


def make_lake() -> Lake:
    """The map of Gymnasium's FrozenLake-v1."""
    env = gymnasium.make("FrozenLake-v1", is_slippery=False).unwrapped
    moves = torch.zeros(16, 4, 16, dtype=F64)
    for s, actions in env.P.items():  # type: ignore[attr-defined]
        for a, outcomes in actions.items():
            moves[s, a, outcomes[0][1]] = 1.0
    loss = torch.ones(16, dtype=F64)
    loss[15] = 0.0
    return Lake(moves, loss)


class Unrolled:
    """The lake in layers, with transitions that may differ in every element of a batch."""

    def __init__(self, lake: Lake) -> None:
        # The layout has every move that is possible for some theta.
        self.mdp = occ.LayeredMDP.from_tables(lake.slippery(torch.full((16,), 0.5)), HORIZON, 0)
        self.loss = self.mdp.lift(lake.loss[:, None].expand(-1, 4))
        self.step = occ.FTRLStep(self.mdp, occ.ConditionalEntropy() / occ.Constant(1 / TEMPERATURE))
        self.states = self.mdp.split(self.mdp.origin, 0)

    def model(self, transition: Tensor) -> occ.LayeredMDP:
        """The layered MDP of a table `(*batch, S, A, S)`."""
        parts = [
            transition[..., here, :, :][..., there]
            for here, there in zip(self.states, self.states[1:], strict=False)
        ]
        last = torch.ones(len(self.states[-1]), 4, 1, dtype=F64)
        return self.mdp.with_transitions([*parts, last])

    def policy(self, transition: Tensor) -> Tensor:
        """The plan for a table, `(*batch, S', A)`; differentiable in the table."""
        batch = transition.shape[:-3]
        loss = self.loss.expand(*batch, *self.loss.shape)
        model = self.model(transition)
        return occ.policy_of(model, self.step(loss, mdp=model))

    def cost(self, transition: Tensor, policy: Tensor) -> Tensor:
        """What a policy costs under a table: the expected steps without the goal, `(*batch,)`."""
        return (occ.occupancy(self.model(transition), policy) * self.loss).sum((-2, -1))


def observe(truth: Tensor, episodes: int, seeds: int) -> Tensor:
    """Counts `(seeds, S, A, S)` of the moves in random episodes."""
    counts = torch.zeros(seeds, 16, 4, 16, dtype=F64)
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        here = torch.zeros(episodes, dtype=torch.long)
        for _ in range(HORIZON):
            action = torch.randint(4, (episodes,), generator=generator)
            following = torch.multinomial(truth[here, action], 1, generator=generator).squeeze(-1)
            counts[seed].index_put_(
                (here, action, following), torch.ones(episodes, dtype=F64), accumulate=True
            )
            here = following
    return counts


def most_likely(lake: Lake, counts: Tensor) -> Tensor:
    """The theta of largest likelihood, `(seeds, 4)`, by a search on a grid."""
    grid = torch.linspace(0.01, 0.99, 99, dtype=F64)
    logs = lake.by_column(grid[:, None].expand(-1, 4)).clamp(min=1e-300).log()
    per_state = (counts.unsqueeze(1) * logs).sum((-2, -1))  # (seeds, grid, S)
    return grid[per_state.unflatten(-1, (4, 4)).sum(-2).argmax(1)]


def fit_transitions(episodes: int, seeds: int, updates: int) -> dict[str, Tensor]:
    """Fit theta in all ways to the same data: the true costs of the plans, `(seeds,)` each."""
    lake = make_lake()
    unrolled, truth = Unrolled(lake), lake.slippery(TRUTH)
    counts = observe(truth, episodes, seeds)
    theta = most_likely(lake, counts)
    model = lake.by_column(theta)
    # Rows without observations follow the most likely model, which counts as one observation.
    seen = (counts + model) / (counts + model).sum(-1, keepdim=True)
    free = torch.logit(theta).requires_grad_()
    optimizer = torch.optim.Adam([free], lr=0.1)
    for _ in range(updates):
        optimizer.zero_grad()
        guess = lake.by_column(torch.sigmoid(free))
        unrolled.cost(seen, unrolled.policy(guess)).sum().backward()
        optimizer.step()
    with torch.no_grad():
        found = lake.by_column(torch.sigmoid(free))
        models = {"maximum likelihood": model, "downstream": found, "observed frequencies": seen}
        return {name: unrolled.cost(truth, unrolled.policy(x)) for name, x in models.items()}


def compare_transitions(args: Args) -> list[dict[str, Any]]:
    """True costs of plans, by the way in which the transitions were fitted."""
    lake = make_lake()
    unrolled, truth = Unrolled(lake), lake.slippery(TRUTH)
    best, rows = unrolled.cost(truth, unrolled.policy(truth)).item(), []
    for episodes in args.episodes:
        found = fit_transitions(episodes, args.transition_seeds, args.transition_updates)
        row: dict[str, Any] = {"episodes": episodes}
        row |= {name: occ.game.Mean.of(costs) for name, costs in found.items()}
        rows.append(row | {"true transitions": best})
    return rows


def tabulate(rows: list[dict[str, Any]]) -> str:
    """A table of rows with the same keys."""

    def cell(key: str, x: Any) -> str:
        if key == "seconds":
            return common.seconds(x)
        return f"{x:.3f}" if isinstance(x, float) else str(x)

    names = list(rows[0])
    return common.table(names, [[cell(name, row[name]) for name in names] for row in rows])


def draw(
    programs: list[dict[str, Any]],
    regularizers: list[dict[str, Any]],
    transitions: list[dict[str, Any]],
) -> Figure:
    """Time per update, excess of the likelihood by regularizer, and costs by fit of P."""
    figure = common.new_figure(13, 4)
    left, middle, right = figure.subplots(1, 3)
    names = list(dict.fromkeys(row["program"] for row in programs))
    cases = list(dict.fromkeys((row["world"], row["reward"]) for row in programs))
    for n, name in enumerate(names):
        mine = {(r["world"], r["reward"]): r["seconds"] for r in programs if r["program"] == name}
        x = [cases.index(case) + 0.8 * (n + 0.5) / len(names) - 0.4 for case in mine]
        height = [1e3 * y for y in mine.values()]
        left.bar(x, height, 0.8 / len(names), color=COLOURS[n], label=name)
    left.set_xticks(range(len(cases)), [f"{w}\n{r}" for w, r in cases], fontsize=8)
    title = "the same fit, by program"
    common.tidy(left, yscale="log", ylabel="milliseconds per update", title=title)
    for n, name in enumerate(REGULARIZERS):
        x = [i + 0.26 * (n - 1) for i in range(len(regularizers))]
        excess = [row[name] - row["itself"] for row in regularizers]
        middle.bar(x, excess, 0.26, color=COLOURS[n], label=f"fit: {name}")
    middle.set_xticks(range(len(regularizers)), [row["expert"] for row in regularizers])
    title = "held out, minus the expert's"
    common.tidy(middle, xlabel="expert", ylabel="nats per trajectory", title=title)
    for n, name in enumerate(("maximum likelihood", "downstream", "observed frequencies")):
        x = [i + 0.26 * (n - 1) for i in range(len(transitions))]
        means = [row[name].mean for row in transitions]
        errors = [1.96 * row[name].standard_error for row in transitions]
        right.errorbar(x, means, errors, fmt="o", capsize=3, color=COLOURS[n], label=name)
    right.axhline(transitions[0]["true transitions"], color="black", linewidth=0.8, linestyle=":")
    ticks = [f"{row['episodes']} episodes" for row in transitions]
    right.set_xticks(range(len(transitions)), ticks)
    common.tidy(right, ylabel="true cost of the plan", title="fits of P (dotted: P is known)")
    for axes in (left, middle, right):
        axes.legend(frameon=False, fontsize=8)
    return figure


def main(args: Args) -> Path:
    """Run all three parts, and write the tables and the figure."""
    directory = common.begin("inverse", args, args.seed)
    programs = [row for name in args.worlds for row in compare_programs(args, name)]
    regularizers = compare_regularizers(args)
    transitions = compare_transitions(args)
    common.write_csv(directory / "programs.csv", programs)
    parts = [tabulate(programs), tabulate(regularizers), tabulate(transitions), common.machine()]
    text = "\n\n".join(parts)
    print(text)
    common.write_text(directory / "inverse.md", text)
    common.write_figure(directory / "inverse.png", draw(programs, regularizers, transitions))
    print(f"written to {directory}")
    return directory


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
