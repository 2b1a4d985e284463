"""The episode loop of PSRL, compiled: draw a model, plan in it, play.

This is the compiled twin of torch_occ.game.learners.planners.psrl, from the same random numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.constants import TIE
from torch_occ.kernels.layout import PAIR, Floats, Ints, Model, Work, kernel, part
from torch_occ.kernels.play.baselines import occupy
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    favour,
)
from torch_occ.kernels.play.planning import enter, explore
from torch_occ.kernels.play.sampling import beta, gamma, key_of


class Posterior(NamedTuple):
    """What PSRL has seen, for one seed, and scratch memory."""

    seed: int
    visits: Floats  # (S * A,)
    counts: Floats  # (M,), as torch_occ.game.beliefs.counts
    entry: Ints  # (S * A,), the first entry of each pair in `counts`
    drawn: Floats  # (S * A,), Q in the model that was drawn
    values: Floats  # (S,)


@kernel
def play_posterior(
    model: Model,
    posterior: Posterior,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    work: Work,
) -> None:
    """Play n episodes. The tally's `cumulative_loss` holds the sums of the observed losses."""
    q, losses, scalars = tally.q, tally.cumulative_loss, tally.scalars
    for t in range(len(numbers)):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        plan_in_sample(model, posterior, before + t + 1, losses, work)
        occupy(model, q, work)
        scalars[EXPECTED] += enter(means, row, tally)
        add_moments(rules, means, row, t, len(numbers), tally.second_moment)
        scalars[REALISED] += explore(
            model,
            rules,
            t,
            means,
            row,
            numbers,
            losses,
            posterior.visits,
            posterior.counts,
            posterior.entry,
            work,
        )


@kernel
def plan_in_sample(model: Model, posterior: Posterior, t: int, losses: Floats, work: Work) -> None:
    """Draw a model and plan in it; `work.softest` receives the pair that each state plays."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    drawn, values = posterior.drawn, posterior.values
    for k in range(layers - 1, -1, -1):
        behind = start[k + 1]
        size = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            best = np.inf
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    failures = max(posterior.visits[i] - losses[i], 0.0)
                    drawn[i] = beta(posterior.seed, t, i, 1.0 + losses[i], 1.0 + failures)
                    drawn[i] += value_ahead(posterior, t, i, behind, size)
                    best = min(best, drawn[i])
            values[s] = best
            limit = best + TIE * max(1.0, abs(best))
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i] and drawn[i] <= limit:
                    work.softest[s] = i
                    break


@part
def value_ahead(posterior: Posterior, t: int, i: int, first: int, size: int) -> float:
    """The expected value of the next state under transitions drawn from the posterior.

    The items of the transitions follow those of the losses, two for each pair.
    """
    if size < 2:
        return posterior.values[first] if size else 0.0
    weighted, total, entry = 0.0, 0.0, posterior.entry[i]
    for j in range(entry, entry + size):
        key = np.uint64(key_of(posterior.seed, t, 2 * len(posterior.drawn) + j))
        share = gamma(key, posterior.counts[j] + 1.0 / size)
        total += share
        weighted += share * posterior.values[first + j - entry]
    return weighted / total
