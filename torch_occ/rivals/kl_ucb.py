"""KL-UCB for known transitions: optimism by relative entropy."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from torch_occ._support.constants import KL_STEPS, KL_TOLERANCE
from torch_occ.engine.lanes import Shared, anywhere, lane, lanes_of
from torch_occ.engine.layout import TRIAL, Floats, Work, routine
from torch_occ.engine.learners import average, observe_averages, plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import Learner

# Rows of the power series of an index in log t: log t and the visits where it was expanded, how far
# log t may grow before the last term exceeds KL_TOLERANCE, and ORDER + 1 coefficients.
BEGIN, COUNT, REACH, FIRST, ORDER = 0, 1, 2, 3, 6
SERIES_ROWS = FIRST + ORDER + 1


class CompiledKLUCB(NamedTuple):
    """`KLUCB`."""

    visits: PerPair
    losses: PerPair
    logs: Shared  # (n + 1,), log t
    mean: PerPair
    root: PerPair
    series: Annotated[Floats, SERIES_ROWS, "pairs"]
    choice: PerState


class KLUCB(Learner):
    """Plays the optimal policy for the smallest losses that the observations allow.

    The index of a pair with N observations of average m is

        min { x : N kl(m, x) <= log t },   kl(m, x) = m log(m / x) + (1-m) log((1-m) / (1-x)),

    and 0 without observations. For L = 1 this is KL-UCB (Garivier and Cappe, 2011, with c = 0),
    which attains the limit of regret (`occ.limits.lower_bound`). Where optimal policies leave out
    states, optimism explores more than is needed (Dann, Marinov, Mohri and Zimmert, 2021);
    docs/rivals.md has measurements. The confidence holds for all losses in [0, 1] with constant
    means.
    """

    compiled = CompiledKLUCB

    def start(self, num_seeds: int) -> None:
        self.state = {"visits": self._zeros(num_seeds), "losses": self._zeros(num_seeds)}

    def settings(self) -> dict[str, Any]:
        return {"logs": lambda t: t.clamp(min=2).log()}


@propose.register(CompiledKLUCB)
def _propose_by_indices(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        average(learner, 0.0)
        for i in range(len(learner.visits)):
            # This is the index 0 of a pair without visits. Others are expanded when needed.
            for row in range(SERIES_ROWS):
                learner.series[row, i] = np.inf if row == REACH else 0.0
    write_indices(learner.logs[t + 1], learner, work)
    plan(game.model, learner.choice, work)


observe.register(CompiledKLUCB)(observe_averages)


@routine
def write_indices(log: float, learner: CompiledKLUCB, work: Work) -> None:
    """Write the indices into row TRIAL.

    An index is a smooth function of log t as long as its pair is not visited.
    """
    visits, series = learner.visits, learner.series
    for i in range(len(visits)):
        grown = log - series[BEGIN, i]
        usable = (visits[i] == series[COUNT, i]) & (grown <= series[REACH, i])
        if anywhere(not usable):
            for n in range(lanes_of(visits)):
                if not lane(usable, n):
                    expand(log, i, lane(learner, n))
            grown = log - series[BEGIN, i]
        index = series[FIRST + ORDER, i]
        for k in range(ORDER - 1, -1, -1):
            index = index * grown + series[FIRST + k, i]
        work.pairs[TRIAL, i] = index


@routine
def expand(log: float, i: int, learner: CompiledKLUCB) -> None:
    """The power series of the index x of a pair in log t.

    From kl(m, x) = log t / visits follows (m - x) x' = (x^2 - x) / visits. Comparing powers gives
    one coefficient after the other.
    """
    mean, visits, series = learner.mean[i], learner.visits[i], learner.series
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


@routine(inline=True)
def kl_lower(mean: float, width: float, guess: float) -> float:
    """The smallest x with kl(mean, x) <= width: Newton's method in log x, from below.

    kl is convex in log x and falls up to x = mean, so a step from above leads below, and a guess
    may be on either side. Steps that are too long are caught by the larger of two bounds: Pinsker's
    inequality, x >= mean - sqrt(width / 2), and -log(1-x) >= 0.
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
