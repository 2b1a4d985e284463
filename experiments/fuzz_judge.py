"""A judge of FTRL steps in extended precision, for experiments/fuzz.py; no code of the solver's.

The question is how far a given q is from the minimizer of <q, loss> + psi(q). From q, the judge
takes Newton steps until nothing moves any more (`settle`). The distance from the given q to the
last point is its error. The judge relies on these choices:

- **Numbers.** The functions below compute with mpmath and 60 digits. `in_doubles` compiles the same
  functions with numbers of 32 digits, which are sums of two doubles; linear systems are in doubles
  then: an inaccurate solve costs another step, not accuracy.
- **Shaping.** The losses are replaced by the gaps of the optimal policy, so that losses of 1e12 + x
  are judged by x. Huge ones are shaped with 700 digits. A row of P is read as p / sum(p).
- **Logarithms.** A point is the logarithm of a policy and of its state occupancies, so nothing
  underflows.
- **Relative changes.** The unknowns are z = dq/q = y + zeta, with y = dq(s)/q(s) and the relative
  change zeta of the policy. One sweep backwards through the layers minimizes over zeta with y as a
  parameter (as a linear-quadratic controller does), one sweep forwards finds y.

States and the N pairs that exist are numbered through all layers, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import mpmath
import numpy as np
from numba import njit
from numpy.typing import NDArray

from torch_occ._support.compiling import KernelCompiler, RoutineCompiler

Array = NDArray[Any]
Floats = NDArray[np.float64]

#: q below this may be anything below it: doubles lose their relative accuracy there.
FLOOR = 1e-300
#: A Newton step that moves no log q(s,a) by more than this, relative to max(1, |log q(s,a)|), is
#: the last one: it leaves its square.
STILL = 1e-11
#: Newton steps before the judge gives up: a certified q needs one or two, a bad one a few more.
STEPS = 60
#: Newton steps on the multipliers of budgets. Below this curvature, a budget changes nothing, and
#: if less than this share of it is left, nothing that other budgets do not change.
PRICES, FLAT, DEPENDENT = 8, 1e-30, 1e-10
#: Losses of more than this many weights of psi are shaped with 700 digits, and scaled with psi, for
#: products not to overflow.
HUGE, SCALE = 1e18, 2.0**-400
#: The terms of psi are sums of f(x): x is one of these arguments, f one of these functions.
ARGUMENTS, FUNCTIONS = ("pair", "rest", "complement", "state"), ("power", "x log x", "log")
PAIR, REST, COMPLEMENT, STATE = range(4)
POWER, ENTROPY, LOG = range(3)


# -- numbers --------------------------------------------------------------------------------------
#
# `number`, `add`, `times`, `over`, `exp` and `log` are the arithmetic of the judge; `rough` takes a
# number into a linear system, and `rough_exp` is for its entries.

CONTEXT, DEEP = mpmath.mp.clone(), mpmath.mp.clone()
DIGITS = 60, 400  # beside huge losses, values of 1e300 meet numbers of size one
CONTEXT.dps, DEEP.dps = DIGITS[0], 700
NUMBER = LINEAR = object
number, log = CONTEXT.mpf, CONTEXT.log


def exp(x: Any) -> Any:
    """e^x, and zero where mpmath's exponents end."""
    return CONTEXT.exp(x) if x > -1e9 else number(0.0)


rough_exp = exp


def rough(x: Any) -> Any:
    """In the type of the linear systems."""
    return x


def add(x: Any, y: Any) -> Any:
    """x + y."""
    return x + y


def times(x: Any, y: Any) -> Any:
    """x * y."""
    return x * y


def over(x: Any, y: Any) -> Any:
    """x / y."""
    return x / y


# A sum of two doubles (Dekker) is kept as the two parts of a complex number.


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only compiled ones call."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "pipeline_class": RoutineCompiler}
    return njit(error_model="numpy", **options)(function)


def _halves(x: Any) -> complex:
    return complex(float(x), float(x - float(x)))


#: 2^(j / 1024), and constants of the exponential function.
ROOTS = np.array([_halves(CONTEXT.mpf(2) ** (CONTEXT.mpf(j) / 1024)) for j in range(1024)])
LOG_2, THIRD = _halves(CONTEXT.ln2 / 1024), _halves(CONTEXT.mpf(1) / 3)


@inner
def _two_sum(a: float, b: float) -> complex:
    total = a + b
    part = total - a
    return complex(total, (a - (total - part)) + (b - part))


@inner
def _add(x: complex, y: complex) -> complex:
    high, low = _two_sum(x.real, y.real), _two_sum(x.imag, y.imag)
    high = _two_sum(high.real, high.imag + low.real)
    return _two_sum(high.real, high.imag + low.imag)


@inner
def _times(x: complex, y: complex) -> complex:
    u, v = 1.0 if abs(x.real) < 1e290 else 2.0**-99, 1.0 if abs(y.real) < 1e290 else 2.0**-99
    x, y = complex(x.real * u, x.imag * u), complex(y.real * v, y.imag * v)
    a, b = 134217729.0 * x.real, 134217729.0 * y.real  # 2^27 + 1
    a, b = a - (a - x.real), b - (b - y.real)
    c, d, product = x.real - a, y.real - b, x.real * y.real
    lost = ((a * b - product) + a * d + c * b) + c * d
    found = _two_sum(product, lost + (x.real * y.imag + x.imag * y.real))
    return complex(found.real / u / v, found.imag / u / v)


@inner
def _over(x: complex, y: complex) -> complex:
    first = x.real / y.real
    rest = _add(x, -_times(complex(first), y))
    second = rest.real / y.real
    rest = _add(rest, -_times(complex(second), y))
    return _add(_two_sum(first, second), complex(rest.real / y.real))


@inner
def _exp(x: complex) -> complex:
    if not -740.0 < x.real < 710.0:
        return complex(np.exp(x.real))
    n = np.round(x.real / LOG_2.real)
    r = _add(x, -_times(complex(n), LOG_2))  # at most 0.0004: powers above the third in doubles
    tail = r.real / 4 * (1 + r.real / 5 * (1 + r.real / 6 * (1 + r.real / 7)))
    third = _times(_times(r, THIRD), complex(1.0 + tail, (1.0 - (1.0 + tail)) + tail))
    half = _times(complex(0.5 * r.real, 0.5 * r.imag), _add(1 + 0j, third))
    power, whole = ROOTS[int(n) % 1024], int(n) // 1024
    found = _add(power, _times(power, _times(r, _add(1 + 0j, half))))
    return complex(math.ldexp(found.real, whole), math.ldexp(found.imag, whole))


@inner
def _log(x: complex) -> complex:
    first = complex(np.log(x.real))
    rest = _add(_times(x, _exp(-first)), -1 + 0j)
    return _add(first, _add(rest, complex(-0.5 * rest.real * rest.real)))


#: What replaces the arithmetic above when the judge is compiled.
DOUBLES: dict[str, Any] = {"add": _add, "times": _times, "over": _over, "exp": _exp, "log": _log}
DOUBLES |= {"NUMBER": np.complex128, "LINEAR": np.float64, "number": complex}
DOUBLES |= {"rough": inner(lambda x: x.real), "rough_exp": np.exp}


# -- one problem ----------------------------------------------------------------------------------


class Step(NamedTuple):
    """One step, in the judge's numbers."""

    layers: NDArray[np.int64]  # (L + 1,), the first state of every layer
    states: NDArray[np.int64]  # (S + 1,), the first pair of every state
    kinds: NDArray[np.int64]  # (terms, 2): places in ARGUMENTS and FUNCTIONS
    initial: Array  # (S_0,)
    P: Array  # (N, W), rows normalized; W is the largest number of states of a layer
    weights: Array  # (terms, N)
    exponents: Array  # (terms, N)


def numbers(x: Any) -> Any:
    """Doubles `(rows, columns)`, exactly."""
    found = np.zeros(x.shape, NUMBER)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            found[i, j] = number(float(x[i, j]))
    return found


def normalize(rows: Any) -> None:
    """Divide each row `(rows, columns)` by its sum, but rows of zeros."""
    for row in rows:
        total = row[0]
        for x in row[1:]:
            total = add(total, x)
        for j in range(len(row) if rough(total) > 0 else 0):
            row[j] = over(row[j], total)


def shape(layers: Any, states: Any, P: Any, loss: Any) -> Any:
    """The gaps of the optimal policy, `(N,)`."""
    gaps, value = loss.copy(), loss[: len(states) - 1].copy()
    for k in range(len(layers) - 2, -1, -1):
        behind = layers[k + 1]
        after = layers[k + 2] - behind if k + 2 < len(layers) else 0
        for s in range(layers[k], behind):
            best = states[s]
            for i in range(states[s], states[s + 1]):
                for j in range(after):
                    gaps[i] = add(gaps[i], times(P[i, j], value[behind + j]))
                best = i if rough(add(gaps[i], -gaps[best])) < 0 else best
            value[s] = gaps[best]
            for i in range(states[s], states[s + 1]):
                gaps[i] = add(gaps[i], -value[s])
    return gaps


# -- Newton's method ------------------------------------------------------------------------------


def log_sum(x: Any, weights: Any) -> Any:
    """log sum weights * exp(x), `(n,)` each; minus infinity if no weight is positive."""
    top, total = -np.inf, number(0.0)
    for i in range(len(x)):
        top = max(top, rough(x[i])) if rough(weights[i]) > 0 else top
    if top == -np.inf:
        return number(top)
    for i in range(len(x)):
        if rough(weights[i]) > 0:
            total = add(total, times(weights[i], exp(add(x[i], number(-top)))))
    return add(number(top), log(total))


def at(step: Any, policy: Any, state: Any) -> Any:
    """Normalize the logarithm of a policy `(N,)`, write that of its states `(S,)`; log q `(N,)`."""
    pairs, ones = np.zeros_like(policy), numbers(np.ones((1, len(policy))))[0]
    for k in range(len(step.layers) - 1):
        for s in range(step.layers[k], step.layers[k + 1]):
            if k == 0:
                state[s] = log(step.initial[s])
            else:
                first, stop = step.states[step.layers[k - 1]], step.states[step.layers[k]]
                state[s] = log_sum(pairs[first:stop], step.P[first:stop, s - step.layers[k]])
            first, stop = step.states[s], step.states[s + 1]
            total = log_sum(policy[first:stop], ones[first:stop])
            for i in range(first, stop):
                policy[i] = add(policy[i], -total)
                pairs[i] = add(policy[i], state[s])
    return pairs


def settle(step: Any, gaps: Any, policy: Any, state: Any) -> bool:
    """Newton steps until nothing moves, written into the point; whether it came to rest."""
    entropic, reach, pairs = (step.kinds[:, 1] == ENTROPY).all(), np.inf, at(step, policy, state)
    last = np.zeros(len(pairs), LINEAR)
    for count in range(STEPS):
        zeta, z = direction(step, gaps, True, policy, state, pairs)
        size, fall = np.abs(zeta).max(), -z.min()
        way = zeta / max(size, FLOOR)
        onward = (way * last).sum() > 0.6 * max((way * way).sum(), (last * last).sum())
        last = way
        fall = fall if fall > 0.5 else 0 * fall
        for i in range(len(z)):
            if entropic:  # log q is what the equations determine
                change = number(zeta[i] * min(reach / max(size, FLOOR), 1.0))
            else:
                # log(1 + z / (1 + fall)), where a pair that falls to nearly nothing cancels nothing
                change = log(add(number(1.0), number(fall + z[i])))
                change = add(change, -log(add(number(1.0), number(fall))))
            policy[i] = add(policy[i], change)
        before, pairs = pairs, at(step, policy, state)
        moved, far = 0.0, 0.0
        for i in range(len(z)):
            off = abs(rough(add(pairs[i], -before[i])))
            far, moved = max(far, off), max(moved, off / max(abs(rough(before[i])), 1.0))
            if not off >= 0:
                return False  # NaN will not get better
        if moved <= STILL and (not entropic or size <= reach):
            return True
        if count > 3:  # full steps may cycle
            reach = max((2.0 if onward else 0.5) * far, 1.0)
    return False


def direction(step: Any, slopes: Any, whole: bool, policy: Any, state: Any, pairs: Any) -> Any:
    """The relative changes of the policy and of q in a full Newton step, `(N,)` each.

    `slopes` are those of the objective without psi, or all of them if it is not `whole`: then the
    result says how q answers to such a loss.
    """
    layers, states, P, wide = step.layers, step.states, step.P, step.P.shape[1]
    value, bend = np.zeros_like(state), np.zeros((len(state), wide), LINEAR)
    found, arrive = np.zeros((len(P), wide + 1), LINEAR), np.zeros(P.shape, LINEAR)
    for k in range(len(layers) - 2, -1, -1):
        here, behind = layers[k], layers[k + 1]
        width, after = behind - here, layers[k + 2] - behind if k + 2 < len(layers) else 0
        zero, n = states[here], states[behind] - states[here]
        slope, K = psi(step, k, policy, state, pairs)
        for i in range(n):
            slope[i] = add(slope[i], slopes[zero + i]) if whole else slopes[zero + i]
            for j in range(after):
                share = rough(add(pairs[zero + i], -state[behind + j]))
                p = rough(P[zero + i, j])
                arrive[zero + i, j] = p * rough_exp(share) if p > 0 else p
                slope[i] = add(slope[i], times(P[zero + i, j], value[behind + j]))
        for i in range(n):
            for j in range(after):
                seen = 0.0
                for m in range(after):
                    seen += rough(P[zero + i, m]) * bend[behind + m, j]
                for c in range(n):
                    K[i, c] += seen * arrive[zero + c, j]

        # An equation for each action but the likeliest one of its state: the difference of the two.
        # For the likeliest one, sum pi zeta = 0. On the right: y = 0, and the derivatives in y.
        M, top = np.zeros((n, n + 1 + width), LINEAR), np.zeros(width, np.int64)
        for s in range(width):
            first, stop = states[here + s] - zero, states[here + s + 1] - zero
            best = first
            for i in range(first, stop):
                best = i if rough(policy[zero + i]) > rough(policy[zero + best]) else best
            top[s] = best
            for i in range(first, stop):
                if i == best:
                    for c in range(first, stop):
                        M[i, c] = rough_exp(rough(policy[zero + c]))
                    continue
                M[i, n] = rough(add(slope[best], -slope[i]))
                for other in range(width):
                    for c in range(states[here + other] - zero, states[here + other + 1] - zero):
                        M[i, c] = K[i, c] - K[best, c]
                        M[i, n + 1 + other] -= M[i, c]
        eliminate(M)
        for s in range(width):
            moved = 0.0
            for other in range(width):
                for c in range(states[here + other] - zero, states[here + other + 1] - zero):
                    moved += K[top[s], c] * M[c, n]
                    bend[here + s, other] += K[top[s], c]
                    for j in range(width):
                        bend[here + s, j] += K[top[s], c] * M[c, n + 1 + j]
            value[here + s] = add(slope[top[s]], number(moved))
        found[zero : zero + n, : width + 1] = M[:, n:]
    zeta, z, y = found[:, 0].copy(), found[:, 0].copy(), np.zeros(len(state), LINEAR)
    for k in range(len(layers) - 1):
        after = layers[k + 2] - layers[k + 1] if k + 2 < len(layers) else 0
        for s in range(layers[k], layers[k + 1]):
            for i in range(states[s], states[s + 1]):
                for j in range(layers[k + 1] - layers[k]):
                    zeta[i] += found[i, 1 + j] * y[layers[k] + j]
                z[i] = zeta[i] + y[s]
                for j in range(after):
                    y[layers[k + 1] + j] += arrive[i, j] * z[i]
    return zeta, z


def eliminate(M: Any) -> None:
    """Gaussian elimination in place, with scaled rows and pivoting; NaN if there is no solution.

    M `(n, n + m)` is a square matrix, and on its right the m vectors that it is solved for.
    """
    n, m = M.shape
    for i in range(n):
        largest = np.abs(M[i, :n]).max()
        for j in range(m):
            M[i, j] = M[i, j] / largest if largest > 0 else M[i, j] * np.nan
    for k in range(n):
        pivot = k
        for i in range(k + 1, n):
            pivot = i if abs(M[i, k]) > abs(M[pivot, k]) else pivot
        for j in range(k, m):
            M[k, j], M[pivot, j] = M[pivot, j], M[k, j]
        if M[k, k] == 0:
            M[k, k] = np.nan
        for i in range(k + 1, n):
            if M[i, k] != 0:
                factor = M[i, k] / M[k, k]
                for j in range(k + 1, m):
                    M[i, j] -= factor * M[k, j]
    for k in range(n - 1, -1, -1):
        for j in range(n, m):
            M[k, j] /= M[k, k]
            for i in range(k):
                M[i, j] -= M[i, k] * M[k, j]


def psi(step: Any, k: int, policy: Any, state: Any, pairs: Any) -> Any:
    """grad psi of a layer `(n,)`, and its Hessian times diag(q), `(n, n)`.

    1 - q(s,a) is read as the sum of the layer's other pairs, in the derivatives too: that is the
    same on Omega, and nothing cancels.
    """
    zero, end = step.states[step.layers[k]], step.states[step.layers[k + 1]]
    n = end - zero
    slope, K = np.zeros(n, NUMBER), np.zeros((n, n), LINEAR)
    firsts, seconds, shares = np.zeros(n, NUMBER), np.zeros(n, LINEAR), np.zeros((n, n), LINEAR)
    ones = numbers(np.ones((1, n)))[0]
    for term in range(len(step.kinds)):
        argument, function = step.kinds[term]
        for s in range(step.layers[k], step.layers[k + 1]):
            first, stop = step.states[s] - zero, step.states[s + 1] - zero
            low, high = (0, n) if argument == COMPLEMENT else (first, stop)
            for i in range(first, stop):
                x = state[s] if argument == STATE else pairs[zero + i]
                if argument in (REST, COMPLEMENT):
                    ones[i] = number(0.0)
                    x = log_sum(pairs[zero + low : zero + high], ones[low:high])
                    ones[i] = number(1.0)
                firsts[i], seconds[i] = number(0.0), 0.0
                if rough(x) > -np.inf:
                    weight, p = step.weights[term, zero + i], step.exponents[term, zero + i]
                    firsts[i], seconds[i] = derivatives(function, weight, p, x)
                for b in range(low, high):  # how x follows the changes of pairs
                    own = b == i if argument == PAIR else b != i or argument == STATE
                    shares[i, b] = rough_exp(rough(add(pairs[zero + b], -x))) if own else 0.0
        for s in range(step.layers[k], step.layers[k + 1]):
            first, stop = step.states[s] - zero, step.states[s + 1] - zero
            low, high = (0, n) if argument == COMPLEMENT else (first, stop)
            for i in range(first, stop):
                for c in range(low, high):
                    alone = argument in (PAIR, STATE)
                    if (c == i) == alone and seconds[c] != 0:
                        slope[i] = add(slope[i], firsts[c])
                        for b in range(low, high):
                            K[i, b] += seconds[c] * shares[c, b]
    return slope, K


def derivatives(function: int, weight: Any, p: Any, x: Any) -> Any:
    """weight * f'(x) and weight * x f''(x), from log x."""
    if function == POWER:
        less = add(p, number(-1.0))
        first = times(times(weight, p), exp(times(less, x)))
        return first, rough(less) * rough(first)
    if function == ENTROPY:
        return times(weight, add(x, number(1.0))), rough(weight)
    first = times(weight, exp(-x))
    return first, -rough(first)


# -- the verdict ----------------------------------------------------------------------------------


def settle_with(
    step: Any, loss: Any, budgets: Any, multipliers: Any, policy: Any, state: Any
) -> Any:
    """`settle` with budgets, by Newton's method on the positive multipliers `(m,)`.

    The rows of `budgets` are costs `(N,)` and a limit. Returned are whether the point came to rest,
    and the relative change of q that would mend what is left: multipliers below zero, and violated
    budgets whose multiplier is zero.
    """
    m, count = len(budgets), len(policy)
    prices, still, change, wrong = multipliers.copy(), False, 0.0, 0.0
    for _ in range(PRICES):
        priced = loss.copy()
        for i in range(count):
            for b in range(m):
                priced[i] = add(priced[i], times(prices[b], budgets[b, i]))
        gaps = shape(step.layers, step.states, step.P, priced)
        settled = settle(step, gaps, policy, state)
        pairs = at(step, policy, state)
        excess, sizes = np.zeros(m, NUMBER), np.zeros(m, LINEAR)
        curvature = np.zeros((m, m), LINEAR)  # how little is spent if prices rise
        for b in range(m):
            z = direction(step, budgets[b, :count].copy(), False, policy, state, pairs)[1]
            excess[b], sizes[b] = -budgets[b, count], np.abs(z).max()
            for i in range(count):
                spent = times(budgets[b, i], exp(pairs[i]))
                excess[b] = add(excess[b], spent)
                for c in range(m):
                    curvature[c, b] -= rough(budgets[c, i]) * rough_exp(rough(pairs[i])) * z[i]
        M, rest = np.zeros((m, m + 1), LINEAR), curvature.copy()
        moving = np.zeros(m, np.bool_)
        for b in range(m):  # a budget that depends on those before keeps its multiplier
            bound = max(DEPENDENT * curvature[b, b], FLAT)
            moving[b] = rough(multipliers[b]) > 0 and rest[b, b] > bound
            for c in range(m if moving[b] else 0):
                factor = rest[c, b] / rest[b, b]
                for d in range(m):
                    rest[c, d] -= factor * rest[b, d] if c != b else 0.0
        for b in range(m):
            M[b, b] = 1.0
            for c in range(m):
                M[b, c] = curvature[b, c] if moving[b] and moving[c] else M[b, c]
            M[b, m] = rough(excess[b]) if moving[b] else 0.0
        eliminate(M)
        change, wrong = 0.0, 0.0
        for b in range(m):
            change += abs(M[b, m]) * sizes[b]
            prices[b] = add(prices[b], number(M[b, m]))
            over_spent = rough(excess[b])
            if rough(multipliers[b]) > 0:
                over_spent = abs(over_spent)
            bent = curvature[b, b] if curvature[b, b] > FLAT else 1.0
            off = max(-rough(prices[b]), 0.0) if moving[b] else max(over_spent, 0.0) / bent
            wrong = max(wrong, off * sizes[b])
        still = settled and change <= STILL
        if still:
            break
    return still, change + wrong


def judge_one(step: Any, loss: Any, q: Any, budgets: Any, multipliers: Any, floor: float) -> float:
    """The error of one q `(N,)`; without budgets, the loss is one of gaps."""
    policy, state, error = np.zeros_like(loss), np.zeros(len(step.states) - 1, NUMBER), 0.0
    for i in range(len(q)):
        policy[i] = log(number(max(q[i], FLOOR)))
    if len(budgets):
        settled, left = settle_with(step, loss, budgets, multipliers, policy, state)
        error += left
    else:
        settled = settle(step, loss, policy, state)
    pairs, least = at(step, policy, state), log(number(floor))
    for i in range(len(q)):
        stated, found = log(number(max(q[i], floor))), pairs[i]
        found = found if rough(found) > rough(least) else least
        error = max(error, abs(rough(add(stated, -found))))
    return error if settled else np.nan


class Case(NamedTuple):
    """Steps with one set of layers and actions, in doubles."""

    layers: NDArray[np.int64]  # as in `Step`
    states: NDArray[np.int64]
    kinds: NDArray[np.int64]
    initial: Floats  # (1, S_0)
    P: Floats  # (b, N, W); b is 1, or B for a batch of MDPs
    weights: Floats  # (B, terms, N), without 1 / eta_t
    exponents: Floats  # (B, terms, N)
    rates: Floats  # (B, 2, terms): t and gamma of eta_t = gamma / sqrt(t)
    loss: Floats  # (B, N)
    budgets: Floats  # (B, m, N + 1): costs and a limit


def judge_all(case: Any, loss: Any, shaped: Any, q: Any, multipliers: Any, floor: float) -> Any:
    """`judge`, with losses `(B, 2, N)` that are sums of two doubles, and gaps where `shaped`."""
    errors, initial = np.zeros(len(q)), numbers(case.initial)
    normalize(initial)
    for b in range(len(q)):
        P, halves = numbers(case.P[b % len(case.P)]), numbers(loss[b])
        normalize(P)
        weights, rates = numbers(case.weights[b]), numbers(case.rates[b])
        for term in range(len(weights)):
            root = exp(times(number(0.5), log(rates[0, term])))
            for i in range(len(q[b])):
                weights[term, i] = times(weights[term, i], over(root, rates[1, term]))
        own = halves[0]
        for i in range(len(own)):
            own[i] = add(own[i], halves[1, i])
        exponents, budgets = numbers(case.exponents[b]), numbers(case.budgets[b])
        step = Step(case.layers, case.states, case.kinds, initial[0], P, weights, exponents)
        if not shaped[b] and not len(budgets):
            own = shape(case.layers, case.states, P, own)
        prices = numbers(multipliers[b : b + 1])[0]
        errors[b] = float(judge_one(step, own, q[b], budgets, prices, floor))
    return errors


@cache
def in_doubles() -> Callable[..., Floats]:
    """`judge_all`, compiled with numbers that are sums of two doubles."""
    names = {**globals(), **DOUBLES}
    for function in (
        *(numbers, normalize, shape, log_sum, at, settle, direction, eliminate, psi, derivatives),
        *(settle_with, judge_one),
    ):
        names[function.__name__] = inner(FunctionType(function.__code__, names, function.__name__))
    again = FunctionType(judge_all.__code__, names, "judge_all")
    return njit(cache=True, error_model="numpy", pipeline_class=KernelCompiler)(again)


def judge(
    case: Case, q: Floats, multipliers: Floats, floor: float = FLOOR, exact: bool = False
) -> Floats:
    """How far q `(B, N)` is from the solutions, `(B,)`; NaN where the judge did not settle.

    An error is the largest |log q - log q*|, which is the relative error where it is small; entries
    below the floor count as the floor. `multipliers` `(B, m)` are those that a solver found for
    budgets. `exact` is with 60 digits, or more.
    """
    arrays: Any = (np.array(x, order="C") for x in case)  # of one type, to compile once
    case, multipliers = Case(*arrays), np.array(multipliers)
    weights = abs(case.weights) * (case.rates[:, 0] ** 0.5 / case.rates[:, 1])[..., None]
    huge = abs(case.loss).max(1) > HUGE * weights.max(1).min(1)
    loss = np.stack([case.loss, 0 * case.loss], 1)
    for b in np.flatnonzero(huge):
        P, deep = (np.vectorize(DEEP.mpf)(x) for x in (case.P[b % len(case.P)], case.loss[b]))
        normalize(P)
        gaps = shape(case.layers, case.states, P, deep)
        gaps *= SCALE  # the loss, psi and prices
        case.weights[b] *= SCALE
        multipliers[b] *= SCALE
        loss[b, 0] = gaps
        loss[b, 1] = gaps - np.vectorize(DEEP.mpf)(loss[b, 0])
    CONTEXT.dps = DIGITS[bool(huge.any())]
    run = judge_all if exact else in_doubles()
    with np.errstate(all="ignore"):  # far from a solution anything may overflow; NaN is not settled
        return run(case, loss, huge, np.array(q), multipliers, floor)
