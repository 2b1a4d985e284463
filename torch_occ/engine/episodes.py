"""The episode loop, compiled: solve, sample, estimate, update, for every seed in parallel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from torch_occ.engine.newton import CONVERGED, Floats, Model, Terms, Work, make_work, newton

NOISE = {"none": 0, "bernoulli": 1, "uniform": 2}
IMPORTANCE_WEIGHTED, IMPLICIT_EXPLORATION, REDUCED_VARIANCE, FULL_INFORMATION = 0, 1, 2, 3


class Rules(NamedTuple):
    """How losses are drawn and estimated."""

    noise: int
    estimator: int
    setting: Floats  # (n,): the bias of implicit exploration, or the threshold of the reduced-variance estimator


class Tally(NamedTuple):
    """What is added up along the run, one row a seed; updated in place."""

    cumulative_loss: Floats  # (N, S, A)
    q: Floats  # (N, S, A)
    cumulative_occupancy: Floats  # (N, S, A)
    total_mean: Floats  # (N, S, A)
    expected: Floats  # (N,)
    realised: Floats  # (N,)
    newton_steps: Floats  # (N,)
    uncertified: Floats  # (N,)
    dual_residual: Floats  # (N,), largest
    flow_residual: Floats  # (N,), largest


@njit(cache=True, parallel=True)
def play(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n, K)
    means: Floats,  # (n or 1, N or 1, S, A)
    numbers: Floats,  # (N, n, L, 3)
    tables: Floats,  # (N, n, S, A) under full information, else empty
    rules: Rules,
    tally: Tally,
    middle: Floats,  # (S, A), an interior point for cold starts
    tolerance: float,
    max_steps: int,
) -> None:
    """n episodes of N seeds."""
    for seed in prange(len(tally.q)):
        mine: int = np.int64(seed)  # type: ignore[assignment]  # prange counts unsigned, and those mix with integers into floats
        which = min(mine, means.shape[1] - 1)
        _play_seed(
            model,
            terms,
            weights,
            means[:, which],
            numbers[mine],
            tables[min(mine, len(tables) - 1)],
            rules,
            tally,
            mine,
            middle,
            tolerance,
            max_steps,
        )


@njit(cache=True)
def play_alone(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n, K)
    means: Floats,  # (n or 1, N or 1, S, A)
    numbers: Floats,  # (N, n, L, 3)
    tables: Floats,  # (N, n, S, A) under full information, else empty
    rules: Rules,
    tally: Tally,
    middle: Floats,  # (S, A), an interior point for cold starts
    tolerance: float,
    max_steps: int,
) -> None:
    """The same for a single seed, without the cost of waking threads."""
    _play_seed(model, terms, weights, means[:, 0], numbers[0], tables[0], rules, tally, 0, middle, tolerance, max_steps)


@njit(cache=True)
def _play_seed(
    model: Model,
    terms: Terms,
    weights: Floats,
    means: Floats,  # (n or 1, S, A)
    numbers: Floats,  # (n, L, 3)
    tables: Floats,  # (n, S, A) or (0, 0, 0)
    rules: Rules,
    tally: Tally,
    seed: int,
    middle: Floats,
    tolerance: float,
    max_steps: int,
) -> None:
    num_states, num_actions = middle.shape
    work = make_work(num_states, num_actions, model.next_state.shape[2])
    nothing, table = np.zeros(num_states), np.zeros((num_states, num_actions))
    q, cumulative_loss = tally.q[seed], tally.cumulative_loss[seed]
    for i in range(len(weights)):
        mean = means[min(i, len(means) - 1)]
        _propose(model, terms, weights[i], seed, nothing, tally, middle, tolerance, max_steps, work)
        expected = 0.0
        for s in range(num_states):
            for a in range(num_actions):
                expected += q[s, a] * mean[s, a]
                tally.cumulative_occupancy[seed, s, a] += q[s, a]
                tally.total_mean[seed, s, a] += mean[s, a]
                if rules.estimator == FULL_INFORMATION:
                    table[s, a] = _draw(rules.noise, mean[s, a], tables[i, s, a])
                    cumulative_loss[s, a] += table[s, a]
                elif rules.estimator == REDUCED_VARIANCE and q[s, a] >= rules.setting[i]:
                    cumulative_loss[s, a] += 0.5
        tally.expected[seed] += expected
        tally.realised[seed] += _walk(model, rules, i, mean, table, q, numbers[i], cumulative_loss)


@njit(cache=True)
def _propose(
    model: Model,
    terms: Terms,
    weights: Floats,
    seed: int,
    nothing: Floats,
    tally: Tally,
    middle: Floats,
    tolerance: float,
    max_steps: int,
    work: Work,
) -> None:
    """q_t from the last q; from the middle if that fails."""
    q, loss = tally.q[seed], tally.cumulative_loss[seed]
    status, steps, _, flow, dual = newton(model, terms, weights, loss, q, nothing, tolerance, max_steps, work)
    if status != CONVERGED:
        found = q.copy()
        q[:] = middle
        again, more, _, new_flow, new_dual = newton(model, terms, weights, loss, q, nothing, tolerance, max_steps, work)
        if again == CONVERGED:
            status, steps, flow, dual = again, more, new_flow, new_dual
        else:
            q[:] = found
    tally.newton_steps[seed] += steps
    tally.uncertified[seed] += status != CONVERGED
    tally.dual_residual[seed] = max(tally.dual_residual[seed], dual)
    tally.flow_residual[seed] = max(tally.flow_residual[seed], flow)


@njit(cache=True)
def _walk(model: Model, rules: Rules, i: int, mean: Floats, table: Floats, q: Floats, numbers: Floats, cumulative_loss: Floats) -> float:
    """One trajectory: adds the estimate of the visited pairs to the cumulative loss and returns what was suffered."""
    layers, num_actions = len(model.start) - 1, q.shape[1]
    local = _invert(model.initial, len(model.initial), numbers[layers - 1, 2])
    suffered = 0.0
    for k in range(layers):
        s = model.start[k] + local
        total = 0.0
        for a in range(num_actions):
            total += q[s, a]
        policy = q[s] / total
        a = _invert(policy, num_actions, numbers[k, 0])
        if rules.estimator == FULL_INFORMATION:
            loss = table[s, a]
        else:
            loss = _draw(rules.noise, mean[s, a], numbers[k, 1])
            if rules.estimator == IMPORTANCE_WEIGHTED:
                cumulative_loss[s, a] += loss / q[s, a]
            elif rules.estimator == IMPLICIT_EXPLORATION:
                cumulative_loss[s, a] += loss / (q[s, a] + rules.setting[i])
            else:
                cumulative_loss[s, a] += (loss - (0.5 if q[s, a] >= rules.setting[i] else 0.0)) / q[s, a]
        suffered += loss
        if k + 1 < layers:
            local = _invert(model.next_state[s, a], model.start[k + 2] - model.start[k + 1], numbers[k, 2])
    return suffered


@njit(cache=True)
def _draw(noise: int, mean: float, uniform: float) -> float:
    if noise == 1:
        return 1.0 if uniform < mean else 0.0
    if noise == 2:
        return mean + min(mean, 1 - mean) * (2 * uniform - 1)
    return mean


@njit(cache=True)
def _invert(probabilities: Floats, size: int, uniform: float) -> int:
    """The index that a uniform number draws; the same rule as `torch_occ.episodes.invert`."""
    total = 0.0
    for j in range(size):
        total += probabilities[j]
    target = min(uniform, 1 - 2.0**-50) * total
    cumulative, index = 0.0, 0
    for j in range(size):
        cumulative += probabilities[j]
        if cumulative <= target:
            index = j + 1
    return index
