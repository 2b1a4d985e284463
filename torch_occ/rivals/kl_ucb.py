"""KL-UCB for known transitions: optimism by relative entropy."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_occ._support.constants import KL_STEPS, KL_TOLERANCE
from torch_occ.engine.lanes import Shared, anywhere, exp, log, sqrt, where
from torch_occ.engine.layout import TRIAL, Work, routine
from torch_occ.engine.learners import TINY, average, observe_averages, plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import Learner


class CompiledKLUCB(NamedTuple):
    """`KLUCB`."""

    visits: PerPair
    losses: PerPair
    logs: Shared  # (n + 1,), log t
    mean: PerPair
    root: PerPair
    least: PerPair  # the index
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
        seen, width = learner.visits[i] > 0.0, learner.logs[t + 1] / max(learner.visits[i], 1.0)
        found = kl_lower(learner.mean[i], width, learner.least[i])
        learner.least[i] = where(seen, found, 0.0)
        work.pairs[TRIAL, i] = learner.least[i]
    plan(game.model, learner.choice, work)


observe.register(CompiledKLUCB)(observe_averages)


@routine(inline=True)
def kl_lower(mean: Any, width: Any, guess: Any) -> Any:
    """The smallest x with kl(mean, x) <= width: Newton's method in log x, from below.

    kl is convex in log x and falls up to x = mean, so a step from above leads below, and a guess
    may be on either side. Steps that are too long are caught by the larger of two bounds: Pinsker's
    inequality, x >= mean - sqrt(width / 2), and -log(1-x) >= 0.
    """
    log_mean, others = log(max(mean, TINY)), max(1.0 - mean, TINY)
    zeros, pinsker = others * log(others), mean - sqrt(0.5 * width)
    bound = log_mean - (width - zeros) / max(mean, TINY)
    bound = where(pinsker > 0.0, max(bound, log(max(pinsker, TINY))), bound)
    x = where((guess > 0.0) & (guess < mean), max(bound, log(max(guess, TINY))), bound)
    for _ in range(KL_STEPS):
        x = where(exp(x) >= mean, bound, x)
        other = exp(x)
        information = mean * (log_mean - x) + zeros - others * log(1.0 - other)
        step = (information - width) * (1.0 - other) / (mean - other)
        x = max(x + step, bound)
        if not anywhere((abs(step) > KL_TOLERANCE) & (mean > 0.0) & (mean < 1.0)):
            break
    return where(mean > 0.0, where(mean < 1.0, min(exp(x), mean), exp(-width)), 0.0)
