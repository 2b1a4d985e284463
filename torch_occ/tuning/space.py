"""The space in which parameters are tuned: one unconstrained coordinate per number, in bounds.

A number is the image of its coordinate under the transform of its parameter's domain: logarithms
for positive numbers, logits for intervals. A parameter with one value per layer, state or pair has
as many numbers, named by their indices: `beta[2]`, `beta[2,0]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.distributions import constraints, transform_to

from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.parameters import Parametrized

#: The bounds of positive parameters, unless `bounds` gives others.
LOWEST, HIGHEST = 1e-4, 1e4


class ParameterSpace:
    """The parameters of a regularizer that are tuned, with their transforms and bounds.

    Args:
        regularizer: its parameters have no batch shape.
        only: names of the parameters to tune: full names (`terms.1.beta`), their last part
            (`beta`), or the same for numbers (`terms.1.beta[2]`, `beta[2]`); all by default.
        bounds: by the same names; 1e-4 to 1e4 by default.

    Raises:
        ValueError: if a name is unknown, a parameter has a batch shape, a parameter belongs to a
            module that is not `Parametrized`, or a value is outside its bounds.
    """

    def __init__(
        self,
        regularizer: Regularizer,
        only: Sequence[str] | None,
        bounds: Mapping[str, tuple[float, float]],
    ) -> None:
        domains, own = _domains(regularizer), dict(regularizer.named_parameters())
        self.bounds = dict(bounds)
        # The parameter and the index of every number, by its name.
        every = {number: (name, i) for name in domains for number, i in numbers(name, own[name])}
        self.entries = {
            number: (name, i)
            for number, (name, i) in every.items()
            if only is None or not {*_names(number), *_names(name)}.isdisjoint(only)
        }
        self.names = tuple(self.entries)
        known = {each for name in (*every, *domains) for each in _names(name)}
        for argument, given in (("only", only or ()), ("bounds", bounds)):
            for name in given:
                if name not in known:
                    raise ValueError(
                        f"{argument}: the regularizer has no parameter {name!r}; it has "
                        f"{', '.join(domains)}"
                    )
        if not self.names:
            raise ValueError("regularizer: there is no parameter to tune")
        for name in dict.fromkeys(name for name, _ in self.entries.values()):
            _check_tunable(regularizer, name, own[name])
        self.own = {name: own[name].detach().double().clone() for name, _ in self.entries.values()}
        self.transforms = [transform_to(domains[name]) for name, _ in self.entries.values()]
        centre, low, high = [], [], []
        for number, transform in zip(self.names, self.transforms, strict=True):
            name, i = self.entries[number]
            value, own_names = self.own[name][i], (*_names(number), *_names(name))
            asked = [bounds[each] for each in own_names if each in bounds]
            limits = (*asked, _default_bounds(domains[name]))[0]
            ends = [transform.inv(torch.tensor(limit, dtype=torch.float64)) for limit in limits]
            if not (bool(ends[0].isfinite()) and bool(ends[1].isfinite()) and ends[0] < ends[1]):
                raise ValueError(
                    f"bounds: {number} must satisfy {domains[name]} with a lower and a higher end "
                    f"inside, got {limits}"
                )
            if not limits[0] <= float(value) <= limits[1]:
                raise ValueError(
                    f"regularizer: {number} is {float(value):g}, outside its bounds {limits}; "
                    "start inside, or give other bounds"
                )
            centre.append(transform.inv(value))
            low.append(ends[0])
            high.append(ends[1])
        # (numbers,)
        self.centre, self.low = torch.stack(centre), torch.stack(low)
        self.high = torch.stack(high)

    def parameters_at(self, u: Tensor) -> Tensor:
        """Numbers from coordinates, `(..., numbers)` both."""
        return torch.stack(
            [transform(u[..., i]) for i, transform in enumerate(self.transforms)], -1
        )

    def tensors(self, parameters: Tensor) -> dict[str, Tensor]:
        """Every parameter `(..., *event)` by its name, from numbers `(..., numbers)`.

        Numbers that are not tuned keep their values.
        """
        columns = dict(zip(self.names, parameters.unbind(-1), strict=True))
        found = {}
        for name, own in self.own.items():
            parts = [
                columns.get(number, own[i].expand(parameters.shape[:-1]))
                for number, i in numbers(name, own)
            ]
            shape = (*parameters.shape[:-1], *own.shape)
            found[name] = torch.stack(parts, -1).reshape(shape)
        return found

    def coordinates_of(self, parameters: Mapping[str, float]) -> Tensor:
        """Coordinates `(numbers,)` of values by name, moved inside the bounds."""
        pairs = zip(self.names, self.transforms, strict=True)
        u = torch.stack(
            [
                transform.inv(torch.tensor(parameters[name], dtype=torch.float64))
                for name, transform in pairs
            ]
        )
        return u.clamp(self.low, self.high)

    def at_bounds(self, u: Tensor) -> tuple[str, ...]:
        """The names of the numbers that are at a bound, for coordinates `(numbers,)`."""
        met = (u <= self.low) | (u >= self.high)
        return tuple(name for name, flag in zip(self.names, met.tolist(), strict=True) if flag)


def numbers(name: str, parameter: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """The names and indices of the numbers of a parameter; a scalar has one, with its name."""
    indices = product(*map(range, parameter.shape))
    return [(f"{name}[{','.join(map(str, i))}]" if i else name, i) for i in indices]


def load_numbers(regularizer: Regularizer, values: Mapping[str, float]) -> None:
    """Set numbers of the parameters by their names."""
    with torch.no_grad():
        for name, parameter in regularizer.named_parameters():
            for number, i in numbers(name, parameter):
                if number in values:
                    parameter[i] = values[number]


def _check_tunable(regularizer: Regularizer, name: str, parameter: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module = regularizer.get_submodule(owner)
    if not isinstance(module, Parametrized):
        raise ValueError(
            f"regularizer: {name} belongs to a {type(module).__name__}, which cannot tell a "
            "batch of starts from its own shape; give the parameter to the regularizer "
            "itself, or leave it out with only="
        )
    if parameter.dim() > module.event_dims(last):
        raise ValueError(
            f"regularizer: {name} has shape {tuple(parameter.shape)}; tune one regularizer, the "
            "starts are the batch. For one value per layer, state or pair, give occ.PerLayer, "
            "occ.PerState or occ.PerPair"
        )


def _names(name: str) -> tuple[str, str]:
    """A full name and its last part."""
    return name, name.rpartition(".")[2]


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
