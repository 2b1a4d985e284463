"""Weighted elementary functions, the data of built-in regularizers.

The `code` of a function is its number in torch_occ.kernels.solver.psi, which has its derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from torch_occ.regularizers.arguments import Argument
from torch_occ.regularizers.places import fit


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

    Tensors have the spread form of torch_occ.regularizers.places.
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
