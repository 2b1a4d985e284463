"""Transitions fitted to trajectories with a goal downstream, against maximum likelihood.

A frozen lake is slippery in its lower half and not in its upper half. The model has one number per
column: the probability theta of going where one wants. It cannot be right everywhere, so it
matters where it is wrong. Maximum likelihood fits all observed moves alike. The other fit minimizes
what the plan of the model costs, and differentiates through the step in the transitions. That cost
is estimated on the table of observed frequencies. The plan of this table itself is a third way.
"""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import torch
from torch import Tensor

import torch_occ as occ

F64 = torch.float64
HORIZON = 14
TEMPERATURE = 0.1


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


TRUTH = torch.tensor([0.95] * 8 + [0.4] * 8, dtype=F64)


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


class Costs(NamedTuple):
    """True costs of the plans, `(seeds,)` each, and the fitted probabilities."""

    likelihood: Tensor
    downstream: Tensor
    table: Tensor
    theta_likelihood: Tensor  # (seeds, 4)
    theta_downstream: Tensor  # (seeds, 4)


def most_likely(lake: Lake, counts: Tensor) -> Tensor:
    """The theta of largest likelihood, `(seeds, 4)`, by a search on a grid."""
    grid = torch.linspace(0.01, 0.99, 99, dtype=F64)
    logs = lake.by_column(grid[:, None].expand(-1, 4)).clamp(min=1e-300).log()
    per_state = (counts.unsqueeze(1) * logs).sum((-2, -1))  # (seeds, grid, S)
    return grid[per_state.unflatten(-1, (4, 4)).sum(-2).argmax(1)]


def compare(episodes: int, seeds: int, updates: int) -> Costs:
    """Fit theta in both ways to the same data, and evaluate the plans in the true lake."""
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
        tuned = torch.sigmoid(free)
        found = lake.by_column(tuned)
        first, second, third = (
            unrolled.cost(truth, unrolled.policy(x)) for x in (model, found, seen)
        )
    return Costs(first, second, third, theta, tuned)


def best_cost() -> float:
    """The cost of the plan that knows the true lake."""
    lake = make_lake()
    unrolled, truth = Unrolled(lake), lake.slippery(TRUTH)
    return unrolled.cost(truth, unrolled.policy(truth)).item()
