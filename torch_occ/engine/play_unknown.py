"""Transitions that are learned, compiled, for one seed: counts, epochs, widths, occupancy bounds.

This is the compiled twin of torch_occ.game.beliefs, which has the formulas; tests compare the two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ._support.constants import CHUNK
from torch_occ.engine.layout import (
    ERROR,
    GUESSED,
    PAIR,
    RECENT,
    Floats,
    Ints,
    Model,
    Terms,
    U,
    Work,
    kernel,
)
from torch_occ.engine.play_old import (
    FULL_INFORMATION,
    REALISED,
    Rules,
    draw,
    drift,
    enter,
    favour,
    index_drawn,
    state_drawn,
)
from torch_occ.engine.play_old import (
    FlatTally as Tally,
)
from torch_occ.engine.play_old import (
    propose_step as propose,
)
from torch_occ.engine.transitions import likelihoods, successor

# Entries of `Belief.epoch`.
NUMBER, FIRST = 0, 1


class Confidence(NamedTuple):
    """Settings of a belief, as torch_occ.rivals.beliefs and `UnknownFTRL` have them."""

    pseudo_count: float
    bounded: bool  # whether there are widths; if not, the settings below are not used
    c1: float
    c2: float
    fewer: Floats  # (2,), subtracted from the visits in the denominators
    variance: bool
    iota: Floats  # (L,)
    scale: float  # of the bonus; 0 if there is none
    share: float
    remaining: bool
    floor: float  # of optimistic transitions, relative to the empirical ones; 1 if there are none


class Belief(NamedTuple):
    """What a learner knows about the transitions; the first six are its state.

    Tables over transitions are flat, as in torch_occ.rivals.beliefs.
    """

    counts: Floats  # (M,)
    visits: Floats  # (S * A,)
    epoch_visits: Floats  # (S * A,)
    transitions: Floats  # (M,)
    widths: Floats  # (M,), or empty
    epoch: Floats  # (2,), the number of the epoch and its first episode
    bonus: Floats  # (S * A,)
    entry: Ints  # (S * A,), the first entry of each pair in a flat table
    # (2, S * A, widest): the smallest probabilities of the confidence set, and what they may grow
    box: Floats
    room: Floats  # (S * A,), the probability that the smallest ones leave over
    ahead: Floats  # (S,), scratch: values of states
    order: Ints  # (widest,), scratch: successors by value


@kernel
def estimate_transitions(model: Model, confidence: Confidence, belief: Belief) -> None:
    """Begin an epoch: the empirical transitions, their widths, and the bonus of every pair."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    kappa, fewer = confidence.pseudo_count, confidence.fewer
    for k in range(layers):
        width = start[k + 2] - start[k + 1] if k + 1 < layers else 1
        iota = confidence.iota[k]
        reach = float(layers - 1 - k if confidence.remaining else layers)
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            m, total = belief.visits[i], 0.0
            belief.epoch_visits[i] = m
            if not model.exists[PAIR, i]:
                continue
            for e in range(belief.entry[i], belief.entry[i] + width):
                p = 1.0 / width
                if m + kappa > 0.0:
                    p = (belief.counts[e] + kappa / width) / (m + kappa)
                belief.transitions[e] = p
                if confidence.bounded:
                    B = 0.0
                    if width > 1:
                        B = 1.0
                        if m > (1.0 if confidence.variance else 0.0):
                            spread = p * (1.0 - p) if confidence.variance else p
                            B = confidence.c1 * np.sqrt(spread * iota / max(m - fewer[0], 1.0))
                            B = min(1.0, B + confidence.c2 * iota / max(m - fewer[1], 1.0))
                    belief.widths[e] = B
                    total += B
            if confidence.scale > 0.0:
                belief.bonus[i] = confidence.scale * reach * min(confidence.share * total, 1.0)


@kernel
def spread_belief(model: Model, confidence: Confidence, belief: Belief) -> None:
    """Write the believed transitions into the model, and the box of the confidence set."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    for k in range(layers - 1):
        width = start[k + 2] - start[k + 1]
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if not model.exists[PAIR, i]:
                continue
            left = 1.0
            for j in range(width):
                p = belief.transitions[belief.entry[i] + j]
                believed = p
                if confidence.bounded:
                    B = belief.widths[belief.entry[i] + j]
                    least = max(0.0, p - B)
                    belief.box[0, i, j], belief.box[1, i, j] = least, min(1.0, p + B) - least
                    left -= least
                    believed = p if confidence.floor >= 1.0 else max(p - B, confidence.floor * p)
                model.next_state[i, j] = believed
                model.arrivals[j, i] = believed
            belief.room[i] = max(left, 0.0)


@kernel
def upper_bound(model: Model, belief: Belief, policy: Floats, target: int, layer: int) -> float:
    """u(target), the upper occupancy bound of a state of this layer (Comp-UOB)."""
    start, num_actions, box, f = model.start, model.num_actions, belief.box, belief.ahead
    if layer == 0:
        return model.initial[target]
    for k in range(layer - 1, -1, -1):
        first = start[k + 1]
        width, there = start[k + 2] - first, target - first
        if k + 1 < layer:
            sort_successors(belief, first, width)
        for s in range(start[k], first):
            total = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if policy[i] > 0.0:
                    value, left = 0.0, belief.room[i]
                    if k + 1 == layer:  # all that is left goes to the target
                        value = box[0, i, there] + min(box[1, i, there], left)
                    else:
                        for n in range(width):
                            j = belief.order[n]
                            more = min(box[1, i, j], left)
                            left -= more
                            value += (box[0, i, j] + more) * f[first + j]
                    total += policy[i] * value
            f[s] = total
    u = 0.0
    for s in range(start[1]):
        u += model.initial[s] * f[s]
    return u


@kernel
def sort_successors(belief: Belief, first: int, width: int) -> None:
    """Sort the states of a layer by decreasing value into `belief.order`."""
    for j in range(width):
        n = j
        while n > 0 and belief.ahead[first + belief.order[n - 1]] < belief.ahead[first + j]:
            belief.order[n] = belief.order[n - 1]
            n -= 1
        belief.order[n] = j


@kernel
def doubled(belief: Belief, path: Ints) -> bool:
    """Whether a pair of the path has doubled its visits since the epoch began."""
    for k in range(len(path)):
        if belief.visits[path[k]] >= max(1.0, 2.0 * belief.epoch_visits[path[k]]):
            return True
    return False


@kernel
def occupy_by(model: Model, policy: Floats, q: Floats, work: Work) -> None:
    """Write the occupancy measure of a policy into q."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[-1]):
        states[U, s] = model.initial[s] if s < start[1] else 0.0
    for k in range(len(start) - 1):
        width = start[k + 2] - start[k + 1] if k + 2 < len(start) else 0
        for s in range(start[k], start[k + 1]):
            for i in range(s * num_actions, (s + 1) * num_actions):
                q[i] = states[U, s] * policy[i]
                if width > 0 and q[i] > 0.0:
                    shares, begin, size = likelihoods(model.next_state, i, width)
                    for j in range(size):
                        there = successor(model.next_state, i, j, start[k + 1])
                        states[U, there] += q[i] * shares[begin + j]


# -- The episode loop of FTRL for unknown transitions, compiled, for one seed ----------------------
#
# This is the compiled twin of `torch_occ.rivals.unknown.UnknownFTRL`, played by
# torch_occ.game.torch_player. There are two models: the true one, along which trajectories
# are drawn, and the believed one, over whose occupancy measures the step is taken. The believed one
# changes in place at the start of an epoch.


class Course(NamedTuple):
    """How the learner uses time: weight k of psi is `powers[0, k]` * time ** `powers[1, k]`."""

    powers: Floats  # (2, K)
    restart: bool
    adaptive: float  # the first time, if it depends on the losses; else 0
    choices: float  # L ln(S A)
    divides_by_bounds: bool


class Memory(NamedTuple):
    """Arrays of one seed. `q` and `spread` are the learner's state; the others are scratch."""

    q: Floats  # (S * A,), the occupancy measure of the believed model
    spread: Floats  # (1,)
    policy: Floats  # (S * A,)
    uniform: Floats  # (S * A,), the uniform policy
    middle: Floats  # (S * A,), its occupancy measure in the believed model
    loss: Floats  # (S * A,), the loss of the step
    estimate: Floats  # (S * A,)
    weights: Floats  # (2, K), of the last episode and of this one
    path: Ints  # (L,), the visited pairs
    no_source: Floats  # (0,)


@kernel
def play_unknown(
    truth: Model,
    believed: Model,
    terms: Terms,
    course: Course,
    confidence: Confidence,
    belief: Belief,
    memory: Memory,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (n, L, 3)
    tables: Floats,  # (n, S * A) under full information, else empty
    rules: Rules,
    tally: Tally,  # its q is that of the true model
    work: Work,  # of the believed model, the same for every call of a run
    scratch: Work,  # of the true model
) -> None:
    """Play n episodes."""
    scalars, num_pairs = tally.scalars, len(tally.q)
    spread_belief(believed, confidence, belief)
    occupy_by(believed, memory.uniform, memory.middle, work)
    for i in range(num_pairs):
        work.pairs[PAIR, i] = memory.q[i]
    for n in range(len(numbers)):
        t, row = before + n + 1, min(n, len(means) - 1)
        if n > 0 and rules.greedy:
            favour(truth, tally.q, means)
        # Nothing is kept from one chunk to the next, so that a run can continue from a file.
        if (t - 1) % CHUNK == 0:
            forget(work)
        set_time(course, belief, memory, tally.cumulative_loss, t, work)
        propose(
            believed,
            terms,
            memory.weights[1],
            memory.loss,
            rules,
            memory.middle,
            memory.no_source,
            t,
            scalars,
            work,
        )
        take_policy(believed, memory, work)
        occupy_by(truth, memory.policy, tally.q, scratch)
        enter(rules, means, row, n, len(numbers), 1, tally)
        scalars[REALISED] += venture(
            truth, believed, course, belief, memory, rules, n, means, row, numbers, tables
        )
        if course.adaptive > 0.0:
            memory.spread[0] += spread_of(believed, belief, memory)
        for i in range(num_pairs):
            tally.cumulative_loss[i] += memory.estimate[i]
        if doubled(belief, memory.path):
            belief.epoch[NUMBER] += 1.0
            belief.epoch[FIRST] = t + 1.0
            estimate_transitions(believed, confidence, belief)
            spread_belief(believed, confidence, belief)
            begin(believed, course.restart, memory, tally.cumulative_loss, work)


@kernel
def forget(work: Work) -> None:
    """Mark the factors as useless, and drop the guess."""
    work.notes[ERROR], work.notes[RECENT], work.notes[GUESSED] = np.inf, 0.0, 0.0


@kernel
def begin(
    believed: Model, restart: bool, memory: Memory, cumulative_loss: Floats, work: Work
) -> None:
    """Start an epoch: an interior point for cold starts, and a q of the new believed model.

    That is the q of the last policy, or with `restart` of the uniform one.
    """
    occupy_by(believed, memory.uniform, memory.middle, work)
    if restart:
        memory.spread[0] = 0.0
        for i in range(len(cumulative_loss)):
            cumulative_loss[i] = 0.0
            memory.q[i] = memory.middle[i]
    else:
        occupy_by(believed, memory.policy, memory.q, work)
    for i in range(len(memory.q)):
        work.pairs[PAIR, i] = memory.q[i]
    forget(work)


@kernel
def set_time(
    course: Course, belief: Belief, memory: Memory, total: Floats, t: int, work: Work
) -> None:
    """Set the loss of the step and the weights of psi at episode t."""
    counted = t - belief.epoch[FIRST] if course.restart else t - 1.0
    for i in range(len(total)):
        memory.loss[i] = total[i] - counted * belief.bonus[i]
    time = counted + 1.0
    if course.adaptive > 0.0:
        time = course.adaptive + memory.spread[0] / course.choices
    for k in range(course.powers.shape[1]):
        exponent = course.powers[1, k]
        growth = 1.0 if exponent == 0.0 else np.sqrt(time) if exponent == 0.5 else time**exponent
        memory.weights[0, k] = memory.weights[1, k]
        memory.weights[1, k] = course.powers[0, k] * growth
    work.notes[ERROR] += drift(memory.weights, 0)


@kernel
def take_policy(model: Model, memory: Memory, work: Work) -> None:
    """Keep the q of the believed model and its policy, which is uniform where q(s) = 0."""
    num_actions, q, policy = model.num_actions, memory.q, memory.policy
    for first in range(0, len(q), num_actions):
        total = 0.0
        for i in range(first, first + num_actions):
            q[i] = work.pairs[PAIR, i]
            total += q[i]
        for i in range(first, first + num_actions):
            policy[i] = q[i] / total if total > 0.0 else memory.uniform[i]


@kernel
def venture(
    truth: Model,
    believed: Model,
    course: Course,
    belief: Belief,
    memory: Memory,
    rules: Rules,
    n: int,
    means: Floats,
    row: int,
    numbers: Floats,
    tables: Floats,
) -> float:
    """Play one trajectory, count its transitions, and return its total loss.

    The estimate of the loss function is written into the memory.
    """
    policy, estimate, num_actions = memory.policy, memory.estimate, truth.num_actions
    full, layers, suffered = rules.estimator == FULL_INFORMATION, len(truth.start) - 1, 0.0
    for i in range(len(estimate)):
        estimate[i] = draw(rules.noise, means[row, i], tables[n, i]) if full else 0.0
    s = index_drawn(truth.initial, 0, len(truth.initial), numbers[n, layers - 1, 2])
    for k in range(layers):
        begun = s * num_actions
        i = begun + index_drawn(policy, begun, num_actions, numbers[n, k, 0])
        if full:
            suffered += estimate[i]
        else:
            loss = draw(rules.noise, means[row, i], numbers[n, k, 1])
            suffered += loss
            shown = memory.q[i]
            if course.divides_by_bounds:
                shown = policy[i] * upper_bound(believed, belief, policy, s, k)
            # The bias of implicit exploration is zero for importance weights.
            estimate[i] = loss / (shown + rules.setting[n])
        after = 0  # of the terminal state
        if k + 1 < layers:
            s = state_drawn(truth, i, k, numbers[n, k, 2])
            after = s - truth.start[k + 1]
        belief.counts[belief.entry[i] + after] += 1.0
        belief.visits[i] += 1.0
        memory.path[k] = i
    return suffered


@kernel
def spread_of(model: Model, belief: Belief, memory: Memory) -> float:
    """min{ sum q l^2, sum q (Q - V)^2 } for the estimate l minus the bonus, and its values."""
    start, num_actions, V = model.start, model.num_actions, belief.ahead
    plain, shifted = 0.0, 0.0
    for k in range(len(start) - 2, -1, -1):
        first = start[k + 1]
        width = start[k + 2] - first if k + 2 < len(start) else 0
        for s in range(start[k], first):
            V[s] = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                memory.loss[i] = memory.estimate[i] - belief.bonus[i]
                plain += memory.q[i] * memory.loss[i] ** 2
                for j in range(width):
                    memory.loss[i] += model.next_state[i, j] * V[first + j]
                V[s] += memory.policy[i] * memory.loss[i]
            for i in range(s * num_actions, (s + 1) * num_actions):
                shifted += memory.q[i] * (memory.loss[i] - V[s]) ** 2
    return min(plain, shifted)
