"""The arguments of separable regularizers, computed from q without cancellation.

    pair        q(s, a)
    rest        q(s) - q(s, a)        the other actions of the state
    state       q(s)
    complement  1 - q(s, a)           all other pairs of the layer

When one action takes nearly all of a state, the subtraction q(s) - q(s, a) leaves no correct
digit, and the regularizers of this package have infinite slope there. So `rest` and `complement`
are sums of the other entries.

An argument does not exist if it is identically zero (the rest of a state with one action) or
belongs to a masked pair. Its value is then set to 1, and its terms are left out of every sum.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.parameters import Parametrized, alone, call_with, fit, spread_batch

Argument = Literal["pair", "rest", "state", "complement"]
ARGUMENTS: tuple[Argument, ...] = ("pair", "rest", "state", "complement")


def marginal(name: Argument, mdp: LayeredMDP, q: Tensor) -> Tensor:
    """Compute one argument at q, which is zero on masked pairs; 1 where it does not exist."""
    if name == "complement":
        elsewhere = torch.cat([sum_of_others(layer) for layer in mdp.split(q.sum(-1), -1)], -1)
        accurate = q @ mdp.other_actions + elsewhere.unsqueeze(-1)
        # On Omega, `accurate` equals 1 - q. Take the value from `accurate`, which does not cancel,
        # and the derivative from 1 - q.
        found = accurate.detach() - (q - q.detach())
    else:
        found = _linear(name, mdp, q)
    return keep(name, mdp, found, 1.0)


def _linear(name: Argument, mdp: LayeredMDP, q: Tensor) -> Tensor:
    match name:
        case "pair":
            return q
        case "rest":
            return q @ mdp.other_actions
        case "state":
            return q.sum(-1)
        case "complement":
            return -q


def change(name: Argument, mdp: LayeredMDP, dq: Tensor) -> Tensor:
    """Return the change of the argument when q changes by dq; 0 where it does not exist."""
    return keep(name, mdp, _linear(name, mdp, dq), 0.0)


def pull_back(name: Argument, mdp: LayeredMDP, slope: Tensor) -> Tensor:
    """Return the gradient in q `(*batch, S, A)` of scalar terms: the adjoint of `change`."""
    slope = keep(name, mdp, slope, 0.0)
    if name == "state":
        slope = slope.unsqueeze(-1).expand(*slope.shape, mdp.num_actions)
    elif name in ("rest", "complement"):  # these maps are their own adjoints
        slope = _linear(name, mdp, slope)
    return keep("pair", mdp, slope, 0.0)


def keep(name: Argument, mdp: LayeredMDP, x: Tensor, otherwise: float) -> Tensor:
    """Return x where the argument exists, and `otherwise` elsewhere."""
    mask = mdp.missing[name]
    return x if mask is None else x.masked_fill(mask, otherwise)


def sum_of_others(x: Tensor) -> Tensor:
    """Return, for each entry along the last dimension, the sum of the others; nothing cancels."""
    before = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
    after = torch.nn.functional.pad(x.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
    return before + after


# -- Weighted elementary functions, the data of built-in regularizers ------------------------------
#
# The `code` of a function is its number in torch_occ.engine.psi, which has its derivatives.


@dataclass(frozen=True)
class Power:
    """x^p; p is a number or the name of a parameter."""

    code: ClassVar[int] = 0

    p: float | str

    @staticmethod
    def at(x: Tensor, p: Tensor | float) -> Tensor:
        """Return the function, with its exponent."""
        return x.sqrt() if isinstance(p, float) and p == 0.5 else x**p


@dataclass(frozen=True)
class XLogX:
    """x log x."""

    code: ClassVar[int] = 1

    @staticmethod
    def at(x: Tensor, p: Tensor | float) -> Tensor:
        return -torch.special.entr(x)  # zero at x = 0


@dataclass(frozen=True)
class Log:
    """log x."""

    code: ClassVar[int] = 2

    @staticmethod
    def at(x: Tensor, p: Tensor | float) -> Tensor:
        return x.log()


@dataclass(frozen=True)
class Term:
    """weight * parameter * function(argument), summed over states or pairs."""

    argument: Argument
    function: Power | XLogX | Log
    weight: float
    parameter: str | None = None  # its name


# -- Weights as data: a constant, times powers of parameters, times a power of t -------------------


class Factor(NamedTuple):
    """What a weight depends on: t, a parameter, or a schedule as a function of t."""

    owner: Parametrized | None  # None for t
    key: str = ""  # the name of the parameter

    def read(self, t: Tensor) -> Tensor:
        """Return the value now, which broadcasts against `(*batch, S, A)`."""
        t, owner = spread_batch(t), self.owner
        if owner is None:
            return t
        with alone():
            if self.key:
                return owner.spread(self.key)
            found: Tensor = call_with(owner, owner.spread_all(2), lambda: owner(t))
            return found


TIME = Factor(None)


@dataclass(frozen=True)
class Weight:
    """constant * product of factor^power * t^(sum of coefficient * factor)."""

    constant: float = 1.0
    powers: Mapping[Factor, float] = field(default_factory=dict)
    slopes: Mapping[Factor, float] = field(default_factory=dict)  # the coefficients

    def times(self, other: Weight, power: int = 1) -> Weight:
        """Return this weight times the other one to the power of 1 or -1."""
        constant = self.constant * other.constant if power == 1 else self.constant / other.constant
        powers = _add(self.powers, other.powers, power)
        return Weight(constant, powers, _add(self.slopes, other.slopes, power))

    def row(self, factors: list[Factor]) -> WeightRow:
        """Return the weight with factors by their index; `factors` gets those that it lacks."""

        def numbered(given: Mapping[Factor, float]) -> tuple[tuple[int, float], ...]:
            factors.extend(factor for factor in given if factor not in factors)
            return tuple((factors.index(factor), p) for factor, p in given.items())

        powers = numbered(self.powers)
        over = tuple((i, p) for i, p in powers if i and p > 0.0)
        under = tuple((i, p) for i, p in powers if i and p < 0.0)
        time = dict(powers).get(0, 0.0)
        return WeightRow(self.constant, over, under, time, numbered(self.slopes))


def _add(x: Mapping[Factor, float], y: Mapping[Factor, float], sign: int) -> dict[Factor, float]:
    total = {key: x.get(key, 0.0) + sign * y.get(key, 0.0) for key in (*x, *y)}
    return {key: p for key, p in total.items() if p}


class WeightRow(NamedTuple):
    """A weight whose factors are indices in a list of values; t is the first of them.

    Values are numbers, tensors, or arrays. Square roots are correctly rounded everywhere. The last
    bit of other powers depends on the implementation, so arrays use Python's: then a batch has the
    same bits as its elements one by one.
    """

    constant: float
    over: tuple[tuple[int, float], ...]  # parameters with positive powers
    under: tuple[tuple[int, float], ...]  # parameters with negative powers
    time: float  # the power of t, apart from the slopes
    slopes: tuple[tuple[int, float], ...]

    def at(self, values: Sequence[Any], known: dict[Any, Any] | None = None) -> Any:
        """Return the weight; a number if it has no factor.

        Parameters with negative powers form a rate with t, such as gamma / sqrt(t), and the weight
        is divided by it. `known` holds the inverse rates that other rows have computed.
        """
        over: Any = self.constant
        for i, p in self.over:
            over = over * (values[i] if p == 1.0 else _power(values[i], p))
        if not (self.under or self.time or self.slopes):
            return over
        own, known = self[2:], {} if known is None else known
        if own not in known:
            known[own] = self._inverse_rate(values)
        return known[own] * over

    def _inverse_rate(self, values: Sequence[Any]) -> Any:
        rate: Any = None
        time: Any = self.time
        for i, c in self.slopes:
            time = time + c * values[i]
        for i, p in self.under:
            rate = _power(values[i], -p) if rate is None else rate * _power(values[i], -p)
        if rate is None:
            return _power(values[0], time)
        if type(time) is float and time == 0.5:
            rate = rate / _power(values[0], 0.5)
        elif type(time) is not float or time:
            rate = rate * _power(values[0], -time)
        return 1.0 / rate

    def slope(self, values: Sequence[Any], i: int, weight: Any) -> Any:
        """Return the derivative with respect to a value, which is no tensor; `weight` is `at`."""
        x: Any = values[i]
        found: Any = 0.0
        power: Any = self.time if i == 0 else dict(self.over + self.under).get(i, 0.0)
        for j, c in self.slopes:
            if j == i:
                found = c * weight * _log(values[0])
            if i == 0:
                power = power + c * values[j]
        if type(power) is not np.ndarray and not power:
            return found
        if x == 0.0 if type(x) is float else not x.all():  # weight / x would be 0 / 0
            rest = self._replace(over=tuple(pair for pair in self.over if pair[0] != i))
            return found + power * rest.at(values) * _power(x, power - 1.0)
        return found + power * weight / x

    @property
    def factors(self) -> set[int]:
        """The values that it depends on."""
        found = {i for i, _ in self.over + self.under + self.slopes}
        return found | {0} if self.slopes or self.time else found


_powers: Any = np.frompyfunc(operator.pow, 2, 1)
_logs: Any = np.frompyfunc(math.log, 1, 1)


def _power(x: Any, p: Any) -> Any:
    if type(p) is float and p in (1.0, 0.5):
        if p == 1.0:
            return x
        if type(x) is float:
            return math.sqrt(x)
        return x.sqrt() if isinstance(x, Tensor) else np.sqrt(x)
    if isinstance(x, np.ndarray) or isinstance(p, np.ndarray):
        return _powers(x, p).astype(np.float64)
    return x**p


def _log(x: Any) -> Any:
    return _logs(x).astype(np.float64) if isinstance(x, np.ndarray) else math.log(x)


class Weighted(NamedTuple):
    """An elementary term with its weight and its exponent (0 for functions without one)."""

    argument: Argument
    function: type[Power] | type[XLogX] | type[Log]
    weight: WeightRow
    exponent: WeightRow

    def value(self, x: Tensor, weight: Tensor | float, exponent: Tensor | float) -> Tensor:
        """Return weight * function(x), entry by entry."""
        dims = 1 if self.argument == "state" else 2
        found = self.function.at(x, fit(exponent, dims))
        weight = fit(weight, dims)
        return found if isinstance(weight, float) and weight == 1.0 else weight * found
