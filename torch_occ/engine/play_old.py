"""What the rivals still need of the loops that were their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from torch_occ._support.constants import CONVERGED
from torch_occ.engine.entropic import follow_or_restart
from torch_occ.engine.lanes import (
    anywhere,
    lane,
    sqrt,
    where,
)
from torch_occ.engine.layout import (
    PAIR,
    PLAN,
    TRIAL,
    Floats,
    Ints,
    Model,
    Terms,
    U,
    V,
    Work,
    ahead,
    inlined,
    kernel,
    part,
)
from torch_occ.engine.learners import cheapest_pair as cheapest
from torch_occ.engine.play import NOISE as NOISE
from torch_occ.engine.play import add_products, draw, index_drawn, state_drawn
from torch_occ.engine.play import favour as favour
from torch_occ.engine.play import react as react
from torch_occ.engine.transitions import likelihoods, successor

IMPORTANCE_WEIGHTED, IMPLICIT_EXPLORATION, REDUCED_VARIANCE, FULL_INFORMATION = 0, 1, 2, 3

# Entries of `FlatTally.scalars`.
EXPECTED, REALISED, NEWTON_STEPS, UNCERTIFIED, DUAL_RESIDUAL, FLOW_RESIDUAL = 0, 1, 2, 3, 4, 5
# The episode of the first step without certificate (0 if there is none), and its status.
FIRST_UNCERTIFIED, FIRST_STATUS = 6, 7


class Rules(NamedTuple):
    """How losses are chosen, drawn and estimated, and the limits of a solve."""

    greedy: bool  # whether `GreedyAdversary` sets the means after the first episode
    noise: int
    estimator: int
    # (n,): the bias of implicit exploration, or the threshold of the reduced-variance estimator
    setting: Floats
    tolerance: float
    max_steps: int


class FlatTally(NamedTuple):
    """The running sums of one seed, or of one per lane, updated in place; pairs are flat."""

    q: Floats  # (S * A,)
    cumulative_loss: Floats  # (S * A,)
    cumulative_occupancy: Floats  # (S * A,)
    total_mean: Floats  # (S * A,)
    # (S * A, S * A), as `losses.second_moments`; (0, 0) if it is not needed
    second_moment: Floats
    scalars: Floats  # (8,), by the indices above


@part
def drift(weights: Floats, t: int) -> float:
    """The largest relative change of a weight from row t to row t + 1."""
    most = 0.0
    for k in range(weights.shape[1]):
        change = abs(weights[t + 1, k] - weights[t, k])
        if change > 0.0:
            most = max(most, change / abs(weights[t, k]))
    return most


@inlined
def propose_step(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    rules: Rules,
    middle: Floats,
    no_source: Floats,
    episode: int,
    scalars: Floats,
    work: Work,
) -> None:
    """Solve for q_t, starting from the last q, or from the middle if that fails."""
    status, steps, _, flow, dual = follow_or_restart(
        model, terms, weights, loss, rules.tolerance, rules.max_steps, no_source, middle, work
    )
    failed = status != CONVERGED
    scalars[NEWTON_STEPS] += steps
    scalars[UNCERTIFIED] += where(failed, 1.0, 0.0)
    scalars[DUAL_RESIDUAL] = max(scalars[DUAL_RESIDUAL], dual)
    scalars[FLOW_RESIDUAL] = max(scalars[FLOW_RESIDUAL], flow)
    fresh = failed & (scalars[FIRST_UNCERTIFIED] == 0.0)
    scalars[FIRST_UNCERTIFIED] = where(fresh, float(episode), scalars[FIRST_UNCERTIFIED])
    scalars[FIRST_STATUS] = where(fresh, status, scalars[FIRST_STATUS])


@inlined
def add_moment(rules: Rules, means: Floats, row: int, t: int, count: int, total: Floats) -> None:
    """Add E[loss_i loss_j] of episode t of `count` to the total, if the total is not empty.

    If the means do not change, the sum over all episodes of the call is added at t = 0.
    """
    if len(total) > 0:
        if rules.greedy or len(means) > 1:
            add_products(rules.noise, means, row, 1.0, total)
        elif t == 0:
            add_products(rules.noise, means, row, float(count), total)


# -- The episode loops of the baselines, compiled: empirical learners and fixed policies -----------
#
# These are the compiled twins of `EmpiricalLearner` and `FixedPolicy` in torch_occ.game.learners,
# played by torch_occ.game.torch_player. Both backends read the same random numbers and play
# the same game; tests compare them.
#
# Other learners with deterministic policies use the parts of this loop.


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
    # (M,), visits by next state, as torch_occ.rivals.beliefs; empty if they are not needed
    counts: Floats
    entry: Ints  # (S * A,), the first entry of each pair in `counts`, or empty


def make_seen(model: Model, new: Callable[..., Floats]) -> Seen:
    """The scratch memory of `Seen`; the fields of a learner's state are empty."""
    num_pairs, none = model.exists.shape[1], new(0)
    return Seen(none, none, new(num_pairs), new(num_pairs), none, np.zeros(0, np.int64))


@kernel
def average_seen(seen: Seen, unseen: float) -> None:
    """Write the averages and roots; `unseen` stands for averages without visits."""
    for i in range(len(seen.mean)):
        visits = max(seen.visits[i], 1.0)
        known = seen.visits[i] > 0.0
        seen.mean[i] = where(known, seen.losses[i] / visits, unseen)
        seen.root[i] = where(known, 1.0 / sqrt(visits), 0.0)


@part
def plan_row(model: Model, work: Work) -> None:
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
def play_plan(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    numbers: Floats,  # (N, n, L, 3)
    tally: FlatTally,
    seen: Seen,
    work: Work,
) -> None:
    """Play episode t with the policy in row CHOICE of the states."""
    row = min(t, len(means) - 1)
    occupy_row(model, tally.q, work)
    enter(rules, means, row, t, numbers.shape[1], len(numbers), tally)
    follow(model, rules, t, means, row, numbers, tally.scalars, seen, work)


@part
def occupy_row(model: Model, q: Floats, work: Work) -> None:
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
    rules: Rules, means: Floats, row: int, t: int, count: int, seeds: int, tally: FlatTally
) -> None:
    """Add q, the means and the expected loss of episode t of `count` to the sums."""
    expected = 0.0
    for i in range(len(tally.q)):
        expected += tally.q[i] * means[row, i]
        tally.cumulative_occupancy[i] += tally.q[i]
        tally.total_mean[i] += means[row, i]
    tally.scalars[EXPECTED] += expected
    for n in range(seeds):
        add_moment(rules, lane(means, n), row, t, count, lane(tally.second_moment, n))


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

    As in `torch_occ.engine.play.walk`, lanes take their steps in turns.
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
            observe_seen(lane(seen, n), i, after, loss)


@part
def observe_seen(seen: Seen, i: int, after: int, loss: float) -> None:
    """Count a visit of a pair, its loss, and its next state, which has this place in its layer."""
    if len(seen.counts) > 0:
        seen.counts[seen.entry[i] + after] += 1.0
    seen.visits[i] += 1.0
    seen.losses[i] += loss
    seen.mean[i] = seen.losses[i] / seen.visits[i]
    seen.root[i] = 1.0 / np.sqrt(seen.visits[i])
