"""The weights and exponents of the terms as a function of t and the parameters, without torch.

The formula stands in torch_occ.schedules, torch_occ.catalog and torch_occ.regularizers, in torch. There it is recorded once, by symbols in
place of tensors, and written out as two Python functions, the formula and its chain rule backwards, for whatever knows arithmetic: plain
numbers, many times as fast as scalar tensors; arrays, for a batch; tensors, where autograd must see it. `Formula.source` shows them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.arrays import list_exponents, terms_of
from torch_occ.regularizers import Regularizer


class Operation(NamedTuple):
    """y as an expression of operands {0}, {1}, and its partial derivatives in them, as Python."""

    value: str
    partials: tuple[str, ...]


ADD = Operation("{0} + {1}", ("1.0", "1.0"))
NEGATE = Operation("-{0}", ("-1.0",))
MULTIPLY = Operation("{0} * {1}", ("{1}", "{0}"))
DIVIDE = Operation("{0} / {1}", ("1.0 / {1}", "-{y} / {1}"))
ROOT = Operation("sqrt({0})", ("0.5 / {y}",))
POWER = Operation("power({0}, {1})", ("{1} * {y} / {0}", "{y} * log({0})"))


class Formula:
    """(t, *parameters) -> K weights and K exponents, 0 for functions other than powers.

    Args:
        inputs: how many there are; they are called x0, x1, ...
        instructions: operations with the names of their operands; their results are called y0, y1, ...
        outputs: names, or numbers as they are written.
    """

    def __init__(self, inputs: int, instructions: Sequence[tuple[Operation, Sequence[str]]], outputs: Sequence[str]) -> None:
        self._arguments = (inputs, instructions, outputs)
        names = [*(f"x{i}" for i in range(inputs)), *(f"y{k}" for k in range(len(instructions)))]
        lines = [f"def replay({_listed(names[:inputs])}):"]
        lines += [f"    y{k} = {operation.value.format(*operands)}" for k, (operation, operands) in enumerate(instructions)]
        lines += [
            f"    return ({_listed(names)},), [{_listed(outputs)}]",
            "",
            "def pull_back(values, bars):",
            f"    {_listed(names)}, = values",
        ]
        bars: dict[str, list[str]] = {name: [] for name in names}  # what is to be added up
        for i, output in enumerate(outputs):
            bars.get(output, []).append(f"bars[{i}]")
        for k, (operation, operands) in reversed(list(enumerate(instructions))):
            lines.append(f"    y{k}_bar = {_added(bars[f'y{k}'])}")
            for operand, partial in zip(operands, operation.partials, strict=True):
                bars.get(operand, []).append(f"y{k}_bar * ({partial.format(*operands, y=f'y{k}')})")
        lines.append(f"    return [{_listed(_added(bars[name]) for name in names[:inputs])}]")
        self.source = "\n".join(lines)
        self._functions: dict[str, Any] = {"sqrt": _sqrt, "power": _power, "log": _log}
        exec(self.source, self._functions)

    def __reduce__(self) -> tuple[Any, ...]:
        """Functions that were compiled here cannot be pickled; they are written out again."""
        return Formula, self._arguments

    def replay(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
        """All values on the way, and the outputs."""
        found: tuple[tuple[Any, ...], list[Any]] = self._functions["replay"](*inputs)
        return found

    def pull_back(self, values: Sequence[Any], bars: Sequence[Any]) -> list[Any]:
        """From derivatives in the outputs to derivatives in the inputs. Shapes that were broadcast are not summed."""
        found: list[Any] = self._functions["pull_back"](values, bars)
        return found


@cache
def identity(count: int) -> Formula:
    """For terms that are known already."""
    return Formula(count, (), [f"x{i}" for i in range(count)])


def slots_of(regularizer: Regularizer) -> list[tuple[dict[str, Any], str]]:
    """Where its parameters are. Dictionaries, because `torch.func.functional_call` exchanges what is in them."""
    return [(module._parameters, name) for module in regularizer.modules() for name in module._parameters]


def record(regularizer: Regularizer) -> Formula | None:
    """The formula of a regularizer, or None if something in it is not built in, or does what this module has no name for."""
    if not all(type(module).__module__.startswith(("torch_occ.", "torch.nn.")) for module in regularizer.modules()):
        return None  # somebody else's schedule may do anything, and something else tomorrow
    regularizer = copy.deepcopy(regularizer, {id(slot[name]): None for slot, name in slots_of(regularizer)})  # all but the parameters
    record: list[tuple[Operation, list[str]]] = []
    slots, t = slots_of(regularizer), _Symbol("x0", record)
    for i, (slot, name) in enumerate(slots):
        slot[name] = _Symbol(f"x{i + 1}", record)
    try:
        terms = terms_of(regularizer, t)  # type: ignore[arg-type]
        outputs = [_name(x) for x in (*(term.weight for term in terms), *list_exponents(terms))]
    except (TypeError, AttributeError):  # something that a symbol does not know
        return None
    return Formula(1 + len(slots), record, outputs)


class _Symbol:
    """Stands for a scalar tensor, and writes down what is done with it."""

    def __init__(self, name: str, record: list[tuple[Operation, list[str]]]) -> None:
        self.name, self.record = name, record

    def _new(self, operation: Operation, *operands: Any) -> _Symbol:
        self.record.append((operation, [_name(x) for x in operands]))
        return _Symbol(f"y{len(self.record) - 1}", self.record)

    def __add__(self, other: Any) -> _Symbol:
        return self._new(ADD, self, other)

    def __neg__(self) -> _Symbol:
        return self._new(NEGATE, self)

    def __mul__(self, other: Any) -> _Symbol:
        return self._new(MULTIPLY, self, other)

    def __truediv__(self, other: Any) -> _Symbol:
        return self._new(DIVIDE, self, other)

    def __rtruediv__(self, other: Any) -> _Symbol:
        return self._new(DIVIDE, other, self)

    def __pow__(self, other: Any) -> _Symbol:
        return self._new(POWER, self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value")

    def sqrt(self) -> _Symbol:
        return self._new(ROOT, self)

    def dim(self) -> int:
        return 0

    def expand_as(self, other: Any) -> _Symbol:
        return self  # shapes are left to broadcasting

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function is torch.full_like:
            return args[1]
        return NotImplemented  # which torch makes a TypeError


def _name(x: Any) -> str:
    if isinstance(x, _Symbol):
        return x.name
    if isinstance(x, int | float):
        return f"({float(x)!r})"
    raise TypeError(f"no name for {type(x).__name__}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _added(names: Sequence[str]) -> str:
    return " + ".join(names) or "0.0"


def _sqrt(x: Any) -> Any:
    return math.sqrt(x) if type(x) is float else x.sqrt() if isinstance(x, Tensor) else np.sqrt(x)  # correctly rounded by all three


# The last bit of a power or a logarithm depends on who computes it, and NumPy has several functions for one processor. A batch is to have
# the bits of its elements, so arrays go through Python's one by one: 0.1 us each, where a solve takes several.
_powers, _logs = np.frompyfunc(pow, 2, 1), np.frompyfunc(math.log, 1, 1)


def _power(x: Any, p: Any) -> Any:
    if isinstance(x, np.ndarray) or isinstance(p, np.ndarray):
        return _powers(x, p).astype(np.float64)
    return x**p


def _log(x: Any) -> Any:
    return math.log(x) if type(x) is float else x.log() if isinstance(x, Tensor) else _logs(x).astype(np.float64)
