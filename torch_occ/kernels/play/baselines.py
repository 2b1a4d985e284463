"""The episode loops of the baselines, compiled: empirical learners and fixed policies.

These are the compiled twins of `EmpiricalLearner` and `FixedPolicy` in torch_occ.game.learners,
played by torch_occ.game.players.torch_player. Both backends read the same random numbers and play
the same game; tests compare them.

Other learners with deterministic policies use the parts of this loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from torch_occ.kernels.constants import TIE
from torch_occ.kernels.lanes.arrays import in_lanes, in_lanes_or_shared, lane
from torch_occ.kernels.lanes.vectors import anywhere, sqrt, where
from torch_occ.kernels.layout import (
    PAIR,
    PLAN,
    TRIAL,
    Bools,
    Floats,
    Ints,
    Model,
    U,
    V,
    Work,
    ahead,
    finite,
    kernel,
    part,
)
from torch_occ.kernels.play.episodes import (
    EXPECTED,
    REALISED,
    Rules,
    Tally,
    add_moments,
    draw,
    favour,
    index_drawn,
    react,
    state_drawn,
    walk,
)
from torch_occ.kernels.solver.transitions import likelihoods, successor

#: The row of `work.states` with the pair that a deterministic policy plays in every state. Learners
#: with such policies have no multipliers, whose row it is otherwise.
CHOICE = V


class Seen(NamedTuple):
    """What one seed, or one per lane, has observed; pairs are flat.

    `mean` and `root` follow from the others. They are kept because an episode changes few of them.
    """

    visits: Floats  # (S * A,)
    losses: Floats  # (S * A,), sums of the observed losses
    mean: Floats  # (S * A,), losses / visits; another number without visits
    root: Floats  # (S * A,), 1 / sqrt(visits), 0 without visits
    # (M,), visits by next state, as torch_occ.game.beliefs.counts; empty if they are not needed
    counts: Floats
    entry: Ints  # (S * A,), the first entry of each pair in `counts`, or empty


def make_seen(model: Model, new: Callable[..., Floats]) -> Seen:
    """The scratch memory of `Seen`; the fields of a learner's state are empty."""
    num_pairs, none = model.exists.shape[1], new(0)
    return Seen(none, none, new(num_pairs), new(num_pairs), none, np.zeros(0, np.int64))


@kernel
def play_empirical(
    model: Model,
    logs: Floats,  # (n,), log t
    scale: float,  # of the optimism sqrt(log t / visits); 0 for follow-the-leader
    floor: float,  # the index of pairs without visits, and the lower bound of every index
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (N, n, L, 3) for N seeds, at most as many as lanes
    rules: Rules,
    tally: Tally,
    seen: Seen,  # its `losses` are the tally's `cumulative_loss`
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes of `EmpiricalLearner`.

    In lanes, tally, seen and work have a last axis of lanes; the means have one if they differ
    between seeds. There may be fewer seeds than lanes.
    """
    tally, seen, work = in_lanes(tally, width), in_lanes(seen, width), in_lanes(work, width)
    means, index = in_lanes_or_shared(means, width), work.pairs
    average(seen, floor)
    for t in range(numbers.shape[1]):
        if t > 0 and rules.greedy:
            react(model, tally.q, means)
        radius = scale * np.sqrt(logs[t])
        for i in range(len(seen.mean)):
            index[TRIAL, i] = seen.mean[i]
            if scale > 0.0:
                index[TRIAL, i] = max(seen.mean[i] - radius * seen.root[i], floor)
        plan(model, work)
        play_plan(model, rules, t, means, numbers, tally, seen, work)


@kernel
def average(seen: Seen, unseen: float) -> None:
    """Write the averages and roots; `unseen` stands for averages without visits."""
    for i in range(len(seen.mean)):
        visits = max(seen.visits[i], 1.0)
        known = seen.visits[i] > 0.0
        seen.mean[i] = where(known, seen.losses[i] / visits, unseen)
        seen.root[i] = where(known, 1.0 / sqrt(visits), 0.0)


@part
def plan(model: Model, work: Work) -> None:
    """Backward induction for the loss in row TRIAL of the pairs, which becomes Q.

    Row CHOICE of the states receives the pair that each state plays.
    """
    start, num_actions, states, pairs = model.start, model.num_actions, work.states, work.pairs
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[TRIAL, i] += ahead(model.next_state, i, states, PLAN, behind, after)
            states[PLAN, s], states[CHOICE, s] = cheapest(
                model.exists[PAIR], pairs, TRIAL, s * num_actions, (s + 1) * num_actions
            )


@part
def cheapest(allowed: Bools, costs: Floats, row: int, first: int, stop: int) -> tuple[Any, Any]:
    """The least cost of a pair that is allowed, and that pair.

    Ties are broken as in `torch_occ.mdp.occupancy.cheapest`.
    """
    best, chosen, open_ = np.inf, -1.0, True
    for i in range(first, stop):
        if allowed[i]:
            best = min(best, costs[row, i])
    limit = where(finite(best), best + TIE * max(1.0, abs(best)), best)
    for i in range(first, stop):
        if allowed[i]:
            here = open_ & (costs[row, i] <= limit)
            chosen, open_ = where(here, float(i), chosen), open_ & (not here)
    return best, chosen


@part
def play_plan(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    numbers: Floats,  # (N, n, L, 3)
    tally: Tally,
    seen: Seen,
    work: Work,
) -> None:
    """Play episode t with the policy in row CHOICE of the states."""
    row = min(t, len(means) - 1)
    occupy(model, tally.q, work)
    enter(rules, means, row, t, numbers.shape[1], len(numbers), tally)
    follow(model, rules, t, means, row, numbers, tally.scalars, seen, work)


@part
def occupy(model: Model, q: Floats, work: Work) -> None:
    """Write the occupancy measure of the policy in row CHOICE of the states into q."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[-1]):
        states[U, s] = model.initial[s] if s < start[1] else 0.0
    for k in range(len(start) - 1):
        width = start[k + 2] - start[k + 1] if k + 2 < len(start) else 0
        for s in range(start[k], start[k + 1]):
            for i in range(s * num_actions, (s + 1) * num_actions):
                mass = where(states[CHOICE, s] == float(i), states[U, s], 0.0)
                q[i] = mass
                if width > 0 and anywhere(mass > 0.0):
                    shares, begin, size = likelihoods(model.next_state, i, width)
                    for j in range(size):
                        there = successor(model.next_state, i, j, start[k + 1])
                        states[U, there] += mass * shares[begin + j]


@part
def enter(
    rules: Rules, means: Floats, row: int, t: int, count: int, seeds: int, tally: Tally
) -> None:
    """Add q, the means and the expected loss of episode t of `count` to the sums."""
    expected = 0.0
    for i in range(len(tally.q)):
        expected += tally.q[i] * means[row, i]
        tally.cumulative_occupancy[i] += tally.q[i]
        tally.total_mean[i] += means[row, i]
    tally.scalars[EXPECTED] += expected
    for n in range(seeds):
        add_moments(rules, lane(means, n), row, t, count, lane(tally.second_moment, n))


@part
def follow(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    numbers: Floats,  # (N, n, L, 3)
    scalars: Floats,
    seen: Seen,
    work: Work,
) -> None:
    """Play one trajectory per lane of the policy in row CHOICE, and add its losses to REALISED.

    As in `torch_occ.kernels.play.episodes.walk`, lanes take their steps in turns.
    """
    layers, places = len(model.start) - 1, work.places
    for n in range(len(numbers)):
        uniform = numbers[n, t, layers - 1, 2]
        places[n] = index_drawn(model.initial, 0, len(model.initial), uniform)
    for k in range(layers):
        for n in range(len(numbers)):
            i = int(lane(work.states, n)[CHOICE, places[n]])
            loss = draw(rules.noise, lane(means, n)[row, i], numbers[n, t, k, 1])
            lane(scalars, n)[REALISED] += loss
            after = 0  # of the terminal state
            if k + 1 < layers:
                places[n] = state_drawn(model, i, k, numbers[n, t, k, 2])
                after = places[n] - model.start[k + 1]
            observe(lane(seen, n), i, after, loss)


@part
def observe(seen: Seen, i: int, after: int, loss: float) -> None:
    """Count a visit of a pair, its loss, and its next state, which has this place in its layer."""
    if len(seen.counts) > 0:
        seen.counts[seen.entry[i] + after] += 1.0
    seen.visits[i] += 1.0
    seen.losses[i] += loss
    seen.mean[i] = seen.losses[i] / seen.visits[i]
    seen.root[i] = 1.0 / np.sqrt(seen.visits[i])


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
    q, loss, scalars = tally.q, tally.cumulative_loss, tally.scalars
    for t in range(numbers.shape[1]):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        enter(rules, means, row, t, numbers.shape[1], 1, tally)
        walk(model, rules, t, means, row, means[row], q, numbers, loss, scalars, places)
