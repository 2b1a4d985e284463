"""The weights and exponents of the terms as a function of t and the parameters, without torch.

The formula stands in torch_occ.regularizers, in torch. It is recorded there once, with symbols in place of tensors, as a list of
instructions. A list runs on whatever knows arithmetic: plain numbers, many times as fast as scalar tensors; arrays, for a batch; tensors,
where autograd must see it. The chain rule runs through it backwards.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import parameter_slots
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.kernel_inputs import list_exponents, terms_of

# The last bit of a power or a logarithm depends on who computes it, and NumPy has several functions
# for one processor. A batch is to have the bits of its elements, so arrays go through Python's, one
# by one: 0.1 us each, where a solve takes several. Roots are correctly rounded by all.
_powers: Any = np.frompyfunc(operator.pow, 2, 1)
_logs: Any = np.frompyfunc(math.log, 1, 1)


def _sqrt(x: Any) -> Any:
    return math.sqrt(x) if type(x) is float else x.sqrt() if isinstance(x, Tensor) else np.sqrt(x)


def _power(x: Any, p: Any) -> Any:
    if isinstance(x, np.ndarray) or isinstance(p, np.ndarray):
        return _powers(x, p).astype(np.float64)
    return x**p


def _log(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return _logs(x).astype(np.float64)
    return math.log(x) if type(x) is float else x.log()


class Operation(NamedTuple):
    """y = value(a, b), and its partial derivatives as functions of a, b and y; one operand for a function of a alone."""

    value: Callable[[Any, Any], Any]
    partials: tuple[Callable[[Any, Any, Any], Any], ...]


OPERATIONS = {
    "add": Operation(operator.add, (lambda a, b, y: 1.0, lambda a, b, y: 1.0)),
    "negate": Operation(lambda a, b: -a, (lambda a, b, y: -1.0,)),
    "multiply": Operation(operator.mul, (lambda a, b, y: b, lambda a, b, y: a)),
    "divide": Operation(operator.truediv, (lambda a, b, y: 1.0 / b, lambda a, b, y: -y / b)),
    "root": Operation(lambda a, b: _sqrt(a), (lambda a, b, y: 0.5 / y,)),
    "power": Operation(_power, (lambda a, b, y: b * y / a, lambda a, b, y: y * _log(a))),
}


class Instruction(NamedTuple):
    """The name of an operation and the places of its operands among all values; a single operand stands twice."""

    operation: str
    a: int
    b: int


class Formula:
    """(t, *parameters) -> K weights and K exponents, 0 for functions other than powers.

    All values stand in one list: the inputs, then constants, then the result of every instruction.

    Args:
        inputs: how many there are.
        constants: numbers that the formula has.
        instructions: in the order of their results.
        outputs: places of the results.
    """

    def __init__(
        self,
        inputs: int,
        constants: Sequence[float],
        instructions: Sequence[Instruction],
        outputs: Sequence[int],
    ) -> None:
        self._arguments = (inputs, constants, instructions, outputs)
        self.inputs, self.constants, self.outputs = inputs, list(constants), list(outputs)
        self.forwards = [(OPERATIONS[name].value, a, b) for name, a, b in instructions]
        results = range(inputs + len(constants), inputs + len(constants) + len(instructions))
        self.backwards = [
            (k, OPERATIONS[name].partials, a, b)
            for k, (name, a, b) in zip(results, instructions, strict=True)
        ][::-1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its instructions."""
        return Formula, self._arguments

    def replay(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """All values, and the outputs."""
        values = [*inputs, *self.constants]
        for value, a, b in self.forwards:
            values.append(value(values[a], values[b]))
        return values, [values[i] for i in self.outputs]

    def pull_back(self, values: Sequence[Any], bars: Sequence[Any]) -> list[Any]:
        """From derivatives in the outputs to derivatives in the inputs. Shapes that were broadcast are not summed."""
        total: list[Any] = [0.0] * len(values)
        for i, bar in zip(self.outputs, bars, strict=True):
            total[i] = total[i] + bar
        for k, partials, a, b in self.backwards:
            for place, partial in zip((a, b), partials, strict=False):
                total[place] = total[place] + total[k] * partial(values[a], values[b], values[k])
        return total[: self.inputs]


@cache
def identity(count: int) -> Formula:
    """For terms that are known already."""
    return Formula(count, (), (), range(count))


def slots_of(regularizer: Regularizer) -> list[tuple[dict[str, Any], str]]:
    """Where its parameters are. Dictionaries, because `torch.func.functional_call` exchanges what is in them."""
    return list(parameter_slots(regularizer))


def record(regularizer: Regularizer) -> Formula | None:
    """The formula of a regularizer, or None if something in it is not built in, or does what this module has no name for."""
    if not all(
        type(module).__module__.startswith(("torch_occ.", "torch.nn."))
        for module in regularizer.modules()
    ):
        return None  # somebody else's schedule may do anything, and something else tomorrow
    regularizer = copy.deepcopy(
        regularizer, {id(slot[name]): None for slot, name in slots_of(regularizer)}
    )  # all but the parameters
    slots = slots_of(regularizer)
    tape = _Tape(1 + len(slots))
    t = _Symbol(tape, ("input", 0))
    for i, (slot, name) in enumerate(slots):
        slot[name] = _Symbol(tape, ("input", i + 1))
    try:
        terms = terms_of(regularizer, t)  # type: ignore[arg-type]
        outputs = [
            tape.place(x) for x in (*(term.weight for term in terms), *list_exponents(terms))
        ]
    except (TypeError, AttributeError):  # something that a symbol does not know
        return None
    return tape.formula(outputs)


#: Where a value stands: among the inputs, the constants or the results.
_Place = tuple[Literal["input", "constant", "result"], int]


class _Tape:
    """What was done with the symbols. Where results stand is known when all constants are."""

    def __init__(self, inputs: int) -> None:
        self.inputs, self.constants = inputs, list[float]()
        self.done: list[tuple[str, _Place, _Place]] = []

    def place(self, x: Any) -> _Place:
        if isinstance(x, _Symbol):
            return x.place
        if isinstance(x, int | float):
            self.constants.append(float(x))
            return ("constant", len(self.constants) - 1)
        raise TypeError(f"no place for {type(x).__name__}")

    def add(self, operation: str, *operands: Any) -> _Symbol:
        places = [self.place(x) for x in operands]
        self.done.append((operation, places[0], places[-1]))
        return _Symbol(self, ("result", len(self.done) - 1))

    def formula(self, outputs: Sequence[_Place]) -> Formula:
        first = {"input": 0, "constant": self.inputs, "result": self.inputs + len(self.constants)}

        def index(place: _Place) -> int:
            return first[place[0]] + place[1]

        instructions = [Instruction(operation, index(a), index(b)) for operation, a, b in self.done]
        return Formula(
            self.inputs, self.constants, instructions, [index(place) for place in outputs]
        )


class _Symbol:
    """Stands for a scalar tensor, and writes down what is done with it."""

    def __init__(self, tape: _Tape, place: _Place) -> None:
        self.tape, self.place = tape, place

    def __add__(self, other: Any) -> _Symbol:
        return self.tape.add("add", self, other)

    def __neg__(self) -> _Symbol:
        return self.tape.add("negate", self)

    def __mul__(self, other: Any) -> _Symbol:
        return self.tape.add("multiply", self, other)

    def __truediv__(self, other: Any) -> _Symbol:
        return self.tape.add("divide", self, other)

    def __rtruediv__(self, other: Any) -> _Symbol:
        return self.tape.add("divide", other, self)

    def __pow__(self, other: Any) -> _Symbol:
        return self.tape.add("power", self, other)

    __radd__, __rmul__ = __add__, __mul__

    def __bool__(self) -> bool:
        raise TypeError("a symbol has no value")

    def sqrt(self) -> _Symbol:
        return self.tape.add("root", self)

    def dim(self) -> int:
        return 0

    def expand_as(self, other: Any) -> _Symbol:
        return self  # shapes are left to broadcasting

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.full_like:
            return args[1]
        return NotImplemented  # which torch makes a TypeError
