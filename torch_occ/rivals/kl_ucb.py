"""KL-UCB for known transitions: optimism by relative entropy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import KL_STEPS, KL_TOLERANCE
from torch_occ.engine.lanes import Shared, lane, lanes_of
from torch_occ.engine.layout import TRIAL, Work, routine
from torch_occ.engine.learners import average, observe_averages, plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import Learner


class CompiledKLUCB(NamedTuple):
    """`KLUCB`."""

    visits: PerPair
    losses: PerPair
    logs: Shared  # (n + 1,), log t
    mean: PerPair
    root: PerPair
    index: PerPair
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
    for n in range(lanes_of(learner.visits)):
        own, loss = lane(learner, n), lane(work.pairs, n)
        for i in range(len(own.visits)):
            if own.visits[i] > 0.0:
                width = learner.logs[t + 1] / own.visits[i]
                own.index[i] = kl_lower(own.mean[i], width, own.index[i])
            loss[TRIAL, i] = own.index[i]
    plan(game.model, learner.choice, work)


observe.register(CompiledKLUCB)(observe_averages)


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
