"""Regularizers: convex functions of q and of the episode t, written at one of three levels.

    SeparableRegularizer   scalar functions of q(s,a), q(s)-q(s,a), q(s) and 1-q(s,a):
                           `pair`, `rest`, `state`, `complement`
    StatewiseRegularizer   one function of the actions of a state: `per_state`
    JointRegularizer       one function of all of q: `joint`

A subclass writes only the function. Autograd computes gradients and Hessians, at the level of the
class. Regularizers can be added, and multiplied or divided by numbers and schedules:

    psi = HybridTsallis(alpha) / InverseSqrt(gamma) + LogBarrier(beta)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.checks import broadcast, check_that, check_type, unexpected
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers import parameters
from torch_occ.regularizers import terms as tables
from torch_occ.regularizers.parameters import Frozen, FrozenList, Parametrized, Value, fit
from torch_occ.regularizers.schedules import Schedule
from torch_occ.regularizers.terms import Argument, Term, Weight, Weighted, WeightRow

#: What a function takes: an argument of scalar terms, `(*batch, S, A)` or `(*batch, S)`; the states
#: with n actions, `(*batch, G, n)`, by the index of their group in the MDP; or all of q.
Key = Argument | int | Literal["joint"]


def dims_of(key: Key) -> tuple[int, int]:
    """Return the dimensions after the batch of what a function takes, and of what it returns."""
    if isinstance(key, int):
        return 2, 1
    return {"state": (1, 1), "joint": (2, 0)}.get(key, (2, 2))


class Regularizer(Parametrized):
    """Base of all regularizers: sums, scaling, and the value psi_t(q)."""

    def parts(self) -> Iterator[tuple[Regularizer, Weight]]:
        """Yield the elementary regularizers with their weights."""
        yield self, Weight()

    def forward(self, q: Tensor, t: Tensor | float = 1.0, mdp: LayeredMDP | None = None) -> Tensor:
        """Evaluate psi_t(q), `(*batch,)`.

        Args:
            q: `(*batch, S, A)`.
            t: the episode, a number or a tensor that broadcasts against `batch`.
            mdp: says which pairs exist and which states form a layer. By default all pairs exist
                and all states form one layer.

        Raises:
            ValueError: if a function of a part returns a tensor of the wrong shape.
        """
        if mdp is None:
            ones = torch.ones(*q.shape[-2:], 1, dtype=q.dtype, device=q.device)
            mdp = LayeredMDP([ones], initial=ones[:, 0, 0] / len(ones))
        t = torch.as_tensor(t, dtype=q.dtype, device=q.device)
        composition = Composition(self)
        weights = composition.weigh(composition.values(t))
        return total(mdp, composition.evaluate(weights, self.read(mdp, q)))

    def read(self, mdp: LayeredMDP, q: Tensor) -> dict[Key, Tensor]:
        """Compute what all functions take at q."""
        found: dict[Key, Tensor] = {x: tables.marginal(x, mdp, q) for x in self.arguments}
        if StatewiseRegularizer in self.levels:
            for i, (states, actions) in enumerate(mdp.action_groups):
                found[i] = q[..., states.unsqueeze(-1), actions]
        return found | {"joint": q} if JointRegularizer in self.levels else found

    def leaves(self) -> list[Regularizer]:
        """Return the elementary regularizers, without weights."""
        return [part for part, _ in self.parts()]

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the scalar terms."""
        used = self._used()
        return tuple(name for name in tables.ARGUMENTS if name in used)

    def _used(self) -> set[Argument]:
        leaves = (leaf for leaf in self.leaves() if isinstance(leaf, SeparableRegularizer))
        return {name for leaf in leaves for name in leaf.arguments}

    @cached_property
    def levels(self) -> set[type[Regularizer]]:
        """The levels in use, as base classes."""
        kinds = (SeparableRegularizer, StatewiseRegularizer, JointRegularizer)
        return {kind for kind in kinds for leaf in self.leaves() if isinstance(leaf, kind)}

    def __add__(self, other: Regularizer) -> Sum:
        return Sum(self, other) if isinstance(other, Regularizer) else NotImplemented

    def __radd__(self, other: int) -> Regularizer:
        return self if other == 0 else NotImplemented  # sum([...]) starts from 0

    def __mul__(self, factor: Schedule | float) -> Scaled:
        return Scaled(self, factor, 1)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Schedule | float) -> Scaled:
        return Scaled(self, divisor, -1)


class SeparableRegularizer(Regularizer):
    """A sum of scalar functions. Override those that you need.

    Each function acts entry by entry and must be convex on x > 0.

    x is `(*batch, S, A)`, or `(*batch, S)` in `state`. A function sees a scalar parameter with a
    batch shape as `(*batch, 1, 1)`, or `(*batch, 1)`, so `self.strength * x` is right in any case.

    Newton's method needs no line search if |x f'''(x)| <= 2 f''(x), as for powers, x log x and
    -log x. For other functions it backtracks.
    """

    def pair(self, x: Tensor) -> Tensor:
        """A function of q(s, a)."""
        raise NotImplementedError

    def rest(self, x: Tensor) -> Tensor:
        """A function of q(s) - q(s, a)."""
        raise NotImplementedError

    def state(self, x: Tensor) -> Tensor:
        """A function of q(s)."""
        raise NotImplementedError

    def complement(self, x: Tensor) -> Tensor:
        """A function of 1 - q(s, a)."""
        raise NotImplementedError

    def _used(self) -> set[Argument]:
        base, own = SeparableRegularizer, type(self)
        return {x for x in tables.ARGUMENTS if getattr(own, x) is not getattr(base, x)}


class StatewiseRegularizer(Regularizer):
    """A sum over states of a function of the state's actions."""

    def per_state(self, q_s: Tensor) -> Tensor:
        """Map the occupancies of G states with n actions `(*batch, G, n)` to `(*batch, G)`."""
        raise NotImplementedError


class JointRegularizer(Regularizer):
    """A function of the whole occupancy measure, for small MDPs: its Hessian is dense."""

    def joint(self, q: Tensor) -> Tensor:
        """Map q `(*batch, S, A)` to `(*batch,)`; the result must not depend on masked pairs."""
        raise NotImplementedError


class Sum(Frozen, Regularizer):
    """psi_1 + psi_2 + ... The list of terms is fixed; the values of parameters may change."""

    fixed: ClassVar = {"terms": "add up a new regularizer, and make a new FTRLStep with it"}
    terms: list[Regularizer]

    def __init__(self, *terms: Regularizer) -> None:
        super().__init__()
        self.terms = FrozenList(terms, self.fixed["terms"])  # type: ignore[assignment]

    def parts(self) -> Iterator[tuple[Regularizer, Weight]]:
        for term in self.terms:
            yield from term.parts()

    def __add__(self, other: Regularizer) -> Sum:
        return Sum(*self.terms, other) if isinstance(other, Regularizer) else NotImplemented


class Scaled(Frozen, Regularizer):
    """psi * factor^power, all fixed; power is 1 or -1, the factor a schedule or a number."""

    fixed: ClassVar = dict.fromkeys(
        ("regularizer", "factor", "power"),
        "scale a new regularizer, and make a new FTRLStep with it",
    )

    def __init__(self, regularizer: Regularizer, factor: Schedule | float, power: int) -> None:
        super().__init__()
        expected, advice = "a positive number or a Schedule", "; occ.Constant(x) is a Schedule"
        check_type("factor", factor, Schedule | int | float, expected, advice)
        if not isinstance(factor, Schedule) and not 0 < factor < math.inf:
            raise ValueError(f"a regularizer can only be scaled by a positive number, got {factor}")
        self.regularizer, self.factor, self.power = regularizer, factor, power

    def parts(self) -> Iterator[tuple[Regularizer, Weight]]:
        given = self.factor
        own = given.weight if isinstance(given, Schedule) else Weight(float(given))
        for part, weight in self.regularizer.parts():
            yield part, weight.times(own, self.power)


class TabularRegularizer(SeparableRegularizer):
    """A separable regularizer given by its table of terms."""

    def __init__(self, **parameters: Value) -> None:
        super().__init__(**parameters)
        for name, dims in self._event_dims.items():
            if dims and name not in self._places:
                raise ValueError(
                    f"{type(self).__name__}: {name} declares {dims} event dimensions, but a table "
                    "takes one number for each problem; derive from SeparableRegularizer instead"
                )

    def table(self) -> tuple[Term, ...]:
        """Return the terms; subclasses write this method."""
        raise NotImplementedError

    def _used(self) -> set[Argument]:
        return {term.argument for term in self.table()}


class Composition:
    """A regularizer as data: terms and functions of users, with the rows of their weights.

    All weights are functions of `factors`, of which t is the first.
    """

    def __init__(self, regularizer: Regularizer) -> None:
        self.regularizer = regularizer
        self.factors: list[tables.Factor] = [tables.TIME]
        self.terms: list[Weighted] = []
        self.others: list[tuple[Regularizer, WeightRow]] = []  # functions that users wrote
        for part, weight in regularizer.parts():
            if isinstance(part, TabularRegularizer):
                self.terms += [self._weighted(part, term, weight) for term in part.table()]
            else:
                self.others.append((part, weight.row(self.factors)))
        for term in self.terms:
            for i in term.weight.factors | term.exponent.factors:
                owner, key = self.factors[i]
                if term.argument == "state" and owner is not None and key:
                    fit(owner.spread(key), 1)  # refuses one value per pair
        built_in = all(
            type(module).__module__.startswith(("torch_occ.", "torch.nn."))
            for module in regularizer.modules()
        )
        #: What a user's regularizer must not change later; None if it is built in.
        self.known = None if built_in else self._structure()

    def _weighted(self, part: TabularRegularizer, term: Term, weight: Weight) -> Weighted:
        def factor(x: float | str | None) -> Weight:
            if isinstance(x, str):
                return Weight(powers={tables.Factor(part, x): 1.0})
            place, expected = f"{type(part).__name__}.table", "numbers and names of parameters"
            check_that(not isinstance(x, Tensor), place, expected, "a tensor", TypeError)
            return Weight(1.0 if x is None else float(x))

        p = term.function.p if isinstance(term.function, tables.Power) else 0.0
        own = factor(term.weight).times(factor(term.parameter)).times(weight)
        rows = own.row(self.factors), factor(p).row(self.factors)
        return Weighted(term.argument, type(term.function), *rows)

    def _structure(self) -> list[tuple[Regularizer, list[Any]]]:
        leaves = self.regularizer.leaves()
        found = ((x, x.table() if isinstance(x, TabularRegularizer) else ()) for x in leaves)
        return [(leaf, [(x.argument, type(x.function)) for x in table]) for leaf, table in found]

    def values(self, t: Tensor) -> list[Tensor]:
        """Return the values of the factors now, after `check`; broadcast as `(*batch, S, A)`."""
        if self.known is not None:
            self.check()
        return [factor.read(t) for factor in self.factors]

    def check(self) -> None:
        """Raise a RuntimeError if a user's regularizer has other parts or terms than before."""
        for leaf, terms in self._structure():
            known = [before for each, before in self.known or () if each is leaf]
            if terms not in known:
                change = f"{type(leaf).__name__} was added after the first use"
                change = f"its terms were {known[0]}, and are {terms} now" if known else change
                raise RuntimeError(f"regularizer: {change}; make a new FTRLStep(mdp, regularizer)")

    def weigh(self, values: Sequence[Any]) -> Weights:
        """Return weights and exponents at values of the factors."""
        known: dict[Any, Any] = {}
        return Weights(
            [term.weight.at(values, known) for term in self.terms],
            [term.exponent.at(values) for term in self.terms],
            [row.at(values, known) for _, row in self.others],
        )

    def evaluate(self, weights: Weights, inputs: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Return the values of all terms and functions, summed by what they take."""
        found: dict[Key, Tensor] = {}

        def add(key: Key, value: Tensor) -> None:
            found[key] = found[key] + value if key in found else value

        for term, weight, p in zip(self.terms, weights.terms, weights.exponents, strict=True):
            add(term.argument, term.value(inputs[term.argument], weight, p))
        for (part, _), weight in zip(self.others, weights.others, strict=True):
            for key in keys_of(part, inputs):
                if isinstance(key, int):
                    fit(weight, 0)  # groups number the states differently: it must be one number
                add(key, fit(weight, dims_of(key)[1]) * call(part, key, inputs[key]))
        return found


class Weights(NamedTuple):
    """Numbers, tensors or arrays that broadcast against `(*batch, S, A)`."""

    terms: list[Any]
    exponents: list[Any]
    others: list[Any]


def keys_of(part: Regularizer, inputs: Iterable[Key]) -> Iterable[Key]:
    """Return what the functions of a user's regularizer take."""
    if isinstance(part, SeparableRegularizer):
        return part.arguments
    if isinstance(part, StatewiseRegularizer):
        return [key for key in inputs if isinstance(key, int)]
    if isinstance(part, JointRegularizer):
        return ["joint"]
    raise TypeError(
        f"{type(part).__name__}: derive it from SeparableRegularizer, "
        "StatewiseRegularizer or JointRegularizer"
    )


def call(part: Regularizer, key: Key, x: Tensor) -> Tensor:
    """Call a user's function at x `(*batch, *event)`, and check the shape that it returns."""
    method, (event_dims, result_dims) = "per_state" if isinstance(key, int) else key, dims_of(key)
    with parameters.alone():
        shown = part.spread_all(event_dims)
        batch = broadcast(x.shape[: x.dim() - event_dims], *part.batched())
        x = x.expand(*batch, *x.shape[x.dim() - event_dims :])
        try:
            value = parameters.call_with(part, shown, lambda: getattr(part, method)(x))
        except RuntimeError as error:
            if not shown:
                raise
            value = error
    expected = x.shape[: x.dim() - event_dims + result_dims]
    if not isinstance(value, Tensor) or value.shape != expected:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        found = f"the error {value}" if isinstance(value, RuntimeError) else found
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in shown.items())
        advice = f"; the parameters have the shapes {shapes} there, which must broadcast"
        asked = f"a tensor of shape {tuple(expected)} at an argument of shape {tuple(x.shape)}"
        found = f"{found}{advice if shown else ''}"
        raise unexpected(f"{type(part).__name__}.{method}", asked, found)
    return value


def total(mdp: LayeredMDP, values: dict[Key, Tensor]) -> Tensor:
    """Return the sum of all values, `(*batch,)`."""
    parts = []
    for key, value in values.items():
        if not isinstance(key, int) and key != "joint":
            value = tables.keep(key, mdp, value, 0.0)
        dims = dims_of(key)[1]
        parts.append(value.sum(tuple(range(-dims, 0))) if dims else value)
    return sum(parts[1:], parts[0])
