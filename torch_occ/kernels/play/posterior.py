"""The episode loop of PSRL, compiled: draw a model, plan in it, play.

This is the compiled twin of torch_occ.game.learners.planners.psrl, from the same random numbers.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.layout import PAIR, PLAN, TRIAL, Floats, Model, Work, kernel, part
from torch_occ.kernels.play.baselines import CHOICE, Seen, average, cheapest, play_plan
from torch_occ.kernels.play.episodes import Rules, Tally, favour
from torch_occ.kernels.play.sampling import beta, gamma, key_of


@kernel
def play_posterior(
    model: Model,
    seed: int,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (1, n, L, 3)
    rules: Rules,
    tally: Tally,
    seen: Seen,
    work: Work,
) -> None:
    """Play n episodes of one seed."""
    average(seen, 0.0)
    for t in range(numbers.shape[1]):
        if t > 0 and rules.greedy:
            favour(model, tally.q, means)
        plan_in_sample(model, seed, before + t + 1, seen, work)
        play_plan(model, rules, t, means, numbers, tally, seen, work)


@kernel
def plan_in_sample(model: Model, seed: int, t: int, seen: Seen, work: Work) -> None:
    """Draw a model and plan in it; row CHOICE of the states receives the pairs to play."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    drawn, values = work.pairs, work.states
    for k in range(layers - 1, -1, -1):
        behind = start[k + 1]
        size = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    losses = seen.losses[i]
                    failures = max(seen.visits[i] - losses, 0.0)
                    drawn[TRIAL, i] = beta(seed, t, i, 1.0 + losses, 1.0 + failures)
                    drawn[TRIAL, i] += value_ahead(seed, t, seen, values, i, behind, size)
            values[PLAN, s], values[CHOICE, s] = cheapest(
                model.exists[PAIR], drawn, TRIAL, s * num_actions, (s + 1) * num_actions
            )


@part
def value_ahead(
    seed: int, t: int, seen: Seen, values: Floats, i: int, first: int, size: int
) -> float:
    """The expected value of the next state under transitions drawn from the posterior.

    The items of the transitions follow those of the losses, two for each pair.
    """
    if size < 2:
        return values[PLAN, first] if size else 0.0
    weighted, total, entry = 0.0, 0.0, seen.entry[i]
    for j in range(entry, entry + size):
        key = np.uint64(key_of(seed, t, 2 * len(seen.visits) + j))
        share = gamma(key, seen.counts[j] + 1.0 / size)
        total += share
        weighted += share * values[PLAN, first + j - entry]
    return weighted / total
