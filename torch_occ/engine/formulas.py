"""The weights and exponents of the terms as a function of t and the parameters, without torch.

The formula stands in torch_occ.schedules, torch_occ.catalog and torch_occ.regularizers, in torch. There it is recorded once, operation by
operation, and written out as two Python functions, the formula and its chain rule backwards, for whatever knows arithmetic: plain numbers,
many times as fast as scalar tensors; arrays, for a batch; tensors, where autograd must see it. `Formula.source` shows them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_occ.engine.arrays import list_exponents, terms_of
from torch_occ.regularizers import Regularizer

aten = torch.ops.aten


class Operation(NamedTuple):
    """y as an expression of operands {0}, {1}, and its partial derivatives in them, as Python."""

    value: str
    partials: tuple[str, ...]


#: By what torch calls them.
OPERATIONS = {
    aten.add.Tensor: Operation("{0} + {1}", ("1.0", "1.0")),
    aten.neg.default: Operation("-{0}", ("-1.0",)),
    aten.mul.Tensor: Operation("{0} * {1}", ("{1}", "{0}")),
    aten.div.Tensor: Operation("{0} / {1}", ("1.0 / {1}", "-{y} / {1}")),
    aten.reciprocal.default: Operation("1.0 / {0}", ("-{y} * {y}",)),
    aten.sqrt.default: Operation("sqrt({0})", ("0.5 / {y}",)),
    aten.pow.Tensor_Tensor: Operation("{0} ** {1}", ("{1} * {y} / {0}", "{y} * log({0})")),
}

#: Those that change nothing but the shape, which broadcasting takes care of.
SAME = {aten.expand.default, aten.alias.default, aten.detach.default}


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
        self._functions: dict[str, Any] = {"sqrt": _sqrt, "log": _log}
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
    inputs: list[Tensor] = [torch.tensor(2.0, dtype=torch.float64)]
    for slot, name in slots_of(regularizer):  # all different, even where one tensor stands in two places
        slot[name] = nn.Parameter(torch.tensor(0.5, dtype=torch.float64), requires_grad=False)
        inputs.append(slot[name])
    recorder = _Recorder(inputs)
    try:
        with recorder:
            terms = terms_of(regularizer, inputs[0])
        outputs = [recorder.name(x) for x in (*(term.weight for term in terms), *list_exponents(terms))]
    except _UnknownError:
        return None
    return Formula(len(inputs), recorder.instructions, outputs)


class _UnknownError(Exception):
    """An operation that cannot be replayed."""


class _Recorder(TorchDispatchMode):
    """Writes down what torch does with scalars."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.names = {id(x): f"x{i}" for i, x in enumerate(inputs)}
        self.instructions: list[tuple[Operation, list[str]]] = []
        self.seen: list[Tensor] = []  # kept, or their addresses would be given to others

    def name(self, x: Tensor | float) -> str:
        if isinstance(x, int | float):
            return f"({float(x)!r})"
        if id(x) not in self.names:
            raise _UnknownError
        return self.names[id(x)]

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in SAME:
            name = self.name(args[0])
        elif function == aten.full_like.default:
            name = self.name(args[1])
        elif function in OPERATIONS and not kwargs:
            name = f"y{len(self.instructions)}"
            self.instructions.append((OPERATIONS[function], [self.name(x) for x in args]))
        else:
            raise _UnknownError
        self.names[id(result)] = name
        self.seen.append(result)
        return result


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _added(names: Sequence[str]) -> str:
    return " + ".join(names) or "0.0"


def _sqrt(x: Any) -> Any:
    return math.sqrt(x) if type(x) is float else x**0.5


def _log(x: Any) -> Any:
    return math.log(x) if type(x) is float else x.log() if isinstance(x, Tensor) else np.log(x)
