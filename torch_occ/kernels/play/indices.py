"""The episode loops of learners at the limit of regret, compiled: KL-UCB, Thompson sampling, OSSB.

These are the compiled twins of kl_ucb, thompson and ossb in torch_occ.game.learners.
Plans are discrete, so both backends play the same game although indices may differ by rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.constants import KL_STEPS, KL_TOLERANCE, TIE
from torch_occ.kernels.layout import (
    PAIR,
    PLAN,
    TRIAL,
    Bools,
    Floats,
    Ints,
    Model,
    Work,
    ahead,
    kernel,
    part,
)
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


class Goals(NamedTuple):
    """The state of `OSSB` for one seed, updated in place; its docstring says what the parts are."""

    visits: Floats  # (S * A,)
    goals: Floats  # (S * A,)
    tries: Floats  # (S * A,)
    due: Floats  # (S * A,)
    greedy: Ints  # (S,)
    visited: Bools  # (S,)
    explored: Floats  # (1,)


@kernel
def play_goals(
    model: Model,
    pairs: Bools,  # (S * A,), whether some policy visits a pair
    floor: float,  # the visits that every pair should have
    aim: float,  # the reward for the pair that is played for
    before: int,  # the number of the episode before the first of all n
    first: int,  # how many of the n episodes were played
    renewal: float,  # the episode in which a new plan is due
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    state: Goals,
    index: Floats,  # (S * A,), scratch
    work: Work,
) -> int:
    """Play episodes of `OSSB` until a new plan is due.

    Returns how many of the n episodes were played, in all. The tally's `cumulative_loss` holds the
    sums of the observed losses.
    """
    q, losses, scalars, visits = tally.q, tally.cumulative_loss, tally.scalars, state.visits
    for t in range(first, len(numbers)):
        if before + t + 1 >= renewal:
            return t
        for i in range(len(visits)):
            if visits[i] >= state.due[i]:
                return t
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        rare = choose(model, pairs, floor, state, work)
        if rare >= 0:
            for i in range(len(visits)):
                index[i] = min(max(losses[i] / max(visits[i], 1.0), 0.0), 1.0)
            index[rare] -= aim
            plan_for(model, index, work)
            state.tries[rare] += 1.0
        occupy(model, q, work)
        scalars[EXPECTED] += enter(means, row, tally)
        add_moments(rules, means, row, t, len(numbers), tally.second_moment)
        familiar = greedy_visits(model, state)
        scalars[REALISED] += follow(model, rules, t, means, row, numbers, losses, visits, work)
        if greedy_visits(model, state) - familiar < len(model.start) - 1:
            state.explored[0] += 1.0
    return len(numbers)


@kernel
def choose(model: Model, pairs: Bools, floor: float, state: Goals, work: Work) -> int:
    """Write the pair that each state plays to `work.softest`.

    Returns the pair that is to be played for instead, or -1.
    """
    visits, num_actions, exploring, rare, fewest = (
        state.visits,
        model.num_actions,
        False,
        -1,
        np.inf,
    )
    for s in range(len(state.greedy)):
        known = s * num_actions + state.greedy[s]
        least = visits[known] if state.visited[s] else np.inf
        work.softest[s] = known
        for i in range(s * num_actions, (s + 1) * num_actions):
            if state.goals[i] > visits[i] and visits[i] < least:
                least = visits[i]
                work.softest[s] = i
                exploring = exploring or state.visited[s]
            if pairs[i] and visits[i] + state.tries[i] < fewest:
                fewest = visits[i] + state.tries[i]
                rare = i
    if fewest == 0.0 or (exploring and fewest <= floor):
        return rare
    return -1


@part
def greedy_visits(model: Model, state: Goals) -> float:
    """The visits of the pairs that the greedy policy plays."""
    total = 0.0
    for s in range(len(state.greedy)):
        total += state.visits[s * model.num_actions + state.greedy[s]]
    return total


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
