"""The episode loops of learners that plan with estimated transitions, compiled.

`plan` is the compiled twin of torch_occ.rivals.planning, which has the formulas. Policies
are deterministic, and both backends break ties alike, so they play the same game.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ.engine.draws import beta, gamma, key_of, uniform
from torch_occ.engine.lanes import anywhere, in_lanes, in_lanes_or_shared, sqrt, where
from torch_occ.engine.layout import (
    PAIR,
    PLAN,
    TRIAL,
    Bools,
    Floats,
    Ints,
    Model,
    Work,
    kernel,
    part,
)
from torch_occ.engine.play_old import (
    CHOICE,
    Rules,
    Seen,
    cheapest,
    enter,
    favour,
    follow,
    play_plan,
    react,
)
from torch_occ.engine.play_old import (
    FlatTally as Tally,
)
from torch_occ.engine.play_old import (
    average_seen as average,
)
from torch_occ.engine.play_old import (
    occupy_row as occupy,
)

#: The bonuses of torch_occ.rivals.planning.
UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING, EULER, STRONG_EULER = 0, 1, 2, 3, 4

# Rows of `values`; rows of `bounds`.
LOWER, UPPER, SPREAD = 0, 1, 2


class Planner(NamedTuple):
    """The settings of an optimistic learner, and its memory for one seed, or one per lane.

    Two planners may share `bounds`, `values` and `allowed`: two sets of data for one plan.
    """

    bonus: int
    monotone: bool  # whether lower bounds never fall
    floor: float
    corruption: float
    states: float  # S
    actions: float  # A
    seen: Seen
    bounds: Floats  # (2, S * A), Q_lower and Q_upper
    values: Floats  # (3, S), V_lower, V_upper and the b' of UCBVI
    allowed: Bools  # (S * A,), the pairs that may be played


def entries(model: Model) -> Ints:
    """The first entry of each pair in a flat table over transitions, `(S * A,)`."""
    sizes = np.append(np.diff(model.start), 1)  # the last layer leads to one terminal state
    next_states = np.repeat(sizes[1:], sizes[:-1] * model.num_actions)
    return np.concatenate([[0], np.cumsum(next_states)[:-1]])


@kernel
def play_planner(
    model: Model,
    planner: Planner,
    logs: Floats,  # (n,), the logarithm in the bonus
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (N, n, L, 3) for N seeds, at most as many as lanes
    rules: Rules,
    tally: Tally,
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes; lanes are as in `torch_occ.engine.play.play_empirical`."""
    tally, planner, work = in_lanes(tally, width), in_lanes(planner, width), in_lanes(work, width)
    means = in_lanes_or_shared(means, width)
    average(planner.seen, 0.0)
    for t in range(numbers.shape[1]):
        if t > 0 and rules.greedy:
            react(model, tally.q, means)
        plan(model, planner, planner, False, logs[t], work)
        play_plan(model, rules, t, means, numbers, tally, planner.seen, work)


@kernel
def plan(
    model: Model, planner: Planner, other: Planner, both: bool, log: float, work: Work
) -> None:
    """Backward induction with a bonus; row CHOICE of the states receives the pairs to play.

    If `both`, then the tightest bounds of the data of both planners count.
    """
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    bounds, values = planner.bounds, planner.values
    widest = float(layers * layers)
    scale = 1e4 * widest * layers * log * log * planner.states * planner.states * planner.actions
    for k in range(layers - 1, -1, -1):
        behind, left = start[k + 1], float(layers - k)
        size = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            arrived = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    arrived += planner.seen.visits[i]
                    low, high = estimate(planner, log, layers, left, behind, size, i)
                    if both:
                        lower, upper = estimate(other, log, layers, left, behind, size, i)
                        low, high = max(low, lower), min(high, upper)
                    if planner.monotone:
                        low = max(low, bounds[LOWER, i])
                    bounds[LOWER, i], bounds[UPPER, i] = low, high
            values[SPREAD, s] = where(arrived > 0.0, min(scale / max(arrived, 1.0), widest), widest)
            values[LOWER, s], chosen = cheapest(
                planner.allowed, bounds, LOWER, s * num_actions, (s + 1) * num_actions
            )
            work.states[CHOICE, s] = chosen
            for i in range(s * num_actions, (s + 1) * num_actions):
                if planner.allowed[i]:
                    values[UPPER, s] = where(chosen == float(i), bounds[UPPER, i], values[UPPER, s])


@part
def estimate(
    planner: Planner,
    log: float,
    layers: int,
    left: float,
    first: int,  # the first state of the next layer
    size: int,  # the number of its states; 0 if it is the terminal state
    i: int,
) -> tuple[Any, Any]:
    """Q_lower and Q_upper of a pair."""
    seen, values, bonus = planner.seen, planner.values, planner.bonus
    n, loss, root, entry = seen.visits[i], seen.mean[i], seen.root[i], seen.entry[i]
    known, share, rest = n > 0.0, root * root, max(n - 1.0, 1.0)
    b, lower, upper, variance, distance, spread = loss - loss, 0.0, 0.0, 0.0, 0.0, 0.0
    if anywhere(known):
        for j in range(size):
            p = seen.counts[entry + j] * share
            lower += p * values[LOWER, first + j]
            upper += p * values[UPPER, first + j]
        if bonus == UCBVI_HOEFFDING:
            b = 7.0 * layers * log * root + min(1.0, 0.5 * planner.corruption * share)
        elif bonus == SHARP_HOEFFDING:
            b = left * np.sqrt(0.5 * log) * root + min(1.0, 0.5 * planner.corruption * share)
        else:
            for j in range(size):
                p = seen.counts[entry + j] * share
                apart = values[LOWER, first + j] - lower
                variance += p * apart * apart
                if bonus == UCBVI_BERNSTEIN:
                    spread += p * values[SPREAD, first + j]
                else:
                    gap = values[UPPER, first + j] - values[LOWER, first + j]
                    distance += p * gap * gap
            each = log / rest
            b = sqrt(2.0 * max(loss * (1.0 - loss), 0.0) * each) + 7.0 / 3.0 * each
            if bonus == UCBVI_BERNSTEIN:
                b += sqrt(8.0 * log * variance) * root + 14.0 / 3.0 * layers * log * share
                b += sqrt(8.0 * spread) * root
            elif size > 1:
                distance = sqrt(distance)
                b += sqrt(2.0 * each) * (sqrt(variance) + distance)
                b += 7.0 / 3.0 * (left - 1.0) * each
                if bonus == STRONG_EULER:
                    b += sqrt(2.0 * size * each) * distance
                    b += 7.0 / 3.0 * size * (left - 1.0) * each
            b = where(n < 2.0, np.inf, b)
    low = where(known, max(loss + lower - b, planner.floor), planner.floor)
    return low, where(known, min(loss + upper + b, left), left)


# -- The episode loop of PSRL, compiled: draw a model, plan in it, play ----------------------------
#
# This is the compiled twin of torch_occ.rivals.psrl, from the same random numbers.


@kernel
def play_posterior(
    model: Model,
    seed: int,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (1, n, L, 3)
    rules: Rules,
    tally: Tally,
    seen: Seen,
    work: Work,
) -> None:
    """Play n episodes of one seed."""
    average(seen, 0.0)
    for t in range(numbers.shape[1]):
        if t > 0 and rules.greedy:
            favour(model, tally.q, means)
        plan_in_sample(model, seed, before + t + 1, seen, work)
        play_plan(model, rules, t, means, numbers, tally, seen, work)


@kernel
def plan_in_sample(model: Model, seed: int, t: int, seen: Seen, work: Work) -> None:
    """Draw a model and plan in it; row CHOICE of the states receives the pairs to play."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    drawn, values = work.pairs, work.states
    for k in range(layers - 1, -1, -1):
        behind = start[k + 1]
        size = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    losses = seen.losses[i]
                    failures = max(seen.visits[i] - losses, 0.0)
                    drawn[TRIAL, i] = beta(seed, t, i, 1.0 + losses, 1.0 + failures)
                    drawn[TRIAL, i] += value_ahead(seed, t, seen, values, i, behind, size)
            values[PLAN, s], values[CHOICE, s] = cheapest(
                model.exists[PAIR], drawn, TRIAL, s * num_actions, (s + 1) * num_actions
            )


@part
def value_ahead(
    seed: int, t: int, seen: Seen, values: Floats, i: int, first: int, size: int
) -> float:
    """The expected value of the next state under transitions drawn from the posterior.

    The items of the transitions follow those of the losses, two for each pair.
    """
    if size < 2:
        return values[PLAN, first] if size else 0.0
    weighted, total, entry = 0.0, 0.0, seen.entry[i]
    for j in range(entry, entry + size):
        key = np.uint64(key_of(seed, t, 2 * len(seen.visits) + j))
        share = gamma(key, seen.counts[j] + 1.0 / size)
        total += share
        weighted += share * values[PLAN, first + j - entry]
    return weighted / total


# -- The episode loop of multi-layer UCBVI, compiled -----------------------------------------------
#
# This is the compiled twin of torch_occ.rivals.multilayer, from the same random numbers.


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
