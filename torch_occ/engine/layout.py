"""The arrays that kernels read and write, and the decorators that compile kernels.

There are few arrays, because every array that is passed to a kernel costs time. States are numbered
over all layers, and the pair (s, a) has the number s * num_actions + a.

Scratch memory has one row per quantity: `work.pairs[D, i]` is d at pair i. If row x holds an
argument of psi, then row x + SLOPE holds the first derivative of psi by it, and row x + BEND the
second. Row x + ROOT holds 1 / sqrt(argument).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from typing import overload as overloaded

import numpy as np
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray

from torch_occ._support.compiling import KernelCompiler, RoutineCompiler, keep_on_disk
from torch_occ._support.constants import SQUARE
from torch_occ._support.private import NO_REFERENCE_COUNTS, AbstractTemplate, infer_global
from torch_occ.engine.lanes import FEW_LANES, LANES, Shared, lanes_for

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Arguments of elementary terms: q(s,a), q(s) - q(s,a), 1 - q(s,a) and q(s). The first three are
# rows of `work.pairs`; q(s) is row 0 of `work.states`.
PAIR, REST, COMPLEMENT, STATE = 0, 1, 2, 3
SLOPE, BEND, ROOT = 3, 6, 9  # offsets from the row of an argument to those of its derivatives

# More rows of `work.pairs`.
GAPS = 12  # the shaped loss
GRADIENT = 13  # the gradient of psi
# Second derivatives, as in torch_occ.regularizers.hessians.Separable. W is zero without REST.
D, W = 14, REST + BEND
INVERSE = 15  # 1 / (d + w)
P = 16  # the signed policy p
FORCE = 17  # the right-hand side x; `solve` subtracts AHEAD from it
RESPONSE = 18  # R x
DQ = 19  # the Newton step
TRIAL = 20  # the next q, and scratch memory
AHEAD = 21  # E[v(next state)] for the multipliers v
ROUNDING = 22  # estimated rounding errors of the gaps, see torch_occ.engine.shaping
KEPT = 23  # q of a failed solve, while another start is tried
SOFT = 24  # 1 at the pair of least curvature of every state, 0 at the others
PAIR_ROWS = 25

# Rows of `work.states`; rows 0, SLOPE, BEND and ROOT belong to q(s).
PLAN = 1  # the value of the optimal policy, which shapes the loss
TOTAL = 2  # the sum of INVERSE over the actions
KAPPA = 4
PULL = 5  # kappa times M, minus p'x
M = 7  # the change of q(s) that the filter predicts from the layers before
U = 8  # the change of q(s), or its inflow
V = 10  # the multipliers
OTHERS = 11  # the sum of q over the other states of the layer
LIFT = 12  # a constant of the layer that is left out of the gradient, at its first state
CURVES = 13  # 1 where psi is convex, 0 where it is convex only at constant q(s), -1 elsewhere
FITTED = 14  # the multipliers of the last Newton step
SHARE = 15  # 1 / TOTAL
LOW = 16  # what rounding took from PLAN
GUESS = 17  # the multipliers that a solve starts from
STATE_ROWS = 18


# Entries of `work.notes`.
ERROR = 0  # of the factors, relative to the Hessian
RECENT = 1  # the largest relative change of q in the first Newton steps of recent solves
GUESSED = 2  # 1 if there is a guess for torch_occ.engine.entropic
USED = 3  # 1 if the lane is in use
ROOTED = 4  # 1 if the rows ROOT belong to q, unless the error is infinite
STEEP = 5  # the largest kappa times Y in the factors


# -- compiling -------------------------------------------------------------------------------------

#: Divisions by zero give infinities, as in torch; the solvers check for them. Threads may run
#: kernels in parallel. Kernels neither allocate nor own arrays, so references are not counted.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, **NO_REFERENCE_COUNTS}

#: For functions that only kernels call. The wrapper for calls from Python would take longer to
#: compile than the function.
_INNER: dict[str, Any] = _OPTIONS | {
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": RoutineCompiler,
}


def kernel(function: Function) -> Function:
    """Compile a function that Python calls for this machine, once, and keep it on disk.

    Products and sums may be fused; no other floating-point optimization is allowed.
    """
    return keep_on_disk(
        njit(fastmath={"contract"}, pipeline_class=KernelCompiler, **_OPTIONS)(function)
    )


@overloaded
def routine(function: Function, *, inline: bool = ..., any_order: bool = ...) -> Function: ...


@overloaded
def routine(*, inline: bool = False, any_order: bool = False) -> Callable[[Function], Function]: ...


def routine(function: Any = None, *, inline: bool = False, any_order: bool = False) -> Any:
    """Compile a function that only kernels call; it becomes a part of them.

    Args:
        inline: whether LLVM must inline it. A call of a small function takes longer than its work,
            because all arrays are passed.
        any_order: whether its sums may be taken in any order, so that they vectorize.
    """
    if function is None:
        return lambda function: routine(function, inline=inline, any_order=any_order)
    fastmath = {"contract", "reassoc"} if any_order else {"contract"}
    return keep_on_disk(njit(fastmath=fastmath, forceinline=inline, **_INNER)(function))


def inlined(function: Function) -> Function:
    """Let Numba inline a helper that is so small that a call would take longer than its work."""
    return njit(inline="always", **_OPTIONS)(function)


#: As in Python, a negative index counts from the end, and Numba tests the sign at every access.
#: Unsigned indices need no test. See also `span`.
unsigned = np.uint64


def dispatch(like: Function, pick: Callable[..., Any]) -> Function:
    """A function that kernels call; `pick` returns a routine for the types of its arguments.

    What is not picked is not compiled. `like` is a function that has its docstring.
    """

    @wraps(like)
    def stub(*_: Any) -> Any:
        raise TypeError("called by kernels only")

    class Choice(AbstractTemplate):
        key = stub

        def generic(self, arguments: Any, keywords: Any) -> Any:
            self.chosen = types.Dispatcher(pick(*arguments))
            return self.chosen.get_call_type(self.context, arguments, keywords)

        def get_impl_key(self, sig: Any) -> Any:
            return self.chosen.get_impl_key(sig)

    infer_global(stub, types.Function(Choice))
    return stub  # type: ignore[return-value]


def choose(test: Callable[..., bool], one: Any, other: Any) -> Any:
    """`one` if the test of the types of its arguments is true, else `other`.

    Both are routines, or both are inlined and have the same names of parameters.
    """

    def chosen(*arguments: Any) -> Any:
        return one if test(*arguments) else other

    if "inline" not in one.targetoptions:
        return dispatch(one.py_func, chosen)

    @wraps(one.py_func)
    def stub(*_: Any) -> Any:
        raise TypeError("called by kernels only")

    @overload(stub, inline="always", strict=False, jit_options=_INNER)  # type: ignore[arg-type]
    @wraps(one.py_func)
    def chosen_code(*arguments: Any) -> Any:
        return chosen(*arguments).py_func

    return stub


class ByLearner(Protocol):
    """What `by_learner` returns."""

    def __call__(self, *arguments: Any) -> Any: ...

    def register(self, kind: type) -> Callable[[Function], Function]:
        """A decorator that enters a function for learners of this class."""


def by_learner(function: Callable[..., Any]) -> ByLearner:
    """A function that kernels call, chosen by the type of its parameter `learner`.

    `register(kind)` is a decorator: the function behind it is called if the learner is a named
    tuple of this class. It has the same parameters, and is compiled as a routine.
    """
    known: dict[type, Any] = {}
    place = [*signature(function).parameters].index("learner")
    found: Any = dispatch(function, lambda *kinds: known[kinds[place].instance_class])

    def register(kind: type) -> Callable[[Function], Function]:
        def enter(own: Function) -> Function:
            known[kind] = routine(own, inline=True)
            return own

        return enter

    found.register = register
    return cast("ByLearner", found)


def either(dense: Function, sparse: Function) -> Function:
    """Dispatch on dense or sparse transitions, the first argument or a part of it."""
    return choose(lambda kind, *_: not _find(Rows, kind), dense, sparse)


def _find(sought: type, *kinds: Any) -> Any:
    """The Numba type of a class of named tuples among some types and their fields, or None."""
    for kind in kinds:
        found = kind if getattr(kind, "instance_class", None) is sought else None
        if found := found or _find(sought, *getattr(kind, "types", ())):
            return found
    return None


def in_logs(*kinds: Any) -> bool:
    """Whether psi may be an entropy, by the Numba type of the `Terms` among the arguments."""
    terms = _find(Terms, *kinds)
    return isinstance(terms.types[terms.fields.index("logs")], types.Boolean)


# -- data ------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Sparse transitions of all layers, in compressed rows.

    The successors of pair i are the entries `starts[i]`, ..., `starts[i + 1] - 1`.
    """

    starts: NDArray[np.uint64]  # (S * A + 1,)
    state: NDArray[np.uint32]  # (nnz,), numbered over all layers
    probability: Floats  # (nnz,)


class Model(NamedTuple):
    """A layered MDP as arrays.

    Numba compiles a kernel for dense or sparse transitions when it is first called with them.
    """

    num_actions: int
    start: Ints  # (L + 1,), the first state of every layer
    next_state: Any  # Floats (S * A, widest layer), probabilities; or Rows
    arrivals: Floats  # dense `next_state` transposed, (widest layer, S * A); else empty
    exists: Bools  # (3, S * A): whether PAIR, REST and COMPLEMENT exist
    initial: Floats  # (S_0,)
    conserved: bool  # whether all rows of the transitions sum to one, up to rounding


class Terms(NamedTuple):
    """The elementary terms of a regularizer. The weights depend on t and are passed separately.

    Weights and exponents have one number per term, (K,), or one per term and pair, (K * S * A,).
    Then a term of q(s) uses that of the first pair of the state.
    """

    argument: Ints  # (K,)
    function: Ints  # (K,)
    # True if all functions are x log x, so that psi may be an entropy; else None. Numba compiles
    # the solver of entropies only for kernels that are called with True.
    logs: Any
    exponent: Floats  # (K,) or (K * S * A,)


#: The fields of `Terms` without the exponents.
Kinds = tuple[Ints, Ints, Any]


class Solver(NamedTuple):
    """A step without its loss: psi at one episode, and the limits of a solve."""

    terms: Terms
    weights: Floats  # (K or K * S * A,)
    tolerance: float
    max_steps: int
    middle: Floats  # (S * A,), an interior point for cold starts
    # torch_occ.engine.newton.BudgetArrays, or None. Numba compiles the search for multipliers only
    # for kernels that are called with budgets.
    budgets: Any = None


class Work(NamedTuple):
    """Scratch memory of one solve, or of one in every lane."""

    pairs: Floats  # (PAIR_ROWS, S * A)
    states: Floats  # (STATE_ROWS, S); CONJUGATE_ROWS more if transitions are sparse
    moves: Floats  # (widest, S), P_p transposed
    gain: Floats  # (S, 2 * widest), the rows of Yhat, and the columns g of `observe_layer`
    centred: Floats  # (2 * widest, widest * A), centred transitions of a layer
    squares: Floats  # (2 * widest, widest), matrices of a layer
    # (S + 4 w, 2 w + 1), w the widest layer, for torch_occ.engine.entropic; empty if w > SQUARE.
    # Lanes use it one after the other.
    jacobian: Shared
    notes: Floats  # (6,), by the entries above


#: The largest dense layer of an MDP whose problems are solved in lanes, and the largest number of
#: pairs of a sparse one. In lanes, a small batch needs the memory of eight problems.
NARROW, MANY = 24, 100_000

#: Additional rows of `work.states` for torch_occ.engine.linear.
CONJUGATE_ROWS = 9


def make_work(model: Model, new: Callable[..., Any] = lambda *shape: np.zeros(shape)) -> Work:
    """Allocate scratch memory for an MDP, by default for one solve.

    With sparse transitions and many states, it is proportional to the number of pairs.
    """
    num_pairs = model.exists.shape[1]
    num_states, sparse = num_pairs // model.num_actions, isinstance(model.next_state, Rows)
    width = int(np.diff(model.start).max())
    widest = 0 if sparse else width
    work = Work(
        new(PAIR_ROWS, num_pairs),
        new(STATE_ROWS + (CONJUGATE_ROWS if sparse else 0), num_states),
        new(widest, num_states),
        new(num_states, 2 * widest),
        new(2 * widest, widest * model.num_actions),
        new(2 * widest, widest),
        np.zeros((num_states + 4 * width, 2 * width + 1) if width <= SQUARE else (0, 0)),
        new(6),
    )
    work.notes[ERROR], work.notes[USED] = np.inf, 1.0
    return work


def suits_lanes(model: Model) -> bool:
    """Whether problems are solved in lanes: with narrow layers, or with sparse transitions.

    One problem in wide dense layers is faster in plain arrays, whose inner loops are long. The rule
    depends on the MDP alone, so an element has the same result in any batch.
    """
    if isinstance(model.next_state, Rows):
        return model.exists.shape[1] <= MANY
    return model.next_state.shape[1] <= NARROW


def few_lanes(model: Model) -> int:
    """The number of lanes for one or two problems.

    With sparse transitions, memory limits the speed, and a lane that is not used costs as much.
    """
    return 1 if isinstance(model.next_state, Rows) else FEW_LANES


def lanes_in(model: Model, count: int) -> int | None:
    """The number of lanes for a batch; None for plain arrays.

    With dense transitions it is LANES for any batch, so that kernels are compiled once.
    """
    if not suits_lanes(model):
        return None
    return lanes_for(count, few_lanes(model)) if isinstance(model.next_state, Rows) else LANES


@inlined
def finite(x: Any) -> Any:
    """Whether a number is finite, or in which lanes."""
    return x - x == 0.0


@inlined
def span(first: int, stop: int) -> Any:
    """range(first, stop), in a form that tells the compiler that no index is negative."""
    return range(max(first, 0), stop)


@inlined
def dot(x: Floats, row: int, y: Floats, other: int, first: int, stop: int) -> float:
    """The sum of x[row, i] * y[other, i] for first <= i < stop."""
    total = 0.0
    for i in span(first, stop):
        total += x[row, i] * y[other, i]
    return total


@inlined
def _ahead_dense(
    next_state: Floats, pair: int, states: Floats, row: int, first: int, width: int
) -> float:
    """E[v(next state) | pair] for v in a row of the states; the next layer begins at `first`."""
    total = 0.0
    for j in range(width):
        total += next_state[pair, j] * states[row, unsigned(first + j)]
    return total


@inlined
def _ahead_sparse(
    next_state: Rows, pair: int, states: Floats, row: int, first: int, width: int
) -> float:
    total = 0.0
    for entry in range(next_state.starts[pair], next_state.starts[pair + 1]):
        total += next_state.probability[entry] * states[row, next_state.state[entry]]
    return total


ahead = either(_ahead_dense, _ahead_sparse)


@inlined
def _likelihoods_dense(next_state: Floats, pair: int, width: int) -> tuple[Floats, int, int]:
    """An array with the probabilities of the next states, their first index and their number."""
    return next_state[pair], 0, width


@inlined
def _likelihoods_sparse(next_state: Rows, pair: int, width: int) -> tuple[Floats, int, int]:
    first, stop = np.int64(next_state.starts[pair]), np.int64(next_state.starts[pair + 1])
    return next_state.probability, first, stop - first  # type: ignore[return-value]


@inlined
def _successor_dense(next_state: Floats, pair: int, index: int, first: int) -> int:
    """The next state that probability number `index` belongs to; its layer begins at `first`."""
    return first + index


@inlined
def _successor_sparse(next_state: Rows, pair: int, index: int, first: int) -> int:
    return np.int64(next_state.state[np.int64(next_state.starts[pair]) + index])  # type: ignore[return-value]


likelihoods = either(_likelihoods_dense, _likelihoods_sparse)
successor = either(_successor_dense, _successor_sparse)
