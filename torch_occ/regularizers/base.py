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
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers import terms as tables
from torch_occ.regularizers.parameters import (
    Frozen,
    FrozenList,
    Parametrized,
    Value,
    alone,
    call_with,
    fit,
)
from torch_occ.regularizers.schedules import Schedule
from torch_occ.regularizers.terms import Argument, Term, Weight, Weighted, WeightRow


class Inputs(NamedTuple):
    """The arguments of the functions at the three levels; empty for levels not in use."""

    scalars: dict[Argument, Tensor]  # see torch_occ.regularizers.terms
    per_state: list[Tensor]  # (*batch, G, n) for each group of G states with n actions
    joint: list[Tensor]  # at most one, (*batch, S, A)


class Values(NamedTuple):
    """The values of a regularizer, summed within each level only, so that each can be derived."""

    scalars: dict[Argument, Tensor]  # weighted scalar terms, elementwise, shaped as their argument
    per_state: list[Tensor]  # (*batch, G) for each group of G states with n actions
    joint: list[Tensor]  # at most one, (*batch,)

    def add(self, name: Argument, value: Tensor) -> None:
        """Add scalar terms."""
        before = self.scalars.get(name)
        self.scalars[name] = value if before is None else before + value


class Regularizer(Parametrized):
    """Base of all regularizers: sums, scaling, and the value psi_t(q)."""

    def parts(self) -> Iterator[tuple[Regularizer, Weight]]:
        """Yield the elementary regularizers with their weights."""
        yield self, Weight()

    def forward(self, q: Tensor, t: Tensor | float = 1.0, mdp: LayeredMDP | None = None) -> Tensor:
        """Evaluate psi_t(q).

        Args:
            q: `(*batch, S, A)`.
            t: the episode, a number or a tensor that broadcasts against `batch`.
            mdp: says which pairs exist and which states form a layer. By default all pairs exist
                and all states form one layer.

        Returns:
            `(*batch,)`.

        Raises:
            TypeError: if a part is derived from none of the three base classes of the levels.
            ValueError: if a function of a part returns a tensor of the wrong shape.
        """
        mdp = _single_layer(q) if mdp is None else mdp
        t = torch.as_tensor(t, dtype=q.dtype, device=q.device)
        composition = Composition(self)
        weights = composition.weigh(composition.values(t))
        return total(mdp, composition.evaluate(weights, self.read(mdp, q)))

    def read(self, mdp: LayeredMDP, q: Tensor) -> Inputs:
        """Compute the arguments of all functions at q."""
        groups = mdp.action_groups if StatewiseRegularizer in self.levels else []
        return Inputs(
            {name: tables.marginal(name, mdp, q) for name in self.arguments},
            [gather(q, group) for group in groups],
            [q] if JointRegularizer in self.levels else [],
        )

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments of the scalar terms."""
        leaves = [leaf for leaf in self.leaves() if isinstance(leaf, SeparableRegularizer)]
        return tuple(
            name for name in tables.ARGUMENTS if any(name in leaf.arguments for leaf in leaves)
        )

    def leaves(self) -> Iterator[Regularizer]:
        """Yield the elementary regularizers, without weights."""
        for part, _ in self.parts():
            yield part

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
        if not isinstance(factor, Schedule | int | float):
            return NotImplemented
        return Scaled(self, factor, 1)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Schedule | float) -> Scaled:
        if not isinstance(divisor, Schedule | int | float):
            return NotImplemented
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

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(
            name
            for name in tables.ARGUMENTS
            if getattr(type(self), name) is not getattr(SeparableRegularizer, name)
        )


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
    """psi * factor^power, with power 1 or -1 and a factor that is a schedule or a number.

    All three are fixed; the values of parameters may change.

    Raises:
        ValueError: if the factor is a number that is not positive and finite.
    """

    fixed: ClassVar = dict.fromkeys(
        ("regularizer", "factor", "power"),
        "scale a new regularizer, and make a new FTRLStep with it",
    )

    def __init__(self, regularizer: Regularizer, factor: Schedule | float, power: int) -> None:
        super().__init__()
        if not isinstance(factor, Schedule) and not 0 < factor < math.inf:
            raise ValueError(f"a regularizer can only be scaled by a positive number, got {factor}")
        self.regularizer, self.factor, self.power = regularizer, factor, power

    def parts(self) -> Iterator[tuple[Regularizer, Weight]]:
        given = self.factor
        own = given.weight if isinstance(given, Schedule) else Weight(float(given))
        for part, weight in self.regularizer.parts():
            yield part, weight.times(own, self.power)


class TabularRegularizer(SeparableRegularizer):
    """A separable regularizer given by its table of terms.

    Raises:
        ValueError: if a parameter is outside its domain or declares event dimensions.
    """

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

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        used = {term.argument for term in self.table()}
        return tuple(name for name in tables.ARGUMENTS if name in used)


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
                self.terms += [self._weighted(part, i, weight) for i in range(len(part.table()))]
            else:
                self.others.append((part, weight.row(self.factors)))
        for term in self.terms:
            if term.argument == "state":
                self._check_states(term)
        built_in = all(
            type(module).__module__.startswith(("torch_occ.", "torch.nn."))
            for module in regularizer.modules()
        )
        #: What a user's regularizer must not change later; None if it is built in.
        self.known = None if built_in else self._structure()

    def _weighted(self, part: TabularRegularizer, index: int, weight: Weight) -> Weighted:
        term = part.table()[index]

        def factor(x: float | str | Tensor | None, attribute: str) -> Weight:
            """Return what a table says as a weight: a number, a parameter, or a user's tensor."""
            if x is None or isinstance(x, int | float):
                return Weight(1.0 if x is None else float(x))
            key = x if isinstance(x, str) else (attribute, index)
            return Weight(powers={tables.Factor(part, key): 1.0})

        p = term.function.p if isinstance(term.function, tables.Power) else 0.0
        own = factor(term.weight, "weight").times(factor(term.parameter, "parameter"))
        return Weighted(
            term.argument,
            type(term.function),
            own.times(weight).row(self.factors),
            factor(p, "exponent").row(self.factors),
        )

    def _check_states(self, term: Weighted) -> None:
        """Check that no parameter of a function of q(s) has one value per pair."""
        for i in term.weight.factors | term.exponent.factors:
            owner, key = self.factors[i]
            place = None if owner is None else owner.places().get(str(key))
            if place is not None and place.kind == "pair":
                raise ValueError(
                    "regularizer: a weight has one value per pair, but the function that it "
                    "multiplies has one value per state"
                )

    def _structure(self) -> list[tuple[Regularizer, list[Any]]]:
        found: list[tuple[Regularizer, list[Any]]] = []
        for leaf in self.regularizer.leaves():
            terms = leaf.table() if isinstance(leaf, TabularRegularizer) else ()
            found.append((leaf, [(term.argument, type(term.function)) for term in terms]))
        return found

    def values(self, t: Tensor) -> list[Tensor]:
        """Return the values of the factors now; they broadcast against `(*batch, S, A)`.

        Raises:
            RuntimeError: if a user's regularizer has other parts or terms than at the start.
        """
        if self.known is not None:
            self.check()
        return [factor.read(t) for factor in self.factors]

    def check(self) -> None:
        """Raise a RuntimeError if a user's regularizer has other parts or terms than before."""
        assert self.known is not None
        before = [leaf for leaf, _ in self.known]
        for leaf, terms in self._structure():
            if not any(leaf is each for each in before):
                raise RuntimeError(
                    f"regularizer: {type(leaf).__name__} was added after the first use; "
                    "make a new FTRLStep(mdp, regularizer)"
                )
            known = next(terms for each, terms in self.known if each is leaf)
            if terms != known:
                raise RuntimeError(
                    f"regularizer: its terms were {known}, and are {terms} now; "
                    "make a new FTRLStep(mdp, regularizer)"
                )

    def weigh(self, values: Sequence[Any]) -> Weights:
        """Return weights and exponents at values of the factors."""
        known: dict[Any, Any] = {}
        return Weights(
            [term.weight.at(values, known) for term in self.terms],
            [term.exponent.at(values) for term in self.terms],
            [row.at(values, known) for _, row in self.others],
        )

    def evaluate(self, weights: Weights, inputs: Inputs) -> Values:
        """Return all terms and functions at the inputs, summed within each level only."""
        found = Values({}, [], [])
        for term, weight, p in zip(self.terms, weights.terms, weights.exponents, strict=True):
            found.add(term.argument, term.value(inputs.scalars[term.argument], weight, p))
        for (part, _), weight in zip(self.others, weights.others, strict=True):
            add(part, weight, inputs, found)
        return found


class Weights(NamedTuple):
    """Numbers, tensors or arrays that broadcast against `(*batch, S, A)`."""

    terms: list[Any]
    exponents: list[Any]
    others: list[Any]


def add(part: Regularizer, weight: Any, inputs: Inputs, values: Values) -> None:
    """Add weight times the functions of a user's regularizer to the values."""
    if isinstance(part, SeparableRegularizer):
        for name in part.arguments:
            dims = 1 if name == "state" else 2
            called = call(part, name, inputs.scalars[name], dims, dims)
            values.add(name, fit(weight, dims) * called)
    elif isinstance(part, StatewiseRegularizer):
        found = [call(part, "per_state", q_s, 2, 1) for q_s in inputs.per_state]
        # The groups number the states differently, so the weight must be one number.
        one = fit(weight, 0)
        one = one.unsqueeze(-1) if isinstance(one, Tensor) and one.dim() else one
        _accumulate(values.per_state, [one * value for value in found])
    elif isinstance(part, JointRegularizer):
        found = [call(part, "joint", q, 2, 0) for q in inputs.joint]
        _accumulate(values.joint, [fit(weight, 0) * value for value in found])
    else:
        raise TypeError(
            f"{type(part).__name__}: derive it from SeparableRegularizer, "
            "StatewiseRegularizer or JointRegularizer"
        )


def call(part: Regularizer, method: str, x: Tensor, event_dims: int, result_dims: int) -> Tensor:
    """Call a function written by a user at x `(*batch, *event)`, and check the shape it returns.

    It sees parameters with a batch or a place in shapes that broadcast against x.
    """
    with alone():
        shown = part.spread_all(event_dims)
        batch = broadcast(x.shape[: x.dim() - event_dims], *(shape for _, shape in part.batched()))
        x = x.expand(*batch, *x.shape[x.dim() - event_dims :])
        try:
            value = call_with(part, shown, lambda: getattr(part, method)(x))
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
        raise ValueError(
            f"{type(part).__name__}.{method}: expected a tensor of shape {tuple(expected)} at "
            f"an argument of shape {tuple(x.shape)}, got {found}{advice if shown else ''}"
        )
    return value


def total(mdp: LayeredMDP, values: Values) -> Tensor:
    """Return the sum of all values, `(*batch,)`."""
    parts = [
        tables.keep(name, mdp, value, 0.0).sum(-1 if name == "state" else (-2, -1))
        for name, value in values.scalars.items()
    ]
    parts += [value.sum(-1) for value in values.per_state]
    parts += values.joint
    return sum(parts[1:], parts[0])


def _accumulate(total: list[Tensor], values: list[Tensor]) -> None:
    total[:] = [a + b for a, b in zip(total, values, strict=True)] if total else values


def gather(q: Tensor, group: tuple[Tensor, Tensor]) -> Tensor:
    """Return the occupancies `(*batch, G, n)` of a group of G states with n actions each."""
    return q[..., group[0].unsqueeze(-1), group[1]]


def _single_layer(q: Tensor) -> LayeredMDP:
    num_states, num_actions = q.shape[-2:]
    initial = torch.full((num_states,), 1 / num_states, dtype=q.dtype, device=q.device)
    transitions = torch.ones(num_states, num_actions, 1, dtype=q.dtype, device=q.device)
    return LayeredMDP([transitions], initial=initial)
