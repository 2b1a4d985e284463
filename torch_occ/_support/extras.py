"""Optional packages, imported where they are used; an error says how to install a missing one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def extra(name: str, need: str) -> Iterator[None]:
    """Turn an ImportError inside the block into one that says what to install.

    Args:
        name: the extra of torch-occ that installs the package.
        need: what needs which package, for the message.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: pip install torch-occ[{name}]") from error


def progress_bar(total: int, done: int, unit: str, label: str = "") -> Any:
    """A progress bar on standard error, with the speed and the time left."""
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
    """A SummaryWriter of TensorBoard."""
    with extra("experiments", "logging needs tensorboard"):
        from torch.utils.tensorboard import SummaryWriter
    return SummaryWriter(str(directory), **options)
