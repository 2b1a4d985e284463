"""What a regularizer is: a convex function of q and of the episode t, written at one of three levels.

    SeparableRegularizer   scalar functions of q(s,a), q(s)-q(s,a), q(s) and 1-q(s,a): `pair`, `rest`, `state`, `complement`
    StatewiseRegularizer   one function of the actions of a state: `per_state`
    JointRegularizer       one function of all of q: `joint`

Only the function is written; gradients and Hessians come from autograd, at the level that fits. Regularizers add up, scale by numbers,
and multiply by or divide by schedules:

    psi = HybridTsallis(alpha) / InverseSqrt(gamma) + LogBarrier(beta)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.arguments import ARGUMENTS, Argument, keep, marginal
from torch_occ.regularizers.frozen import Frozen, FrozenList
from torch_occ.regularizers.parametrized import Parametrized, one_by_one
from torch_occ.regularizers.schedules import Schedule
from torch_occ.regularizers.terms import Table, align


class Inputs(NamedTuple):
    """An occupancy measure as the three levels read it."""

    scalars: dict[Argument, Tensor]  # see torch_occ.regularizers.arguments
    per_state: list[Tensor]  # (*batch, G, n) for each group of G states with n actions
    joint: list[Tensor]  # one (*batch, S, A), or nothing


class Values(NamedTuple):
    """A regularizer taken apart by level, ready to be differentiated at each."""

    scalars: dict[
        Argument, Tensor
    ]  # the weighted scalar terms, elementwise, shaped like their argument
    per_state: list[Tensor]  # (*batch, G) for each group of states with one number of actions
    joint: list[Tensor]  # one (*batch,), or nothing


class Regularizer(Parametrized):
    """Base of all regularizers: the algebra, and the value psi_t(q)."""

    def parts(self, t: Tensor) -> Iterator[tuple[Regularizer, Tensor | None]]:
        """The elementary regularizers with their weights at t (None is 1)."""
        yield self, None

    def forward(self, q: Tensor, t: Tensor | float = 1.0, mdp: LayeredMDP | None = None) -> Tensor:
        """psi_t(q), `(*batch,)`. The mdp tells which pairs exist and how states form layers; without it, q is one layer."""
        mdp = _single_layer(q) if mdp is None else mdp
        t = torch.as_tensor(t, dtype=q.dtype, device=q.device)
        return total(mdp, self.evaluate(self.read(mdp, q), t))

    def read(self, mdp: LayeredMDP, q: Tensor) -> Inputs:
        """What the levels in use need of q."""
        return Inputs(
            {name: marginal(name, mdp, q) for name in self.arguments},
            [gather(q, group) for group in mdp.action_groups]
            if StatewiseRegularizer in self.levels
            else [],
            [q] if JointRegularizer in self.levels else [],
        )

    def evaluate(self, inputs: Inputs, t: Tensor) -> Values:
        """The weighted value of every elementary regularizer, summed within its level and nowhere else."""
        return evaluate(list(self.parts(t)), inputs)

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments that the scalar terms read."""
        used = {
            name
            for leaf in self.leaves()
            if isinstance(leaf, SeparableRegularizer)
            for name in leaf.arguments
        }
        return tuple(name for name in ARGUMENTS if name in used)

    def constant(self, weight: Tensor | None) -> tuple[Regularizer | Table, Tensor | None]:
        """This regularizer and its weight, with what does not depend on q worked out once and for all."""
        return self, weight

    def leaves(self) -> Iterator[Regularizer]:
        """The elementary regularizers, without weights."""
        yield self

    @cached_property
    def levels(self) -> set[type[Regularizer]]:
        """Which of the three levels are in use."""
        kinds = (SeparableRegularizer, StatewiseRegularizer, JointRegularizer)
        return {kind for kind in kinds for leaf in self.leaves() if isinstance(leaf, kind)}

    def __add__(self, other: Regularizer) -> Sum:
        return Sum(self, other) if isinstance(other, Regularizer) else NotImplemented

    def __radd__(self, other: int) -> Regularizer:
        return self if other == 0 else NotImplemented  # what sum([...]) begins with

    def __mul__(self, factor: Schedule | float) -> Scaled:
        return (
            Scaled(self, factor, 1)
            if isinstance(factor, Schedule | int | float)
            else NotImplemented
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: Schedule | float) -> Scaled:
        return (
            Scaled(self, divisor, -1)
            if isinstance(divisor, Schedule | int | float)
            else NotImplemented
        )


class SeparableRegularizer(Regularizer):
    """A sum of scalar functions. Override the ones that you need; each acts entry by entry and must be convex on x > 0.

    When a parameter has a batch shape, a function is called for one element of the batch: it sees
    the parameter without its batch shape and x of shape `(S, A)`, or `(S,)` in `state`. Otherwise x
    is `(*batch, S, A)`. So `self.strength * x` means the same in both cases, at every level.

    For Newton's method to need no line search, f should satisfy |x f'''(x)| <= 2 f''(x), as powers, x log x and -log x do. Other
    functions work too, by backtracking.
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

    def scalar(self, name: Argument, x: Tensor, weight: Tensor | None) -> Tensor:
        """weight times the function of this argument."""
        event_dims = 1 if name == "state" else 2
        return weighted(weight, call(self, name, x, event_dims, event_dims), event_dims)

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(
            name
            for name in ARGUMENTS
            if getattr(type(self), name) is not getattr(SeparableRegularizer, name)
        )


class StatewiseRegularizer(Regularizer):
    """A sum over states of a function of the state's actions."""

    def per_state(self, q_s: Tensor) -> Tensor:
        """`(*batch, G, n)`, the occupancies of the n available actions of G states -> `(*batch, G)`."""
        raise NotImplementedError


class JointRegularizer(Regularizer):
    """A function of the whole occupancy measure; its Hessian is dense, so this is for small MDPs."""

    def joint(self, q: Tensor) -> Tensor:
        """`(*batch, S, A)` -> `(*batch,)`. Masked pairs are zero and must not matter."""
        raise NotImplementedError


class Sum(Frozen, Regularizer):
    """psi_1 + psi_2 + ...; which terms there are is fixed, the values of their parameters are not."""

    fixed: ClassVar = {"terms": "add up a new regularizer, and make a new FTRLStep with it"}
    terms: list[Regularizer]

    def __init__(self, *terms: Regularizer) -> None:
        super().__init__()
        self.terms = FrozenList(terms, self.fixed["terms"])  # type: ignore[assignment]

    def parts(self, t: Tensor) -> Iterator[tuple[Regularizer, Tensor | None]]:
        for term in self.terms:
            yield from term.parts(t)

    def leaves(self) -> Iterator[Regularizer]:
        for term in self.terms:
            yield from term.leaves()

    def __add__(self, other: Regularizer) -> Sum:
        return Sum(*self.terms, other) if isinstance(other, Regularizer) else NotImplemented


class Scaled(Frozen, Regularizer):
    """psi times a schedule or number, to the power 1 or -1; fixed, but for the values of parameters."""

    fixed: ClassVar = dict.fromkeys(
        ("regularizer", "factor", "power"),
        "scale a new regularizer, and make a new FTRLStep with it",
    )

    def __init__(self, regularizer: Regularizer, factor: Schedule | float, power: int) -> None:
        super().__init__()
        if not isinstance(factor, Schedule) and not 0 < factor < math.inf:
            raise ValueError(f"a regularizer can only be scaled by a positive number, got {factor}")
        self.regularizer, self.factor, self.power = regularizer, factor, power

    def weight(self, t: Tensor) -> Tensor:
        factor = (
            self.factor(t) if isinstance(self.factor, Schedule) else torch.full_like(t, self.factor)
        )
        return factor if self.power == 1 else 1 / factor

    def parts(self, t: Tensor) -> Iterator[tuple[Regularizer, Tensor | None]]:
        own = self.weight(t)
        for part, weight in self.regularizer.parts(t):
            yield part, own if weight is None else own * weight

    def leaves(self) -> Iterator[Regularizer]:
        return self.regularizer.leaves()


def evaluate(parts: list[tuple[Regularizer | Table, Tensor | None]], inputs: Inputs) -> Values:
    """The sum of weighted elementary regularizers, level by level."""
    values = Values({}, [], [])
    for part, weight in parts:
        if isinstance(part, SeparableRegularizer | Table):
            for name in part.arguments:
                value = part.scalar(name, inputs.scalars[name], weight)
                values.scalars[name] = (
                    values.scalars[name] + value if name in values.scalars else value
                )
        elif isinstance(part, StatewiseRegularizer):
            _expected(part, inputs.per_state)
            found = [call(part, "per_state", q_s, 2, 1) for q_s in inputs.per_state]
            _accumulate(values.per_state, [weighted(weight, value, 1) for value in found])
        elif isinstance(part, JointRegularizer):
            _expected(part, inputs.joint)
            found = [call(part, "joint", q, 2, 0) for q in inputs.joint]
            _accumulate(values.joint, [weighted(weight, value, 0) for value in found])
        else:
            raise TypeError(
                f"{type(part).__name__}: derive it from SeparableRegularizer, StatewiseRegularizer or JointRegularizer"
            )
    return values


def call(part: Regularizer, method: str, x: Tensor, event_dims: int, result_dims: int) -> Tensor:
    """What the user wrote, at x `(*batch, *event)`; it never sees the batch shape of a parameter.

    Raises:
        ValueError: the function does not return one number for each entry, state or q.
    """

    reduced = event_dims - result_dims

    def checked(x: Tensor) -> Tensor:
        value = getattr(part, method)(x)
        expected = x.shape if reduced == 0 else x.shape[: x.dim() - reduced]
        if not isinstance(value, Tensor) or value.shape != expected:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{type(part).__name__}.{method}: expected a tensor of shape {tuple(expected)} at "
                f"an argument of shape {tuple(x.shape)}, got {found}"
            )
        return value

    return one_by_one(part, checked, x, event_dims)


def total(mdp: LayeredMDP, values: Values) -> Tensor:
    """The sum of all parts, `(*batch,)`."""
    parts = [
        keep(name, mdp, value, 0.0).sum(-1 if name == "state" else (-2, -1))
        for name, value in values.scalars.items()
    ]
    parts += [value.sum(-1) for value in values.per_state]
    parts += values.joint
    return sum(parts[1:], parts[0])


def _expected(part: Regularizer, inputs: list[Tensor]) -> None:
    """What a part reads is worked out once for all parts; one that came later would be left out."""
    if not inputs:
        raise RuntimeError(
            f"regularizer: {type(part).__name__} was added after the first use; make a new FTRLStep(mdp, regularizer)"
        )


def _accumulate(total: list[Tensor], values: list[Tensor]) -> None:
    total[:] = [a + b for a, b in zip(total, values, strict=True)] if total else values


def weighted(weight: Tensor | None, value: Tensor, event_dims: int) -> Tensor:
    """weight * value, the weight's batch shape lined up with the value's."""
    return value if weight is None else align(weight, event_dims) * value


def gather(q: Tensor, group: tuple[Tensor, Tensor]) -> Tensor:
    """The occupancies of a group of states with equally many actions, `(*batch, G, n)`."""
    states, actions = group
    return q[..., states.unsqueeze(-1), actions]


def _single_layer(q: Tensor) -> LayeredMDP:
    num_states, num_actions = q.shape[-2:]
    initial = torch.full((num_states,), 1 / num_states, dtype=q.dtype, device=q.device)
    return LayeredMDP(
        [torch.ones(num_states, num_actions, 1, dtype=q.dtype, device=q.device)], initial=initial
    )
