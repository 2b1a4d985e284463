"""The weights and exponents of the terms as a function of t and the parameters, without torch.

The regularizers compute them in torch. `record` runs that computation once, with symbols in place
of tensors, and keeps it as a list of instructions. The list can be run on plain numbers (many times
faster than scalar tensors), on arrays for a batch, and on tensors for autograd. `pull_back` applies
the chain rule to it in reverse.
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

from torch_occ._support.private import own_parameter_names, parameter_slots
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.parametrized import Parametrized
from torch_occ.regularizers.places import Place
from torch_occ.step.compiled.inputs import list_exponents, spread, terms_of

# The last bit of a power or a logarithm depends on the implementation, and NumPy has several. A
# batch must have the same bits as its elements one by one, so arrays use Python's functions: 0.1 us
# per entry, where a solve takes several. Square roots are correctly rounded everywhere.
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
    """y = value(a, b), and its partial derivatives as functions of a, b and y.

    A function of a alone has one partial derivative.
    """

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
    """The name of an operation, and the indices of its operands; a single operand is repeated."""

    operation: str
    a: int
    b: int


class Formula:
    """A function from (t, *parameters) to K weights and K exponents.

    Exponents are 0 for functions other than powers. All values are in one list: the inputs, then
    the constants, then the result of every instruction. Inputs and results that are not numbers are
    in the spread form of torch_occ.regularizers.places.

    Args:
        places: of the inputs; None for t and for scalar parameters.
        constants: the constants in the formula.
        instructions: in the order of their results.
        outputs: the indices of the outputs in the list.
    """

    def __init__(
        self,
        places: Sequence[Place | None],
        constants: Sequence[float],
        instructions: Sequence[Instruction],
        outputs: Sequence[int],
    ) -> None:
        self._arguments = (places, constants, instructions, outputs)
        self.places, inputs = list(places), len(places)
        self.inputs, self.constants, self.outputs = inputs, list(constants), list(outputs)
        self.forwards = [(OPERATIONS[name].value, a, b) for name, a, b in instructions]
        # 2 if an exponent depends on the inputs, 1 if only weights do.
        exponents = self.outputs[len(self.outputs) // 2 :]
        fixed = range(inputs, inputs + len(constants))
        self.depth = 1 if all(i in fixed for i in exponents) else 2
        results = range(inputs + len(constants), inputs + len(constants) + len(instructions))
        # One entry per operand that is not a constant: the place of the result, of the operand, its
        # partial derivative, and the operands of that.
        self.backwards = [
            (k, place, partial, a, b)
            for k, (name, a, b) in reversed(list(zip(results, instructions, strict=True)))
            for place, partial in zip((a, b), OPERATIONS[name].partials, strict=False)
            if not inputs <= place < results.start
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by the arguments, because functions cannot be pickled."""
        return Formula, self._arguments

    def spread(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs in their spread form."""
        return [
            x if type(x) is float else spread(x, place)
            for x, place in zip(inputs, self.places, strict=True)
        ]

    def replay(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Run the formula on inputs in their spread form; return all values, and the outputs."""
        values = [*inputs, *self.constants]
        for value, a, b in self.forwards:
            values.append(value(values[a], values[b]))
        return values, [values[i] for i in self.outputs]

    def pull_back(self, values: Sequence[Any], bars: Sequence[Any]) -> list[Any]:
        """Return derivatives with respect to the inputs from those with respect to the outputs.

        All are in the spread form. They are not summed over dimensions that were broadcast.
        """
        total: list[Any] = [None] * len(values)
        for i, bar in zip(self.outputs, bars, strict=True):
            total[i] = bar if total[i] is None else total[i] + bar
        for k, place, partial, a, b in self.backwards:
            if total[k] is not None:
                bar = total[k] * partial(values[a], values[b], values[k])
                total[place] = bar if total[place] is None else total[place] + bar
        return [0.0 if bar is None else bar for bar in total[: self.inputs]]


@cache
def identity(count: int) -> Formula:
    """Return the formula whose outputs are its inputs, for terms that are known already."""
    return Formula([Place("pair", (), 0)] * count, (), (), range(count))  # spread already


def slots_of(regularizer: Regularizer) -> list[tuple[dict[str, Any], str]]:
    """Return the dictionary and name of each parameter.

    The values are read at each call, because `torch.func.functional_call` exchanges them.
    """
    return list(parameter_slots(regularizer))


def places_of(regularizer: Regularizer) -> list[Place | None]:
    """Return the place of each parameter, in the order of `slots_of`; None for a scalar."""
    return [
        module.place(name) if isinstance(module, Parametrized) else None
        for module in regularizer.modules()
        for name in own_parameter_names(module)
    ]


def record(regularizer: Regularizer) -> Formula | None:
    """Record the formula of a regularizer.

    Returns:
        None if a part is not built in, or uses an operation that is not in OPERATIONS.
    """
    for module in regularizer.modules():
        # A user's schedule may compute something else at every call.
        if not type(module).__module__.startswith(("torch_occ.", "torch.nn.")):
            return None
    skipped = {id(slot[name]): None for slot, name in slots_of(regularizer)}
    regularizer = copy.deepcopy(regularizer, skipped)  # without the parameters
    slots = slots_of(regularizer)
    tape = _Tape([None, *places_of(regularizer)])
    t = _Symbol(tape, ("input", 0))
    for i, (slot, name) in enumerate(slots):
        slot[name] = _Symbol(tape, ("input", i + 1))
    try:
        terms = terms_of(regularizer, t)  # type: ignore[arg-type]
        found = (*(term.weight for term in terms), *list_exponents(terms))
        outputs = [tape.place(x) for x in found]
    except (TypeError, AttributeError):  # an operation that symbols do not have
        return None
    return tape.formula(outputs)


#: The place of a value: its kind, and its index among the values of this kind.
_Place = tuple[Literal["input", "constant", "result"], int]


class _Tape:
    """A record of the operations on symbols, and of the constants in them.

    Indices in the list of all values are known only when all constants are.
    """

    def __init__(self, places: Sequence[Place | None]) -> None:
        self.places, self.constants = places, list[float]()
        self.done: list[tuple[str, _Place, _Place]] = []

    def place(self, x: Any) -> _Place:
        if isinstance(x, _Symbol):
            return x.place
        if isinstance(x, int | float):
            self.constants.append(float(x))
            return ("constant", len(self.constants) - 1)
        raise TypeError(f"a formula cannot contain a {type(x).__name__}")

    def add(self, operation: str, *operands: Any) -> _Symbol:
        places = [self.place(x) for x in operands]
        self.done.append((operation, places[0], places[-1]))
        return _Symbol(self, ("result", len(self.done) - 1))

    def formula(self, outputs: Sequence[_Place]) -> Formula:
        inputs = len(self.places)
        first = {"input": 0, "constant": inputs, "result": inputs + len(self.constants)}

        def index(place: _Place) -> int:
            return first[place[0]] + place[1]

        instructions = [Instruction(operation, index(a), index(b)) for operation, a, b in self.done]
        return Formula(
            self.places, self.constants, instructions, [index(place) for place in outputs]
        )


class _Symbol:
    """A stand-in for a scalar tensor that records the operations on it."""

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
        return self  # broadcasting does the same later

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.full_like:
            return args[1]
        return NotImplemented  # torch raises a TypeError then
