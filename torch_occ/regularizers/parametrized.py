"""Modules whose scalar parameters declare their domain as class data, as in `torch.distributions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributions import constraints


class Parametrized(nn.Module):
    """Registers `nn.Parameter`s and checks them against `arg_constraints`, at construction and before every solve.

    A parameter is a scalar, or has the batch shape of the problems that it is used with.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(self, **parameters: Tensor | float) -> None:
        super().__init__()
        for name, value in parameters.items():
            dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.float64
            self.register_parameter(name, nn.Parameter(torch.as_tensor(value, dtype=dtype).detach().clone()))
        self.validate()

    def validate(self, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Raise a ValueError that names the first parameter outside its domain.

        Args:
            parameters: values by their name in `named_parameters`, to check instead of the module's own.
        """
        for path, module in self.named_modules():
            if isinstance(module, Parametrized):
                for name, constraint in module.arg_constraints.items():
                    value = getattr(module, name) if parameters is None else parameters[f"{path}.{name}" if path else name]
                    _check(type(module).__name__, name, value.detach(), constraint)


def _check(owner: str, name: str, value: Tensor, constraint: constraints.Constraint) -> None:
    valid = constraint.check(value) & value.isfinite()
    if not bool(valid.all()):
        wrong = value[~valid].flatten()[0].item() if value.dim() else value.item()
        raise ValueError(f"{owner}: {name} must satisfy {constraint}, got {wrong}")
