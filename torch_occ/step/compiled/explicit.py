"""Terms whose weights and exponents are parameters, for derivatives on the torch path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.catalog import TabularRegularizer
from torch_occ.regularizers.parametrized import Value
from torch_occ.regularizers.places import PerPair, PerState, fit
from torch_occ.regularizers.terms import Power, Term


class Explicit(TabularRegularizer):
    """A table of terms whose weights and exponents are its parameters.

    Args:
        terms: the template.
        mdp: given if weights and exponents differ between pairs.
    """

    def __init__(self, terms: Sequence[Term], mdp: LayeredMDP | None) -> None:
        self.terms = tuple(terms)

        def value(term: Term, x: Tensor | float) -> Value:
            x = torch.as_tensor(x)
            if mdp is None:
                return fit(x, 0)
            return PerState(mdp, fit(x, 1)) if term.argument == "state" else PerPair(mdp, x)

        powers = {
            f"p{i}": value(term, term.function.p)
            for i, term in enumerate(terms)
            if isinstance(term.function, Power)
        }
        weights = {f"w{i}": value(term, term.weight) for i, term in enumerate(terms)}
        super().__init__(**weights, **powers)

    def table(self) -> tuple[Term, ...]:
        functions = [
            Power(getattr(self, f"p{i}")) if isinstance(term.function, Power) else term.function
            for i, term in enumerate(self.terms)
        ]
        return tuple(
            Term(term.argument, functions[i], getattr(self, f"w{i}"))
            for i, term in enumerate(self.terms)
        )


def in_form(term: Term, x: Tensor | float, pairs: torch.Size | None) -> Tensor:
    """Return a weight or exponent in the shape that it has in `Explicit`, from its spread form.

    Args:
        pairs: `(S, A)` if weights and exponents differ between pairs.
    """
    x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    if pairs is None:
        return fit(x, 0)
    event_dims = 1 if term.argument == "state" else 2
    return fit(x, event_dims).expand(*x.shape[:-2], *pairs[:event_dims])
