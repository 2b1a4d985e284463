"""Leaping, compiled: one particle after the other goes through its leaps. torch_occ.leaping explains what a leap is."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from torch_occ.engine.newton import CONVERGED, Floats, Ints, Model, Terms, derive, make_work, newton

#: From so many expected events on, a binomial number is drawn as a rounded normal one.
MANY = 50.0


@njit(cache=True, parallel=True)
def leap(
    model: Model,
    terms: Terms,
    log_t: Floats,  # (G,), a fine grid
    log_weights: Floats,  # (G, K), logarithms of |weights| there, between which they are straight lines for every power of t
    signs: Floats,  # (K,), signs of the weights
    means: Floats,  # (P, S, A), by phase
    gaps: Floats,  # (P, S, A)
    noise: int,
    stops: Floats,  # (C,), no leap goes beyond one
    phase: Ints,  # (C,), the phase before each stop
    accuracy: float,
    widest: float,
    middle: Floats,  # (S, A)
    tolerance: float,
    max_steps: int,
    seeds: Ints,  # (N,)
    regret: Floats,  # (N, C), filled
    counts: Ints,  # (N, 2), filled: leaps, and those without certificate
) -> None:
    """N particles."""
    for i in prange(len(seeds)):
        mine: int = np.int64(i)  # type: ignore[assignment]
        np.random.seed(seeds[mine])  # noqa: NPY002  (Numba has no other generator that threads do not share)
        _leap_alone(
            model,
            terms,
            log_t,
            log_weights,
            signs,
            means,
            gaps,
            noise,
            stops,
            phase,
            accuracy,
            widest,
            middle,
            tolerance,
            max_steps,
            regret[mine],
            counts[mine],
        )


@njit(cache=True)
def _leap_alone(
    model: Model,
    terms: Terms,
    log_t: Floats,
    log_weights: Floats,
    signs: Floats,
    means: Floats,
    gaps: Floats,
    noise: int,
    stops: Floats,
    phase: Ints,
    accuracy: float,
    widest: float,
    middle: Floats,
    tolerance: float,
    max_steps: int,
    regret: Floats,
    counts: Ints,
) -> None:
    num_states, num_actions = middle.shape
    work = make_work(num_states, num_actions, model.next_state.shape[2])
    nothing, q, cumulative_loss = np.zeros(num_states), middle.copy(), np.zeros((num_states, num_actions))
    weights, entering = np.zeros(len(signs)), np.zeros(num_states)
    t, total, length, opening = 1.0, 0.0, 0.0, 0.0
    stop = 0
    while True:
        _weights_at(np.log(t), log_t, log_weights, signs, weights)
        status = newton(model, terms, weights, cumulative_loss, q, nothing, tolerance, max_steps, work)[0]
        if status != CONVERGED:
            q[:] = middle
            status = newton(model, terms, weights, cumulative_loss, q, nothing, tolerance, max_steps, work)[0]
        counts[1] += status != CONVERGED
        if length > 0.0:
            closing = np.sum(q * gaps[phase[stop]])
            total += 0.5 * (length + 1.0) * opening + 0.5 * (length - 1.0) * closing
            if t > stops[stop]:
                regret[stop] = total
                stop += 1
                if stop == len(stops):
                    return
        mean = means[phase[stop]]
        opening = np.sum(q * gaps[phase[stop]])
        derive(model, terms, weights, q, work)
        length = max(1.0, np.floor(min(_patience(model, q, work.d, work.w, accuracy), widest * t)))
        length = min(length, stops[stop] - t + 1.0)
        _play(model, noise, mean, q, length, cumulative_loss, entering)
        counts[0] += 1
        t += length


@njit(cache=True)
def _patience(model: Model, q: Floats, d: Floats, w: Floats, accuracy: float) -> float:
    """For how many episodes q may stay as it is; the formula is that of torch_occ.leaping."""
    patience = np.inf
    for s in range(q.shape[0]):
        total = 0.0
        for a in range(q.shape[1]):
            if model.actions[s, a]:
                total += 1.0 / (d[s, a] + w[s, a])
        for a in range(q.shape[1]):
            if not model.has_rest[s, a]:
                continue
            own, others = 1.0 / (d[s, a] + w[s, a]), 0.0
            for b in range(q.shape[1]):
                if b != a and model.actions[s, b]:
                    others += 1.0 / (d[s, b] + w[s, b])
            slack = accuracy * q[s, a] * total / (own * others)
            patience = min(patience, max(slack, q[s, a] * slack * slack))
    return patience


@njit(cache=True)
def _play(model: Model, noise: int, mean: Floats, q: Floats, length: float, cumulative_loss: Floats, entering: Floats) -> None:
    """That many episodes with q as it is: how often every pair is visited, layer by layer, and what is charged there."""
    entering[:] = 0.0
    _split(length, model.initial, len(model.initial), entering, 0)
    layers = len(model.start) - 1
    for k in range(layers):
        for s in range(model.start[k], model.start[k + 1]):
            left, share = entering[s], np.sum(q[s])
            for a in range(q.shape[1]):
                if left <= 0.0 or not model.actions[s, a]:
                    continue
                visits = _binomial(left, q[s, a] / share)
                share -= q[s, a]
                left -= visits
                if visits > 0.0:
                    cumulative_loss[s, a] += _charge(noise, mean[s, a], visits) / q[s, a]
                    if k + 1 < layers:
                        _split(visits, model.next_state[s, a], model.start[k + 2] - model.start[k + 1], entering, model.start[k + 1])


@njit(cache=True)
def _split(count: float, probabilities: Floats, size: int, into: Floats, offset: int) -> None:
    """A multinomial number of arrivals in each of `size` states, added to `into` from `offset` on."""
    left, share = count, 0.0
    for j in range(size):
        share += probabilities[j]
    for j in range(size):
        if left <= 0.0:
            return
        drawn = _binomial(left, probabilities[j] / share) if share > 0.0 else 0.0
        share -= probabilities[j]
        into[offset + j] += drawn
        left -= drawn


@njit(cache=True)
def _charge(noise: int, mean: float, visits: float) -> float:
    """The sum of the losses of so many visits."""
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


@njit(cache=True)
def _binomial(n: float, p: float) -> float:
    """A binomial number, by inversion where few events are expected."""
    if p >= 1.0 or p <= 0.0:
        return n if p >= 1.0 else 0.0
    if p > 0.5:
        return n - _binomial(n, 1.0 - p)
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


@njit(cache=True)
def _weights_at(x: float, log_t: Floats, log_weights: Floats, signs: Floats, weights: Floats) -> None:
    """The weights at t = exp(x), straight lines between the logarithms on the grid."""
    width = log_t[1] - log_t[0]
    i = min(max(int(x / width), 0), len(log_t) - 2)
    part = (x - log_t[i]) / width
    for k in range(len(signs)):
        if signs[k] == 0.0:
            weights[k] = 0.0
        else:
            weights[k] = signs[k] * np.exp((1.0 - part) * log_weights[i, k] + part * log_weights[i + 1, k])
