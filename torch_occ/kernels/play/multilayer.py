"""The episode loop of multi-layer UCBVI, compiled.

This is the compiled twin of torch_occ.game.learners.multilayer, from the same random numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.layout import PAIR, Bools, Floats, Ints, Model, Work, kernel, part
from torch_occ.kernels.play.baselines import Seen, average, enter, follow, occupy
from torch_occ.kernels.play.episodes import Rules, Tally, favour
from torch_occ.kernels.play.planning import LOWER, SHARP_HOEFFDING, UPPER, Planner, plan
from torch_occ.kernels.play.sampling import key_of, uniform


class Stack(NamedTuple):
    """The settings and the memory of R layers, for one seed; the first layer is the fastest.

    Row R of `visits`, `losses` and `counts` has the data of all layers.
    """

    seed: int
    log: float
    corruption: float
    visits: Floats  # (R + 1, S * A)
    losses: Floats  # (R + 1, S * A), sums of observed losses
    counts: Floats  # (R + 1, M)
    mean: Floats  # (R + 1, S * A), scratch
    root: Floats  # (R + 1, S * A), scratch
    possible: Floats  # (R, S * A), 1 where the layer found the action possible at its last turn
    entry: Ints  # (S * A,)
    bounds: Floats  # (2, S * A)
    values: Floats  # (3, S)
    allowed: Bools  # (S * A,)
    ignored: Floats  # (8,), scratch: the scalars of a trajectory that is played again


@kernel
def play_stack(
    model: Model,
    stack: Stack,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (1, n, L, 3)
    rules: Rules,
    tally: Tally,
    work: Work,
) -> None:
    """Play n episodes."""
    q, everything, count = tally.q, len(stack.possible), numbers.shape[1]
    for r in range(everything + 1):
        average(seen_of(stack, r), 0.0)
    for t in range(count):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        layer = layer_drawn(stack, before + t + 1)
        plan_layer(model, stack, layer, work)
        occupy(model, q, work)
        enter(rules, means, row, t, count, 1, tally)
        # The same trajectory twice: into both sets of data.
        own, together = seen_of(stack, layer), seen_of(stack, everything)
        follow(model, rules, t, means, row, numbers, tally.scalars, own, work)
        follow(model, rules, t, means, row, numbers, stack.ignored, together, work)


@part
def seen_of(stack: Stack, r: int) -> Seen:
    """A row of data."""
    return Seen(
        stack.visits[r],
        stack.losses[r],
        stack.mean[r],
        stack.root[r],
        stack.counts[r],
        stack.entry,
    )


@part
def layer_drawn(stack: Stack, t: int) -> int:
    """The layer of episode t: r with probability 2^-(r + 1), and 0 for the rest."""
    number, layer, share = uniform(np.uint64(key_of(stack.seed, t, 0)), 0), 0, 0.5
    while layer < len(stack.possible) and number < share:
        layer += 1
        share *= 0.5
    return layer if layer < len(stack.possible) else 0


@part
def planner_of(stack: Stack, r: int, corruption: float) -> Planner:
    """A row of data with its bonus."""
    return Planner(
        SHARP_HOEFFDING,
        False,
        0.0,
        corruption,
        0.0,  # the numbers of states and actions are not in this bonus
        0.0,
        seen_of(stack, r),
        stack.bounds,
        stack.values,
        stack.allowed,
    )


@kernel
def plan_layer(model: Model, stack: Stack, layer: int, work: Work) -> None:
    """Plan the turn of a layer with the actions that slower layers found possible."""
    num_actions, bounds, allowed = model.num_actions, stack.bounds, stack.allowed
    for i in range(len(allowed)):
        allowed[i] = model.exists[PAIR, i]
    for r in range(len(stack.possible) - 1, layer, -1):
        for first in range(0, len(allowed), num_actions):
            left = False
            for i in range(first, first + num_actions):
                left = left or (allowed[i] and stack.possible[r, i] > 0.0)
            if left:
                for i in range(first, first + num_actions):
                    allowed[i] = allowed[i] and stack.possible[r, i] > 0.0
    own = planner_of(stack, layer, stack.corruption)
    together = planner_of(stack, len(stack.possible), 2.0 ** (layer + 1))
    plan(model, own, together, True, stack.log, work)
    for first in range(0, len(allowed), num_actions):
        best = np.inf
        for i in range(first, first + num_actions):
            if allowed[i]:
                best = min(best, bounds[UPPER, i])
        for i in range(first, first + num_actions):
            stack.possible[layer, i] = 1.0 if allowed[i] and bounds[LOWER, i] <= best else 0.0
