"""Parameters with domains, with one value per layer, state or pair, and modules that are fixed.

A parameter has the shape `(*batch, *event)`. The event shape belongs to one problem: `()` for a
scalar, `(S, A)` for one number per pair. The batch shape is that of the problems it is used with.
Where weights are computed, every parameter, and t as well, has a shape that broadcasts against
`(*batch, S, A)`, so that a batch is never mistaken for states or actions:

    ()                        a number
    (*batch, 1, 1)            one number per problem of a batch
    (*batch, S, 1 or A)       one value per layer or state, or per pair
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never

import torch
from torch import Tensor, nn
from torch.distributions import constraints

from torch_occ._support.private import own_parameters
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP


@dataclass(frozen=True)
class Place:
    """What the entries of a parameter belong to."""

    kind: Literal["layer", "state", "pair"]
    layer_sizes: tuple[int, ...]
    num_actions: int

    def spread(self, x: Tensor) -> Tensor:
        """Return a parameter in the shape `(*batch, S, 1 or A)`."""
        if self.kind == "layer":
            x = x[..., [k for k, size in enumerate(self.layer_sizes) for _ in range(size)]]
        return x if self.kind == "pair" else x[..., None]


class _Placed:
    """The first values of a parameter: a number, or a tensor that broadcasts to the shape.

        LogBarrier(beta=PerState(mdp, 1.0))        one beta per state, all of them 1 at first

    Raises:
        ValueError: if the values do not broadcast to the event shape.
    """

    kind: ClassVar[Literal["layer", "state", "pair"]]

    def __init__(self, mdp: LayeredMDP, values: Tensor | float = 1.0) -> None:
        self.place = Place(self.kind, mdp.layer_sizes, mdp.num_actions)
        given = torch.as_tensor(values, dtype=mdp.dtype, device=mdp.device).detach()
        pairs = tuple(mdp.actions.shape)
        event = {"layer": (mdp.horizon,), "state": pairs[:1], "pair": pairs}[self.kind]
        try:
            batch = given.shape[: max(given.dim() - len(event), 0)]
            self.values = given.expand(*batch, *event).clone()
        except RuntimeError:
            raise ValueError(
                f"{type(self).__name__}: expected a number or a tensor of shape {event}, "
                f"with the batch dimensions in front, got {tuple(given.shape)}"
            ) from None


class PerLayer(_Placed):
    """A parameter with one value per layer, `(L,)`."""

    kind = "layer"


class PerState(_Placed):
    """A parameter with one value per state, `(S,)`."""

    kind = "state"


class PerPair(_Placed):
    """A parameter with one value per pair, `(S, A)`; values on masked pairs have no effect."""

    kind = "pair"


def spread_batch(x: Tensor) -> Tensor:
    """Return a number, or one number per problem, in a shape that broadcasts against `(S, A)`."""
    return x[..., None, None] if x.dim() else x


def fit(x: Any, event_dims: int) -> Any:
    """Drop dimensions of a weight `(*batch, S or 1, A or 1)`, to `event_dims` after the batch.

    Numbers stay as they are. It is a ValueError if values differ along such a dimension.
    """
    if not isinstance(x, Tensor) or x.dim() == 0 or event_dims == 2:
        return x
    if any(size > 1 for size in x.shape[event_dims - 2 :]):
        kind = "state or pair" if event_dims == 0 else "pair"
        raise ValueError(
            f"regularizer: a weight has one value per {kind}, but the function that it multiplies "
            f"has one value per {'problem' if event_dims == 0 else 'state'}"
        )
    return x[..., 0] if event_dims == 1 else x[..., 0, 0]


def with_rank(x: Tensor, rank: int, event_dims: int) -> Tensor:
    """Add leading dimensions of size 1 to x until it has `rank` batch dimensions."""
    return x[(None,) * (rank + event_dims - x.dim())] if x.dim() < rank + event_dims else x


# -- Modules whose parameters declare their domains as class data, as in `torch.distributions` -----

#: torch.func.functional_call exchanges the parameters of a module for all threads.
_LOCK = RLock()


def alone() -> AbstractContextManager[Any]:
    """Return a context in which no other thread exchanges parameters."""
    # torch.compile cannot trace a lock, and no parameter is exchanged inside its graphs.
    return nullcontext() if torch.compiler.is_dynamo_compiling() else _LOCK


class _FunctionCaller(nn.Module):
    """Calls a function in its `forward`, because `functional_call` calls only `forward`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def call_with(module: nn.Module, given: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
    """Call a function that sees these tensors as the parameters of the module."""
    with alone():
        if not given:
            return function()
        named = {f"module.{path}": x for path, x in given.items()}
        caller = _FunctionCaller(module)
        return torch.func.functional_call(caller, named, (function,), tie_weights=False)


#: What a parameter can be made from.
Value = Tensor | float | PerLayer | PerState | PerPair


class Parametrized(nn.Module):
    """A module that registers `nn.Parameter`s and checks them against `arg_constraints`.

    Parameters are checked at construction and before every solve. A parameter with more than one
    number per problem declares its event dimensions, as in `torch.distributions`: for the shape
    `(*batch, S, A)` the constraint is `constraints.independent(constraints.positive, 2)`. For a
    parameter that is only set as an attribute, the first shape that is set is the event shape. A
    scalar parameter gets one value per layer, state or pair if it is given as `PerLayer`,
    `PerState` or `PerPair`.

    Raises:
        ValueError: if a parameter is outside its domain; the message names it.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, **parameters: Value) -> None:
        super().__init__()
        self._event_dims = dict.fromkeys(parameters, 0)
        self._event_dims |= {name: each.event_dim for name, each in self.arg_constraints.items()}
        self._places: dict[str, Place] = {}
        for name, value in parameters.items():
            if isinstance(value, PerLayer | PerState | PerPair):
                if own := self._event_dims[name]:
                    declares = f"{type(self).__name__}: {name} declares {own} event dimensions"
                    raise ValueError(
                        f"{declares}, so it cannot be a {type(value).__name__}; give a tensor"
                    )
                self._places[name] = value.place
                self._event_dims[name] = 2 if value.kind == "pair" else 1
                value = value.values
            which, fine = f"{type(self).__name__}: {name}", not isinstance(value, str | None)
            check_that(fine, which, "a number or a tensor", repr(value), TypeError)
            floating = isinstance(value, Tensor) and value.is_floating_point()
            given = torch.as_tensor(value, dtype=None if floating else torch.float64)
            self.register_parameter(name, nn.Parameter(given.detach().clone()))
        self.validate()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            self._event_dims.setdefault(name, param.dim())

    def event_dims(self, name: str) -> int:
        """Return the number of event dimensions; the dimensions before them are the batch."""
        return self._event_dims[name]

    def places(self) -> dict[str, Place]:
        """Return the places of the parameters that have one, by name; submodules included."""
        return {  # read from the owners: `unconstrain` moves parameters to other names
            f"{path}.{name}" if path else name: place
            for path, owner in self.named_modules()
            if isinstance(owner, Parametrized)
            for name, place in owner._places.items()
        }

    def check_places(self, mdp: LayeredMDP) -> None:
        """Check that parameters with a value per layer, state or pair belong to this MDP."""
        for name, place in self.places().items():
            if (place.layer_sizes, place.num_actions) != (mdp.layer_sizes, mdp.num_actions):
                raise ValueError(
                    f"regularizer: {name} has one value per {place.kind} of an MDP with layers of "
                    f"{place.layer_sizes} states and {place.num_actions} actions, and this is "
                    f"{mdp}; make the regularizer for it"
                )

    def batched(self) -> list[torch.Size]:
        """Return the batch shapes of all parameters that have one; submodules included."""
        shapes = [p.shape[: p.dim() - dims] for _, p, dims, _ in self._own_parameters()]
        return [batch for batch in shapes if batch]

    def _own_parameters(self) -> Iterator[tuple[str, Tensor, int, Place | None]]:
        """Yield paths, parameters, event dimensions and places; submodules included."""
        for path, owner in self.named_modules():
            if isinstance(owner, Parametrized):
                for name, p in own_parameters(owner).items():
                    if p is not None:
                        dims, place = owner._event_dims.get(name, 0), owner._places.get(name)
                        yield f"{path}.{name}" if path else name, p, dims, place

    def spread_all(self, event_dims: int) -> dict[str, Tensor]:
        """Return the parameters with a batch or a place, in shapes that broadcast.

        They broadcast against `(*batch, S, A)`, or against `(*batch, S)` for one event dimension.
        """
        return {
            path: fit(spread_batch(p) if place is None else place.spread(p), event_dims)
            for path, p, dims, place in self._own_parameters()
            if place is not None or (p.dim() and not dims)
        }

    def spread(self, name: str) -> Tensor:
        """Return an own parameter in a shape that broadcasts against `(*batch, S, A)`."""
        found, place = getattr(self, name), self._places.get(name)
        return spread_batch(found) if place is None else place.spread(found)

    def validate(self) -> None:
        """Check that all parameters, also of submodules, are in their domains."""
        with alone():
            for module in self.modules():
                if isinstance(module, Parametrized):
                    for name, constraint in module.arg_constraints.items():
                        value = getattr(module, name).detach()
                        _check(type(module).__name__, name, value, constraint)

    def check_value(self, name: str, value: Tensor) -> None:
        """Check a value of an own parameter that broadcasts against `(*batch, S, A)`."""
        constraint = self.arg_constraints.get(name)
        if constraint is not None:
            own = value if name in self._places else fit(value, 0)
            _check(type(self).__name__, name, own.detach(), constraint)


def _check(owner: str, name: str, value: Tensor, constraint: constraints.Constraint) -> None:
    while isinstance(constraint, constraints.independent):  # so that the message shows the entry
        constraint = constraint.base_constraint
    valid = constraint.check(value)[(..., *(None,) * constraint.event_dim)] & value.isfinite()
    if not bool(valid.all()):
        place = tuple((~valid).nonzero()[0].tolist())  # () for a scalar
        at = f" at {place}" if place else ""
        raise ValueError(f"{owner}: {name} must satisfy {constraint}, got {value[place]}{at}")


# -- Modules with a fixed structure: attributes that are set once, and lists that never change -----
#
# A step analyses its regularizer when it is made, and would ignore later changes of its structure.
# So they are errors. The values of parameters may change at any time.


class Frozen(nn.Module):
    """A module whose attributes named in `fixed` can be set only once.

    `fixed` maps each name to advice: what to do instead of setting the attribute again.
    """

    fixed: ClassVar[dict[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in self.fixed and (name in own or name in own.get("_modules", ())):
            self._refuse(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.fixed:
            self._refuse(name)
        super().__delattr__(name)

    def _refuse(self, name: str) -> Never:
        raise AttributeError(f"{type(self).__name__}: {name} cannot be changed; {self.fixed[name]}")


class FrozenList(nn.ModuleList):
    """A list of modules that cannot be changed; `advice` says what to do instead."""

    def __init__(self, modules: Iterable[nn.Module], advice: str = "make a new list") -> None:
        super().__init__()
        self._advice = advice
        for i, module in enumerate(modules):
            nn.Module.add_module(self, str(i), module)

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise AttributeError(f"the modules in this list cannot be changed; {self._advice}")

    __setitem__ = __delitem__ = __iadd__ = append = extend = insert = pop = _refuse
    add_module = register_module = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._refuse()
        super().__setattr__(name, value)
