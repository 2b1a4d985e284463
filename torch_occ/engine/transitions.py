"""Functions of transitions that exist in a dense and a sparse version.

The version is chosen when the calling kernel is compiled, by the type of its model. A version that
is not used costs no time, neither at run time nor in compiling.
"""

from __future__ import annotations

import numpy as np

from torch_occ.engine import dense, sparse
from torch_occ.engine.layout import Floats, Rows, either, inlined


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


factorize = either(dense.factorize_dense, sparse.factorize_sparse)
solve = either(dense.solve_dense, sparse.solve_sparse)
arrive = either(dense.arrive_dense, sparse.arrive_sparse)
likelihoods = either(_likelihoods_dense, _likelihoods_sparse)
successor = either(_successor_dense, _successor_sparse)
