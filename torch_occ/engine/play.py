"""The episode loop of FTRL, compiled: solve, sample, estimate, update; one seed, or one per lane.

This is the compiled twin of torch_occ.game.torch_player with the learner `FTRL`. Both
backends read the same random numbers and play the same game.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba.extending import overload

from torch_occ._support.constants import CHUNK, CONVERGED, TIE
from torch_occ.engine.entropic import follow_or_restart
from torch_occ.engine.lanes import (
    LaneArray,
    anywhere,
    called_by_kernels,
    in_lanes,
    in_lanes_or_shared,
    lane,
    sqrt,
    where,
)
from torch_occ.engine.layout import (
    PAIR,
    PLAN,
    TRIAL,
    Bools,
    Floats,
    Ints,
    Model,
    Terms,
    U,
    V,
    Work,
    ahead,
    finite,
    inlined,
    kernel,
    part,
    routine,
)
from torch_occ.engine.transitions import likelihoods, successor

NOISE = {"none": 0, "bernoulli": 1, "uniform": 2}
IMPORTANCE_WEIGHTED, IMPLICIT_EXPLORATION, REDUCED_VARIANCE, FULL_INFORMATION = 0, 1, 2, 3

# Entries of `Tally.scalars`.
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


class Tally(NamedTuple):
    """The running sums of one seed, or of one per lane, updated in place; pairs are flat."""

    q: Floats  # (S * A,)
    cumulative_loss: Floats  # (S * A,)
    cumulative_occupancy: Floats  # (S * A,)
    total_mean: Floats  # (S * A,)
    # (S * A, S * A), as `losses.second_moments`; (0, 0) if it is not needed
    second_moment: Floats
    scalars: Floats  # (8,), by the indices above


@kernel
def play(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n + 1, K or K * S * A), of the previous episode and of these n
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (N, n, L, 3) for N seeds, at most as many as lanes
    tables: Floats,  # (N, n, S * A) under full information, else empty
    rules: Rules,
    tally: Tally,
    middle: Floats,  # (S * A,), an interior point for cold starts
    table: Floats,  # (S * A,), scratch: the losses under full information
    own: Floats,  # (K or K * S * A,), scratch: the weights of an episode
    nowhere: Floats,  # (0,)
    work: Work,  # the same for every call of a run
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes, with one seed per lane unless the width is None.

    In lanes, exponents, tally, table, own, nowhere and work have a last axis of lanes; the means
    have one if they differ between seeds. There may be fewer seeds than lanes.
    """
    terms, tally, work = in_lanes(terms, width), in_lanes(tally, width), in_lanes(work, width)
    table, own, nowhere = in_lanes(table, width), in_lanes(own, width), in_lanes(nowhere, width)
    means = in_lanes_or_shared(means, width)
    q, loss, scalars, num_pairs = tally.q, tally.cumulative_loss, tally.scalars, len(tally.q)
    for i in range(num_pairs):
        work.pairs[PAIR, i] = q[i]
    for t in range(len(weights) - 1):
        if t > 0 and rules.greedy:
            react(model, q, means)
        work.stale[0] += drift(weights, t)
        # Nothing is kept from one chunk to the next, so that a run can continue from a file.
        if (before + t) % CHUNK == 0:
            work.stale[0], work.stale[1], work.stale[2] = np.inf, 0.0, 0.0
        for k in range(len(own)):
            own[k] = weights[t + 1, k]
        propose(model, terms, own, loss, rules, middle, nowhere, before + t + 1, scalars, work)
        row, expected = min(t, len(means) - 1), 0.0
        for i in range(num_pairs):
            x = work.pairs[PAIR, i]
            q[i] = x
            expected += x * means[row, i]
            tally.cumulative_occupancy[i] += x
            tally.total_mean[i] += means[row, i]
            if rules.estimator == REDUCED_VARIANCE:
                loss[i] += where(x >= rules.setting[t], 0.5, 0.0)
        scalars[EXPECTED] += expected
        for n in range(len(numbers)):
            charged, shown, total = lane(means, n), lane(table, n), lane(loss, n)
            if rules.estimator == FULL_INFORMATION:
                for i in range(num_pairs):
                    shown[i] = draw(rules.noise, charged[row, i], tables[n, t, i])
                    total[i] += shown[i]
            add_moments(rules, charged, row, t, len(weights) - 1, lane(tally.second_moment, n))
        walk(model, rules, t, means, row, table, q, numbers, loss, scalars, work.places)


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
def propose(
    model: Model,
    terms: Terms,
    weights: Floats,
    loss: Floats,
    rules: Rules,
    middle: Floats,
    nowhere: Floats,
    episode: int,
    scalars: Floats,
    work: Work,
) -> None:
    """Solve for q_t, starting from the last q, or from the middle if that fails."""
    status, steps, _, flow, dual = follow_or_restart(
        model, terms, weights, loss, rules.tolerance, rules.max_steps, nowhere, middle, work
    )
    failed = status != CONVERGED
    scalars[NEWTON_STEPS] += steps
    scalars[UNCERTIFIED] += where(failed, 1.0, 0.0)
    scalars[DUAL_RESIDUAL] = max(scalars[DUAL_RESIDUAL], dual)
    scalars[FLOW_RESIDUAL] = max(scalars[FLOW_RESIDUAL], flow)
    fresh = failed & (scalars[FIRST_UNCERTIFIED] == 0.0)
    scalars[FIRST_UNCERTIFIED] = where(fresh, float(episode), scalars[FIRST_UNCERTIFIED])
    scalars[FIRST_STATUS] = where(fresh, status, scalars[FIRST_STATUS])


@routine
def walk(
    model: Model,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    table: Floats,
    q: Floats,
    numbers: Floats,  # (N, n, L, 3)
    cumulative_loss: Floats,
    scalars: Floats,
    places: Ints,  # (lanes,), scratch: the state of every lane
) -> None:
    """Play one trajectory per lane, and add its losses to REALISED.

    The estimates of the losses of the visited pairs are added to the cumulative loss. Lanes take
    their steps in turns, since the steps of one trajectory must wait for each other.
    """
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    for n in range(len(numbers)):
        initial = lane(model.initial, n)
        places[n] = index_drawn(initial, 0, start[1], numbers[n, t, layers - 1, 2])
    for k in range(layers):
        for n in range(len(numbers)):
            own, total, s = lane(q, n), lane(cumulative_loss, n), places[n]
            uniforms = numbers[n, t, k]
            i = s * num_actions + index_drawn(own, s * num_actions, num_actions, uniforms[0])
            if rules.estimator == FULL_INFORMATION:
                loss = lane(table, n)[i]
            else:
                loss = draw(rules.noise, lane(means, n)[row, i], uniforms[1])
                if rules.estimator == IMPORTANCE_WEIGHTED:
                    total[i] += loss / own[i]
                elif rules.estimator == IMPLICIT_EXPLORATION:
                    total[i] += loss / (own[i] + rules.setting[t])
                else:
                    total[i] += (loss - (0.5 if own[i] >= rules.setting[t] else 0.0)) / own[i]
            lane(scalars, n)[REALISED] += loss
            if k + 1 < layers:
                places[n] = state_drawn(lane(model, n), i, k, uniforms[2])


@inlined
def state_drawn(model: Model, pair: int, k: int, uniform: float) -> int:
    """Draw the state of layer k + 1 that follows a pair, from a uniform number."""
    first = model.start[k + 1]
    shares, begin, size = likelihoods(model.next_state, pair, model.start[k + 2] - first)
    return successor(model.next_state, pair, index_drawn(shares, begin, size, uniform), first)


@routine
def favour(model: Model, q: Floats, means: Floats) -> None:
    """Write the mean losses of `GreedyAdversary` after q into `means`.

    The mean is 1 for the likeliest action of each state, and 0 for the others. Ties are broken as
    in `torch_occ.mdp.occupancy.likeliest`.
    """
    num_actions = model.num_actions
    for first in range(0, len(q), num_actions):
        most, open_ = 0.0, True
        for i in range(first, first + num_actions):
            most = max(most, q[i])
        for i in range(first, first + num_actions):
            chosen = open_ & (q[i] >= (1.0 - TIE) * most) & model.exists[PAIR, i]
            means[0, i] = where(chosen, 1.0, 0.0)
            open_ = open_ & (not chosen)


def react(model: Model, q: Floats, means: Floats) -> None:
    """`favour`; means that all lanes share are never those of a greedy adversary."""
    called_by_kernels(model, q, means)


@overload(react, strict=False)
def _react(model: Any, q: Any, means: Any) -> Any:
    if isinstance(q, LaneArray) and not isinstance(means, LaneArray):
        return lambda model, q, means: None
    return lambda model, q, means: favour(model, q, means)


@inlined
def add_moments(rules: Rules, means: Floats, row: int, t: int, count: int, total: Floats) -> None:
    """Add E[loss_i loss_j] of episode t of `count` to the total, if the total is not empty.

    If the means do not change, the sum over all episodes of the call is added at t = 0.
    """
    if len(total) > 0:
        if rules.greedy or len(means) > 1:
            add_products(rules.noise, means, row, 1.0, total)
        elif t == 0:
            add_products(rules.noise, means, row, float(count), total)


@routine
def add_products(noise: int, means: Floats, row: int, times: float, total: Floats) -> None:
    """Add `times` E[loss_i loss_j] for i <= j; the compiled twin of `losses.second_moments`."""
    for i in range(len(total)):
        mean = means[row, i]
        if mean > 0.0:
            weight, square = times * mean, mean * mean
            if noise == 1:
                square = mean
            elif noise == 2:
                square += min(mean, 1 - mean) ** 2 / 3
            total[i, i] += times * square
            for j in range(i + 1, len(total)):
                total[i, j] += weight * means[row, j]


@part
def draw(noise: int, mean: float, uniform: float) -> float:
    """Draw a loss with this mean from a uniform number; the compiled twin of `LossProcess.draw`."""
    if noise == 1:
        return 1.0 if uniform < mean else 0.0
    if noise == 2:
        return mean + min(mean, 1 - mean) * (2 * uniform - 1)
    return mean


@part
def index_drawn(shares: Floats, first: int, size: int, uniform: float) -> int:
    """Draw an index with probabilities proportional to some entries, from a uniform number.

    The rule is that of `torch_occ._support.streams.invert`.
    """
    total = 0.0
    for j in range(first, first + size):
        total += shares[j]
    target = min(uniform, 1 - 2.0**-50) * total
    cumulative, index = 0.0, 0
    for j in range(first, first + size - 1):
        cumulative += shares[j]
        index += cumulative <= target
    return index


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
