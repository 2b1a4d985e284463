"""KL-UCB for known transitions: optimism by relative entropy."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_occ._support.constants import KL_STEPS, KL_TOLERANCE
from torch_occ.engine.lanes import Shared, anywhere, exp, log, sqrt, where
from torch_occ.engine.layout import TRIAL, Work, routine
from torch_occ.engine.learners import TINY, average, observe_averages, plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import EmpiricalLearner


class CompiledKLUCB(NamedTuple):
    """`KLUCB`."""

    visits: PerPair
    losses: PerPair
    logs: Shared  # (n + 1,), log t
    mean: PerPair
    root: PerPair
    least: PerPair  # the logarithm of the index
    choice: PerState


class KLUCB(EmpiricalLearner):
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
    engine_only = True


@propose.register(CompiledKLUCB)
def _propose_by_indices(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        average(learner, 0.0)
    for i in range(len(learner.visits)):
        mean, width = learner.mean[i], learner.logs[t + 1] / max(learner.visits[i], 1.0)
        learner.least[i] = log_kl_lower(mean, width, learner.least[i])
        index = where(mean < 1.0, min(exp(learner.least[i]), mean), exp(-width))
        work.pairs[TRIAL, i] = where((learner.visits[i] > 0.0) & (mean > 0.0), index, 0.0)
    plan(game.model, learner.choice, work)


observe.register(CompiledKLUCB)(observe_averages)


@routine(inline=True)
def log_kl_lower(mean: Any, width: Any, guess: Any) -> Any:
    """log of the smallest x with kl(mean, x) <= width, for 0 < mean < 1: Newton's method in log x.

    kl is convex in log x and falls up to x = mean. So a step from above the solution leads below
    it, and steps from below stay there, from any guess below log(mean). A small error e becomes
    others x / ((1-x) (mean-x)) e^2 / 2, which says when the next step would change nothing.
    """
    others, inside = max(1.0 - mean, TINY), (mean > 0.0) & (mean < 1.0)
    log_mean, zeros = log(max(mean, TINY)), others * log(others)
    x = guess
    if anywhere(not (guess < log_mean)):  # as in episode 1, where it is 0
        usual = log_mean - sqrt(2.0 * width * others / max(mean, TINY))
        x = where(guess < log_mean, guess, usual)
    for _ in range(KL_STEPS):
        other = exp(x)
        information = mean * (log_mean - x) + zeros - others * log(1.0 - other)
        slope = (mean - other) / (1.0 - other)
        step = (information - width) / slope
        x = max(x + step, -700.0)  # exp(-700) is zero for all purposes
        left = others * other * step * step / (slope * (1.0 - other) * (1.0 - other))
        if not anywhere(((left > KL_TOLERANCE) | (abs(step) > 1e-3)) & inside):
            break
    return x
