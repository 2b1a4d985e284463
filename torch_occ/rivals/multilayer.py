"""Multi-layer UCBVI (simplified): losses of which an unknown part was changed."""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import numpy as np

from torch_occ.engine.draws import episode_key, key_of, uniform
from torch_occ.engine.lanes import lane, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, Work, routine
from torch_occ.engine.learners import average, count_visit
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.beliefs import count_transitions, entries, num_transitions
from torch_occ.rivals.ucbvi import (
    LOWER,
    SHARP_HOEFFDING,
    UPPER,
    check_delta,
    needed_episodes,
    plan_with_bounds,
)


class Averages(NamedTuple):
    """Sums of observations, and what follows from them."""

    visits: Floats  # (S * A,)
    losses: Floats  # (S * A,)
    counts: Floats  # (M,)
    mean: Floats  # (S * A,)
    root: Floats  # (S * A,)


class CompiledLayers(NamedTuple):
    """`MultiLayerUCBVI`; the first layer is the fastest."""

    visits: PerPair  # (R, S * A)
    losses: PerPair  # (R, S * A)
    counts: Floats  # (R, M)
    possible: PerPair  # (R, S * A), 1 where the layer found the action possible at its last turn
    seeds: Any
    bonus: int
    monotone: bool
    floor: float
    logarithm: float
    corruption: float
    entry: Ints
    own: Averages  # the data of the layer that plays
    together: Averages  # the data of all layers
    layer: Floats  # (1,), the layer that plays
    lower: PerPair
    allowed: PerPair
    bounds: Annotated[Floats, 2, "pairs"]
    values: Annotated[Floats, 3, "states"]
    choice: PerState


class MultiLayerUCBVI(Learner):
    """Multi-layer UCBVI, simplified (after Lykouris, Simchowitz, Slivkins and Sun, 2021).

    The losses are stochastic, but an adversary has changed some of them, by an unknown amount C
    (`occ.Corrupted`). There are R = ceil(log2 T) copies of UCBVI, called layers; layer r is robust
    to C = 2^r. An episode belongs to layer r with probability 2^-r (the rest to layer 1). A layer
    has the tightest bounds of two kinds of data, with the bonus of `UCBVI(bonus="sharp")` plus

    - min(1, (ln(2 L R / delta) + 3) / N) for its own episodes: if C <= 2^r, they contain changes of
      at most ln(2 L R / delta) + 3 per pair, with high probability, because so few episodes belong
      to it;
    - min(1, 2^r / (2 N)) for the episodes of all layers.

    The slow layers supervise the fast ones. When a layer has planned, it finds those actions
    possible whose lower bound is at most the smallest upper bound. A layer plays the smallest lower
    bound among the actions that every slower layer found possible at its last turn. (If slower
    layers leave no action in a state, the slowest ones count.)

    What is simplified: the paper passes control to slower layers within an episode, so that they
    see states that only fast layers reach; its bonuses are larger; it also covers changed
    transitions. Its guarantee does not carry over. What holds here by the argument above, with
    probability 1 - delta: no layer with 2^r >= C excludes an optimal action.

    Raises:
        TypeError: if `episodes` is no whole number.
        ValueError: if `episodes` or `delta` is not valid.
    """

    compiled = CompiledLayers
    bonus, monotone, floor = SHARP_HOEFFDING, False, 0.0

    def __init__(self, mdp: LayeredMDP, episodes: int, delta: float = 0.1) -> None:
        super().__init__(mdp.blind())
        self.max_episodes = needed_episodes(
            "MultiLayerUCBVI", episodes, "which decides the number of its layers"
        )
        self.delta = check_delta("MultiLayerUCBVI", delta)

    @property
    def layers(self) -> int:
        """R, the number of layers."""
        assert self.max_episodes is not None
        return max(1, math.ceil(math.log2(self.max_episodes)))

    @property
    def logarithm(self) -> float:
        """The logarithm in the bonus, ln(4 S A (R + 1) T / delta): a union over data and visits."""
        assert self.max_episodes is not None
        return math.log(4 * self.mdp.num_pairs * (self.layers + 1) * self.max_episodes / self.delta)

    @property
    def corruption(self) -> float:
        """Twice the changes that a slow layer sees, as `UCBVI` counts them."""
        return 2 * (math.log(2 * self.mdp.horizon * self.layers / self.delta) + 3)

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds).unsqueeze(1).repeat(1, self.layers, 1, 1)
        counts = pairs.new_zeros(num_seeds, self.layers, num_transitions(self.mdp))
        self.state = {"visits": pairs, "losses": pairs.clone(), "counts": counts}
        self.state["possible"] = self.mdp.actions.to(pairs).expand_as(pairs).clone()

    def settings(self) -> dict[str, Any]:
        pairs, count = self.mdp.actions.numel(), num_transitions(self.mdp)
        blank = Averages(*(np.zeros(n) for n in (pairs, pairs, count, pairs, pairs)))
        found = {"entry": entries(self.mdp), "own": blank, "together": blank}
        return found | {"layer": np.zeros(1)}


@propose.register(CompiledLayers)
def _propose_in_layers(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        add_layers(learner)
    for n in range(len(learner.seeds)):
        take_turn(learner.seeds[n], game.before + t + 1, lane(learner, n))
    average(learner.own, 0.0)
    allow(game.model, learner)
    robust_to = 1.0
    for r in range(len(learner.possible)):
        robust_to = where(learner.layer[0] >= float(r), 2.0 * robust_to, robust_to)
    changed, own, together = (learner.corruption, robust_to), learner.own, learner.together
    plan_with_bounds(game.model, own, together, True, changed, learner.logarithm, learner)
    for n in range(len(learner.seeds)):
        find_possible(game.model.num_actions, lane(learner, n))


@observe.register(CompiledLayers)
def _observe_in_layers(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(game.pairs)):
        seed = lane(learner, n)
        r = int(seed.layer[0])
        for k in range(game.pairs.shape[1]):
            i, loss = game.pairs[n, k], game.losses[n, k]
            seed.visits[r, i] += 1.0
            seed.losses[r, i] += loss
            count_visit(seed.together, i, loss)
        count_transitions(game, n, seed.counts[r], seed.entry)
        count_transitions(game, n, seed.together.counts, seed.entry)


@routine(inline=True)
def add_layers(learner: CompiledLayers) -> None:
    """The data of all layers."""
    together = learner.together
    for i in range(len(together.visits)):
        together.visits[i], together.losses[i] = 0.0, 0.0
        for r in range(len(learner.possible)):
            together.visits[i] += learner.visits[r, i]
            together.losses[i] += learner.losses[r, i]
    for e in range(len(together.counts)):
        together.counts[e] = 0.0
        for r in range(len(learner.possible)):
            together.counts[e] += learner.counts[r, e]
    average(together, 0.0)


@routine(inline=True)
def take_turn(seed: int, t: int, learner: CompiledLayers) -> None:
    """Draw the layer of episode t for one seed, and take its data; r is numbered from 0."""
    number, layer, share, own = uniform(key_of(episode_key(seed, t), 0), 0), 0, 0.5, learner.own
    while layer < len(learner.possible) and number < share:
        layer += 1
        share *= 0.5
    r = layer if layer < len(learner.possible) else 0
    learner.layer[0] = float(r)
    for i in range(len(own.visits)):
        own.visits[i], own.losses[i] = learner.visits[r, i], learner.losses[r, i]
    for e in range(len(own.counts)):
        own.counts[e] = learner.counts[r, e]


@routine(inline=True)
def allow(model: Model, learner: CompiledLayers) -> None:
    """The actions that all slower layers found possible; if they leave none, the slowest count."""
    allowed, possible, num_actions = learner.allowed, learner.possible, model.num_actions
    for i in range(len(allowed)):
        allowed[i] = 1.0 if model.exists[PAIR, i] else 0.0
    for first in range(0, len(allowed), num_actions):
        for r in range(len(possible) - 1, 0, -1):
            left = 0.0
            for i in range(first, first + num_actions):
                left = max(left, allowed[i] * possible[r, i])
            counts = (left > 0.0) & (learner.layer[0] < float(r))
            for i in range(first, first + num_actions):
                allowed[i] = where(counts, allowed[i] * possible[r, i], allowed[i])


@routine(inline=True)
def find_possible(num_actions: int, learner: CompiledLayers) -> None:
    """The allowed actions of one seed whose lower bound is at most the smallest upper bound."""
    allowed, bounds, r = learner.allowed, learner.bounds, int(learner.layer[0])
    for first in range(0, len(allowed), num_actions):
        best = np.inf
        for i in range(first, first + num_actions):
            if allowed[i] > 0.0:
                best = min(best, bounds[UPPER, i])
        for i in range(first, first + num_actions):
            good = allowed[i] > 0.0 and bounds[LOWER, i] <= best
            learner.possible[r, i] = 1.0 if good else 0.0
