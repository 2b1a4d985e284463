"""A judge of FTRL steps in extended precision, for experiments/fuzz.py; no code of the solver's.

The question is how far a given q is from the minimizer of <q, loss> + psi(q). From q, the judge
takes Newton steps until nothing moves any more (`settle`). The distance from the given q to the
last point is its error. The judge relies on these choices:

- **Numbers.** Residuals are computed in `numpy.longdouble` or in mpmath with 60 digits. Linear
  systems may be solved in less: an inaccurate solve costs another step, not accuracy.
- **Shaping.** The gaps of the losses are computed with twice that precision, so that losses of
  1e12 + x are judged by x. A row of P is read as p / sum(p).
- **Logarithms.** A point is the logarithm of a policy and of its state occupancies, so nothing
  underflows.
- **Relative changes.** The unknowns are z = dq/q = y + zeta, with y = dq(s)/q(s) and the relative
  change zeta of the policy. One sweep backwards through the layers minimizes over zeta with y as a
  parameter (as a linear-quadratic controller does), one sweep forwards finds y.

All arrays have the batch last: pairs of a layer are `(n, B)` with n = S_k * A, states `(S_k, B)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import mpmath
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]

#: q below this may be anything below it: doubles lose their relative accuracy there.
FLOOR = 1e-300
#: A Newton step that moves no log q(s,a) by more than this, relative to max(1, |log q(s,a)|), is
#: the last one: it leaves its square.
STILL = 1e-11
#: Numbers with 60 digits, whatever the precision of `mpmath.mp` is.
DIGITS = 60
CONTEXT = mpmath.mp.clone()
CONTEXT.dps = DIGITS


class Arithmetic(NamedTuple):
    """The numbers of a judge."""

    name: str
    of: Callable[[Floats], Array]  # doubles, exactly
    exp: Callable[[Array], Array]
    log: Callable[[Array], Array]
    log1p: Callable[[Array], Array]
    two_product: Callable[[Array, Array], tuple[Array, Array]]  # a * b, and what rounding left out
    linear: type | None  # the type in which linear systems are solved; None is the numbers' own


def _split_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Veltkamp's splitting and Dekker's product, for any even or odd length of the mantissa."""
    factor = np.longdouble(2.0) ** ((np.finfo(np.longdouble).nmant + 2) // 2) + 1

    def split(x: Array) -> tuple[Array, Array]:
        high = factor * x - (factor * x - x)
        return high, x - high

    product = a * b
    (a1, a2), (b1, b2) = split(a), split(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _elementwise(function: Callable[[Any], Any]) -> Callable[[Array], Array]:
    return np.frompyfunc(function, 1, 1)


def _long(x: Floats) -> Array:
    return np.asarray(x, dtype=np.longdouble)


FAST = Arithmetic("long double", _long, np.exp, np.log, np.log1p, _split_product, np.float64)
CAREFUL = FAST._replace(name="long double throughout", linear=None)
EXACT = Arithmetic(
    f"mpmath, {DIGITS} digits",
    _elementwise(lambda x: CONTEXT.mpf(float(x))),
    _elementwise(CONTEXT.exp),
    _elementwise(CONTEXT.log),
    _elementwise(CONTEXT.log1p),
    lambda a, b: (a * b, 0 * a * b),
    None,
)
#: For gaps beside losses of 1e300, which are differences of equal sums; without logarithms.
DEEP_CONTEXT = mpmath.mp.clone()
DEEP_CONTEXT.dps = 700
DEEP = EXACT._replace(
    of=_elementwise(lambda x: DEEP_CONTEXT.mpf(float(x))), log=_elementwise(lambda x: x)
)


def extended() -> bool:
    """Whether `numpy.longdouble` is longer than a double, as it is on x86 and on Linux for ARM."""
    return bool(np.finfo(np.longdouble).nmant in (63, 112))


# -- the problem ----------------------------------------------------------------------------------


class Term(NamedTuple):
    """weight * sum f(argument), f = x^exponent, x log x or log x.

    Weight and exponent are `(B, 1, 1)`, or `(B, S, A)` with one value per pair.
    """

    argument: Literal["pair", "rest", "state", "complement"]
    function: Literal["power", "x log x", "log"]
    weight: Array
    exponent: Array | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of an MDP; the last dimension b is 1, or B for a batch of MDPs."""

    first: int  # the number of its first state
    states: int
    exists: NDArray[np.bool_]  # (n,), which pairs there are
    P: tuple[Array, Array]  # (n, S', b), rows normalized: the numbers, and what rounding left out
    logs: Array  # (n, S', b), of P

    @property
    def pairs(self) -> int:
        return len(self.exists)

    @property
    def actions(self) -> int:
        return self.pairs // self.states

    def within(self, x: Array) -> Array:
        """`(B, 1, 1)` or `(B, S, A)` -> `(n, B)`."""
        own = x[:, self.first : self.first + self.states] if x.shape[1] > 1 else x
        return np.broadcast_to(own.reshape(len(x), -1).T, (self.pairs, len(x)))


@dataclass(frozen=True)
class Model:
    """An MDP in some arithmetic, or a batch of them."""

    arithmetic: Arithmetic
    layers: tuple[Layer, ...]
    log_initial: Array  # (S_0, b)

    @classmethod
    def of(
        cls,
        arithmetic: Arithmetic,
        transitions: Sequence[Floats],
        actions: NDArray[np.bool_],
        initial: Floats,
    ) -> Model:
        """Tables `(*b, S_k, A, S_{k+1})`, a mask `(S, A)` and a distribution `(*b, S_0)`."""
        layers, first = [], 0
        for k, table in enumerate(transitions):
            states, after = table.shape[-3], table.shape[-1] if k + 1 < len(transitions) else 0
            exists = actions[first : first + states].reshape(-1)
            rows = table.reshape(-1, len(exists), table.shape[-1])[..., :after]
            high, low = _normalized(arithmetic, np.where(exists[:, None], rows, 0.0))
            layers.append(Layer(first, states, exists, (high, low), _logs(arithmetic, high)))
            first += states
        start = _normalized(arithmetic, initial.reshape(-1, 1, initial.shape[-1]))[0][0]
        return cls(arithmetic, tuple(layers), _logs(arithmetic, start))

    def take(self, index: NDArray[np.intp]) -> Model:
        """Some MDPs of a batch."""
        if max(layer.logs.shape[-1] for layer in self.layers) == 1:
            return self
        layers = []
        for layer in self.layers:
            P = layer.P[0][..., index], layer.P[1][..., index]
            layers.append(replace(layer, P=P, logs=layer.logs[..., index]))
        start = self.log_initial if self.log_initial.shape[1] == 1 else self.log_initial[:, index]
        return Model(self.arithmetic, tuple(layers), start)

    def split(self, x: Floats) -> list[Array]:
        """`(B, S, A)` in doubles -> `(n, B)` of each layer."""
        ends = np.cumsum([layer.states for layer in self.layers])[:-1]
        parts = np.split(x, ends, axis=1)
        return [self.arithmetic.of(part.reshape(len(x), -1).T) for part in parts]


def _normalized(arithmetic: Arithmetic, rows: Floats) -> tuple[Array, Array]:
    """Each row of `(b, n, S')` over its sum, `(n, S', b)`: numbers, and what rounding left out."""
    x = arithmetic.of(np.moveaxis(rows, 0, -1))
    total = rest = arithmetic.of(np.zeros((x.shape[0], x.shape[2])))
    for j in range(x.shape[1]):
        total, lost = _two_sum(total, x[:, j])
        rest = rest + lost
    total, rest = (part[:, None] for part in _two_sum(total, rest))
    total = np.where(total > 0, total, 1 + 0 * total)
    high = x / total
    product, error = arithmetic.two_product(high, total)
    return high, ((x - product) - error - high * rest) / total


def _logs(arithmetic: Arithmetic, x: Array) -> Array:
    """log x, and minus infinity for zero."""
    positive = x > 0
    logs = arithmetic.log(np.where(positive, x, arithmetic.of(np.ones(x.shape))))
    return np.where(positive, logs, arithmetic.of(np.full(x.shape, -np.inf)))


def shape(model: Model, loss: list[Array]) -> list[Array]:
    """The gaps of the optimal policy, `(n, B)` of each layer, from a loss in the same form.

    Q is a sum of two numbers that together have twice the digits (Dekker), until the best Q of the
    state is subtracted.
    """
    of, two_product = model.arithmetic.of, model.arithmetic.two_product
    gaps: list[Array] = []
    high = low = of(np.zeros((0, loss[0].shape[1])))
    for layer, own in reversed(list(zip(model.layers, loss, strict=True))):
        total, rest = own, 0 * own
        for j in range(len(high)):
            p, tail = layer.P[0][:, j], layer.P[1][:, j]
            product, error = two_product(*np.broadcast_arrays(p, high[j]))
            total, lost = _two_sum(total, product)
            rest = rest + (lost + (error + p * low[j] + tail * high[j]))
        total, rest = _two_sum(total, rest)
        best = _best(layer, total, rest)
        high, low = (np.take_along_axis(_states(layer, x), best, 1)[:, 0] for x in (total, rest))
        gap = (_states(layer, total) - high[:, None]) + (_states(layer, rest) - low[:, None])
        gaps.insert(0, np.where(layer.exists[:, None], gap.reshape(total.shape), 0 * total))
    return gaps


def _best(layer: Layer, total: Array, rest: Array) -> NDArray[np.intp]:
    """The action of the smallest total + rest in each state, `(S_k, 1, B)`."""
    exists = _states(layer, np.broadcast_to(layer.exists[:, None], total.shape))
    high, low = _states(layer, total), _states(layer, rest)
    best = np.argmax(exists, 1)[:, None]
    for a in range(layer.actions):
        apart = high[:, a, None] - np.take_along_axis(high, best, 1)
        apart = apart + (low[:, a, None] - np.take_along_axis(low, best, 1))
        best = np.where(exists[:, a, None] & (apart < 0), a, best)
    return best


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _states(layer: Layer, x: Array) -> Array:
    """`(n, ...)` -> `(S_k, A, ...)`."""
    return x.reshape(layer.states, layer.actions, *x.shape[1:])


# -- Newton's method ------------------------------------------------------------------------------


#: Newton steps before a judge gives up: a certified q needs one or two, a bad one a few more.
STEPS = {FAST.name: 12, CAREFUL.name: 60, EXACT.name: 60}


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
        return Problem(self.model.take(index), terms, [x[:, index] for x in self.gaps])

    @property
    def entropic(self) -> bool:
        """Then log q is what the equations determine, and steps are taken in it."""
        return all(term.function == "x log x" for term in self.terms)


def settle(problem: Problem, point: Point) -> tuple[Point, NDArray[np.bool_]]:
    """Newton steps until nothing moves: the point, and whether it came to rest, `(B,)`."""
    model = problem.model
    batch = point.state[0].shape[1]
    policies = [x.copy() for x in point.policy]
    settled, active, reach = np.zeros(batch, bool), np.arange(batch), np.full(batch, np.inf)
    for count in range(STEPS[model.arithmetic.name]):
        part = problem.take(active)
        here = at(part.model, [x[:, active] for x in policies])
        there = step(part, here, reach[active])
        for whole, own in zip(policies, there.policy, strict=True):
            whole[:, active] = own
        moved, far = np.zeros(len(active)), np.zeros(len(active))
        for layer, x, y in zip(model.layers, here.pairs(model), there.pairs(model), strict=True):
            x, y = x[layer.exists], y[layer.exists]
            far = np.maximum(far, np.max(abs(x - y), 0).astype(float))
            moved = np.maximum(moved, np.max(abs(x - y) / np.maximum(abs(x), 1), 0).astype(float))
        if count > 3:  # full steps may cycle
            reach[active] = np.maximum(0.7 * far, 1.0)
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
        states.append(_log_sum(model, pairs[:, None] + layer.logs))
    return Point(policies, states)


def _normalize(model: Model, layer: Layer, policy: Array) -> Array:
    table = policy.reshape(layer.states, layer.actions, -1)
    return (table - _log_sum(model, table.swapaxes(0, 1))[:, None]).reshape(policy.shape)


def _log_sum(model: Model, x: Array) -> Array:
    """log sum exp over the first axis."""
    top = np.max(x, 0)
    return top + model.arithmetic.log(np.sum(model.arithmetic.exp(x - top), 0))


# -- one step -------------------------------------------------------------------------------------


def step(problem: Problem, point: Point, reach: Floats) -> Point:
    """One Newton step, short enough that nothing becomes negative.

    For entropies, logarithms change by at most `reach` `(B,)`.
    """
    model, log1p = problem.model, problem.model.arithmetic.log1p
    zeta, z = ([_high(model, x) for x in part] for part in direction(problem, point))
    if problem.entropic:
        size = np.max([np.max(abs(d), 0).astype(float) for d in zeta], 0)
        length = model.arithmetic.of(np.minimum(reach / np.maximum(size, FLOOR), 1.0))
        return at(model, [p + length * d for p, d in zip(point.policy, zeta, strict=True)])
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


def direction(
    problem: Problem,
    point: Point,
    slopes: list[Array] | None = None,
) -> tuple[list[Array], list[Array]]:
    """The relative changes of the policy and of q in a full Newton step, `(n, B)` of each layer.

    With `slopes` in place of the slope of the objective: how q answers to such a loss.
    """
    model, batch = problem.model, point.state[0].shape[1]
    value = model.arithmetic.of(np.zeros((0, batch)))
    bend, behind = _low(model, np.zeros((0, 0, batch))), value
    stages: list[Stage] = []
    for k in range(len(model.layers) - 1, -1, -1):
        after = value, bend, behind
        own = None if slopes is None else slopes[k]
        stage, value, bend = _stage(problem, point, k, after, own)
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
    instead: Array | None,
) -> tuple[Stage, Array, Array]:
    """Minimize over zeta in one layer; `instead` as the slopes of `direction`.

    `after` has the slope of what follows in q(s') `(S', B)`, its curvature times diag(q(s'))
    `(S', S', B)`, and log q(s'); the first two are returned for this layer.
    """
    model, layer, (value, bend, behind) = problem.model, problem.model.layers[k], after
    exp = np.exp if model.arithmetic.linear is not None else model.arithmetic.exp
    policy, state = point.policy[k], point.state[k]
    pairs = policy + np.repeat(state, layer.actions, 0)
    slope, K = psi(problem, layer, policy, state)
    slope = slope + problem.gaps[k] if instead is None else instead
    arrive = exp(_low(model, pairs[:, None] + layer.logs - behind))
    P = _low(model, layer.P[0])
    for j in range(len(value)):
        slope = slope + layer.P[0][:, j] * value[j]
        K = K + np.sum(P * bend[:, j], 1)[:, None] * arrive[None, :, j]

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
    M = M / _divisor(np.max(abs(matrix), 1))[:, None]
    for k in range(n):
        pivot = k + np.argmax(abs(M[k:, k]), 0)
        if (pivot != k).any():
            chosen = np.take_along_axis(M, pivot[None, None], 0)
            np.put_along_axis(M, pivot[None, None], M[k : k + 1], 0)
            M[k] = chosen[0]
        M[k, k] = _divisor(M[k, k])
        M[k + 1 :, k + 1 :] -= (M[k + 1 :, k] / M[k, k])[:, None] * M[k, k + 1 :]
    found = M[:, n:]
    for k in range(n - 1, -1, -1):
        found[k] = found[k] / M[k, k]
        found[:k] -= M[:k, k, None] * found[k]
    return found


def _divisor(x: Array) -> Array:
    """x, and NaN for zero; mpmath would raise an error."""
    return np.where(x == 0, 0 * x + np.nan, x)


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
    for whole in problem.terms:
        exponent = None if whole.exponent is None else layer.within(whole.exponent)
        term = whole._replace(weight=layer.within(whole.weight), exponent=exponent)
        if term.argument == "pair":
            first, second = derivatives(model, term, pairs[every], every)
            slope[every] += first
            K[every, every] += _low(model, second)
        elif term.argument == "state":
            first, second = derivatives(model, term, state, np.arange(0, n, layer.actions))
            for s, group in enumerate(by_state):
                slope[group] += first[s]
                shares = model.arithmetic.exp(policy[group])
                K[np.ix_(group, group)] += _low(model, second[s] * shares)
        else:
            for group in [every] if term.argument == "complement" else by_state:
                if len(group) > 1:
                    q = model.arithmetic.exp(pairs[group])
                    rest = others(q)
                    first, second = derivatives(model, term, model.arithmetic.log(rest), group)
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


def derivatives(
    model: Model, term: Term, log: Array, where: NDArray[np.intp]
) -> tuple[Array, Array]:
    """weight * f'(x) and weight * x f''(x), from log x at these pairs."""
    exp, weight = model.arithmetic.exp, term.weight[where]
    if term.function == "power":
        assert term.exponent is not None
        p = term.exponent[where]
        first = weight * p * exp((p - 1) * log)
        return first, (p - 1) * first
    if term.function == "x log x":
        return weight * (log + 1), weight + 0 * log
    first = weight * exp(-log)
    return first, -first


# -- the verdict ----------------------------------------------------------------------------------


class Spending(NamedTuple):
    """Budgets ⟨costs, q⟩ <= limits, and the multipliers that a solver found for them."""

    costs: Floats  # (B, m, S, A)
    limits: Floats  # (B, m)
    multipliers: Floats  # (B, m)


def judge(
    model: Model,
    terms: Sequence[Term],
    loss: Floats,
    q: Floats,
    budgets: Spending | None = None,
    floor: float = FLOOR,
    deep: Model | None = None,
) -> Floats:
    """How far q `(B, S, A)` is from the solutions, `(B,)`; NaN where the judge did not settle.

    An error is the largest |log q - log q*|, which is the relative error where it is small; entries
    below the floor count as the floor. `deep` is the same MDP in the arithmetic DEEP, for huge
    losses.
    """
    with np.errstate(all="ignore"):  # far from a solution anything may overflow; NaN is not settled
        given = [_logs_of(model, *x) for x in zip(model.layers, model.split(q), strict=True)]
        start, error = at(model, given), np.zeros(len(q))
        if budgets is None:
            finer = model if deep is None else deep
            gaps = shape(finer, finer.split(loss))
            if deep is not None:
                of, high = model.arithmetic.of, [x.astype(float) for x in gaps]
                pairs = zip(gaps, high, strict=True)
                gaps = [of(y) + of((x - DEEP.of(y)).astype(float)) for x, y in pairs]
            problem = Problem(model, terms, gaps)
            truth, settled = settle(problem, start)
        else:
            truth, settled, error = settle_with(model, terms, loss, budgets, start)
        for layer, stated, found in zip(model.layers, given, truth.pairs(model), strict=True):
            x, y = (np.maximum(logs[layer.exists], np.log(floor)) for logs in (stated, found))
            error = np.maximum(error, np.max(abs(x - y), 0).astype(float))
        return np.where(settled, error, np.nan)


#: Newton steps on the multipliers of budgets. Below this curvature, a budget changes nothing, and
#: if less than this share of it is left, nothing that other budgets do not change.
PRICES, FLAT, DEPENDENT = 8, 1e-30, 1e-10


def settle_with(
    model: Model,
    terms: Sequence[Term],
    loss: Floats,
    budgets: Spending,
    point: Point,
) -> tuple[Point, NDArray[np.bool_], Floats]:
    """`settle` with budgets, by Newton's method on the positive multipliers.

    The third result is the relative change of q that would mend what is left: multipliers below
    zero, and violated budgets whose multiplier is zero.
    """
    arithmetic, m = model.arithmetic, budgets.limits.shape[1]
    costs = [model.split(budgets.costs[:, i]) for i in range(m)]
    prices, limits = arithmetic.of(budgets.multipliers.T), arithmetic.of(budgets.limits.T)
    tight, own, eye = budgets.multipliers.T > 0, model.split(loss), np.eye(m)[..., None]
    exists = [layer.exists[:, None] for layer in model.layers]
    still, change = np.zeros(len(loss), bool), np.zeros(len(loss))
    for _ in range(PRICES):
        priced = [x + sum(prices[i] * costs[i][k] for i in range(m)) for k, x in enumerate(own)]
        problem = Problem(model, terms, shape(model, priced))
        point, settled = settle(problem, point)
        q = [
            np.where(e, arithmetic.exp(x), 0)
            for e, x in zip(exists, point.pairs(model), strict=True)
        ]
        answers = [[_high(model, z) for z in direction(problem, point, c)[1]] for c in costs]

        def spent(x: list[Array], q: list[Array] = q) -> Array:
            parts = [[np.sum(c * y * z, 0) for c, y, z in zip(g, q, x, strict=True)] for g in costs]
            return np.array([sum(part[1:], part[0]) for part in parts])

        excess = spent([1 + 0 * x for x in q]) - limits
        curvature = -np.array([spent(answer) for answer in answers])  # (m, m, B), symmetric
        bends = np.array([curvature[i, i] for i in range(m)])
        moving, rest = tight.copy(), curvature
        for i in range(m):  # a budget that depends on those before keeps its multiplier
            moving[i] &= rest[i, i] > np.maximum(DEPENDENT * bends[i], FLAT)
            pivot = np.where(moving[i], rest[i, i], 0 * bends[i] + 1)
            rest = rest - np.where(moving[i], rest[:, i] / pivot, 0 * bends)[:, None] * rest[i]
        bends = np.where(bends > FLAT, bends, 0 * bends + 1)
        matrix = np.where(moving[:, None] & moving, curvature, arithmetic.of(eye))
        step = gauss(matrix, np.where(moving, excess, 0 * excess)[:, None])[:, 0]
        sizes = np.array([np.max([np.max(abs(z), 0) for z in answer], 0) for answer in answers])
        change = np.sum(abs(step) * sizes, 0).astype(float)
        still = settled & (change <= STILL)
        prices = prices + step
        if still.all():
            break
    off = np.where(tight, abs(excess), np.maximum(excess, 0)) / bends
    wrong = np.where(moving, np.maximum(-prices, 0), off) * sizes
    return point, still, change + np.max(wrong, 0).astype(float)


def _logs_of(model: Model, layer: Layer, q: Array) -> Array:
    """log q; where q is zero but the pair exists, that of a number too small for a double."""
    tiny = model.arithmetic.of(np.full(q.shape, 1e-320))
    exists = layer.exists[:, None]
    logs = model.arithmetic.log(np.where(exists & (q > tiny), q, tiny))
    return np.where(exists, logs, model.arithmetic.of(np.full(q.shape, -np.inf)))
