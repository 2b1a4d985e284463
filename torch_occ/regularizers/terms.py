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

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.parameters import fit

Argument = Literal["pair", "rest", "state", "complement"]
ARGUMENTS: tuple[Argument, ...] = ("pair", "rest", "state", "complement")


def marginal(name: Argument, mdp: LayeredMDP, q: Tensor) -> Tensor:
    """Compute one argument at q.

    Args:
        q: `(*batch, S, A)`, zero on masked pairs.

    Returns:
        `(*batch, S)` for `state`, `(*batch, S, A)` for the others; 1 where it does not exist.
    """
    match name:
        case "pair":
            found = q
        case "rest":
            found = q @ mdp.other_actions
        case "state":
            found = q.sum(-1)
        case "complement":
            elsewhere = torch.cat([sum_of_others(layer) for layer in mdp.split(q.sum(-1), -1)], -1)
            accurate = q @ mdp.other_actions + elsewhere.unsqueeze(-1)
            # On Omega, `accurate` equals 1 - q. Take the value from `accurate`, which does not
            # cancel, and the derivative from 1 - q.
            found = accurate.detach() - (q - q.detach())
    return keep(name, mdp, found, 1.0)


def change(name: Argument, mdp: LayeredMDP, dq: Tensor) -> Tensor:
    """Return the change of the argument when q changes by dq; 0 where it does not exist."""
    match name:
        case "pair":
            moved = dq
        case "rest":
            moved = dq @ mdp.other_actions
        case "state":
            moved = dq.sum(-1)
        case "complement":
            moved = -dq
    return keep(name, mdp, moved, 0.0)


def pull_back(name: Argument, mdp: LayeredMDP, slope: Tensor) -> Tensor:
    """Return the gradient in q `(*batch, S, A)` of scalar terms with this slope.

    This is the adjoint of `change`.
    """
    slope = keep(name, mdp, slope, 0.0)
    match name:
        case "pair":
            return slope
        case "rest":
            return keep("pair", mdp, slope @ mdp.other_actions, 0.0)
        case "state":
            return keep("pair", mdp, slope.unsqueeze(-1).expand(*slope.shape, mdp.num_actions), 0.0)
        case "complement":
            return -slope


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
    """x^p."""

    code: ClassVar[int] = 0

    p: Tensor | float

    def __call__(self, x: Tensor, event_dims: int) -> Tensor:
        if isinstance(self.p, float):
            return x.sqrt() if self.p == 0.5 else x**self.p
        return x ** fit(self.p, event_dims)


@dataclass(frozen=True)
class XLogX:
    """x log x."""

    code: ClassVar[int] = 1

    def __call__(self, x: Tensor, event_dims: int) -> Tensor:
        return -torch.special.entr(x)  # zero at x = 0


@dataclass(frozen=True)
class Log:
    """log x."""

    code: ClassVar[int] = 2

    def __call__(self, x: Tensor, event_dims: int) -> Tensor:
        return x.log()


@dataclass(frozen=True)
class Term:
    """weight * function(argument), summed over states or pairs.

    Tensors have the spread form of torch_occ.regularizers.parameters.
    """

    argument: Argument
    function: Power | XLogX | Log
    weight: Tensor | float


@dataclass(frozen=True)
class Table:
    """A sum of terms."""

    terms: tuple[Term, ...]

    def times(self, weight: Tensor | None) -> Table:
        """Return the table with every weight multiplied by one in its spread form."""
        if weight is None:
            return self
        terms = (Term(term.argument, term.function, weight * term.weight) for term in self.terms)
        return Table(tuple(terms))

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(dict.fromkeys(term.argument for term in self.terms))

    def scalar(self, name: Argument, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the sum of the terms of one argument at x, entry by entry."""
        assert weight is None, "use Table.times for a weight"
        event_dims = 1 if name == "state" else 2
        values = [
            (fit(term.weight, event_dims) if isinstance(term.weight, Tensor) else term.weight)
            * term.function(x, event_dims)
            for term in self.terms
            if term.argument == name
        ]
        return sum(values[1:], values[0])
