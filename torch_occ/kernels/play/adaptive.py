"""The episode loop of FTRL with hints and adaptive rates, compiled, for one seed.

This is the compiled twin of torch_occ.game.learners.adaptive, which has the formulas. The loop is
that of torch_occ.kernels.play.episodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ._support.spacing import CHUNK
from torch_occ.kernels.layout import (
    PAIR,
    Floats,
    Ints,
    Model,
    Terms,
    Work,
    ahead,
    kernel,
)
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    draw,
    drift,
    favour,
    index_drawn,
    propose,
    state_drawn,
)
from torch_occ.kernels.solver.psi import POWER

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
    """The state of hints and rates of one seed, and scratch memory; pairs are flat."""

    visits: Floats  # (S * A,), of `MeanHints`
    losses: Floats  # (S * A,), of `MeanHints`; the hints of `GradientHints`
    inverse_rate: Floats  # (S * A,), (1,), or (0,) without rates
    weights: Floats  # (2, K or K * S * A), of the last episode and of this one
    loss: Floats  # (S * A,), scratch: the loss of the step
    hint: Floats  # (S * A,), scratch
    excess: Floats  # (S * A,), zeros between episodes
    value: Floats  # (1, S), scratch
    visited: Ints  # (L,), scratch
    seen: Floats  # (L,), scratch


@kernel
def play_adaptive(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n, K or K * S * A), without rates
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    manner: Manner,
    tally: Tally,
    memory: Memory,
    middle: Floats,  # (S * A,), an interior point for cold starts
    nowhere: Floats,  # (0,)
    work: Work,  # the same for every call of a run
) -> None:
    """Play n episodes."""
    q, scalars, num_pairs = tally.q, tally.scalars, len(tally.q)
    for i in range(num_pairs):
        work.pairs[PAIR, i] = q[i]
    for t in range(len(weights)):
        if t > 0 and rules.greedy:
            favour(model, q, means)
        weigh(terms, weights, t, num_pairs, memory)
        work.stale[0] += drift(memory.weights, 0)
        # Nothing is kept from one chunk to the next, so that a run can continue from a file.
        if (before + t) % CHUNK == 0:
            work.stale[0], work.stale[1], work.stale[2] = np.inf, 0.0, 0.0
        predict(model, manner, tally.cumulative_loss, memory)
        own, episode = memory.weights[1], before + t + 1
        propose(model, terms, own, memory.loss, rules, middle, nowhere, episode, scalars, work)
        row, expected = min(t, len(means) - 1), 0.0
        for i in range(num_pairs):
            q[i] = work.pairs[PAIR, i]
            expected += q[i] * means[row, i]
            tally.cumulative_occupancy[i] += q[i]
            tally.total_mean[i] += means[row, i]
        add_moments(rules, means, row, t, len(weights), tally.second_moment)
        scalars[EXPECTED] += expected
        scalars[REALISED] += walk(
            model, rules, t, means, row, q, numbers, memory.visited, memory.seen
        )
        learn(model, terms, manner, q, tally.cumulative_loss, memory)


@kernel
def weigh(terms: Terms, weights: Floats, t: int, num_pairs: int, memory: Memory) -> None:
    """Multiply the weights of episode t by the inverse rates."""
    inverse, each = memory.inverse_rate, memory.weights.shape[1]
    count = len(terms.argument)
    for k in range(each):
        memory.weights[0, k] = memory.weights[1, k]
        term = k * count // each
        own = weights[t, k] if weights.shape[1] == each else weights[t, term]
        if len(inverse) > 0:
            own *= inverse[k % num_pairs] if len(inverse) > 1 else inverse[0]
        memory.weights[1, k] = own


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
    model: Model, terms: Terms, manner: Manner, q: Floats, total: Floats, memory: Memory
) -> None:
    """Update the cumulative loss, the rates and the hints after an episode."""
    for k in range(len(memory.visited)):
        i = memory.visited[k]
        memory.excess[i] = (memory.seen[k] - memory.hint[i]) / q[i]
    for i in range(len(total)):
        total[i] += memory.excess[i] + memory.hint[i]
    if manner.rates == ADAPTIVE_RATES:
        evaluate(model, q, memory)
        for k in range(len(memory.visited)):
            i = memory.visited[k]
            x, inverse = memory.excess[i], memory.inverse_rate[i]
            advantage = lookahead(model, k, i, memory) - memory.value[0, i // model.num_actions]
            zeta = q[i] ** 2 * min(x * x, (x + advantage) ** 2)
            memory.inverse_rate[i] = inverse + zeta / (inverse * manner.log_episodes)
    elif manner.rates == MATCHING_RATES:
        match(model, terms, q, memory)
    for k in range(len(memory.visited)):
        i = memory.visited[k]
        memory.excess[i] = 0.0
        if manner.hints == MEAN_HINTS:
            memory.visits[i] += 1.0
            memory.losses[i] += memory.seen[k]
        elif manner.hints == GRADIENT_HINTS:
            memory.losses[i] += manner.step * (memory.seen[k] - memory.losses[i])


@kernel
def lookahead(model: Model, k: int, pair: int, memory: Memory) -> float:
    """E[V(next state)] after a pair of layer k."""
    behind = model.start[k + 1]
    after = model.start[k + 2] - behind if k + 2 < len(model.start) else 0
    return ahead(model.next_state, pair, memory.value, 0, behind, after)


@kernel
def evaluate(model: Model, q: Floats, memory: Memory) -> None:
    """Write V of the estimated excess and of the policy of q."""
    start, num_actions = model.start, model.num_actions
    for k in range(len(start) - 2, -1, -1):
        for s in range(start[k], start[k + 1]):
            value, total = 0.0, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    value += q[i] * (memory.excess[i] + lookahead(model, k, i, memory))
                    total += q[i]
            memory.value[0, s] = value / total if total > 0.0 else 0.0


@kernel
def match(model: Model, terms: Terms, q: Floats, memory: Memory) -> None:
    """`StabilityPenaltyMatching.update` for the first term."""
    p, power, num_actions = terms.exponent[0], terms.function[0] == POWER, model.num_actions
    z, h = 0.0, 0.0
    for first in range(0, len(q), num_actions):
        total = 0.0
        for i in range(first, first + num_actions):
            total += q[i]
        for i in range(first, first + num_actions):
            if model.exists[PAIR, i] and total > 0.0:
                others = 1.0 - q[i] / total
                if power:
                    z += q[i] ** (1.0 - p) * others / (2.0 * p * (1.0 - p))
                    h += q[i] ** p
                else:
                    z += 0.5 * others
                    h -= q[i] * np.log(q[i] / total) if q[i] > 0.0 else 0.0
        h -= total**p if power else 0.0
    inverse = memory.inverse_rate[0]
    memory.inverse_rate[0] = inverse + z / (inverse * max(h, TINY))
