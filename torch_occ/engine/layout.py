"""What the compiled kernels read and write: plain arrays, few of them, because every array handed to a kernel costs time.

States are numbered over all layers; the pair (s, a) is number s * num_actions + a. Scratch memory has a row for every quantity:
`work.pairs[D, i]` is d at pair i. The rows of an argument x of psi, of its slopes and of its bends lie `SLOPE` and `BEND` apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Arguments of elementary terms; in `work.pairs` the rows of their values. STATE has its rows in `work.states`.
PAIR, REST, COMPLEMENT, STATE = 0, 1, 2, 3
SLOPE, BEND = 3, 6  # rows further down

# Functions.
POWER, X_LOG_X, LOG = 0, 1, 2

# More rows of `work.pairs`.
GAPS = 9  # the shaped loss
GRADIENT = 10  # of psi
D, W = 11, 12  # second derivatives, as in torch_occ.hessians.Separable
INVERSE = 13  # 1 / (d + w)
P = 14  # the signed policy p
FORCE = 15  # the right-hand side x, less what the next layer's multipliers take of it
RESPONSE = 16  # R x
DQ = 17
TRIAL = 18
AHEAD = 19  # E[v(next state)], of the multipliers
PAIR_ROWS = 20

# Rows of `work.states`; 0, SLOPE and BEND are those of q(s).
PLAN = 1  # the value of the optimal policy, which shapes the loss
TOTAL = 2  # sum of INVERSE
KAPPA = 4
PULL = 5
M = 7
U = 8
V = 9  # the multipliers
OTHERS = 10
STATE_ROWS = 11


# -- compiling ------------------------------------------------------------------------------------------------------------

#: Divisions by zero give infinities, as in torch, and are noticed where it matters; threads may run kernels side by side. Kernels do not
#: allocate and do not own arrays, so no references are counted (`_nrt`), which took half of the time.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True, "_nrt": False}

#: For what only kernels call: what Python would call it by takes longer to compile than the function.
_NO_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def kernel(function: Function) -> Function:
    """Compiled once for the machine and kept on disk; products and sums may be fused, nothing else."""
    return njit(cache=True, fastmath={"contract"}, **_OPTIONS)(function)


def adder(function: Function) -> Function:
    """A kernel whose sums may be added in any order, so that they vectorize."""
    return njit(cache=True, fastmath={"contract", "reassoc"}, **_OPTIONS)(function)


def part(function: Function) -> Function:
    """A kernel of which LLVM puts a copy wherever it is called, for handing over the arrays takes longer; Python cannot call it."""
    return njit(cache=True, fastmath={"contract"}, forceinline=True, **_OPTIONS, **_NO_WRAPPERS)(function)


def inlined(function: Function) -> Function:
    """A helper too small to be called: arguments cost more than it does."""
    return njit(inline="always", **_OPTIONS)(function)


#: Numba lets an index count from the end, as in Python, and asks at every access whether it does. Unsigned ones cannot; see `span`, too.
unsigned = np.uint64


# -- data -----------------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A layered MDP as arrays."""

    num_actions: int
    start: Ints  # (L + 1,), the first state of every layer
    next_state: Floats  # (S * A, widest layer), probabilities
    arrivals: Floats  # the same transposed, (widest layer, S * A)
    exists: Bools  # (3, S * A): pairs, and those that have a rest and a complement
    initial: Floats  # (S_0,)


class Terms(NamedTuple):
    """The elementary terms of a regularizer; their weights change with t and come apart."""

    argument: Ints  # (K,)
    function: Ints  # (K,)
    exponent: Floats  # (K,)


class Work(NamedTuple):
    """Scratch memory of one solve."""

    pairs: Floats  # (PAIR_ROWS, S * A)
    states: Floats  # (STATE_ROWS, S)
    softest: Ints  # (S,), the pair of least curvature in every state
    moves: Floats  # (widest, S), P_p transposed
    gain: Floats  # (S, widest), the rows of Yhat
    centred: Floats  # (2 * widest, widest * A), transitions of a layer
    squares: Floats  # (3 * widest, widest), of a layer
    stale: Floats  # (2,): how far the factors are off, relative to the Hessian; what the first steps of the last solves changed at most


def make_work(model: Model) -> Work:
    """Scratch memory for an MDP."""
    num_pairs, widest = model.next_state.shape
    num_states = num_pairs // model.num_actions
    return Work(
        np.zeros((PAIR_ROWS, num_pairs)),
        np.zeros((STATE_ROWS, num_states)),
        np.zeros(num_states, np.int64),
        np.zeros((widest, num_states)),
        np.zeros((num_states, widest)),
        np.zeros((2 * widest, widest * model.num_actions)),
        np.zeros((3 * widest, widest)),
        np.array([np.inf, 0.0]),
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
def ahead(next_state: Floats, pair: int, states: Floats, row: int, first: int, width: int) -> float:
    """E[v(next state) | pair] for v in a row of the states, of which the next layer's begin at `first`."""
    total = 0.0
    for j in range(width):
        total += next_state[pair, j] * states[row, unsigned(first + j)]
    return total
