"""The cells of a sweep: what they are made of, and what a worker does with one."""

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
    """All combinations, the last axis fastest: `grid(gamma=[0.5, 1.0], seed=range(3))` has six
    cells. Grids add up with `+`.
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclass(frozen=True)
class Failure:
    """A cell that raised an exception or lost its process again and again."""

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
    """What a worker does: run a cell, and turn whatever goes wrong into words."""
    # one cell, one thread: cells run beside each other, and sums are added up in one order
    torch.set_num_threads(1)
    try:
        result = function(config)
        if not isinstance(result, dict) or set(result) & set(config):
            raise TypeError(
                "the function must return a dictionary with keys other than the configuration's, "
                f"got {result!r}"
            )
        # as it will be read from its file; floats keep every bit
        found: dict[str, Any] = json.loads(json.dumps(result))
    except Exception as error:
        return Failure(config, f"{type(error).__name__}: {error}", traceback.format_exc())
    return found
