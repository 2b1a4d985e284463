"""The episode loop of FTRL on corrected empirical means, compiled, for one seed.

This is the compiled twin of torch_occ.game.learners.adaptive.corrected, which has the formulas. The
loop is that of torch_occ.kernels.play.episodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ._support.spacing import CHUNK
from torch_occ.kernels.layout import PAIR, Floats, Ints, Model, Terms, Work, kernel
from torch_occ.kernels.play.adaptive import walk
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    drift,
    favour,
    propose,
)


class Trust(NamedTuple):
    """The numbers of `CorrectedFTRL`."""

    width: float
    prior: float
    strength: float  # the count of the prior


class Record(NamedTuple):
    """What one seed has observed, and scratch memory; pairs are flat."""

    visits: Floats  # (S * A,)
    losses: Floats  # (S * A,)
    squares: Floats  # (S * A,)
    loss: Floats  # (S * A,), scratch: the loss of the step
    visited: Ints  # (L,), scratch
    seen: Floats  # (L,), scratch


@kernel
def play_corrected(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n + 1, K or K * S * A), of the previous episode and of these n
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    trust: Trust,
    tally: Tally,
    record: Record,
    middle: Floats,  # (S * A,), an interior point for cold starts
    nowhere: Floats,  # (0,)
    work: Work,  # the same for every call of a run
) -> None:
    """Play n episodes."""
    visited, seen = record.visited, record.seen
    q, scalars, num_pairs = tally.q, tally.scalars, len(tally.q)
    for i in range(num_pairs):
        work.pairs[PAIR, i] = q[i]
    for t in range(len(weights) - 1):
        if t > 0 and rules.greedy:
            favour(model, q, means)
        work.stale[0] += drift(weights, t)
        # Nothing is kept from one chunk to the next, so that a run can continue from a file.
        if (before + t) % CHUNK == 0:
            work.stale[0], work.stale[1], work.stale[2] = np.inf, 0.0, 0.0
        correct(model, trust, float(before + t), tally.cumulative_loss, record)
        own, episode = weights[t + 1], before + t + 1
        propose(model, terms, own, record.loss, rules, middle, nowhere, episode, scalars, work)
        row, expected = min(t, len(means) - 1), 0.0
        for i in range(num_pairs):
            q[i] = work.pairs[PAIR, i]
            expected += q[i] * means[row, i]
            tally.cumulative_occupancy[i] += q[i]
            tally.total_mean[i] += means[row, i]
        add_moments(rules, means, row, t, len(weights) - 1, tally.second_moment)
        scalars[EXPECTED] += expected
        scalars[REALISED] += walk(model, rules, t, means, row, q, numbers, visited, seen)
        for k in range(len(visited)):
            i = visited[k]
            weighted = seen[k] / q[i]
            tally.cumulative_loss[i] += weighted
            record.squares[i] += weighted**2
            record.losses[i] += seen[k]
            record.visits[i] += 1.0


@kernel
def correct(model: Model, trust: Trust, past: float, total: Floats, record: Record) -> None:
    """Write the loss of the step after `past` episodes, `CorrectedFTRL.loss`."""
    for i in range(len(total)):
        record.loss[i] = 0.0
        if model.exists[PAIR, i]:
            mean = (trust.strength * trust.prior + record.losses[i]) / (
                trust.strength + record.visits[i]
            )
            apart = total[i] - past * mean
            noise = trust.width**2 * record.squares[i]
            kept = 1.0 - noise / apart**2 if apart**2 > noise else 0.0
            record.loss[i] = (past + 1.0) * mean + apart * kept
