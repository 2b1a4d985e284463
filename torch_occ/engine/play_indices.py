"""The episode loops of learners at the limit of regret, compiled: KL-UCB, Thompson sampling.

These are the compiled twins of kl_ucb and thompson in torch_occ.game.learners.
Plans are discrete, so both backends play the same game although indices may differ by rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ._support.constants import KL_STEPS, KL_TOLERANCE
from torch_occ.engine.draws import beta
from torch_occ.engine.lanes import anywhere, in_lanes, in_lanes_or_shared, lane, lanes_of
from torch_occ.engine.layout import PAIR, TRIAL, Floats, Model, Work, kernel, part
from torch_occ.engine.play_old import FlatTally as Tally
from torch_occ.engine.play_old import Rules, Seen, play_plan, react
from torch_occ.engine.play_old import average_seen as average
from torch_occ.engine.play_old import plan_row as plan

KL_UCB, THOMPSON = 0, 1

# Rows of the power series of KL-UCB's indices in log t: log t and the visits where it was expanded,
# how far log t may grow before the last term exceeds KL_TOLERANCE, and ORDER + 1 coefficients.
BEGIN, COUNT, REACH, FIRST, ORDER = 0, 1, 2, 3, 6
SERIES_ROWS = FIRST + ORDER + 1


@kernel
def play_indices(
    model: Model,
    kind: int,  # KL_UCB or THOMPSON
    seeds: Any,  # (N,), unsigned; at most as many as lanes
    before: int,  # the number of the previous episode
    logs: Floats,  # (n,), log t
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (N, n, L, 3)
    rules: Rules,
    tally: Tally,
    seen: Seen,
    series: Floats,  # (SERIES_ROWS, S * A), scratch
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes; lanes are as in `torch_occ.engine.play.play_empirical`."""
    tally, seen, work = in_lanes(tally, width), in_lanes(seen, width), in_lanes(work, width)
    means, series = in_lanes_or_shared(means, width), in_lanes(series, width)
    average(seen, 0.0)
    for i in range(len(seen.visits)):
        # This is the index 0 of a pair without visits. Others are expanded when they are needed.
        for row in range(SERIES_ROWS):
            series[row, i] = np.inf if row == REACH else 0.0
    for t in range(numbers.shape[1]):
        if t > 0 and rules.greedy:
            react(model, tally.q, means)
        if kind == THOMPSON:
            for n in range(len(seeds)):
                sample(model, seeds[n], before + t + 1, lane(seen, n), lane(work.pairs, n))
        else:
            bound(logs[t], seen, series, work)
        plan(model, work)
        play_plan(model, rules, t, means, numbers, tally, seen, work)


@kernel
def sample(model: Model, seed: int, t: int, seen: Seen, loss: Floats) -> None:
    """Draw the losses of `Thompson` from their posteriors into row TRIAL."""
    for i in range(len(seen.visits)):
        loss[TRIAL, i] = 0.0
        if model.exists[PAIR, i]:
            failures = max(seen.visits[i] - seen.losses[i], 0.0)
            loss[TRIAL, i] = beta(seed, t, i, 1.0 + seen.losses[i], 1.0 + failures)


@kernel
def bound(log: float, seen: Seen, series: Floats, work: Work) -> None:
    """Write the indices of `KLUCB` into row TRIAL.

    An index is a smooth function of log t as long as its pair is not visited.
    """
    for i in range(len(seen.visits)):
        grown = log - series[BEGIN, i]
        usable = (seen.visits[i] == series[COUNT, i]) & (grown <= series[REACH, i])
        if anywhere(not usable):
            for n in range(lanes_of(seen.visits)):
                if not lane(usable, n):
                    expand(log, i, lane(seen, n), lane(series, n))
            grown = log - series[BEGIN, i]
        index = series[FIRST + ORDER, i]
        for k in range(ORDER - 1, -1, -1):
            index = index * grown + series[FIRST + k, i]
        work.pairs[TRIAL, i] = index


@kernel
def expand(log: float, i: int, seen: Seen, series: Floats) -> None:
    """The power series of the index x of a pair in log t.

    From kl(m, x) = log t / visits follows (m - x) x' = (x^2 - x) / visits. Comparing powers gives
    one coefficient after the other.
    """
    mean, visits = seen.mean[i], seen.visits[i]
    index = kl_lower(mean, log / visits, series[FIRST, i])
    series[BEGIN, i], series[COUNT, i], series[REACH, i] = log, visits, 0.0
    series[FIRST, i] = index
    for k in range(ORDER):
        series[FIRST + k + 1, i] = 0.0
    if mean > index:
        for k in range(ORDER):
            total = -series[FIRST + k, i]
            for j in range(k + 1):
                total += series[FIRST + j, i] * series[FIRST + k - j, i]
            total /= visits
            for j in range(1, k + 1):
                total += series[FIRST + j, i] * (k + 1 - j) * series[FIRST + k + 1 - j, i]
            series[FIRST + k + 1, i] = total / ((k + 1) * (mean - index))
        last = abs(series[FIRST + ORDER, i])
        # Near log t = 0 an index is a root of log t.
        series[REACH, i] = min((KL_TOLERANCE / last) ** (1.0 / ORDER), 0.1 * log)
    elif mean <= 0.0:
        series[REACH, i] = np.inf


@part
def kl_lower(mean: float, width: float, guess: float) -> float:
    """The smallest x with kl(mean, x) <= width: Newton's method in log x, from below.

    A step from above leads below, since kl is convex in log x. So a guess may be on either side.
    The bounds of torch_occ.rivals.kl_ucb catch steps that are too long.
    """
    if mean <= 0.0:
        return 0.0
    if mean >= 1.0:
        return np.exp(-width)
    log_mean = np.log(mean)
    zeros = (1.0 - mean) * np.log1p(-mean)
    x = log_mean - (width - zeros) / mean
    pinsker = mean - np.sqrt(0.5 * width)
    if pinsker > 0.0:
        x = max(x, np.log(pinsker))
    bound = x
    if guess > 0.0 and guess < mean:
        x = max(x, np.log(guess))
    for _ in range(KL_STEPS):
        other = np.exp(x)
        if other >= mean:
            x = bound
            other = np.exp(x)
        information = mean * (log_mean - x) + zeros - (1.0 - mean) * np.log1p(-other)
        step = (information - width) * (1.0 - other) / (mean - other)
        x = max(x + step, bound)
        if abs(step) <= KL_TOLERANCE:
            break
    return min(np.exp(x), mean)
