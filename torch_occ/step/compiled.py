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
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.constants import DEAD, SQUARE
from torch_occ._support.private import (
    in_forward_mode,
    own_parameter_names,
    parameter_slots,
    refuse_batched_derivatives,
)
from torch_occ.engine.batch import BAD_INPUT
from torch_occ.engine.layout import Floats, Kinds, Model, Rows
from torch_occ.engine.newton import SMALLEST
from torch_occ.engine.sparse import sweep_all
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import SparseLayer
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import TabularRegularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.parameters import Parametrized, PerPair, PerState, Place, Value, fit
from torch_occ.regularizers.terms import Power, Term
from torch_occ.step.arrays import (
    ONE,
    Groups,
    World,
    followed,
    kinds_of,
    list_exponents,
    number,
    pays_off,
    plain,
    rows,
    rows_of,
    shaped,
    spread,
    summed,
    tabulate,
    terms_of,
    untabulate,
    why_not_world,
)
from torch_occ.step.checks import (
    check_arguments,
    check_layout,
    check_probabilities,
    check_types,
    check_values,
    parameter_shapes,
)
from torch_occ.step.entropic import Entropy, Task, entropy_of, is_entropy, solve_entropic
from torch_occ.step.implicit import (
    Bound,
    ImplicitSolution,
    Setting,
    Stationarity,
    poison,
    push_forward,
)
from torch_occ.step.problem import with_rank
from torch_occ.step.solution import Options, Solution
from torch_occ.step.system import SeparableStates, Swept

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
    in the spread form of torch_occ.regularizers.parameters.

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
            (k, place, slope, a, b)
            for k, (name, a, b) in reversed(list(zip(results, instructions, strict=True)))
            for place, slope in zip((a, b), OPERATIONS[name].partials, strict=False)
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
        for k, place, slope, a, b in self.backwards:
            if total[k] is not None:
                bar = total[k] * slope(values[a], values[b], values[k])
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


# -- Terms whose weights and exponents are parameters, for derivatives on the torch path -----------


class Explicit(TabularRegularizer):
    """A table of terms whose weights and exponents are its parameters.

    Args:
        terms: the template.
        mdp: given if weights and exponents differ between pairs.
    """

    def __init__(self, terms: Sequence[Term], mdp: LayeredMDP | None) -> None:
        self.terms = tuple(terms)

        def value(term: Term, x: Tensor | float) -> Value:
            x = torch.as_tensor(x)
            if mdp is None:
                return fit(x, 0)
            return PerState(mdp, fit(x, 1)) if term.argument == "state" else PerPair(mdp, x)

        powers = {
            f"p{i}": value(term, term.function.p)
            for i, term in enumerate(terms)
            if isinstance(term.function, Power)
        }
        weights = {f"w{i}": value(term, term.weight) for i, term in enumerate(terms)}
        super().__init__(**weights, **powers)

    def table(self) -> tuple[Term, ...]:
        functions = [
            Power(getattr(self, f"p{i}")) if isinstance(term.function, Power) else term.function
            for i, term in enumerate(self.terms)
        ]
        return tuple(
            Term(term.argument, functions[i], getattr(self, f"w{i}"))
            for i, term in enumerate(self.terms)
        )


def in_form(term: Term, x: Tensor | float, pairs: torch.Size | None) -> Tensor:
    """Return a weight or exponent in the shape that it has in `Explicit`, from its spread form.

    Args:
        pairs: `(S, A)` if weights and exponents differ between pairs.
    """
    x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    if pairs is None:
        return fit(x, 0)
    event_dims = 1 if term.argument == "state" else 2
    return fit(x, event_dims).expand(*x.shape[:-2], *pairs[:event_dims])


# -- Derivatives of a compiled step: by kernels where possible, by the torch path elsewhere --------
#
# The kernels differentiate q and v with respect to the weights and exponents of the terms; a
# formula differentiates those with respect to t and the parameters. Forward mode in the terms and
# second derivatives use the torch path, with the weights and exponents as parameters of the
# regularizer.


class Found(NamedTuple):
    """The solutions of a batch, in rows; the status may be BAD_INPUT."""

    q: Floats  # (N * S, A)
    v: Floats  # (N * S,)
    certificate: Floats  # (N, 5)

    def tensors(self, batch: torch.Size, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return q and v as tensors that share memory with these arrays."""
        if not batch:
            return torch.from_numpy(self.q), torch.from_numpy(self.v)
        q, v = self.q.reshape(*batch, *shape), self.v.reshape(*batch, shape[0])
        return torch.from_numpy(q), torch.from_numpy(v)


class Origin(NamedTuple):
    """All that the derivative of a solution needs, apart from tensors."""

    step: CompiledStep
    world: World
    formula: Formula
    replayed: list[Any]  # all values of the formula
    terms: Floats  # (2, N or 1, K or K * S * A), weights and exponents
    found: Found
    batch: torch.Size
    converged: bool

    @property
    def has_dead(self) -> bool:
        """Whether some q(s) is so small that v must be differentiated in logarithms."""
        return self.step.in_logs and bool((self.found.q.sum(-1) < DEAD).any())

    @property
    def certificate(self) -> Tensor:
        return torch.from_numpy(self.found.certificate.reshape(*self.batch, 5))

    def linear(
        self, q: Tensor, x: Tensor | None, r: Tensor | None, wanted: int = 0
    ) -> tuple[Floats, Floats, Floats]:
        """Solve H(q) u - E'm = -x, E u = r. Failed elements are NaN.

        Args:
            wanted: 1 to differentiate ⟨u, grad psi(q)⟩ with respect to the weights, 2 with respect
                to weights and exponents, 0 otherwise.

        Returns:
            u, m, and these derivatives, `(wanted, N, K or K * S * A)`.
        """
        if x is None or not self.converged:
            x = torch.zeros_like(q) if x is None else x
            r = torch.zeros_like(q[..., 0]) if r is None else r
            x, r = poison((q, q, self.certificate), (x, r))
        right = self.step.zeros if r is None else rows(r, self.batch, 1)
        given = (self.terms, self.found.q, rows(x, self.batch, 2), right)
        return self.step.groups.linear(self.world, self.batch, *given, wanted)


class Follow(torch.autograd.Function):
    """(q, v), which are known already, as a function of the loss and the formula's inputs.

    The probabilities follow if they are differentiated.
    """

    @staticmethod
    def forward(ctx: Any, origin: Origin, loss: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, v = origin.found.tensors(origin.batch, origin.step.shape)
        ctx.origin, ctx.numbers = origin, [None if isinstance(x, Tensor) else x for x in inputs]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(q, loss, *tensors)
        if in_forward_mode():
            ctx.save_for_forward(q, loss, *tensors)
        ctx.set_materialize_grads(False)
        return q, v

    @staticmethod
    def backward(ctx: Any, q_bar: Tensor | None, v_bar: Tensor | None) -> tuple[Any, ...]:
        origin: Origin = ctx.origin
        batch, needed = origin.batch, ctx.needs_input_grad[1:]
        if q_bar is None and v_bar is None:  # as after the envelope theorem (torch_occ.learning)
            return None, *[None] * len(needed)
        refuse_batched_derivatives(q_bar, v_bar)
        q, loss, inputs = _saved(ctx)
        if torch.is_grad_enabled() or in_forward_mode():  # this pass is differentiated, too
            with torch.enable_grad():
                return None, *_differentiably(origin, q, (loss, *inputs), needed, q_bar, v_bar)
        if origin.has_dead:
            with torch.enable_grad():
                again = _differentiably(origin, q, (loss, *inputs), needed, q_bar, v_bar)
            return None, *(None if x is None else x.detach() for x in again)
        # The system is K' and not K: the sign of v_bar differs.
        last = 1 + origin.formula.inputs  # the probabilities follow
        wanted = origin.formula.depth if any(needed[1:last]) else 0
        minus_x_bar, r_bar, bars = origin.linear(q, q_bar, v_bar, wanted)
        loss_bar = torch.from_numpy(minus_x_bar.reshape(q.shape))
        found = [summed(loss_bar, loss) if needed[0] else None, *[None] * (len(needed) - 1)]
        if wanted:
            formula, pairs = origin.formula, origin.step.pairs
            given = untabulate(bars, batch, pairs)
            given += [0.0] * (len(formula.outputs) - len(given))  # exponents that are constants
            pulled = formula.pull_back(origin.replayed, given)
            found[1:last] = [
                shaped(bar, x, place, batch, pairs) if need else None
                for bar, x, place, need in zip(
                    pulled, inputs[: last - 1], formula.places, needed[1:last], strict=True
                )
            ]
        if any(needed[last:]):
            v = origin.found.tensors(batch, origin.step.shape)[1]
            m = torch.from_numpy(r_bar.reshape(v.shape))
            found[last:] = origin.world.pull_back(q, v, loss_bar, m, needed[last:])
        return None, *found

    @staticmethod
    def jvp(ctx: Any, _origin: None, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        origin: Origin = ctx.origin
        refuse_batched_derivatives(*tangents)
        q, loss, inputs = _saved(ctx)
        if origin.has_dead:
            return _push(origin, q, (loss, *inputs), tangents)
        last = 1 + origin.formula.inputs  # the probabilities follow
        x = torch.zeros_like(q) if tangents[0] is None else tangents[0].expand_as(q)
        r = None
        if any(tangent is not None for tangent in tangents[1:last]):
            moved = inputs[: last - 1], tangents[1:last]
            x = x + origin.step.push_gradient(origin.formula, q, *moved)
        if any(tangent is not None for tangent in tangents[last:]):
            v = origin.found.tensors(origin.batch, origin.step.shape)[1]
            more, r = origin.world.push_forward(q, v, tangents[last:])
            x = x + more
        u, m, _ = origin.linear(q, x, r)
        return origin.found._replace(q=u, v=m).tensors(origin.batch, origin.step.shape)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """Return q, the loss, and the other inputs."""
    q, loss, *tensors = ctx.saved_tensors
    rest = iter(tensors)
    return q, loss, [next(rest) if x is None else x for x in ctx.numbers]


def _push(
    origin: Origin, q: Tensor, inputs: Sequence[Any], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Compute the derivative along tangents on the torch path."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def again(*moved: Tensor) -> tuple[Tensor, Tensor]:
        given = list(inputs)
        for i, x in zip(moving, moved, strict=True):
            given[i] = x
        return origin.step.replay(origin.formula, origin.world.mdp, q, given[0], given[1:])

    return push_forward(again, [inputs[i] for i in moving], [tangents[i] for i in moving])


def _differentiably(
    origin: Origin,
    q: Tensor,
    inputs: Sequence[Any],
    needed: Sequence[bool],
    q_bar: Tensor | None,
    v_bar: Tensor | None,
) -> list[Tensor | None]:
    """Run the backward pass in differentiable operations."""
    v = origin.found.tensors(origin.batch, origin.step.shape)[1]
    q_bar = torch.zeros_like(q) if q_bar is None else q_bar
    v_bar = torch.zeros_like(v) if v_bar is None else v_bar
    again = origin.step.replay(origin.formula, origin.world.mdp, q, inputs[0], inputs[1:])
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    bars = poison((q, v, origin.certificate), (q_bar, v_bar))
    grads = torch.autograd.grad(again, wanted, bars, create_graph=True, allow_unused=True)
    found = iter(grads)
    return [next(found) if need else None for need in needed]


# -- The engine of `FTRLStep`: compiled solves of a batch of problems ------------------------------
#
# Each problem has its own loss, t, warm start and parameters, and may have its own transitions. The
# kernels read weights and exponents of the elementary terms. A formula
# (torch_occ.step.compiled) computes them from t and the parameters. For regularizers with
# parts written by a user, torch computes them.


_SINGLE = torch.Size()


class CompiledStep:
    """min ⟨q, loss⟩ + psi_t(q) in compiled kernels, for tensors outside torch.func transforms."""

    def __init__(self, mdp: LayeredMDP, regularizer: Regularizer, options: Options) -> None:
        self.mdp, self.regularizer, self.options = mdp, regularizer, options
        self.shape = torch.Size((mdp.num_states, mdp.num_actions))
        self.tolerance = options.tolerance_in(torch.float64)
        self.zeros = np.zeros(mdp.num_states)
        # The shape of weights and exponents: one per pair if a parameter has one per layer, ...
        self.pairs = self.shape if regularizer.places() else ONE
        self.slots = slots_of(regularizer)
        self.valid: list[Any] = []  # the last values of the parameters that were valid

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without scratch memory, so that a copy makes its own."""
        return CompiledStep, (self.mdp, self.regularizer, self.options)

    @cached_property
    def world(self) -> World:
        return World(self.mdp)

    @property
    def model(self) -> Model:
        return self.world.model

    @cached_property
    def template(self) -> list[Term]:
        """The terms at t = 1; their arguments and functions are the same at every t."""
        with torch.no_grad():
            return terms_of(self.regularizer, torch.ones((), dtype=torch.float64))

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.template)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.kinds)

    @cached_property
    def formula(self) -> Formula | None:
        return record(self.regularizer)

    @cached_property
    def explicit(self) -> Evaluator:
        """psi with the weights and exponents of its terms as parameters."""
        return Evaluator(Explicit(self.template, None if self.pairs is ONE else self.mdp))

    @cached_property
    def in_logs(self) -> bool:
        """Whether psi is an entropy, and the MDP small enough to solve it in logarithms."""
        return is_entropy(self.regularizer) and self.shape[0] <= SQUARE

    def __call__(
        self, loss: Tensor, t: Tensor | float, start: Tensor, mdp: LayeredMDP | None = None
    ) -> tuple[Solution, bool] | None:
        """Solve the step.

        Args:
            mdp: other probabilities for the step's layout; by default its own MDP.

        Returns:
            The solution, and whether all elements converged; None if the engine does not support
            these inputs.

        Raises:
            ValueError, TypeError: if an argument is wrong, with the message of the torch path.
        """
        try:
            inputs: list[Any] = [t, *[slot[name] for slot, name in self.slots]]
        except KeyError:  # a parametrization was registered; the torch path says what to do
            return None
        world = self.world_of(mdp)
        if world is None:
            return None
        values = [number(x) for x in inputs]
        readable = plain(loss) and plain(start) and not any(x is None for x in values)
        if not readable or not self._in_domain(values):
            self._complain(world, loss, t, start)
            return None
        formula = self.formula
        if formula is None:
            formula, inputs, values = self.computed_by_torch(t)
        scalars = all(type(x) is float for x in values)
        values = values if scalars else formula.spread(values)
        batch = self._batch(world, loss, start, values, scalars)
        if batch is None:
            self._complain(world, loss, t, start)
            return None
        try:
            replayed, numbers = formula.replay(values)
        except ArithmeticError:
            return None
        table = tabulate(numbers, batch, self.pairs)
        found = self.solve(world, batch, start, loss, table)
        statuses = found.certificate[:, 0]
        converged = not (statuses.any() if batch else statuses.item())
        if not converged and (statuses == BAD_INPUT).any():
            self._complain(world, loss, t, start)
            return None
        # The user gets a copy of failures, because derivatives read them from `found` later.
        certificate = found.certificate if converged else found.certificate.copy()
        given = (loss, *inputs, *world.tensors)
        if in_forward_mode() or (torch.is_grad_enabled() and followed(*given)):
            origin = Origin(self, world, formula, replayed, table, found, batch, converged)
            q, v = Follow.apply(origin, *given)
        else:
            q, v = found.tensors(batch, self.shape)
        return Solution(q, v, torch.from_numpy(certificate.reshape(*batch, 5)), "engine"), converged

    def computed_by_torch(self, t: Tensor | float) -> tuple[Formula, list[Any], list[Any]]:
        """Return a formula whose inputs are the weights and exponents; they, and their values."""
        terms = terms_of(self.regularizer, torch.as_tensor(t, dtype=torch.float64))
        self._check_kinds(terms)
        outputs = (*(term.weight for term in terms), *list_exponents(terms))
        inputs = [x.double() if isinstance(x, Tensor) else x for x in outputs]
        return identity(2 * len(terms)), inputs, [number(x) for x in inputs]

    def world_of(self, mdp: LayeredMDP | None) -> World | None:
        """Return the MDPs of a call; None if the engine does not support them.

        Raises:
            ValueError: if the layout is not that of the step, or a probability is wrong.
        """
        if mdp is None and not self.world.tensors:
            return self.world
        # The user may have changed tensors that are differentiated, so they are read again.
        mdp = self.mdp if mdp is None else check_layout(mdp, self.mdp)
        if mdp.is_sparse or why_not_world(mdp) is not None or not pays_off(mdp):
            return None
        check_probabilities(mdp)
        return World(mdp)

    def _complain(self, world: World, loss: Tensor, t: Tensor | float, start: Tensor) -> None:
        """Raise the error of the torch path if an argument is wrong, else return."""
        parameters = dict(self.regularizer.named_parameters())
        evaluator = Evaluator(self.regularizer)
        given = evaluator.batch_shapes(evaluator.own_parameters)
        t, _ = check_arguments(world.mdp, loss, t, start, parameter_shapes(given))
        check_types(parameters, self.mdp)
        check_values(self.mdp, self.mdp, loss.detach(), start, t.detach(), zeros=self.in_logs)

    def _check_kinds(self, terms: Sequence[Term]) -> None:
        """Check that arguments and functions of a user's terms are those at construction."""
        found = [(term.argument, type(term.function)) for term in terms]
        known = [(term.argument, type(term.function)) for term in self.template]
        if found != known:
            raise RuntimeError(
                f"regularizer: its terms were {known}, and are {found} now; "
                "make a new FTRLStep(mdp, regularizer)"
            )

    def _in_domain(self, values: list[Any]) -> bool:
        """Return whether t is finite and at least 1; validate parameters that have changed."""
        t = values[0]
        if type(t) is float:
            good = 1.0 <= t < math.inf
        else:
            good = bool(((t >= 1.0) & (t < math.inf)).all())
        known = [x if type(x) is float else x.tolist() for x in values[1:]]
        if known != self.valid:
            self.regularizer.validate()
            self.valid = known
        return good

    def _batch(
        self, world: World, loss: Tensor, start: Tensor, values: list[Any], scalars: bool
    ) -> torch.Size | None:
        """Return the batch shape, or None if shapes are wrong or do not broadcast.

        `scalars` says that all values are numbers.
        """
        if scalars and loss.shape == self.shape == start.shape and not world.batch_shape:
            return _SINGLE
        batches = [x.shape[:-2] for x in values if type(x) is not float]  # of the spread forms
        try:
            batch = broadcast(loss.shape[:-2], start.shape[:-2], world.batch_shape, *batches)
        except RuntimeError:
            return None
        return batch if loss.shape[-2:] == self.shape == start.shape[-2:] else None

    def solve(
        self, world: World, batch: torch.Size, start: Tensor, loss: Tensor, terms: Floats
    ) -> Found:
        """Solve every element of a batch; `terms` are weights and exponents of `tabulate`."""
        found = self.groups.solve(
            world,
            batch,
            terms,
            rows(loss, batch, 2),
            rows(start, batch, 2),
            self.tolerance,
            self.options.max_steps,
        )
        return Found(*found)

    # -- on the torch path -------------------------------------------------------------------------

    def replay(
        self, formula: Formula, mdp: LayeredMDP, q: Tensor, loss: Tensor, inputs: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Return (q, v) in differentiable operations, starting from the solution q.

        Args:
            inputs: those of the formula, followed by the probabilities if they are differentiated.
        """
        rank, count = q.dim() - 2, formula.inputs
        one = torch.ones((1,) * rank, dtype=q.dtype)  # stands for t, on which nothing depends
        dims = (1, *(layer.event_dims for layer in mdp.layers))
        given = [with_rank(p, rank, dim) for p, dim in zip(inputs[count:], dims, strict=False)]
        differentiated, named = len(given) > 0, self._named(formula, inputs[:count])
        mdp = mdp.with_probabilities(*given) if differentiated else mdp
        if self.in_logs:
            arguments = (term.argument for term in self.template)
            entropy = entropy_of(list(zip(arguments, named, strict=True)))
            entropy = Entropy(*(x[(None,) * (rank - x.dim())] for x in entropy))
            task = Task(mdp, self.options, differentiated, lambda *_: None, lambda _: None)
            again = solve_entropic(task, loss.expand_as(q), q.detach(), entropy, one, True)
            return again.q, again.value
        setting = Setting(mdp, self.explicit, differentiated)
        equation = Stationarity(setting, self.options, check=lambda *_: None, report=lambda _: None)
        tensors = (-loss.expand_as(q), q.detach(), one, *named, *given)
        found = ImplicitSolution.apply(equation, *tensors)
        return found[0], found[1]

    def push_gradient(
        self, formula: Formula, q: Tensor, at: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the derivative of grad psi(q) along tangents of the formula's inputs."""
        one, zero = torch.ones(q.shape[:-2], dtype=q.dtype), torch.zeros((), dtype=q.dtype)
        # The same floor as in torch_occ.engine.newton.floor_pairs.
        q = torch.where(self.mdp.actions, q.clamp(min=SMALLEST), 0.0)
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def gradient(*moved: Tensor) -> tuple[Tensor, Tensor]:
            inputs = list(at)
            for i, x in zip(moving, moved, strict=True):
                inputs[i] = x
            bound = Bound(self.mdp, self.explicit, one, self._named(formula, inputs))
            return bound.gradient(q), zero

        return push_forward(gradient, [at[i] for i in moving], [tangents[i] for i in moving])[0]

    def _named(self, formula: Formula, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the parameters of `explicit`: the weights, then the exponents of the powers."""
        _, outputs = formula.replay(formula.spread(inputs))
        powers = [isinstance(term.function, Power) for term in self.template]
        wanted = [True] * len(self.template) + powers
        terms = [*self.template, *self.template]
        return tuple(
            in_form(term, x, None if self.pairs is ONE else self.shape)
            for term, x, want in zip(terms, outputs, wanted, strict=True)
            if want
        )


# -- Compiled sweeps for torch_occ.step.system, with separable Hessians and sparse transitio ----


_ROWS: WeakKeyDictionary[LayeredMDP, Rows] = WeakKeyDictionary()


def applies(mdp: LayeredMDP) -> bool:
    """Return whether the kernel supports this MDP: single, sparse, float64, on the CPU."""
    sparse = all(isinstance(layer, SparseLayer) for layer in mdp.layers[:-1])
    plain = mdp.device.type == "cpu" and mdp.dtype == torch.float64
    return sparse and not mdp.batch_shape and plain


class CompiledSweeps:
    """The compiled twin of torch_occ.step.system.TorchSweeps; loops over a batch."""

    def __init__(self, states: SeparableStates, mdp: LayeredMDP) -> None:
        if mdp not in _ROWS:
            _ROWS[mdp] = rows_of(mdp)
        self.rows = _ROWS[mdp]
        self.pairs = tuple(states.p.shape[-2:])
        softest = states.softest.squeeze(-1).to(states.p.dtype)
        self.states = [part.detach() for part in (states.p, states.inverse, states.total, softest)]

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        p, inverse, total, softest = self.states
        given = [(z, 1), (p, 2)]
        given += [(part, dims) for part, dims in ((x, 2), (r, 1)) if part is not None]
        batch = broadcast(*(part.shape[: part.dim() - dims] for part, dims in given))
        v, within = z.new_empty(*batch, self.pairs[0]), z.new_empty(*batch, *self.pairs)
        du = z.new_zeros(*batch, self.pairs[0])
        count = batch.numel()
        if r is not None:
            du.copy_(r)
        force = np.zeros((1, 0)) if x is None else _flat(x, batch, 2)
        own = ((p, 2), (inverse, 2), (total, 1), (softest, 1))
        parts: Any = tuple(_flat(part, batch, dims) for part, dims in own)
        out = (part.view(count, -1).numpy() for part in (v, within, du))
        sweep_all(self.pairs[1], self.rows, parts, _flat(z, batch, 1), force, x is not None, *out)
        return Swept(v, within, du)


def _flat(part: Tensor, batch: torch.Size, dims: int) -> NDArray[Any]:
    """Return one row per element of the batch, or a single row if all elements share it."""
    event = part.shape[part.dim() - dims :]
    part = part.detach() if part.numel() == event.numel() else part.detach().expand(*batch, *event)
    return part.reshape(-1, event.numel()).contiguous().numpy()
