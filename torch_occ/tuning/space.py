"""The space in which parameters are tuned: one unconstrained coordinate per parameter, in bounds.

A parameter is the image of its coordinate under the transform of its declared domain: logarithms
for positive numbers, logits for intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributions import constraints, transform_to

from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.parametrized import Parametrized

#: The bounds of positive parameters, unless `bounds` gives others.
LOWEST, HIGHEST = 1e-4, 1e4


class ParameterSpace:
    """The parameters of a regularizer that are tuned, with their transforms and bounds.

    Args:
        regularizer: its parameters are scalars.
        only: names of the parameters to tune: full names (`terms.1.beta`) or their last part
            (`beta`); all by default.
        bounds: by the same names; 1e-4 to 1e4 by default.

    Raises:
        ValueError: if a name is unknown, a parameter is not a scalar, a parameter belongs to a
            module that is not `Parametrized`, or a value is outside its bounds.
    """

    def __init__(
        self,
        regularizer: Regularizer,
        only: Sequence[str] | None,
        bounds: Mapping[str, tuple[float, float]],
    ) -> None:
        domains = _domains(regularizer)
        self.bounds = dict(bounds)
        self.names = tuple(
            name for name in domains if only is None or name in only or _last(name) in only
        )
        known = {*domains, *map(_last, domains)}
        for argument, given in (("only", only or ()), ("bounds", bounds)):
            for name in given:
                if name not in known:
                    raise ValueError(
                        f"{argument}: the regularizer has no parameter {name!r}; it has "
                        f"{', '.join(domains)}"
                    )
        if not self.names:
            raise ValueError("regularizer: there is no parameter to tune")
        self.transforms = [transform_to(domains[name]) for name in self.names]
        own = dict(regularizer.named_parameters())
        centre, low, high = [], [], []
        for name, transform in zip(self.names, self.transforms, strict=True):
            value = own[name].detach().double()
            owner = regularizer.get_submodule(name.rpartition(".")[0])
            if not isinstance(owner, Parametrized):
                raise ValueError(
                    f"regularizer: {name} belongs to a {type(owner).__name__}, which cannot tell a "
                    "batch of starts from its own shape; give the parameter to the regularizer "
                    "itself, or leave it out with only="
                )
            if value.dim():
                raise ValueError(
                    f"regularizer: {name} has shape {tuple(value.shape)}; tune scalars, the starts "
                    "are the batch"
                )
            limits = bounds.get(name, bounds.get(_last(name), _default_bounds(domains[name])))
            ends = [transform.inv(torch.tensor(limit, dtype=torch.float64)) for limit in limits]
            if not (bool(ends[0].isfinite()) and bool(ends[1].isfinite()) and ends[0] < ends[1]):
                raise ValueError(
                    f"bounds: {name} must satisfy {domains[name]} with a lower and a higher end "
                    f"inside, got {limits}"
                )
            if not limits[0] <= float(value) <= limits[1]:
                raise ValueError(
                    f"regularizer: {name} is {float(value):g}, outside its bounds {limits}; start "
                    "inside, or give other bounds"
                )
            centre.append(transform.inv(value))
            low.append(ends[0])
            high.append(ends[1])
        # (parameters,)
        self.centre, self.low = torch.stack(centre), torch.stack(low)
        self.high = torch.stack(high)

    def parameters_at(self, u: Tensor) -> Tensor:
        """Parameters from coordinates, `(..., parameters)` both."""
        return torch.stack(
            [transform(u[..., i]) for i, transform in enumerate(self.transforms)], -1
        )

    def coordinates_of(self, parameters: Mapping[str, float]) -> Tensor:
        """Coordinates `(parameters,)` of values by name, moved inside the bounds."""
        pairs = zip(self.names, self.transforms, strict=True)
        u = torch.stack(
            [
                transform.inv(torch.tensor(parameters[name], dtype=torch.float64))
                for name, transform in pairs
            ]
        )
        return u.clamp(self.low, self.high)

    def at_bounds(self, u: Tensor) -> tuple[str, ...]:
        """The names of the parameters that are at a bound, for coordinates `(parameters,)`."""
        met = (u <= self.low) | (u >= self.high)
        return tuple(name for name, flag in zip(self.names, met.tolist(), strict=True) if flag)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _domains(regularizer: Regularizer) -> dict[str, constraints.Constraint]:
    """The declared domain of every parameter, by its name."""
    found: dict[str, constraints.Constraint] = {}
    for path, module in regularizer.named_modules():
        if isinstance(module, Parametrized):
            found |= {
                f"{path}.{name}" if path else name: constraint
                for name, constraint in module.arg_constraints.items()
            }
    return {name: found.get(name, constraints.real) for name, _ in regularizer.named_parameters()}


def _default_bounds(domain: constraints.Constraint) -> tuple[float, float]:
    if isinstance(domain, constraints.interval):
        margin = 1e-3 * (domain.upper_bound - domain.lower_bound)
        return domain.lower_bound + margin, domain.upper_bound - margin
    return (-HIGHEST, HIGHEST) if domain is constraints.real else (LOWEST, HIGHEST)
