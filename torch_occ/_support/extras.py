"""Packages that need not be installed, imported where they are used; who lacks one is told how to
get it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def extra(name: str, need: str) -> Iterator[None]:
    """Around an import: `need` says what needs which package, `name` is the extra that installs it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: pip install torch-occ[{name}]") from error


def progress_bar(total: int, done: int, unit: str, label: str = "") -> Any:
    """A bar on standard error, with its speed and the time that is left."""
    with extra("experiments", "the progress bar needs tqdm"):
        from tqdm import tqdm
    return tqdm(
        total=total,
        initial=done,
        desc=label or None,
        unit=unit,
        dynamic_ncols=True,
        mininterval=0.5,
    )


def summary_writer(directory: str | Path, **options: Any) -> Any:
    """TensorBoard's."""
    with extra("experiments", "logging needs tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(directory), **options)
