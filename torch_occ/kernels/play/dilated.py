"""The episode loop of policy optimization with dilated bonuses, compiled, for one seed.

This is the compiled twin of `torch_occ.game.learners.dilated`, which has the formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.layout import PAIR, PLAN, TRIAL, Floats, Model, U, Work, ahead, kernel
from torch_occ.kernels.play.baselines import enter
from torch_occ.kernels.play.episodes import (
    REALISED,
    Rules,
    Tally,
    draw,
    favour,
    index_drawn,
    state_drawn,
)
from torch_occ.kernels.solver.transitions import likelihoods, successor


class Optimizer(NamedTuple):
    """The settings of the learner, and its memory for one seed."""

    gamma: float
    scale: float
    iterations: int  # the largest number of Newton iterations
    inverse: Floats  # (S,), the sums of 1 / q(s)
    path: Floats  # (2, L), scratch: the visited pairs and their losses


@kernel
def play_policy_optimization(
    model: Model,
    optimizer: Optimizer,
    means: Floats,  # (n or 1, S * A)
    numbers: Floats,  # (n, L, 3)
    rules: Rules,
    tally: Tally,
    work: Work,
) -> None:
    """Play n episodes. The tally's `cumulative_loss` holds the sums of Q - B."""
    q, total, scalars, layers = tally.q, tally.cumulative_loss, tally.scalars, len(model.start) - 1
    for t in range(len(numbers)):
        row = min(t, len(means) - 1)
        if t > 0 and rules.greedy:
            favour(model, q, means)
        improve(model, optimizer, total, q, work)
        enter(rules, means, row, t, len(numbers), 1, tally)
        subtract_bonus(model, optimizer, total, q, work)
        scalars[REALISED] += roam(model, optimizer, rules, t, means, row, numbers, q)
        to_go = 0.0
        for k in range(layers - 1, -1, -1):
            i = int(optimizer.path[0, k])
            to_go += optimizer.path[1, k]
            total[i] += to_go / q[i]


@kernel
def improve(model: Model, optimizer: Optimizer, total: Floats, q: Floats, work: Work) -> None:
    """The policies of all states, layer by layer, and their occupancy measure."""
    start, num_actions, states = model.start, model.num_actions, work.states
    layers = len(start) - 1
    for s in range(start[layers]):
        states[U, s] = model.initial[s] if s < start[1] else 0.0
    for k in range(layers):
        width = start[k + 2] - start[k + 1] if k + 1 < layers else 0
        for s in range(start[k], start[k + 1]):
            optimizer.inverse[s] += 1.0 / states[U, s]
            rate = optimizer.gamma / ((layers - k) * np.sqrt(optimizer.inverse[s]))
            choose(model, optimizer.iterations, total, s, rate, work)
            for i in range(s * num_actions, (s + 1) * num_actions):
                q[i] = states[U, s] * work.pairs[TRIAL, i]
                if width > 0 and model.exists[PAIR, i]:
                    shares, begin, size = likelihoods(model.next_state, i, width)
                    for j in range(size):
                        there = successor(model.next_state, i, j, start[k + 1])
                        states[U, there] += q[i] * shares[begin + j]


@kernel
def choose(model: Model, iterations: int, total: Floats, s: int, rate: float, work: Work) -> None:
    """The policy of a state; the twin of `tsallis_policy`."""
    first, stop, pairs = s * model.num_actions, (s + 1) * model.num_actions, work.pairs
    least = np.inf
    for i in range(first, stop):
        if model.exists[PAIR, i]:
            least = min(least, total[i])
    for i in range(first, stop):
        pairs[TRIAL, i] = 2.0 * rate * (total[i] - least) if model.exists[PAIR, i] else np.inf
    v = -1.0
    for _ in range(iterations):
        square, cube = 0.0, 0.0
        for i in range(first, stop):
            root = 1.0 / (pairs[TRIAL, i] - v)
            square += root * root
            cube += root * root * root
        step = (square - 1.0) / (2.0 * cube)
        if not (square > 1.0 and v - step < v):
            break
        v -= step
    square = 0.0
    for i in range(first, stop):
        root = 1.0 / (pairs[TRIAL, i] - v)
        pairs[TRIAL, i] = root * root
        square += pairs[TRIAL, i]
    for i in range(first, stop):
        pairs[TRIAL, i] /= square


@kernel
def subtract_bonus(
    model: Model, optimizer: Optimizer, total: Floats, q: Floats, work: Work
) -> None:
    """Subtract the dilated bonus of q from the sums."""
    start, num_actions, states = model.start, model.num_actions, work.states
    layers, gamma = len(start) - 1, optimizer.gamma
    factor = optimizer.scale * (2.0 * gamma + 1.0 / gamma)
    for k in range(layers - 1, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 1 < layers else 0
        for s in range(start[k], behind):
            first, stop = s * num_actions, (s + 1) * num_actions
            spread, average = 0.0, 0.0
            for i in range(first, stop):
                spread += np.sqrt(q[i] / states[U, s]) * (1.0 - q[i] / states[U, s])
            root = np.sqrt(optimizer.inverse[s])
            own = factor * (layers - k) * spread / (states[U, s] * root)
            for i in range(first, stop):
                if model.exists[PAIR, i]:
                    B = own
                    if after > 0:
                        rest = ahead(model.next_state, i, states, PLAN, behind, after)
                        B += (1.0 + 1.0 / layers) * rest
                    total[i] -= B
                    average += q[i] / states[U, s] * B
            states[PLAN, s] = average


@kernel
def roam(
    model: Model,
    optimizer: Optimizer,
    rules: Rules,
    t: int,
    means: Floats,
    row: int,
    numbers: Floats,
    q: Floats,
) -> float:
    """Play one trajectory, keep its path, and return its total loss."""
    num_actions, layers, suffered = model.num_actions, len(model.start) - 1, 0.0
    s = index_drawn(model.initial, 0, len(model.initial), numbers[t, layers - 1, 2])
    for k in range(layers):
        first, mass = s * num_actions, 0.0
        for i in range(first, first + num_actions):
            mass += q[i]
        i = first + index_drawn(q, first, num_actions, numbers[t, k, 0])
        loss = draw(rules.noise, means[row, i], numbers[t, k, 1])
        optimizer.path[0, k], optimizer.path[1, k] = i, loss
        suffered += loss
        if k + 1 < layers:
            s = state_drawn(model, i, k, numbers[t, k, 2])
    return suffered
