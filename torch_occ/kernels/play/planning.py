"""The episode loops of learners that plan with estimated transitions, compiled.

`plan` is the compiled twin of torch_occ.game.learners.planning, which has the formulas. Policies
are deterministic, and both backends break ties alike, so they play the same game.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ.kernels.lanes.arrays import in_lanes, in_lanes_or_shared
from torch_occ.kernels.lanes.vectors import anywhere, sqrt, where
from torch_occ.kernels.layout import PAIR, Bools, Floats, Ints, Model, Work, kernel, part
from torch_occ.kernels.play.baselines import CHOICE, Seen, average, cheapest, play_plan
from torch_occ.kernels.play.episodes import Rules, Tally, react

#: The bonuses of torch_occ.game.learners.planning.
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
    """Play n episodes; lanes are as in `torch_occ.kernels.play.baselines.play_empirical`."""
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
