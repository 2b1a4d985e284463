"""The learners that FTRL is compared with, compiled: plan on averages of what was seen, or play one policy for ever.

The same games as those of torch_occ.game.learners under torch_occ.game.torch_player, from the same random numbers; tests hold the two together.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import TIE
from torch_occ.kernels.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    draw,
    favour,
    index_drawn,
    state_drawn,
    walk,
)
from torch_occ.kernels.layout import PAIR, PLAN, TRIAL, Floats, Model, U, Work, ahead, kernel
from torch_occ.kernels.transitions import likelihoods, successor


@kernel
def play_empirical(
    model: Model,
    logs: Floats,  # (n,), log t
    scale: float,  # of the optimism sqrt(log t / visits); 0 for follow-the-leader
    floor: float,  # what unseen pairs are believed to cost, and the least that optimism believes
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    visits: Floats,  # (S * A,)
    work: Work,
) -> None:
    """n episodes of `EmpiricalLearner`; the sums of the observed losses are the tally's `cumulative_loss`."""
    q, losses, scalars, num_pairs = tally.q, tally.cumulative_loss, tally.scalars, len(tally.q)
    for t in range(len(numbers)):
        row, expected = min(t, len(means) - 1), 0.0
        if t > 0 and rules.greedy:
            favour(model, q, means)
        plan(model, logs[t], scale, floor, losses, visits, work)
        occupy(model, q, work)
        for i in range(num_pairs):
            expected += q[i] * means[row, i]
            tally.cumulative_occupancy[i] += q[i]
            tally.total_mean[i] += means[row, i]
        add_moments(rules, means, row, t, len(numbers), tally.second_moment)
        scalars[EXPECTED] += expected
        scalars[REALISED] += follow(model, rules, t, means, row, numbers, losses, visits, work)


@kernel
def plan(
    model: Model, log: float, scale: float, floor: float, losses: Floats, visits: Floats, work: Work
) -> None:
    """Backward induction on the optimistic averages; `work.softest` holds the pair that each state plays,
    by `torch_occ.mdp.occupancy.cheapest`.
    """
    start, num_actions, states, pairs = model.start, model.num_actions, work.states, work.pairs
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            best = np.inf
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    total = floor
                    if visits[i] > 0:
                        total = losses[i] / visits[i]
                        if scale > 0:
                            total = max(total - scale * np.sqrt(log / visits[i]), floor)
                    total += ahead(model.next_state, i, states, PLAN, behind, after)
                    pairs[TRIAL, i] = total
                    best = min(best, total)
            states[PLAN, s] = best
            limit = best if np.isinf(best) else best + TIE * max(1.0, abs(best))
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i] and pairs[TRIAL, i] <= limit:
                    work.softest[s] = i
                    break


@kernel
def occupy(model: Model, q: Floats, work: Work) -> None:
    """The occupancy measure of the policy in `work.softest`."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[1], start[-1]):
        states[U, s] = 0.0
    for k in range(len(start) - 1):
        width = start[k + 2] - start[k + 1] if k + 2 < len(start) else 0
        for s in range(start[k], start[k + 1]):
            for i in range(s * num_actions, (s + 1) * num_actions):
                q[i] = 0.0
            pair = work.softest[s]
            q[pair] = model.initial[s] if k == 0 else states[U, s]
            shares, begin, size = likelihoods(model.next_state, pair, width)
            for j in range(size):
                states[U, successor(model.next_state, pair, j, start[k + 1])] += (
                    q[pair] * shares[begin + j]
                )


@kernel
def follow(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    numbers: Floats,
    losses: Floats,
    visits: Floats,
    work: Work,
) -> float:
    """One trajectory of the policy in `work.softest`: counts what it meets and returns what was suffered."""
    layers, suffered = len(model.start) - 1, 0.0
    s = index_drawn(model.initial, 0, len(model.initial), 1.0, numbers[t, layers - 1, 2])
    for k in range(layers):
        i = work.softest[s]
        loss = draw(rules.noise, means[row, i], numbers[t, k, 1])
        losses[i] += loss
        visits[i] += 1.0
        suffered += loss
        if k + 1 < layers:
            s = state_drawn(model, i, k, numbers[t, k, 2])
    return suffered


@kernel
def play_fixed(model: Model, means: Floats, numbers: Floats, rules: Rules, tally: Tally) -> None:
    """n episodes of `FixedPolicy`, whose q is the tally's; its `cumulative_loss` is scratch."""
    q = tally.q
    for t in range(len(numbers)):
        row, expected = min(t, len(means) - 1), 0.0
        if t > 0 and rules.greedy:
            favour(model, q, means)
        for i in range(len(q)):
            expected += q[i] * means[row, i]
            tally.cumulative_occupancy[i] += q[i]
            tally.total_mean[i] += means[row, i]
        add_moments(rules, means, row, t, len(numbers), tally.second_moment)
        tally.scalars[EXPECTED] += expected
        tally.scalars[REALISED] += walk(
            model, rules, t, means, row, means, q, numbers, tally.cumulative_loss
        )
