"""What the compiled kernels read and write: plain arrays, few of them, because every array handed to a kernel costs time.

States are numbered over all layers; the pair (s, a) is number s * num_actions + a. Scratch memory has a row for every quantity:
`work.pairs[D, i]` is d at pair i. The rows of an argument x of psi, of its slopes and of its bends lie `SLOPE` and `BEND` apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit
from numba.extending import overload
from numpy.typing import NDArray

from torch_occ._support.caching import keep
from torch_occ._support.private import NO_REFERENCE_COUNTS
from torch_occ.kernels.constants import SQUARE

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Arguments of elementary terms; in `work.pairs` the rows of their values. STATE has its rows in `work.states`.
PAIR, REST, COMPLEMENT, STATE = 0, 1, 2, 3
SLOPE, BEND = 3, 6  # rows further down

# More rows of `work.pairs`.
GAPS = 9  # the shaped loss
GRADIENT = 10  # of psi
D, W = 11, 12  # second derivatives, as in torch_occ.regularizers.hessians.Separable
INVERSE = 13  # 1 / (d + w)
P = 14  # the signed policy p
FORCE = 15  # the right-hand side x, less what the next layer's multipliers take of it
RESPONSE = 16  # R x
DQ = 17
TRIAL = 18
AHEAD = 19  # E[v(next state)], of the multipliers
ROUNDING = 20  # what it did to the gaps, see torch_occ.kernels.shaping
KEPT = 21  # q of a solve that failed, while another one is tried
PAIR_ROWS = 22

# Rows of `work.states`; 0, SLOPE and BEND are those of q(s).
PLAN = 1  # the value of the optimal policy, which shapes the loss
TOTAL = 2  # sum of INVERSE
KAPPA = 4
PULL = 5
M = 7
U = 8
V = 9  # the multipliers
OTHERS = 10
LIFT = 11  # a constant of the layer that is left out of the gradient, at its first state
CURVES = 12  # 1 where psi curves upwards, 0 if it does so only at constant q(s), -1 if not
STATE_ROWS = 13


# -- compiling ------------------------------------------------------------------------------------------------------------

#: Divisions by zero give infinities, as in torch, and are noticed where it matters; threads may run kernels side by side. Kernels do not
#: allocate and do not own arrays, so no references are counted.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, **NO_REFERENCE_COUNTS}

#: For what only kernels call: what Python would call it by takes longer to compile than the function.
_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def kernel(function: Function) -> Function:
    """Compiled once for the machine and kept on disk; products and sums may be fused, nothing else."""
    return keep(njit(fastmath={"contract"}, **_OPTIONS)(function))


def adder(function: Function) -> Function:
    """A kernel whose sums may be added in any order, so that they vectorize."""
    return keep(njit(fastmath={"contract", "reassoc"}, **_OPTIONS)(function))


def part(function: Function) -> Function:
    """A kernel of which LLVM puts a copy wherever it is called, for handing over the arrays takes longer; Python cannot call it."""
    options: dict[str, Any] = (
        {"fastmath": {"contract"}, "forceinline": True} | _OPTIONS | _NO_WRAPPERS
    )
    return keep(njit(**options)(function))


def inlined(function: Function) -> Function:
    """A helper too small to be called: arguments cost more than it does."""
    return njit(inline="always", **_OPTIONS)(function)


#: Numba lets an index count from the end, as in Python, and asks at every access whether it does. Unsigned ones cannot; see `span`, too.
unsigned = np.uint64


def either(dense: Function, sparse: Function) -> Function:
    """One of two functions for kernels, by the transitions in the first argument (or that it is); decided when the kernel is compiled."""

    @wraps(dense.py_func)  # type: ignore[attr-defined]
    def stub(*_: Any) -> Any:
        raise TypeError("called by kernels only")

    options = {
        name: value
        for name, value in dense.targetoptions.items()  # type: ignore[attr-defined]
        if name not in ("nopython", "inline")
    }
    inline = dense.targetoptions.get("inline", "never")  # type: ignore[attr-defined]

    @overload(stub, inline=inline, strict=False, jit_options=options)  # type: ignore[arg-type]
    @wraps(dense.py_func)  # type: ignore[attr-defined]
    def choose(*arguments: Any) -> Any:
        return (sparse if _is_sparse(arguments[0]) else dense).py_func  # type: ignore[attr-defined]

    return stub  # type: ignore[return-value]


def _is_sparse(kind: Any) -> bool:
    """Whether a type of Numba's is that of `Rows`, or has them for a part."""
    return getattr(kind, "instance_class", None) is Rows or any(
        _is_sparse(part) for part in getattr(kind, "types", ())
    )


# -- data -----------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Sparse transitions of all layers: the successors of pair i stand from `starts[i]` to `starts[i + 1]`."""

    starts: NDArray[np.uint64]  # (S * A + 1,)
    state: NDArray[np.uint32]  # (nnz,), numbered over all layers
    probability: Floats  # (nnz,)


class Model(NamedTuple):
    """A layered MDP as arrays. Numba compiles every kernel for the kind of transitions that it meets, dense or sparse, and for no other."""

    num_actions: int
    start: Ints  # (L + 1,), the first state of every layer
    next_state: Any  # Floats (S * A, widest layer), probabilities; or Rows
    arrivals: Floats  # the same transposed, (widest layer, S * A); empty if they are sparse
    exists: Bools  # (3, S * A): pairs, and those that have a rest and a complement
    initial: Floats  # (S_0,)
    conserved: bool  # whether rows of transitions sum to one but for rounding


class Terms(NamedTuple):
    """The elementary terms of a regularizer; their weights change with t and come apart."""

    argument: Ints  # (K,)
    function: Ints  # (K,)
    exponent: Floats  # (K,)


class Work(NamedTuple):
    """Scratch memory of one solve."""

    pairs: Floats  # (PAIR_ROWS, S * A)
    states: Floats  # (STATE_ROWS, S); more of them for torch_occ.kernels.conjugate
    softest: Ints  # (S,), the pair of least curvature in every state
    moves: Floats  # (widest, S), P_p transposed
    gain: Floats  # (S, widest), the rows of Yhat
    centred: Floats  # (2 * widest, widest * A), transitions of a layer
    squares: Floats  # (3 * widest, widest), of a layer
    jacobian: (
        Floats  # (S, S + 1), for torch_occ.kernels.entropic; empty if there are too many states
    )
    # How far the factors are off, relative to the Hessian; what the first steps of the last solves
    # changed at most; whether there is a guess for torch_occ.kernels.entropic.
    stale: Floats  # (3,)


#: Rows of `work.states` that conjugate gradients have in addition.
CONJUGATE_ROWS = 9


def make_work(model: Model) -> Work:
    """Scratch memory for an MDP; with sparse transitions, in proportion to its pairs."""
    num_pairs = model.exists.shape[1]
    num_states, sparse = num_pairs // model.num_actions, isinstance(model.next_state, Rows)
    widest = 0 if sparse else model.next_state.shape[1]
    return Work(
        np.zeros((PAIR_ROWS, num_pairs)),
        np.zeros((STATE_ROWS + (CONJUGATE_ROWS if sparse else 0), num_states)),
        np.zeros(num_states, np.int64),
        np.zeros((widest, num_states)),
        np.zeros((num_states, widest)),
        np.zeros((2 * widest, widest * model.num_actions)),
        np.zeros((3 * widest, widest)),
        np.zeros((num_states, num_states + 1) if num_states <= SQUARE else (0, 0)),
        np.array([np.inf, 0.0, 0.0]),
    )


@inlined
def span(first: int, stop: int) -> Any:
    """range(first, stop), and a word to the compiler that none of it is negative."""
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
    """E[v(next state) | pair] for v in a row of the states, of which the next layer's begin at `first`."""
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
