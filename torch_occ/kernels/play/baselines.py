"""The episode loops of the baselines, compiled: empirical learners and fixed policies.

These are the compiled twins of `EmpiricalLearner` and `FixedPolicy` in torch_occ.game.learners,
played by torch_occ.game.players.torch_player. Both backends read the same random numbers and play
the same game; tests compare them.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.constants import TIE
from torch_occ.kernels.layout import PAIR, PLAN, TRIAL, Floats, Ints, Model, U, Work, ahead, kernel
from torch_occ.kernels.play.episodes import (
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
from torch_occ.kernels.solver.transitions import likelihoods, successor


@kernel
def play_empirical(
    model: Model,
    logs: Floats,  # (n,), log t
    scale: float,  # of the optimism sqrt(log t / visits); 0 for follow-the-leader
    floor: float,  # the index of pairs without visits, and the lower bound of every index
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    visits: Floats,  # (S * A,)
    work: Work,
) -> None:
    """Play n episodes of `EmpiricalLearner`.

    The tally's `cumulative_loss` holds the sums of the observed losses.
    """
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
    """Backward induction on the optimistic averages of the losses.

    `work.softest` receives the pair that each state plays. Ties are broken as in
    `torch_occ.mdp.occupancy.cheapest`.
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
    """Write the occupancy measure of the policy in `work.softest` into q."""
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
    """Play one trajectory of the policy in `work.softest`, and return its total loss.

    `losses` and `visits` are updated at the visited pairs.
    """
    layers, suffered = len(model.start) - 1, 0.0
    s = index_drawn(model.initial, 0, len(model.initial), numbers[t, layers - 1, 2])
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
def play_fixed(
    model: Model,
    means: Floats,
    numbers: Floats,  # (1, n, L, 3)
    rules: Rules,
    tally: Tally,
    places: Ints,  # (1,), scratch
) -> None:
    """Play n episodes of `FixedPolicy` with the tally's q; `cumulative_loss` is scratch memory."""
    q = tally.q
    for t in range(numbers.shape[1]):
        row, expected = min(t, len(means) - 1), 0.0
        if t > 0 and rules.greedy:
            favour(model, q, means)
        for i in range(len(q)):
            expected += q[i] * means[row, i]
            tally.cumulative_occupancy[i] += q[i]
            tally.total_mean[i] += means[row, i]
        add_moments(rules, means, row, t, numbers.shape[1], tally.second_moment)
        tally.scalars[EXPECTED] += expected
        loss, scalars = tally.cumulative_loss, tally.scalars
        walk(model, rules, t, means, row, means[row], q, numbers, loss, scalars, places)
