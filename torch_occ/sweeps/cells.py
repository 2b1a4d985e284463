"""Cells of a sweep, failures, and the code that a worker runs for a cell."""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch

Config = dict[str, Any]
Function = Callable[[Config], dict[str, Any]]


def grid(**axes: Iterable[Any]) -> list[Config]:
    """All combinations of the values, with the last axis fastest.

    `grid(gamma=[0.5, 1.0], seed=range(3))` has six cells. Join grids with `+`.

    Returns:
        One configuration, a dictionary, per cell.
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclass(frozen=True)
class Failure:
    """A cell that raised an exception, or whose process died repeatedly."""

    config: Config
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{json.dumps(self.config)}: {self.error}"


@dataclass(frozen=True)
class Cell:
    """A configuration and the name of its file."""

    config: Config
    key: str


Work = Generator[tuple[Cell, dict[str, Any] | Failure], None, None]


def attempt(function: Function, config: Config) -> dict[str, Any] | Failure:
    """Run a cell in a worker; return its result, or a Failure that describes the exception."""
    # One thread per cell: cells run in parallel, and sums have a fixed order.
    torch.set_num_threads(1)
    try:
        result = function(config)
        if not isinstance(result, dict) or set(result) & set(config):
            raise TypeError(
                "the function must return a dictionary with keys other than the configuration's, "
                f"got {result!r}"
            )
        # As it will be read from its file; floats keep every bit.
        found: dict[str, Any] = json.loads(json.dumps(result))
    except Exception as error:
        return Failure(config, f"{type(error).__name__}: {error}", traceback.format_exc())
    return found
