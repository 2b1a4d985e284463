"""The episode loop of multi-layer UCBVI, compiled.

This is the compiled twin of torch_occ.game.learners.multilayer. The plan of a layer changes only
when the layer or a slower one has learned, so plans are kept until then.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.layout import Bools, Floats, Ints, Model, Work, kernel, part
from torch_occ.kernels.play.baselines import occupy
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    favour,
)
from torch_occ.kernels.play.planning import (
    LOWER,
    SHARP_HOEFFDING,
    UPPER,
    Planner,
    enter,
    explore,
    plan,
)
from torch_occ.kernels.play.sampling import key_of, uniform


class Stack(NamedTuple):
    """The settings and the memory of R layers, for one seed; the first layer is the fastest."""

    seed: int
    log: float
    corruption: float
    visits: Floats  # (R, S * A)
    losses: Floats  # (R, S * A), sums of observed losses
    counts: Floats  # (R, M)
    entry: Ints  # (S * A,)
    bounds: Floats  # (2, S * A)
    values: Floats  # (3, S)
    # (R + 1, S * A): row r has the actions that the layers r, r + 1, ... find possible; row R all
    allowed: Bools
    chosen: Ints  # (R, S), the pair that each state plays


@kernel
def play_stack(
    model: Model,
    stack: Stack,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    work: Work,
) -> None:
    """Play n episodes."""
    q, scalars, planned = tally.q, tally.scalars, len(stack.visits)  # plans from `planned` on hold
    for t in range(len(numbers)):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        layer = layer_drawn(stack, before + t + 1)
        while planned > layer:
            planned -= 1
            plan_layer(model, stack, planned, work)
        for s in range(len(work.softest)):
            work.softest[s] = stack.chosen[layer, s]
        occupy(model, q, work)
        scalars[EXPECTED] += enter(means, row, tally)
        add_moments(rules, means, row, t, len(numbers), tally.second_moment)
        scalars[REALISED] += explore(
            model,
            rules,
            t,
            means,
            row,
            numbers,
            stack.losses[layer],
            stack.visits[layer],
            stack.counts[layer],
            stack.entry,
            work,
        )
        planned = layer + 1


@part
def layer_drawn(stack: Stack, t: int) -> int:
    """The layer of episode t: r with probability 2^-(r + 1), and 0 for the rest."""
    number, layer, share = uniform(np.uint64(key_of(stack.seed, t, 0)), 0), 0, 0.5
    while layer < len(stack.visits) and number < share:
        layer += 1
        share *= 0.5
    return layer if layer < len(stack.visits) else 0


@kernel
def plan_layer(model: Model, stack: Stack, r: int, work: Work) -> None:
    """Plan with the data of layer r and the actions that slower layers find possible."""
    num_actions, bounds = model.num_actions, stack.bounds
    planner = Planner(
        SHARP_HOEFFDING,
        False,
        0.0,
        stack.corruption,
        0.0,  # the numbers of states and actions are not in this bonus
        0.0,
        stack.visits[r],
        stack.counts[r],
        stack.entry,
        bounds,
        stack.values,
        stack.allowed[r + 1],
    )
    plan(model, planner, stack.log, stack.losses[r], work)
    for s in range(len(work.softest)):
        stack.chosen[r, s] = work.softest[s]
        best = np.inf
        for i in range(s * num_actions, (s + 1) * num_actions):
            if stack.allowed[r + 1, i]:
                best = min(best, bounds[UPPER, i])
        for i in range(s * num_actions, (s + 1) * num_actions):
            stack.allowed[r, i] = stack.allowed[r + 1, i] and bounds[LOWER, i] <= best
