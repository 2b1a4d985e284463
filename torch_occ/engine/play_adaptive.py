"""The episode loop of FTRL with hints and adaptive rates, compiled; one seed, or one per lane.

This is the compiled twin of torch_occ.game.learners.adaptive, which has the formulas. The loop is
that of torch_occ.engine.play.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import CHUNK
from torch_occ.engine.lanes import (
    Shared,
    anywhere,
    in_lanes,
    in_lanes_or_shared,
    lane,
    log,
    power,
    sqrt,
    where,
)
from torch_occ.engine.layout import (
    PAIR,
    Floats,
    Ints,
    Model,
    Terms,
    Work,
    ahead,
    kernel,
    part,
    routine,
)
from torch_occ.engine.play import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    draw,
    drift,
    enter,
    index_drawn,
    propose,
    react,
    state_drawn,
)
from torch_occ.engine.psi import POWER

NO_HINTS, MEAN_HINTS, GRADIENT_HINTS = 0, 1, 2
NO_RATES, ADAPTIVE_RATES, MATCHING_RATES = 0, 1, 2
TINY = float(np.finfo(np.float64).tiny)


class Manner(NamedTuple):
    """How hints and rates follow from the observations."""

    hints: int
    prior: float
    strength: float  # the count of `MeanHints`
    step: float  # of `GradientHints`
    rates: int
    log_episodes: float  # of `AdaptiveRates`


class Memory(NamedTuple):
    """The state of hints and rates of one seed, or of one per lane, and scratch memory.

    Pairs are flat.
    """

    visits: Floats  # (S * A,), of `MeanHints`
    losses: Floats  # (S * A,), of `MeanHints`; the hints of `GradientHints`
    inverse_rate: Floats  # (S * A,), (1,), or (0,) without rates
    weights: Floats  # (K or K * S * A,), of the last episode
    loss: Floats  # (S * A,), scratch: the loss of the step
    hint: Floats  # (S * A,), scratch
    excess: Floats  # (S * A,), zeros between episodes
    value: Floats  # (1, S), scratch
    visited: Ints  # (N, L), scratch
    seen: Shared  # (N, L), scratch


@kernel
def play_adaptive(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n, K or K * S * A), without rates
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (N, n, L, 3) for N seeds, at most as many as lanes
    rules: Rules,
    manner: Manner,
    tally: Tally,
    memory: Memory,
    middle: Floats,  # (S * A,), an interior point for cold starts
    nowhere: Floats,  # (0,)
    work: Work,  # the same for every call of a run
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes; lanes are as in `torch_occ.engine.play.play`."""
    terms, tally, work = in_lanes(terms, width), in_lanes(tally, width), in_lanes(work, width)
    memory, nowhere = in_lanes(memory, width), in_lanes(nowhere, width)
    means = in_lanes_or_shared(means, width)
    q, num_pairs, num_seeds = tally.q, len(tally.q), len(numbers)
    for i in range(num_pairs):
        work.pairs[PAIR, i] = q[i]
    for t in range(len(weights)):
        if t > 0 and rules.greedy:
            react(model, q, means)
        work.stale[0] += weigh(terms, weights, t, num_pairs, memory)
        # Nothing is kept from one chunk to the next, so that a run can continue from a file.
        if (before + t) % CHUNK == 0:
            work.stale[0], work.stale[1], work.stale[2] = np.inf, 0.0, 0.0
        predict(model, manner, tally.cumulative_loss, memory)
        own, loss, scalars = memory.weights, memory.loss, tally.scalars
        episode, row = before + t + 1, min(t, len(means) - 1)
        propose(model, terms, own, loss, rules, middle, nowhere, episode, scalars, work)
        for i in range(num_pairs):
            q[i] = work.pairs[PAIR, i]
        enter(rules, means, row, t, len(weights), num_seeds, tally)
        for n in range(num_seeds):
            visited, seen = memory.visited[n], memory.seen[n]
            lane(scalars, n)[REALISED] += walk(
                model, rules, t, lane(means, n), row, lane(q, n), numbers[n], visited, seen
            )
        learn(model, terms, manner, q, tally.cumulative_loss, num_seeds, memory)


@kernel
def weigh(terms: Terms, weights: Floats, t: int, num_pairs: int, memory: Memory) -> Any:
    """Multiply the weights of episode t by the inverse rates; return their largest change.

    Changes are relative to the weights of the last episode.
    """
    inverse, own = memory.inverse_rate, memory.weights
    count, each, most = len(terms.argument), len(own), 0.0
    for k in range(each):
        factor, before = 1.0, own[k]
        if len(inverse) > 1:
            factor = inverse[k % num_pairs]
        elif len(inverse) == 1:
            factor = inverse[0]
        at = k if weights.shape[1] == each else k * count // each
        own[k] = weights[t, at] * factor
        change = abs(own[k] - before)
        most = max(most, where(change > 0.0, change / abs(before), 0.0))
    return most


@kernel
def predict(model: Model, manner: Manner, total: Floats, memory: Memory) -> None:
    """Write the hints, and the loss of the step."""
    for i in range(len(total)):
        hint = 0.0
        if manner.hints == MEAN_HINTS and model.exists[PAIR, i]:
            hint = (manner.strength * manner.prior + memory.losses[i]) / (
                manner.strength + memory.visits[i]
            )
        elif manner.hints == GRADIENT_HINTS and model.exists[PAIR, i]:
            hint = memory.losses[i]
        memory.hint[i] = hint
        memory.loss[i] = total[i] + hint


@kernel
def walk(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    q: Floats,
    numbers: Floats,
    visited: Ints,  # (L,), written
    seen: Floats,  # (L,), written
) -> float:
    """Play one trajectory, write its pairs and losses, and return its total loss."""
    start, num_actions = model.start, model.num_actions
    layers, suffered = len(start) - 1, 0.0
    s = index_drawn(model.initial, 0, len(model.initial), numbers[t, layers - 1, 2])
    for k in range(layers):
        i = s * num_actions + index_drawn(q, s * num_actions, num_actions, numbers[t, k, 0])
        visited[k], seen[k] = i, draw(rules.noise, means[row, i], numbers[t, k, 1])
        suffered += seen[k]
        if k + 1 < layers:
            s = state_drawn(model, i, k, numbers[t, k, 2])
    return suffered


@kernel
def learn(
    model: Model,
    terms: Terms,
    manner: Manner,
    q: Floats,
    total: Floats,
    num_seeds: int,
    memory: Memory,
) -> None:
    """Update the cumulative loss, the rates and the hints after an episode."""
    for n in range(num_seeds):
        visited, seen = memory.visited[n], memory.seen[n]
        note_excess(visited, seen, lane(q, n), lane(memory, n))
    for i in range(len(total)):
        total[i] += memory.excess[i] + memory.hint[i]
    if manner.rates == ADAPTIVE_RATES:
        evaluate(model, q, memory)
        for n in range(num_seeds):
            adapt_rates(model, manner, memory.visited[n], lane(q, n), lane(memory, n))
    elif manner.rates == MATCHING_RATES:
        match(model, terms, q, memory)
    for n in range(num_seeds):
        renew_hints(manner, memory.visited[n], memory.seen[n], lane(memory, n))


@part
def note_excess(visited: Ints, seen: Floats, q: Floats, memory: Memory) -> None:
    """Write the estimates of the losses beyond the hints, of one lane."""
    for k in range(len(visited)):
        i = visited[k]
        memory.excess[i] = (seen[k] - memory.hint[i]) / q[i]


@part
def adapt_rates(model: Model, manner: Manner, visited: Ints, q: Floats, memory: Memory) -> None:
    """`AdaptiveRates.update` of one lane, from the values of `evaluate`."""
    for k in range(len(visited)):
        i = visited[k]
        x, inverse = memory.excess[i], memory.inverse_rate[i]
        advantage = lookahead(model, k, i, memory.value) - memory.value[0, i // model.num_actions]
        zeta = q[i] ** 2 * min(x * x, (x + advantage) ** 2)
        memory.inverse_rate[i] = inverse + zeta / (inverse * manner.log_episodes)


@part
def renew_hints(manner: Manner, visited: Ints, seen: Floats, memory: Memory) -> None:
    """Clear the excess, and update the hints of one lane."""
    for k in range(len(visited)):
        i = visited[k]
        memory.excess[i] = 0.0
        if manner.hints == MEAN_HINTS:
            memory.visits[i] += 1.0
            memory.losses[i] += seen[k]
        elif manner.hints == GRADIENT_HINTS:
            memory.losses[i] += manner.step * (seen[k] - memory.losses[i])


@part
def lookahead(model: Model, k: int, pair: int, value: Floats) -> Any:
    """E[V(next state)] after a pair of layer k."""
    behind = model.start[k + 1]
    after = model.start[k + 2] - behind if k + 2 < len(model.start) else 0
    return ahead(model.next_state, pair, value, 0, behind, after)


@kernel
def evaluate(model: Model, q: Floats, memory: Memory) -> None:
    """Write V of the estimated excess and of the policy of q."""
    start, num_actions = model.start, model.num_actions
    for k in range(len(start) - 2, -1, -1):
        for s in range(start[k], start[k + 1]):
            value, total = 0.0, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    value += q[i] * (memory.excess[i] + lookahead(model, k, i, memory.value))
                    total += q[i]
            memory.value[0, s] = where(total > 0.0, value / total, 0.0)


@kernel
def match(model: Model, terms: Terms, q: Floats, memory: Memory) -> None:
    """`StabilityPenaltyMatching.update` for the first term."""
    p, powers, num_actions = terms.exponent[0], terms.function[0] == POWER, model.num_actions
    roots, z, h = not anywhere(p != 0.5), 0.0, 0.0
    for first in range(0, len(q), num_actions):
        total = 0.0
        for i in range(first, first + num_actions):
            total += q[i]
        for i in range(first, first + num_actions):
            if model.exists[PAIR, i]:
                others = where(total > 0.0, 1.0 - q[i] / total, 0.0)
                if powers and roots:
                    x = sqrt(q[i])
                    z += 2.0 * x * others
                    h += x
                elif powers:
                    z += power(q[i], 1.0 - p) * others / (2.0 * p * (1.0 - p))
                    h += power(q[i], p)
                else:
                    z += 0.5 * others
                    h -= where(q[i] > 0.0, q[i] * log(q[i] / total), 0.0)
        if powers:
            h -= sqrt(total) if roots else power(total, p)
    inverse = memory.inverse_rate[0]
    memory.inverse_rate[0] = inverse + z / (inverse * max(h, TINY))


# -- The episode loop of FTRL on corrected empirical means, compiled; one seed, or one per lane ----
#
# This is the compiled twin of torch_occ.game.adaptive, which has the formulas.
# The loop is that of torch_occ.engine.play.


class Trust(NamedTuple):
    """The numbers of `CorrectedFTRL`."""

    width: float
    prior: float
    strength: float  # the count of the prior


class Record(NamedTuple):
    """What one seed, or one per lane, has observed, and scratch memory; pairs are flat."""

    visits: Floats  # (S * A,)
    losses: Floats  # (S * A,)
    squares: Floats  # (S * A,)
    loss: Floats  # (S * A,), scratch: the loss of the step
    visited: Ints  # (L,), scratch
    seen: Shared  # (L,), scratch


@kernel
def play_corrected(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n + 1, K or K * S * A), of the previous episode and of these n
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (N, n, L, 3) for N seeds, at most as many as lanes
    rules: Rules,
    trust: Trust,
    tally: Tally,
    record: Record,
    middle: Floats,  # (S * A,), an interior point for cold starts
    own: Floats,  # (K or K * S * A,), scratch: the weights of an episode
    nowhere: Floats,  # (0,)
    work: Work,  # the same for every call of a run
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes; lanes are as in `torch_occ.engine.play.play`."""
    terms, tally, work = in_lanes(terms, width), in_lanes(tally, width), in_lanes(work, width)
    record, own, nowhere = in_lanes(record, width), in_lanes(own, width), in_lanes(nowhere, width)
    means = in_lanes_or_shared(means, width)
    q, scalars, num_pairs = tally.q, tally.scalars, len(tally.q)
    for i in range(num_pairs):
        work.pairs[PAIR, i] = q[i]
    for t in range(len(weights) - 1):
        if t > 0 and rules.greedy:
            react(model, q, means)
        work.stale[0] += drift(weights, t)
        # Nothing is kept from one chunk to the next, so that a run can continue from a file.
        if (before + t) % CHUNK == 0:
            work.stale[0], work.stale[1], work.stale[2] = np.inf, 0.0, 0.0
        correct(model, trust, float(before + t), tally.cumulative_loss, record)
        for k in range(len(own)):
            own[k] = weights[t + 1, k]
        episode = before + t + 1
        propose(model, terms, own, record.loss, rules, middle, nowhere, episode, scalars, work)
        row, expected = min(t, len(means) - 1), 0.0
        for i in range(num_pairs):
            q[i] = work.pairs[PAIR, i]
            expected += q[i] * means[row, i]
            tally.cumulative_occupancy[i] += q[i]
            tally.total_mean[i] += means[row, i]
        scalars[EXPECTED] += expected
        for n in range(len(numbers)):
            charged = lane(means, n)
            add_moments(rules, charged, row, t, len(weights) - 1, lane(tally.second_moment, n))
            observe(lane(model, n), rules, t, charged, row, numbers[n], n, tally, record)


@part
def observe(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    numbers: Floats,  # (n, L, 3)
    n: int,
    tally: Tally,
    record: Record,
) -> None:
    """Play one trajectory of lane n, and record its losses."""
    visited, seen, q = record.visited, record.seen, lane(tally.q, n)
    squares, losses, visits = (
        lane(record.squares, n),
        lane(record.losses, n),
        lane(record.visits, n),
    )
    total, scalars = lane(tally.cumulative_loss, n), lane(tally.scalars, n)
    scalars[REALISED] += walk(model, rules, t, means, row, q, numbers, visited, seen)
    for k in range(len(visited)):
        i = visited[k]
        weighted = seen[k] / q[i]
        total[i] += weighted
        squares[i] += weighted**2
        losses[i] += seen[k]
        visits[i] += 1.0


@routine
def correct(model: Model, trust: Trust, past: float, total: Floats, record: Record) -> None:
    """Write the loss of the step after `past` episodes, `CorrectedFTRL.loss`."""
    for i in range(len(total)):
        record.loss[i] = 0.0
        if model.exists[PAIR, i]:
            mean = (trust.strength * trust.prior + record.losses[i]) / (
                trust.strength + record.visits[i]
            )
            apart = total[i] - past * mean
            noise, square = trust.width * trust.width * record.squares[i], apart * apart
            kept = where(square > noise, 1.0 - noise / square, 0.0)
            record.loss[i] = (past + 1.0) * mean + apart * kept
