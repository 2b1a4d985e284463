"""Choices at run time: torch or the engine, and optional packages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal, get_args

Backend = Literal["auto", "torch", "engine"]


def later(module: str) -> Any:
    """Import the module `torch_occ.<module>` on demand.

    Adapters to compiled kernels need Numba, which is slow to import. Importers build MDPs of a
    class that is derived from the class that calls them. Nothing else is imported in functions.
    """
    return import_module(f"torch_occ.{module}")


def former(package: str, name: str, moved: dict[str, str], gone: dict[str, str]) -> Any:
    """What a former name of a package stands for, with a warning, or an AttributeError.

    `moved` has the names of each module where they are now, `gone` the advice for removed names.
    """
    for module, names in moved.items():
        if name in names.split():
            text = f"{package}.{name} is {package}.{module}.{name} now"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            return getattr(import_module(f"{package}.{module}"), name)
    for names, advice in gone.items():
        if name in names.split():
            raise AttributeError(f"{package}.{name} was removed: {advice}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def check_backend(backend: Backend) -> Backend:
    """Raise a ValueError if `backend` is none of these; return it."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend: expected auto, torch or engine, got {backend!r}")
    return backend


def engine_takes(backend: Backend, why_not: Callable[[], str | None]) -> bool:
    """Whether to use the engine; an error if it is demanded and cannot do this work.

    `why_not` imports the engine and returns the reason why it cannot, or None.
    """
    if check_backend(backend) == "torch":
        return False
    try:
        reason = why_not()
    except ImportError as error:
        if backend == "engine":
            raise ImportError(f"backend: the engine cannot be imported: {error}") from error
        _without_engine(str(error))
        return False
    if reason is not None and backend == "engine":
        raise ValueError(f"backend: {reason}; use backend='torch'")
    return reason is None


@cache
def _without_engine(reason: str) -> None:
    """Warn once that the engine cannot be imported."""
    warnings.warn(
        f"torch_occ: the engine cannot be imported ({reason}), and torch is used, which is up to "
        "hundreds of times slower. Install Numba, or say backend='torch'.",
        stacklevel=2,
    )


@contextmanager
def extra(name: str, need: str) -> Iterator[None]:
    """Turn an ImportError into one that says what (`need`) requires which extra of torch-occ."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: pip install 'torch-occ[{name}]'") from error


def wants_bar(progress: bool | None) -> bool:
    """Whether to show a progress bar: if asked for, and by default (None) on a terminal with tqdm.

    The bars of processes of a pool would mix.
    """
    if progress is not None:
        return progress
    return sys.stderr.isatty() and parent_process() is None and find_spec("tqdm") is not None


def progress_bar(total: int, done: int, unit: str, label: str = "", after: float = 0.0) -> Any:
    """A progress bar on standard error, with the speed and the time left, after some seconds."""
    with extra("experiments", "the progress bar needs tqdm"):
        from tqdm import tqdm
    shown = {"desc": label or None, "unit": unit, "dynamic_ncols": True}
    return tqdm(total=total, initial=done, mininterval=0.5, miniters=0, delay=after, **shown)


def summary_writer(directory: str | Path, **options: Any) -> Any:
    """A SummaryWriter of TensorBoard."""
    with extra("experiments", "logging needs tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(directory), **options)
