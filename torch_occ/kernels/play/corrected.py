"""The episode loop of FTRL on corrected empirical means, compiled; one seed, or one per lane.

This is the compiled twin of torch_occ.game.learners.adaptive.corrected, which has the formulas. The
loop is that of torch_occ.kernels.play.episodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.spacing import CHUNK
from torch_occ.kernels.lanes.arrays import Shared, in_lanes, in_lanes_or_shared, lane
from torch_occ.kernels.lanes.vectors import where
from torch_occ.kernels.layout import (
    PAIR,
    Floats,
    Ints,
    Model,
    Terms,
    Work,
    kernel,
    part,
    routine,
)
from torch_occ.kernels.play.adaptive import walk
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    drift,
    propose,
    react,
)


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
    """Play n episodes; lanes are as in `torch_occ.kernels.play.episodes.play`."""
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
