"""Everything that is private of other packages, and may change with their next release.

Each function says what would replace it. No other module reads a private name of torch, Numba,
TensorBoard or the standard library, but torch_occ._support.caching, which derives from the classes
of Numba's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

#: Numba's option for kernels that neither allocate nor own arrays: no references are counted, which
#: took half of the time.
NO_REFERENCE_COUNTS: dict[str, Any] = {"_nrt": False}


# -- torch
# ------------------------------------------------------------------------------------------------------------------


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open."""
    return forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Whether x carries a tangent of forward mode."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def inside_transform() -> bool:
    """Whether a transform of torch.func is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def carries_derivative(x: Tensor) -> bool:
    """Whether a derivative may be taken in x: by autograd, by forward mode, or by an enclosing
    transform of torch.func.
    """
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return x.requires_grad or wrapped or forward_ad.unpack_dual(x).tangent is not None


def forward_modes() -> int:
    """How many levels of torch.func's forward mode enclose the caller."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    return sum(level.key() == functorch.TransformType.Jvp for level in stack)


class _Readable(Tensor):
    """A tensor whose `float` does not warn that it requires gradients; every operation on it gives
    an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __float__(self) -> float:
        return float(self.item())


def readable(x: Tensor) -> Tensor:
    """The same tensor, differentiable as before, whose `float(x)` does not warn; unchanged inside
    transforms of torch.func.
    """
    return x if inside_transform() else x.as_subclass(_Readable)


def standard_gamma(shape: Tensor, generator: torch.Generator) -> Tensor:
    """Gamma variates from an explicit generator, which torch.distributions does not take;
    differentiable in the shape.
    """
    return torch._standard_gamma(shape, generator=generator)


def indices(p: Tensor) -> Tensor:
    """The indices of a COO tensor as they are stored; `Tensor.indices` would refuse one that is not
    coalesced.
    """
    return p._indices()


def values(p: Tensor) -> Tensor:
    """The values of a COO tensor as they are stored; see `indices`."""
    return p._values()


def held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, children and hooks of a module, by name; `named_children` leaves out
    what is there twice.
    """
    for table in (module._parameters, module._buffers, module._modules):
        yield from table.items()
    yield "hooks", [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def parameter_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the parameters of a module and its children are: dictionaries, since functional_call
    exchanges what is in them.
    """
    for part in module.modules():
        for name in part._parameters:
            yield part._parameters, name


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of one module by name; `named_parameters` takes several microseconds."""
    return module._parameters


def has_children(module: nn.Module) -> bool:
    """Whether a module holds others; `modules` takes several microseconds."""
    return bool(module._modules)


def own_parameter_names(module: nn.Module) -> list[str]:
    """The parameters of one module, without its children, under each of their names."""
    return list(module._parameters)


# -- other packages
# -----------------------------------------------------------------------------------------------------------


def event_writer(writer: Any) -> Any:
    """The event file of a SummaryWriter, opened again if it was closed; takes protocol buffers as
    they are.
    """
    return writer._get_file_writer()


def processes_of(pool: ProcessPoolExecutor) -> list[BaseProcess]:
    """The processes of a pool, to end them at once; Python 3.14 has `terminate_workers`."""
    return list((pool._processes or {}).values())
