"""Which backend solves or plays, torch or the compiled engine, and modules that are imported only
when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, get_args

Backend = Literal["auto", "torch", "engine"]


def later(module: str) -> Any:
    """The module `torch_occ.<module>`, imported when it is first asked for.

    Two kinds of modules wait: adapters to compiled kernels, since Numba takes long to import and
    need not be installed, and importers, which make MDPs of a class that is derived from theirs. No
    other module of the package imports inside a function.
    """
    return import_module(f"torch_occ.{module}")


def check_backend(backend: Backend) -> Backend:
    """One of the three."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected auto, torch or engine, got {backend!r}")
    return backend


def engine_takes(backend: Backend, why_not: Callable[[], str | None]) -> bool:
    """Whether the engine is to be used; an error that says why if it was asked for and cannot.

    Args:
        why_not: imports the engine, and returns the reason why it cannot do this, or None if it
            can.
    """
    if check_backend(backend) == "torch":
        return False
    try:
        reason = why_not()
    except ImportError as error:
        if backend == "engine":
            raise ImportError(
                "backend: the engine needs numba: pip install torch-occ[engine]"
            ) from error
        return False
    if reason is not None and backend == "engine":
        raise ValueError(f"backend: {reason}; use backend='torch'")
    return reason is None
