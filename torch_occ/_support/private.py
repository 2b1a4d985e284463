"""Every use of a private interface of another package; these may change with its next release.

Each function says what it replaces. No other module names a private interface of torch, Numba,
llvmlite or the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from importlib import import_module
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: What compilers and types are derived from, by module. It is imported when it is asked for:
#: `import torch_occ` shall not wait for Numba.
_ON_DEMAND = {
    "llvmlite": "ir",
    "llvmlite.binding": "parse_bitcode",
    "numba.core": "caching cgutils",
    "numba.core.codegen": "JITCodeLibrary",
    "numba.core.compiler": "Compiler compile_result",
    "numba.core.datamodel": "models",
    "numba.core.ir_utils": "alias_func_extensions",
    "numba.core.typeconv": "Conversion",
    "numba.core.typing.templates": "AbstractTemplate infer_global signature",
    "numba.np.arrayobj": "populate_array",
}


def __getattr__(name: str) -> Any:
    for module, names in _ON_DEMAND.items():
        if name in names.split():
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


#: Numba's option for kernels that neither allocate nor own arrays. Reference counting took half of
#: their time.
NO_REFERENCE_COUNTS: dict[str, Any] = {"_nrt": False}


# -- torch -------------------------------------------------------------------------------------


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


def has_tangent(x: Tensor) -> bool:
    """Whether x has a forward-mode tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def inside_transform() -> bool:
    """Whether a transform of torch.func is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def constant_in_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that torch.compile calls while it records a graph, and whose result it keeps.

    The public torch.compiler.assume_constant_result imports torch's compiler at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def refuse_compiled_derivatives() -> None:
    """Refuse torch.func.grad, vjp and jvp inside torch.compile, whose message shows its inside."""
    kinds = torch._C._functorch.TransformType
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() in (kinds.Grad, kinds.Jvp) for level in stack):
        raise NotImplementedError(
            "torch.compile: torch.func.grad, vjp and jvp of a step are not compiled; call them "
            "without torch.compile, or compile the step alone and use torch.autograd.grad"
        )


def carries_derivative(*tensors: Tensor) -> bool:
    """Whether autograd, forward mode or an enclosing transform may differentiate in any."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor if inside_transform() else has_tangent
    return any(x.requires_grad or has_tangent(x) or wrapped(x) for x in tensors)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed in place; nothing if one of inference mode does not say."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return []


def forward_modes() -> int:
    """The number of enclosing levels of torch.func's forward mode."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    return sum(level.key() == functorch.TransformType.Jvp for level in stack)


def values_are_hidden() -> bool:
    """Whether control flow cannot depend on values: in transforms, and inside torch.compile."""
    return torch.compiler.is_compiling() or inside_transform()


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A function that torch.compile calls between two graphs.

    The public torch.compiler.disable imports torch's compiler at once, which takes seconds.
    """
    return torch._compile._disable_dynamo(function)


def refuse_batched_derivatives(*tensors: Tensor | None) -> None:
    """Raise a RuntimeError if autograd batches derivatives in its old way, `is_grads_batched`."""
    check = torch._C._functorch.is_legacy_batchedtensor
    if any(x is not None and check(x) for x in tensors):
        raise RuntimeError(
            "is_grads_batched=True and vectorize=True do not work with this package; use "
            "torch.func.jacrev, torch.func.vmap over torch.func.vjp, or a loop over the gradients"
        )


#: What torch dispatches to outside of any operator.
_OUTSIDE = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


def with_autograd() -> AbstractContextManager[Any]:
    """Inside the implementation of an operator, let autograd record as it does outside.

    torch calls such code below autograd, where `enable_grad` has no effect.
    """
    return torch._C._ForceDispatchKeyGuard(*_OUTSIDE)


class _Readable(Tensor):
    """A tensor for which `float(x)` does not warn that x requires gradients.

    Every operation on it returns an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __float__(self) -> float:
        return float(self.item())


def readable(x: Tensor) -> Tensor:
    """The same tensor, still differentiable, for which `float(x)` does not warn."""
    return x if inside_transform() else x.as_subclass(_Readable)


def standard_gamma(shape: Tensor, generator: torch.Generator) -> Tensor:
    """Gamma variates, differentiable in the shape; torch.distributions takes no generator."""
    return torch._standard_gamma(shape, generator=generator)


def indices(p: Tensor) -> Tensor:
    """The stored indices of a COO tensor; `Tensor.indices` refuses one that is not coalesced."""
    return p._indices()


def held_by(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, children and hooks of a module, by name.

    `named_children` leaves out a child that occurs twice.
    """
    for table in (module._parameters, module._buffers, module._modules):
        yield from table.items()
    yield "hooks", [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of one module by name; `named_parameters` takes several microseconds."""
    return module._parameters


# -- other packages ----------------------------------------------------------------------------


def processes_of(pool: ProcessPoolExecutor) -> list[BaseProcess]:
    """The processes of a pool, to end them at once; Python 3.14 has `terminate_workers`."""
    return list((pool._processes or {}).values())
