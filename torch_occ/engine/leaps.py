"""Leaping, compiled: the regret of particles that play many episodes per step.

torch_occ.tuning.leaps explains the method. The kernel plays one particle, or one per lane. Lanes
solve their steps together. Every lane has its own t and its own random numbers, so it plays and
counts alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import CONVERGED
from torch_occ.engine import layout as at
from torch_occ.engine.draws import Generators, binomial_drawn, normal_drawn, uniform_drawn
from torch_occ.engine.entropic import follow_or_restart
from torch_occ.engine.lanes import in_lanes, lane, lanes_of
from torch_occ.engine.layout import (
    Floats,
    Ints,
    Model,
    Rows,
    Solver,
    Work,
    kernel,
    likelihoods,
    routine,
    successor,
)
from torch_occ.engine.newton import floor_pairs
from torch_occ.engine.psi import derive

#: The sum of this many uniform losses is drawn as a normal number.
MANY = 50.0
#: The longest leap relative to t.
WIDEST = 0.25

# Entries of `Particle.clock`: the next episode, the regret so far, the length of the last leap, and
# its regret per episode when it began.
T, REGRET, LENGTH, OPENING = 0, 1, 2, 3
# Entries of `Particle.counts`.
LEAPS, UNCERTIFIED = 0, 1


class LeapSettings(NamedTuple):
    """The inputs that all particles share."""

    # (2, K or K * S * A): the weights of psi at t = 1, and their powers of t
    powers: Floats
    # (2,), likewise: the baseline of the estimator is 1/2 where q reaches this threshold
    threshold: Floats
    means: Floats  # (P, S * A), by phase
    gaps: Floats  # (P, S * A)
    noise: int
    stops: Floats  # (C,), checkpoints; leaps end there
    phase: Ints  # (C,), the phase before each stop
    initial: Floats  # (1, S_0)
    accuracy: float  # the largest relative change of q during a leap


class Particle(NamedTuple):
    """The state of one particle, or of one per lane, updated in place; floats begin with zeros."""

    stop: Ints  # (lanes,), the number of stops that have been reached; all, if nobody is there
    generators: Generators  # (lanes,); these begin with the seeds
    clock: Floats  # (4,), by the indices above
    counts: Floats  # (2,), by the indices above
    regret: Floats  # (C,), at the stops
    loss: Floats  # (S * A,)
    entering: Floats  # (S,), scratch: visits


@kernel
def leap_to_the_end(
    model: Model,
    solver: Solver,  # its weights are overwritten
    settings: LeapSettings,
    particle: Particle,
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Play from the first episode to the last stop, with one particle per lane.

    In lanes, the floats of solver, particle and work have a last axis of lanes. A lane that has
    finished rests until the others have.
    """
    solver, particle = in_lanes(solver, width), in_lanes(particle, width)
    work = in_lanes(work, width)
    lanes = lanes_of(particle.loss)
    for i in range(work.pairs.shape[1]):
        work.pairs[at.PAIR, i] = solver.middle[i]
    particle.clock[T] = 1.0
    while True:
        for n in range(lanes):
            lane(work.notes, n)[at.USED] = 1.0 if particle.stop[n] < len(settings.stops) else 0.0
            t, weights = lane(particle.clock, n)[T], lane(solver.weights, n)
            for k in range(len(weights)):
                weights[k] = settings.powers[0, k] * t ** settings.powers[1, k]
        # Discard the factors of the last leap.
        work.notes[at.ERROR], work.notes[at.GUESSED] = np.inf, 0.0
        found = follow_or_restart(model, solver, particle.loss, work)
        running = 0
        for n in range(lanes):
            if particle.stop[n] < len(settings.stops):
                lane(particle.counts, n)[UNCERTIFIED] += lane(found[0], n) != CONVERGED
                _count(settings, lane(work.pairs, n), particle, n)
            running += particle.stop[n] < len(settings.stops)
        if running == 0:
            return
        floor_pairs(model, work)
        derive(model, solver.terms, solver.weights, np.inf, work)
        longest = longest_leap(model, settings.accuracy, work)
        for n in range(lanes):
            if particle.stop[n] < len(settings.stops):
                _play(model, settings, lane(longest, n), lane(work.pairs, n), particle, n)


@routine
def _count(settings: LeapSettings, pairs: Floats, particle: Particle, n: int) -> None:
    """Add the regret of the last leap of lane n, and record it at a stop.

    The regret per episode is taken to change linearly over the leap.
    """
    clock, stop = lane(particle.clock, n), particle.stop[n]
    length = clock[LENGTH]
    if length > 0.0:
        closing = _cost(pairs, settings.gaps, settings.phase[stop])
        clock[REGRET] += 0.5 * (length + 1.0) * clock[OPENING] + 0.5 * (length - 1.0) * closing
        if clock[T] > settings.stops[stop]:
            lane(particle.regret, n)[stop] = clock[REGRET]
            stop += 1
            particle.stop[n] = stop
    if stop < len(settings.stops):
        clock[OPENING] = _cost(pairs, settings.gaps, settings.phase[stop])


@routine
def _cost(pairs: Floats, gaps: Floats, phase: int) -> float:
    """⟨q, gaps⟩."""
    total = 0.0
    for i in range(pairs.shape[1]):
        total += pairs[at.PAIR, i] * gaps[phase, i]
    return total


@routine
def longest_leap(model: Model, accuracy: float, work: Work) -> Any:
    """The number of episodes during which q may stay constant. Overwrites INVERSE.

    At fixed q(s), a unit force on an action changes its q by R = (1/D_a) (sum_{b != a} 1/D_b) /
    (sum_b 1/D_b), where D is the curvature of psi. An episode has a force of about one. While a
    pair is not visited, q changes relatively by R/q per episode. Over many visits the forces
    average out, and their fluctuation R/q sqrt(length/q) remains. The larger of the two lengths is
    allowed.
    """
    pairs, actions, longest = work.pairs, model.num_actions, np.inf
    for s in range(work.states.shape[1]):
        total = 0.0
        for i in range(s * actions, (s + 1) * actions):
            curvature = pairs[at.D, i] + pairs[at.W, i]
            pairs[at.INVERSE, i] = 1.0 / curvature if model.exists[at.PAIR, i] else 0.0
            total += pairs[at.INVERSE, i]
        for i in range(s * actions, (s + 1) * actions):
            if model.exists[at.REST, i]:
                others = 0.0  # not total minus own, which could cancel
                for j in range(s * actions, (s + 1) * actions):
                    others += pairs[at.INVERSE, j] if j != i else 0.0
                slack = accuracy * pairs[at.PAIR, i] * total / (pairs[at.INVERSE, i] * others)
                longest = min(longest, max(slack, pairs[at.PAIR, i] * slack * slack))
    return longest


@routine
def _play(
    model: Model, settings: LeapSettings, longest: float, pairs: Floats, particle: Particle, n: int
) -> None:
    """Play a leap of lane n with the same q, and add the estimates to the cumulative loss.

    The numbers of visits of all pairs are drawn layer by layer.
    """
    clock, loss = lane(particle.clock, n), lane(particle.loss, n)
    entering = lane(particle.entering, n)
    generators, start, actions = particle.generators, model.start, model.num_actions
    t, stop, layers = clock[T], particle.stop[n], len(model.start) - 1
    means = settings.means[settings.phase[stop]]
    length = max(1.0, np.floor(min(longest, WIDEST * t)))
    length = min(length, settings.stops[stop] - t + 1.0)
    threshold = settings.threshold[0] * t ** settings.threshold[1]
    for s in range(len(entering)):
        entering[s] = 0.0
    _split(length, settings.initial, 0, settings.initial.shape[1], entering, 0, generators, n)
    for k in range(layers):
        for s in range(start[k], start[k + 1]):
            left, share, last = entering[s], 0.0, -1
            for i in range(s * actions, (s + 1) * actions):
                if model.exists[at.PAIR, i]:
                    share += pairs[at.PAIR, i]
                    loss[i] += 0.5 * length if pairs[at.PAIR, i] >= threshold else 0.0
                    last = i
            for i in range(s * actions, last + 1):
                if left <= 0.0 or not model.exists[at.PAIR, i]:
                    continue
                visits = left
                if i < last:
                    visits = binomial_drawn(left, pairs[at.PAIR, i] / share, generators, n)
                share -= pairs[at.PAIR, i]
                left -= visits
                if visits > 0.0:
                    baseline = 0.5 if pairs[at.PAIR, i] >= threshold else 0.0
                    charge = _charge(settings.noise, means[i], visits, generators, n)
                    loss[i] += (charge - baseline * visits) / pairs[at.PAIR, i]
                    if k + 1 < layers:
                        there, width = start[k + 1], start[k + 2] - start[k + 1]
                        _split(visits, model.next_state, i, width, entering, there, generators, n)
    lane(particle.counts, n)[LEAPS] += 1.0
    clock[LENGTH] = length
    clock[T] += length


@routine
def _split(
    count: float,
    table: Floats | Rows,
    pair: int,
    width: int,
    into: Floats,
    offset: int,
    generators: Generators,
    n: int,
) -> None:
    """Draw how many of `count` visits of a pair go to each next state, and add them to `into`.

    The numbers are multinomial. The next layer begins at `offset` in `into`.
    """
    shares, first, size = likelihoods(table, pair, width)
    left, share, last = count, 0.0, 0
    for j in range(size):
        share += shares[first + j]
        last = j if shares[first + j] > 0.0 else last
    for j in range(last):
        if left <= 0.0:
            return
        part = shares[first + j] / share if share > 0.0 else 0.0
        drawn = binomial_drawn(left, part, generators, n)
        share -= shares[first + j]
        into[successor(table, pair, j, offset)] += drawn
        left -= drawn
    into[successor(table, pair, last, offset)] += left


@routine
def _charge(noise: int, mean: float, visits: float, generators: Generators, n: int) -> float:
    """Draw the sum of the losses of this many visits."""
    if noise == 1:
        return binomial_drawn(visits, mean, generators, n)
    if noise == 2:
        radius = min(mean, 1.0 - mean)
        if visits < MANY:
            total = 0.0
            for _ in range(int(visits)):
                total += mean + radius * (2.0 * uniform_drawn(generators, n) - 1.0)
            return total
        return visits * mean + radius * np.sqrt(visits / 3.0) * normal_drawn(generators, n)
    return visits * mean
