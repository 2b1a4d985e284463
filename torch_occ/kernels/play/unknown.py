"""The episode loop of FTRL for unknown transitions, compiled, for one seed.

This is the compiled twin of `torch_occ.game.learners.unknown.UnknownFTRL`, played by
torch_occ.game.players.torch_player. There are two models: the true one, along which trajectories
are drawn, and the believed one, over whose occupancy measures the step is taken. The believed one
changes in place at the start of an epoch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ._support.spacing import CHUNK
from torch_occ.kernels.layout import PAIR, Floats, Ints, Model, Terms, Work, kernel
from torch_occ.kernels.play.baselines import enter
from torch_occ.kernels.play.beliefs import (
    FIRST,
    NUMBER,
    Belief,
    Confidence,
    doubled,
    estimate_transitions,
    occupy_by,
    spread_belief,
    upper_bound,
)
from torch_occ.kernels.play.episodes import (
    FULL_INFORMATION,
    REALISED,
    Rules,
    Tally,
    draw,
    drift,
    favour,
    index_drawn,
    propose,
    state_drawn,
)


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
    nowhere: Floats  # (0,)


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
            memory.nowhere,
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
    work.stale[0], work.stale[1], work.stale[2] = np.inf, 0.0, 0.0


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
    work.stale[0] += drift(memory.weights, 0)


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
