"""A judge of FTRL steps in extended precision, for experiments/fuzz.py; no code of the solver's.

The question is how far a given q is from the minimizer of <q, loss> + psi(q). From q, the judge
takes Newton steps until nothing moves any more (experiments/fuzzing/newton.py). The distance from
the given q to the last point is its error. The judge relies on these choices:

- **Numbers.** Residuals are computed in `numpy.longdouble` (64 bits of mantissa on x86) or in
  mpmath with 60 digits. The linear systems may be solved in less: an inaccurate solve costs another
  step, not accuracy.
- **Shaping.** The gaps of the losses are computed with twice that precision, so that losses of
  1e12 + x are judged by x. A row of P is read as p / sum(p): doubles sum to one only up to
  rounding, and without this a constant loss of 1e12 in a layer would act like one of 1e-4.
- **Logarithms.** A point is the logarithm of a policy and of its state occupancies, so nothing
  underflows.
- **Relative changes.** The unknowns are z = dq/q = y + zeta, with y = dq(s)/q(s) and the relative
  change zeta of the policy. One sweep backwards through the layers minimizes over zeta with y as a
  parameter (as a linear-quadratic controller does), one sweep forwards finds y.

All arrays have the batch last: pairs of a layer are `(n, B)` with n = S_k * A, states `(S_k, B)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import mpmath
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float64]

#: q below this may be anything below it, zero included: doubles lose their relative accuracy there.
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


def extended() -> bool:
    """Whether `numpy.longdouble` is longer than a double, as it is on x86 and on Linux for ARM."""
    return bool(np.finfo(np.longdouble).nmant in (63, 112))


# -- the problem ----------------------------------------------------------------------------------


class Term(NamedTuple):
    """weight * sum f(argument), f = x^exponent, x log x or log x; weight and exponent `(B,)`."""

    argument: Literal["pair", "rest", "state", "complement"]
    function: Literal["power", "x log x", "log"]
    weight: Array
    exponent: Array | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of an MDP."""

    states: int
    exists: NDArray[np.bool_]  # (n,), which pairs there are
    P: tuple[Array, Array]  # (n, S'), rows normalized: the numbers, and what rounding left out
    logs: Array  # (n, S'), of P

    @property
    def pairs(self) -> int:
        return len(self.exists)

    @property
    def actions(self) -> int:
        return self.pairs // self.states


@dataclass(frozen=True)
class Model:
    """An MDP in some arithmetic."""

    arithmetic: Arithmetic
    layers: tuple[Layer, ...]
    log_initial: Array  # (S_0, 1)

    @classmethod
    def of(
        cls,
        arithmetic: Arithmetic,
        transitions: Sequence[Floats],
        actions: NDArray[np.bool_],
        initial: Floats,
    ) -> Model:
        """Tables `(S_k, A, S_{k+1})`, a mask `(S, A)` and a distribution `(S_0,)`, as doubles."""
        layers, first = [], 0
        for k, table in enumerate(transitions):
            states, exists = table.shape[0], actions[first : first + table.shape[0]].reshape(-1)
            first += states
            rows = table.reshape(len(exists), -1)[:, : 0 if k == len(transitions) - 1 else None]
            P = _normalized(arithmetic, np.where(exists[:, None], rows, 0.0))
            layers.append(Layer(states, exists, P, _logs(arithmetic, P[0])))
        start = _normalized(arithmetic, initial[None])[0]
        return cls(arithmetic, tuple(layers), _logs(arithmetic, start).T)

    def split(self, x: Floats) -> list[Array]:
        """`(B, S, A)` in doubles -> `(n, B)` of each layer."""
        ends = np.cumsum([layer.states for layer in self.layers])[:-1]
        parts = np.split(x, ends, axis=1)
        return [self.arithmetic.of(part.reshape(len(x), -1).T) for part in parts]


def _normalized(arithmetic: Arithmetic, rows: Floats) -> tuple[Array, Array]:
    """Each row over its sum, exactly but for the rounding of the second part."""
    pieces = np.zeros((4, *rows.shape))
    for i, row in enumerate(rows):
        entries = [Fraction(float(p)) for p in row]
        total = sum(entries)
        for j, p in enumerate(entries):
            left = p / total if total else Fraction(0)
            for piece in pieces:
                piece[i, j] = float(left)
                left -= Fraction(float(left))
    a, b, c, d = (arithmetic.of(piece) for piece in pieces)
    return a + b, ((a - (a + b)) + b) + c + d


def _logs(arithmetic: Arithmetic, x: Array) -> Array:
    """log x, and minus infinity for zero."""
    positive = x > 0
    logs = arithmetic.log(np.where(positive, x, arithmetic.of(np.ones(x.shape))))
    return np.where(positive, logs, arithmetic.of(np.full(x.shape, -np.inf)))


def shape(model: Model, loss: Floats) -> list[Array]:
    """The gaps of the optimal policy, `(n, B)` of each layer.

    Q is a sum of two numbers that together have twice the digits (Dekker), until the best Q of the
    state is subtracted.
    """
    of, two_product = model.arithmetic.of, model.arithmetic.two_product
    batch = len(loss)
    gaps: list[Array] = []
    high = low = of(np.zeros((0, batch)))
    for layer, own in reversed(list(zip(model.layers, model.split(loss), strict=True))):
        total, rest = own, 0 * own
        for j in range(len(high)):
            p, tail = layer.P[0][:, j, None], layer.P[1][:, j, None]
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
