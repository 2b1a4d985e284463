"""Leaping, compiled: the regret of one particle that plays many episodes per step.

This is the compiled twin of torch_occ.forecasting.torch_leaps; torch_occ.forecasting.leaping
explains the method. The twins draw different random numbers, so their results agree only
statistically.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.constants import CONVERGED
from torch_occ.kernels.layout import (
    PAIR,
    REST,
    D,
    Floats,
    Ints,
    Model,
    Rows,
    Terms,
    W,
    Work,
    kernel,
)
from torch_occ.kernels.solver.entropic import follow_or_restart
from torch_occ.kernels.solver.newton import floor_pairs
from torch_occ.kernels.solver.psi import derive
from torch_occ.kernels.solver.transitions import likelihoods, successor

#: A binomial number is drawn as a rounded normal number if at least this many events are expected.
MANY = 50.0


class Way(NamedTuple):
    """The inputs that all particles share."""

    log_t: Floats  # (G,), a fine grid
    # (G, K or K * S * A), log |weights| on the grid. Linear interpolation is exact for powers of t.
    log_weights: Floats
    signs: Floats  # (K or K * S * A,), signs of the weights
    # (G,), the logarithm of a threshold. The baseline of the estimator is 1/2 where q reaches it.
    log_threshold: Floats
    means: Floats  # (P, S * A), by phase
    gaps: Floats  # (P, S * A)
    noise: int
    stops: Floats  # (C,), checkpoints; leaps end there
    phase: Ints  # (C,), the phase before each stop
    initial: Floats  # (1, S_0)
    middle: Floats  # (S * A,), an interior point
    accuracy: float  # the largest relative change of q during a leap
    widest: float  # the largest length of a leap, relative to t
    tolerance: float
    max_steps: int


@kernel
def leap(
    model: Model,
    terms: Terms,
    way: Way,
    seed: int,
    regret: Floats,  # (C,), out
    counts: Ints,  # (2,), out: leaps, and steps without certificate
    loss: Floats,  # (S * A,), zeros
    weights: Floats,  # (K or K * S * A,), scratch
    entering: Floats,  # (S,), scratch
    nowhere: Floats,  # (0,)
    work: Work,
) -> None:
    """Play one particle from the first episode to the last stop."""
    np.random.seed(seed)  # noqa: NPY002  (every thread has its own generator)
    pairs, stop = work.pairs, 0
    t, total, length, opening = 1.0, 0.0, 0.0, 0.0
    for i in range(len(way.middle)):
        pairs[PAIR, i] = way.middle[i]
    while True:
        _weights_at(np.log(t), way.log_t, way.log_weights, way.signs, weights)
        work.stale[0], work.stale[2] = np.inf, 0.0  # discard the factors of the last leap
        limits = (way.tolerance, way.max_steps)
        found = follow_or_restart(model, terms, weights, loss, *limits, nowhere, way.middle, work)
        status = found[0]
        counts[1] += status != CONVERGED
        if length > 0.0:
            total += 0.5 * (length + 1.0) * opening + 0.5 * (length - 1.0) * _cost(
                pairs, way.gaps, way.phase[stop]
            )
            if t > way.stops[stop]:
                regret[stop] = total
                stop += 1
                if stop == len(way.stops):
                    return
        opening = _cost(pairs, way.gaps, way.phase[stop])
        floor_pairs(model, work)
        derive(model, terms, weights, work)
        length = max(1.0, np.floor(min(_longest_leap(model, way.accuracy, work), way.widest * t)))
        length = min(length, way.stops[stop] - t + 1.0)
        threshold = np.exp(_between(np.log(t), way.log_t, way.log_threshold))
        _play(model, way, way.phase[stop], threshold, length, loss, entering, work)
        counts[0] += 1
        t += length


@kernel
def _cost(pairs: Floats, gaps: Floats, phase: int) -> float:
    """⟨q, gaps⟩."""
    total = 0.0
    for i in range(pairs.shape[1]):
        total += pairs[PAIR, i] * gaps[phase, i]
    return total


@kernel
def _longest_leap(model: Model, accuracy: float, work: Work) -> float:
    """For how many episodes q may be kept; see `torch_occ.forecasting.torch_leaps.longest_leap`."""
    pairs, actions, longest = work.pairs, model.num_actions, np.inf
    for s in range(work.states.shape[1]):
        total = 0.0
        for i in range(s * actions, (s + 1) * actions):
            if model.exists[PAIR, i]:
                total += 1.0 / (pairs[D, i] + pairs[W, i])
        for i in range(s * actions, (s + 1) * actions):
            if not model.exists[REST, i]:
                continue
            own, others = 1.0 / (pairs[D, i] + pairs[W, i]), 0.0
            for j in range(s * actions, (s + 1) * actions):
                if j != i and model.exists[PAIR, j]:
                    others += 1.0 / (pairs[D, j] + pairs[W, j])
            slack = accuracy * pairs[PAIR, i] * total / (own * others)
            longest = min(longest, max(slack, pairs[PAIR, i] * slack * slack))
    return longest


@kernel
def _play(
    model: Model,
    way: Way,
    phase: int,
    threshold: float,
    length: float,
    loss: Floats,
    entering: Floats,
    work: Work,
) -> None:
    """Play `length` episodes with the same q, and add the estimates to the cumulative loss.

    The numbers of visits of all pairs are drawn layer by layer.
    """
    pairs, start, actions = work.pairs, model.start, model.num_actions
    for s in range(len(entering)):
        entering[s] = 0.0
    _split(length, way.initial, 0, way.initial.shape[1], entering, 0)
    layers = len(start) - 1
    for k in range(layers):
        for s in range(start[k], start[k + 1]):
            left, share = entering[s], 0.0
            for i in range(s * actions, (s + 1) * actions):
                if model.exists[PAIR, i]:
                    share += pairs[PAIR, i]
                    loss[i] += 0.5 * length if pairs[PAIR, i] >= threshold else 0.0
            for i in range(s * actions, (s + 1) * actions):
                if left <= 0.0 or not model.exists[PAIR, i]:
                    continue
                visits = _binomial(left, pairs[PAIR, i] / share)
                share -= pairs[PAIR, i]
                left -= visits
                if visits > 0.0:
                    baseline = 0.5 if pairs[PAIR, i] >= threshold else 0.0
                    loss[i] += (
                        _charge(way.noise, way.means[phase, i], visits) - baseline * visits
                    ) / pairs[PAIR, i]
                    if k + 1 < layers:
                        _split(
                            visits,
                            model.next_state,
                            i,
                            start[k + 2] - start[k + 1],
                            entering,
                            start[k + 1],
                        )


@kernel
def _split(
    count: float, table: Floats | Rows, pair: int, width: int, into: Floats, offset: int
) -> None:
    """Draw how many of `count` visits of a pair go to each next state, and add them to `into`.

    The numbers are multinomial. The next layer begins at `offset` in `into`.
    """
    shares, first, size = likelihoods(table, pair, width)
    left, share = count, 0.0
    for j in range(first, first + size):
        share += shares[j]
    for j in range(size):
        if left <= 0.0:
            return
        drawn = _binomial(left, shares[first + j] / share) if share > 0.0 else 0.0
        share -= shares[first + j]
        into[successor(table, pair, j, offset)] += drawn
        left -= drawn


@kernel
def _charge(noise: int, mean: float, visits: float) -> float:
    """Draw the sum of the losses of this many visits."""
    if noise == 1:
        return _binomial(visits, mean)
    if noise == 2:
        radius = min(mean, 1.0 - mean)
        if visits < MANY:
            total = 0.0
            for _ in range(int(visits)):
                total += mean + radius * (2.0 * np.random.random() - 1.0)  # noqa: NPY002
            return total
        return visits * mean + radius * np.sqrt(visits / 3.0) * np.random.standard_normal()  # noqa: NPY002
    return visits * mean


@kernel
def _binomial(n: float, p: float) -> float:
    """Draw a binomial number: by inversion if few events are expected, else as a rounded normal."""
    if p >= 1.0 or p <= 0.0:
        return n if p >= 1.0 else 0.0
    if p > 0.5:
        return n - _few(n, 1.0 - p)
    return _few(n, p)


@kernel
def _few(n: float, p: float) -> float:
    """`_binomial` for 0 < p <= 1/2."""
    if n * p >= MANY:
        drawn = np.round(n * p + np.sqrt(n * p * (1.0 - p)) * np.random.standard_normal())  # noqa: NPY002
        return min(max(drawn, 0.0), n)
    target, k = np.random.random(), 0.0  # noqa: NPY002
    probability = np.exp(n * np.log1p(-p))
    odds = p / (1.0 - p)
    while target > probability and k < n:
        target -= probability
        k += 1.0
        probability *= (n - k + 1.0) / k * odds
        if probability < 1e-300:
            break
    return k


@kernel
def _weights_at(
    x: float, log_t: Floats, log_weights: Floats, signs: Floats, weights: Floats
) -> None:
    """Write the weights at t = exp(x), by linear interpolation of their logarithms."""
    i, part = _place(x, log_t)
    for k in range(len(signs)):
        if signs[k] == 0.0:
            weights[k] = 0.0
        else:
            weights[k] = signs[k] * np.exp(
                (1.0 - part) * log_weights[i, k] + part * log_weights[i + 1, k]
            )


@kernel
def _between(x: float, log_t: Floats, values: Floats) -> float:
    """The value at x, by linear interpolation on the grid."""
    i, part = _place(x, log_t)
    return (1.0 - part) * values[i] + part * values[i + 1]


@kernel
def _place(x: float, log_t: Floats) -> tuple[int, float]:
    """The interval of the grid that contains x, and the position of x in it, from 0 to 1."""
    width = log_t[1] - log_t[0]
    i = min(max(int(x / width), 0), len(log_t) - 2)
    return i, (x - log_t[i]) / width
