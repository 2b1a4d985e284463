"""The episode loop of learners with an index per pair, compiled: KL-UCB and Thompson sampling.

This is the compiled twin of torch_occ.game.learners.kl_ucb and torch_occ.game.learners.thompson.
Plans are discrete, so both backends play the same game although indices may differ by rounding.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import KL_STEPS, KL_TOLERANCE, TIE
from torch_occ.kernels.layout import PAIR, PLAN, TRIAL, Floats, Model, Work, ahead, kernel, part
from torch_occ.kernels.play.baselines import follow, occupy
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    favour,
)
from torch_occ.kernels.play.planning import enter
from torch_occ.kernels.play.sampling import beta

KL_UCB, THOMPSON = 0, 1


@kernel
def play_indices(
    model: Model,
    kind: int,  # KL_UCB or THOMPSON
    seed: int,
    before: int,  # the number of the previous episode
    logs: Floats,  # (n,), log t
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    visits: Floats,  # (S * A,)
    index: Floats,  # (S * A,), scratch
    work: Work,
) -> None:
    """Play n episodes. The tally's `cumulative_loss` holds the sums of the observed losses."""
    q, losses, scalars = tally.q, tally.cumulative_loss, tally.scalars
    for i in range(len(index)):
        index[i] = 0.0
    for t in range(len(numbers)):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        for i in range(len(index)):
            if model.exists[PAIR, i]:
                if kind == THOMPSON:
                    failures = max(visits[i] - losses[i], 0.0)
                    index[i] = beta(seed, before + t + 1, i, 1.0 + losses[i], 1.0 + failures)
                elif visits[i] > 0.0:
                    # The last index is close to this one.
                    index[i] = kl_lower(losses[i] / visits[i], logs[t] / visits[i], index[i])
        plan_for(model, index, work)
        occupy(model, q, work)
        scalars[EXPECTED] += enter(means, row, tally)
        add_moments(rules, means, row, t, len(numbers), tally.second_moment)
        scalars[REALISED] += follow(model, rules, t, means, row, numbers, losses, visits, work)


@part
def kl_lower(mean: float, width: float, guess: float) -> float:
    """The smallest x with kl(mean, x) <= width: Newton's method in log x, from below.

    A step from above leads below, since kl is convex in log x. So a guess may be on either side.
    The bounds of torch_occ.game.learners.kl_ucb catch steps that are too long.
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


@kernel
def plan_for(model: Model, loss: Floats, work: Work) -> None:
    """Backward induction for a loss; `work.softest` receives the pair that each state plays.

    Ties are broken as in `torch_occ.mdp.occupancy.cheapest`.
    """
    start, num_actions, states, pairs = model.start, model.num_actions, work.states, work.pairs
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            best = np.inf
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    pairs[TRIAL, i] = loss[i] + ahead(
                        model.next_state, i, states, PLAN, behind, after
                    )
                    best = min(best, pairs[TRIAL, i])
            states[PLAN, s] = best
            limit = best + TIE * max(1.0, abs(best))
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i] and pairs[TRIAL, i] <= limit:
                    work.softest[s] = i
                    break
