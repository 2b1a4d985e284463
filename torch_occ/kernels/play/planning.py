"""The episode loops of learners that plan with estimated transitions, compiled.

`plan` is the compiled twin of torch_occ.game.learners.planning, which has the formulas. Policies
are deterministic, and both backends break ties alike, so they play the same game.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.constants import TIE
from torch_occ.kernels.layout import PAIR, Bools, Floats, Ints, Model, Work, kernel, part
from torch_occ.kernels.play.baselines import occupy
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    draw,
    favour,
    index_drawn,
    state_drawn,
)

#: The bonuses of torch_occ.game.learners.planning.
UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING, EULER, STRONG_EULER = 0, 1, 2, 3, 4

# Rows of `values`; rows of `bounds`.
LOWER, UPPER, ARRIVALS = 0, 1, 2


class Planner(NamedTuple):
    """The settings of an optimistic learner, and its memory for one seed.

    Two planners may share `bounds`, `values` and `allowed`: two sets of data for one plan.
    """

    bonus: int
    monotone: bool  # whether lower bounds never fall
    floor: float
    corruption: float
    states: float  # S
    actions: float  # A
    visits: Floats  # (S * A,)
    losses: Floats  # (S * A,), sums of observed losses
    counts: Floats  # (M,), visits by next state, as torch_occ.game.beliefs.counts
    entry: Ints  # (S * A,), the first entry of each pair in `counts`
    bounds: Floats  # (2, S * A), Q_lower and Q_upper
    values: Floats  # (3, S), V_lower, V_upper and the visits of every state
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
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    work: Work,
) -> None:
    """Play n episodes."""
    q, scalars = tally.q, tally.scalars
    for t in range(len(numbers)):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        plan(model, planner, planner, False, logs[t], work)
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
            planner.losses,
            planner.visits,
            planner.counts,
            planner.entry,
            work,
        )


@part
def enter(means: Floats, row: int, tally: Tally) -> float:
    """Add q and the means of an episode to the sums; return the expected loss of q."""
    expected = 0.0
    for i in range(len(tally.q)):
        expected += tally.q[i] * means[row, i]
        tally.cumulative_occupancy[i] += tally.q[i]
        tally.total_mean[i] += means[row, i]
    return expected


@kernel
def plan(
    model: Model, planner: Planner, other: Planner, both: bool, log: float, work: Work
) -> None:
    """Backward induction with a bonus; `work.softest` receives the pair that each state plays.

    If `both`, then the tightest bounds of the data of both planners count.
    """
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    visits, bounds, values = planner.visits, planner.bounds, planner.values
    for k in range(layers - 1, -1, -1):
        behind, left = start[k + 1], float(layers - k)
        size = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            best, arrived = np.inf, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    arrived += visits[i]
                    low, high = estimate(planner, log, layers, left, behind, size, i)
                    if both:
                        lower, upper = estimate(other, log, layers, left, behind, size, i)
                        low, high = max(low, lower), min(high, upper)
                    if planner.monotone:
                        low = max(low, bounds[LOWER, i])
                    bounds[LOWER, i], bounds[UPPER, i] = low, high
                    if planner.allowed[i]:
                        best = min(best, low)
            values[LOWER, s], values[ARRIVALS, s] = best, arrived
            limit = best if np.isinf(best) else best + TIE * max(1.0, abs(best))
            for i in range(s * num_actions, (s + 1) * num_actions):
                if planner.allowed[i] and bounds[LOWER, i] <= limit:
                    work.softest[s] = i
                    values[UPPER, s] = bounds[UPPER, i]
                    break


@part
def estimate(
    planner: Planner,
    log: float,
    layers: int,
    left: float,
    first: int,  # the first state of the next layer
    size: int,  # the number of its states; 0 if it is the terminal state
    i: int,
) -> tuple[float, float]:
    """Q_lower and Q_upper of a pair."""
    if planner.visits[i] == 0.0:
        return planner.floor, left
    loss = planner.losses[i] / planner.visits[i]
    n, values, bonus, entry = planner.visits[i], planner.values, planner.bonus, planner.entry[i]
    share, lower, upper, variance, distance, spread = 1.0 / n, 0.0, 0.0, 0.0, 0.0, 0.0
    for j in range(size):
        p = planner.counts[entry + j] * share
        lower += p * values[LOWER, first + j]
        upper += p * values[UPPER, first + j]
    if bonus != UCBVI_HOEFFDING and bonus != SHARP_HOEFFDING:
        widest = float(layers * layers)
        scale = 1e4 * layers**3 * log * log
        scale *= planner.states * planner.states * planner.actions
        for j in range(size):
            p = planner.counts[entry + j] * share
            variance += p * (values[LOWER, first + j] - lower) ** 2
            if bonus == UCBVI_BERNSTEIN:
                arrived = values[ARRIVALS, first + j]
                spread += p * (min(scale / arrived, widest) if arrived > 0.0 else widest)
            else:
                distance += p * (values[UPPER, first + j] - values[LOWER, first + j]) ** 2
    b = 0.0
    if bonus == UCBVI_HOEFFDING:
        b = 7.0 * layers * log / np.sqrt(n) + min(1.0, planner.corruption / (2.0 * n))
    elif bonus == SHARP_HOEFFDING:
        b = left * np.sqrt(log / (2.0 * n)) + min(1.0, planner.corruption / (2.0 * n))
    elif n < 2.0:
        b = np.inf
    else:
        rest = n - 1.0
        b = np.sqrt(2.0 * max(loss * (1.0 - loss), 0.0) * log / rest) + 7.0 * log / (3.0 * rest)
        if bonus == UCBVI_BERNSTEIN:
            b += np.sqrt(8.0 * log * variance / n) + 14.0 * layers * log / (3.0 * n)
            b += np.sqrt(8.0 / n * spread)
        elif size > 1:
            distance, root = np.sqrt(distance), np.sqrt(2.0 * log / rest)
            b += root * (np.sqrt(variance) + distance) + 7.0 * (left - 1.0) * log / (3.0 * rest)
            if bonus == STRONG_EULER:
                b += np.sqrt(2.0 * size * log / rest) * distance
                b += 7.0 * size * (left - 1.0) * log / (3.0 * rest)
    return max(loss + lower - b, planner.floor), min(loss + upper + b, left)


@kernel
def explore(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    numbers: Floats,
    losses: Floats,
    visits: Floats,
    counts: Floats,
    entry: Ints,
    work: Work,
) -> float:
    """Play one trajectory of the policy in `work.softest`, and return its total loss.

    `losses`, `visits` and `counts` are updated at the visited pairs.
    """
    layers, suffered = len(model.start) - 1, 0.0
    s = index_drawn(model.initial, 0, len(model.initial), numbers[t, layers - 1, 2])
    for k in range(layers):
        i = work.softest[s]
        loss = draw(rules.noise, means[row, i], numbers[t, k, 1])
        losses[i] += loss
        visits[i] += 1.0
        suffered += loss
        after = 0  # of the terminal state
        if k + 1 < layers:
            s = state_drawn(model, i, k, numbers[t, k, 2])
            after = s - model.start[k + 1]
        counts[entry[i] + after] += 1.0
    return suffered
