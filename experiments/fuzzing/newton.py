"""Newton's method of the judge of experiments/fuzz.py: the error of given occupancy measures.

See experiments/fuzzing/judge.py for what it relies on, and for the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.fuzzing.judge import (
    CAREFUL,
    EXACT,
    FAST,
    FLOOR,
    STILL,
    Array,
    Floats,
    Layer,
    Model,
    Term,
    shape,
)

#: Newton steps before a judge gives up: a certified q needs one or two, a bad one a few more.
STEPS = {FAST.name: 12, CAREFUL.name: 40, EXACT.name: 200}


class Point(NamedTuple):
    """An occupancy measure in logarithms, by layer."""

    policy: list[Array]  # (n, B), minus infinity on pairs that do not exist
    state: list[Array]  # (S_k, B)

    def pairs(self, model: Model) -> list[Array]:
        """log q(s,a), `(n, B)`."""
        parts = zip(model.layers, self.policy, self.state, strict=True)
        return [policy + np.repeat(state, layer.actions, 0) for layer, policy, state in parts]


class Problem(NamedTuple):
    """A batch of steps."""

    model: Model
    terms: Sequence[Term]
    gaps: list[Array]  # (n, B)

    def take(self, index: NDArray[np.intp]) -> Problem:
        """Some elements of the batch."""
        terms = []
        for argument, function, weight, p in self.terms:
            terms.append(Term(argument, function, weight[index], None if p is None else p[index]))
        return Problem(self.model, terms, [x[:, index] for x in self.gaps])

    @property
    def entropic(self) -> bool:
        """Then log q is what the equations determine, and steps are taken in it."""
        return all(term.function == "x log x" for term in self.terms)


def settle(problem: Problem, point: Point) -> tuple[Point, NDArray[np.bool_]]:
    """Newton steps until nothing moves: the point, and whether it came to rest, `(B,)`."""
    model = problem.model
    batch = point.state[0].shape[1]
    policies = [x.copy() for x in point.policy]
    settled, active = np.zeros(batch, bool), np.arange(batch)
    for _ in range(STEPS[model.arithmetic.name]):
        here = at(model, [x[:, active] for x in policies])
        there = step(problem.take(active), here)
        for whole, part in zip(policies, there.policy, strict=True):
            whole[:, active] = part
        moved = np.zeros(len(active))
        for layer, x, y in zip(model.layers, here.pairs(model), there.pairs(model), strict=True):
            x, y = x[layer.exists], y[layer.exists]
            moved = np.maximum(moved, np.max(abs(x - y) / np.maximum(abs(x), 1), 0).astype(float))
        settled[active] = moved <= STILL
        active = active[(moved > STILL)]  # NaN will not get better
        if not len(active):
            break
    return at(model, policies), settled


def at(model: Model, policies: list[Array]) -> Point:
    """The occupancy measure of policies, which are normalized first."""
    policies = [_normalize(model, *x) for x in zip(model.layers, policies, strict=True)]
    states = [np.broadcast_to(model.log_initial, (model.layers[0].states, policies[0].shape[1]))]
    for layer, policy in zip(model.layers[:-1], policies, strict=False):
        pairs = policy + np.repeat(states[-1], layer.actions, 0)
        states.append(_log_sum(model, pairs[:, None] + layer.logs[..., None]))
    return Point(policies, states)


def _normalize(model: Model, layer: Layer, policy: Array) -> Array:
    table = policy.reshape(layer.states, layer.actions, -1)
    return (table - _log_sum(model, table.swapaxes(0, 1))[:, None]).reshape(policy.shape)


def _log_sum(model: Model, x: Array) -> Array:
    """log sum exp over the first axis."""
    top = np.max(x, 0)
    return top + model.arithmetic.log(np.sum(model.arithmetic.exp(x - top), 0))


# -- one step -------------------------------------------------------------------------------------


def step(problem: Problem, point: Point) -> Point:
    """One Newton step, short enough that nothing becomes negative."""
    model, log1p = problem.model, problem.model.arithmetic.log1p
    zeta, z = ([_high(model, x) for x in part] for part in direction(problem, point))
    if problem.entropic:
        return at(model, [p + d for p, d in zip(point.policy, zeta, strict=True)])
    fall = np.max([-np.min(d, 0) for d in z], 0)
    fall = np.where(fall > 0.5, fall, 0 * fall)
    # log(1 + z / (1 + fall)) without the cancellation of a pair that falls to nearly nothing.
    changes = [log1p(fall + d) - log1p(fall) for d in z]
    return at(model, [p + d for p, d in zip(point.policy, changes, strict=True)])


class Stage(NamedTuple):
    """The results of the backward sweep in one layer, for the forward sweep."""

    zeta: Array  # (n, B) for y = 0
    slope: Array  # (n, S_k, B), its derivative in y
    arrive: Array  # (n, S_{k+1}, B): the share of the next state that comes through this pair


def direction(problem: Problem, point: Point) -> tuple[list[Array], list[Array]]:
    """The relative changes of the policy and of q in a full Newton step, `(n, B)` of each layer."""
    model, batch = problem.model, point.state[0].shape[1]
    value = model.arithmetic.of(np.zeros((0, batch)))
    bend, behind = _low(model, np.zeros((0, 0, batch))), value
    stages: list[Stage] = []
    for k in range(len(model.layers) - 1, -1, -1):
        stage, value, bend = _stage(problem, point, k, (value, bend, behind))
        stages.insert(0, stage)
        behind = point.state[k]
    zetas, zs = [], []
    y = _low(model, np.zeros((model.layers[0].states, batch)))
    for layer, stage in zip(model.layers, stages, strict=True):
        zeta = stage.zeta + np.sum(stage.slope * y, 1)
        z = np.where(layer.exists[:, None], zeta + np.repeat(y, layer.actions, 0), 0 * zeta)
        y = np.sum(stage.arrive * z[:, None], 0)
        zetas.append(zeta)
        zs.append(z)
    return zetas, zs


def _high(model: Model, x: Array) -> Array:
    """From the type of the linear systems to that of everything else."""
    return x if model.arithmetic.linear is None else model.arithmetic.of(x)


def _low(model: Model, x: Any) -> Array:
    """In the type of the linear systems."""
    linear = model.arithmetic.linear
    if linear is not None:
        return np.asarray(x).astype(linear)
    return x if np.asarray(x).dtype != np.float64 else model.arithmetic.of(x)


def _stage(
    problem: Problem,
    point: Point,
    k: int,
    after: tuple[Array, Array, Array],
) -> tuple[Stage, Array, Array]:
    """Minimize over zeta in one layer.

    `after` has the slope of what follows in q(s') `(S', B)`, its curvature times diag(q(s'))
    `(S', S', B)`, and log q(s'); the first two are returned for this layer.
    """
    model, layer, (value, bend, behind) = problem.model, problem.model.layers[k], after
    exp = np.exp if model.arithmetic.linear is not None else model.arithmetic.exp
    policy, state = point.policy[k], point.state[k]
    pairs = policy + np.repeat(state, layer.actions, 0)
    slope, K = psi(problem, layer, policy, state)
    slope = slope + problem.gaps[k]
    arrive = exp(_low(model, pairs[:, None] + layer.logs[..., None] - behind))
    P = _low(model, layer.P[0])
    for j in range(len(value)):
        slope = slope + layer.P[0][:, j, None] * value[j]
        K = K + np.sum(P[..., None] * bend[:, j], 1)[:, None] * arrive[None, :, j]

    # An equation for each action but the likeliest one of its state: the difference of the two.
    # For the likeliest one, sum pi zeta = 0.
    states, actions, n, batch = layer.states, layer.actions, layer.pairs, policy.shape[1]
    top = np.argmax(policy.reshape(states, actions, batch), 1)
    chosen = (np.arange(actions)[:, None] == top[:, None]).reshape(n, batch)
    table = K.reshape(states, actions, n, batch)
    rows = np.take_along_axis(table, top[:, None, None], 1)[:, 0]  # (S_k, n, B)
    base = np.take_along_axis(slope.reshape(states, actions, batch), top[:, None], 1)[:, 0]
    own = np.arange(n)[:, None] // actions == np.arange(n) // actions
    settled = chosen | ~layer.exists[:, None]
    zero = _low(model, np.zeros(1))
    differences = np.where(settled[:, None], zero, K - np.repeat(rows, actions, 0))
    constraint = np.where(own[..., None] & chosen[:, None], exp(_low(model, policy)), zero)
    identity = _low(model, (np.eye(n) * ~layer.exists)[..., None])
    force = np.where(settled, zero, -_low(model, slope - np.repeat(base, actions, 0)))
    parameters = -np.sum(differences.reshape(n, states, actions, batch), 2)
    right = np.concatenate([force[:, None], parameters], 1)
    found = gauss(differences + constraint + identity, right)

    directly = np.repeat(np.eye(states), actions, 0)[..., None]
    moving = found[:, 1:] + _low(model, directly)  # the derivative of z in y
    new_value = base + np.sum(rows * found[:, 0], 1)
    new_bend = np.sum(rows[:, :, None] * moving, 1)
    return Stage(found[:, 0], found[:, 1:], arrive), new_value, new_bend


def gauss(matrix: Array, right: Array) -> Array:
    """Gaussian elimination, scaled rows and pivoting: `(n, n, B)`, `(n, m, B)` -> `(n, m, B)`."""
    n = len(matrix)
    M = np.concatenate([matrix, right], 1)
    M = M / np.max(abs(matrix), 1)[:, None]
    for k in range(n):
        pivot = k + np.argmax(abs(M[k:, k]), 0)
        if (pivot != k).any():
            chosen = np.take_along_axis(M, pivot[None, None], 0)
            np.put_along_axis(M, pivot[None, None], M[k : k + 1], 0)
            M[k] = chosen[0]
        M[k + 1 :, k + 1 :] -= (M[k + 1 :, k] / M[k, k])[:, None] * M[k, k + 1 :]
    found = M[:, n:]
    for k in range(n - 1, -1, -1):
        found[k] = found[k] / M[k, k]
        found[:k] -= M[:k, k, None] * found[k]
    return found


# -- the regularizer ------------------------------------------------------------------------------


def psi(problem: Problem, layer: Layer, policy: Array, state: Array) -> tuple[Array, Array]:
    """grad psi `(n, B)`, and its Hessian times diag(q), `(n, n, B)`.

    1 - q(s,a) is read as the sum of the layer's other pairs, in the derivatives too: that is the
    same on Omega, and nothing cancels.
    """
    model, n = problem.model, layer.pairs
    pairs = policy + np.repeat(state, layer.actions, 0)
    slope, K = (
        model.arithmetic.of(np.zeros(pairs.shape)),
        _low(model, np.zeros((n, n, pairs.shape[1]))),
    )
    every = np.flatnonzero(layer.exists)
    by_state = [every[every // layer.actions == s] for s in range(layer.states)]
    for term in problem.terms:
        if term.argument == "pair":
            first, second = derivatives(model, term, pairs[every])
            slope[every] += first
            K[every, every] += _low(model, second)
        elif term.argument == "state":
            first, second = derivatives(model, term, state)
            for s, group in enumerate(by_state):
                slope[group] += first[s]
                shares = model.arithmetic.exp(policy[group])
                K[np.ix_(group, group)] += _low(model, second[s] * shares)
        else:
            for group in [every] if term.argument == "complement" else by_state:
                if len(group) > 1:
                    q = model.arithmetic.exp(pairs[group])
                    rest = others(q)
                    first, second = derivatives(model, term, model.arithmetic.log(rest))
                    slope[group] += others(first)
                    # [c, b]: the share of q_b in the rest of c, times the curvature there
                    shares = _low(model, second / rest)[:, None] * _low(model, q)
                    shares[np.arange(len(group)), np.arange(len(group))] *= 0
                    K[np.ix_(group, group)] += others(shares)
    return slope, K


def others(x: Array) -> Array:
    """Along the first axis, the sum of all entries but this one."""
    nothing = 0 * x[:1]
    before = np.concatenate([nothing, np.cumsum(x[:-1], 0)])
    after = np.concatenate([np.cumsum(x[:0:-1], 0)[::-1], nothing])
    return before + after


def derivatives(model: Model, term: Term, log: Array) -> tuple[Array, Array]:
    """weight * f'(x) and weight * x f''(x), from log x."""
    exp = model.arithmetic.exp
    if term.function == "power":
        assert term.exponent is not None
        first = term.weight * term.exponent * exp((term.exponent - 1) * log)
        return first, (term.exponent - 1) * first
    if term.function == "x log x":
        return term.weight * (log + 1), term.weight + 0 * log
    first = term.weight * exp(-log)
    return first, -first


# -- the verdict ----------------------------------------------------------------------------------


def judge(model: Model, terms: Sequence[Term], loss: Floats, q: Floats) -> Floats:
    """How far q `(B, S, A)` is from the solutions, `(B,)`; NaN where the judge did not settle.

    An error is the largest |log q - log q*|, which is the relative error where it is small; entries
    below FLOOR count as FLOOR.
    """
    with np.errstate(all="ignore"):  # far from a solution anything may overflow; NaN is not settled
        problem = Problem(model, terms, shape(model, loss))
        given = [_logs_of(model, *x) for x in zip(model.layers, model.split(q), strict=True)]
        truth, settled = settle(problem, at(model, given))
        error, floor = np.zeros(len(q)), np.log(FLOOR)
        for layer, stated, found in zip(model.layers, given, truth.pairs(model), strict=True):
            x, y = (np.maximum(logs[layer.exists], floor) for logs in (stated, found))
            error = np.maximum(error, np.max(abs(x - y), 0).astype(float))
        return np.where(settled, error, np.nan)


def _logs_of(model: Model, layer: Layer, q: Array) -> Array:
    """log q; where q is zero but the pair exists, that of a number too small for a double."""
    tiny = model.arithmetic.of(np.full(q.shape, 1e-320))
    exists = layer.exists[:, None]
    logs = model.arithmetic.log(np.where(exists & (q > tiny), q, tiny))
    return np.where(exists, logs, model.arithmetic.of(np.full(q.shape, -np.inf)))
