"""Parameters that plain optimizers cannot drive out of their domains.

Every parameter of a regularizer declares its domain (torch_occ.regularizers.parameters). Here it
becomes the image of a free parameter, under the transform of `torch.distributions.transform_to`:
exp for positive numbers, a scaled sigmoid for intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn
from torch.distributions import constraints, transform_to
from torch.nn.utils import parametrize

from torch_occ._support.private import own_parameters
from torch_occ.regularizers.parameters import Parametrized
from torch_occ.step.ftrl import FTRLStep

Module = TypeVar("Module", bound=nn.Module)


class Domain(nn.Module):
    """A map from all real numbers to a domain, with its inverse, for torch's parametrizations."""

    def __init__(self, constraint: constraints.Constraint) -> None:
        super().__init__()
        self.transform = transform_to(constraint)

    def forward(self, free: Tensor) -> Tensor:
        """Return the parameter."""
        return self.transform(free)

    def right_inverse(self, parameter: Tensor) -> Tensor:
        """Return the free parameter."""
        return self.transform.inv(parameter)


def unconstrain(module: Module, only: Sequence[str] | None = None) -> Module:
    """Let the parameters of a step, a regularizer or a network with steps live in free spaces.

    Afterwards `module.parameters()` has free parameters, with the names
    `...parametrizations.beta.original`, and every step of any optimizer keeps `beta` in its domain.
    `regularizer.beta` is the value as before, and may be set as before. It uses
    `torch.nn.utils.parametrize`. Call it before the optimizer is made. Calling it twice changes
    nothing.

    Args:
        module: an `FTRLStep`, a `Regularizer`, a `Schedule`, or a network that contains steps.
        only: last parts of names, such as `["beta"]`; all parameters by default. The others are
            frozen (`requires_grad_(False)`), because an optimizer could drive them out of their
            domains.

    Returns:
        The same module.

    Raises:
        ValueError: if a parameter is at the edge of its domain, which no free parameter reaches;
            if it has a batch shape; or if no parameter has a name in `only`. Nothing is changed.
    """
    parts = [part for part in module.modules() if isinstance(part, Parametrized)]
    declared = [(part, name) for part in parts for name in part.arg_constraints]
    for name in only or ():
        if name not in {name for _, name in declared}:
            raise ValueError(f"only: there is no parameter {name!r} with a declared domain")
    bound = [(part, name) for part, name in declared if name in own_parameters(part)]
    chosen = [(part, name) for part, name in bound if only is None or name in only]
    for part, name in chosen:
        _check_single(part, name)
    for part, name in bound:
        if only is not None:
            getattr(part, name).requires_grad_((part, name) in chosen)
        if (part, name) in chosen:
            parametrize.register_parametrization(part, name, Domain(part.arg_constraints[name]))
    for step in module.modules():
        if isinstance(step, FTRLStep):
            step.use(step.backend)  # it looks up the parameters again
    return module


def _check_single(owner: Parametrized, name: str) -> None:
    value, constraint = getattr(owner, name), owner.arg_constraints[name]
    place = f"{type(owner).__name__}: {name}"
    if value.dim() > owner.event_dims(name):
        raise ValueError(
            f"{place} has the shape {tuple(value.shape)}, a batch; only parameters without a batch "
            "shape can be unconstrained"
        )
    free = transform_to(constraint).inv(value.detach())
    if not bool(free.isfinite().all()):
        edge = value.detach()[~free.isfinite()].flatten()[0].item()
        raise ValueError(
            f"{place} is {edge:g}, at the edge of its domain {constraint}; start inside, or leave "
            "it out with only="
        )
