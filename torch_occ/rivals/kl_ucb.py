"""KL-UCB for known transitions: optimism by relative entropy."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from torch_occ.engine.lanes import Shared, anywhere, exp, lane, lanes_of, log, sqrt, where
from torch_occ.engine.layout import TRIAL, Floats, Work, routine
from torch_occ.engine.learners import average, observe_averages, plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import EmpiricalLearner

#: The order of power series, the most steps of Newton's method, and the last term or residual.
ORDER, STEPS, TOLERANCE = 6, 30, 1e-12


class CompiledKLUCB(NamedTuple):
    """`KLUCB`."""

    visits: PerPair
    losses: PerPair
    logs: Shared  # (n + 1,), log t
    mean: PerPair
    root: PerPair
    series: Annotated[Floats, ORDER + 1, "pairs"]  # of the indices, in log t minus
    begin: PerPair  # log t where it was expanded,
    number: PerPair  # for so many visits
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
    now, series = learner.logs[t + 1], learner.series
    for i in range(len(learner.visits)):
        grown, index = now - learner.begin[i], series[ORDER, i]
        last = max(abs(index), abs(series[ORDER - 1, i]))  # if one of them is 0 by chance
        for k in range(ORDER - 1, -1, -1):
            index, last = index * grown + series[k, i], last * grown
        known = (learner.visits[i] == learner.number[i]) & (last <= TOLERANCE)
        if anywhere(not known):
            for n in range(lanes_of(learner.visits)):
                if not lane(known, n):
                    expand(now, i, lane(index, n), lane(learner, n))
        work.pairs[TRIAL, i] = where(known, index, series[0, i])
    plan(game.model, learner.choice, work)


observe.register(CompiledKLUCB)(observe_averages)


@routine
def expand(now: float, i: int, guess: float, own: CompiledKLUCB) -> None:
    """The power series of the index x of a pair in log t.

    From N kl(m, x) = log t follows N (m x - x^2 / 2)' = x^2 - x. Comparing powers gives one
    coefficient after the other.
    """
    series, mean, visits = own.series, own.mean[i], own.visits[i]
    own.begin[i], own.number[i] = now, visits
    if mean > 0.0:  # else the index is 0
        x = series[0, i] = kl_lower(mean, now / visits, guess)
        square = x * x
        for k in range(ORDER):
            inner = 0.0
            for j in range(1, k + 1):
                inner += series[j, i] * series[k + 1 - j, i]
            change = 0.5 * inner + (square - series[k, i]) / (visits * (k + 1))
            series[k + 1, i] = change / (mean - x)
            square = inner + 2.0 * x * series[k + 1, i]


@routine(inline=True)
def kl_lower(mean: float, width: float, guess: float) -> float:
    """The smallest x with kl(mean, x) <= width, for 0 < mean <= 1: Newton's method in log x.

    kl is convex in log x and falls up to x = mean. So a step from above the solution leads below
    it, and steps from below stay there, from any guess below the mean.
    """
    if mean >= 1.0:
        return exp(-width)
    others, log_mean = 1.0 - mean, log(mean)
    zeros = others * log(others)
    near = 0.0 < guess < (1.0 - 1e-9) * mean
    x = log(guess) if near else log_mean - sqrt(2.0 * width * others / mean)
    for _ in range(STEPS):
        other = exp(x)
        excess = mean * (log_mean - x) + zeros - others * log(1.0 - other) - width
        x = max(x + excess * (1.0 - other) / (mean - other), -700.0)  # exp(-700) is as good as zero
        if abs(excess) <= TOLERANCE:
            break
    return min(exp(x), mean)
