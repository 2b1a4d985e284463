"""Which way to solve: the engine or torch, in logarithms or not, and the linear algebra of a step.

| question | rule |
|---|---|
| the engine or torch? | `why_not` (a step), `why_not_game` (a game), then `pays_off` |
| dense or sparse transitions in the engine? | `prefers_rows` |
| in logarithms? | `solves_in_logs` |
| a factorization or conjugate gradients in torch? | `prefers_iterations` |

Whether a batch is solved in lanes is `lanes_in` of torch_occ.engine.layout.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from torch_occ._support.choices import later
from torch_occ._support.constants import SQUARE
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer, TabularRegularizer
from torch_occ.regularizers.derivatives import Evaluator


def why_not_model(mdp: LayeredMDP, *, batch: bool = False) -> str | None:
    """Return the reason why the engine does not support this MDP, or None if it does.

    Args:
        batch: whether a batch of MDPs is supported.
    """
    if mdp.device.type != "cpu" or mdp.dtype != torch.float64:
        return f"the engine works in float64 on the CPU, the MDP is {mdp.dtype} on {mdp.device}"
    if mdp.batch_shape and not batch:
        return "the engine works with a single MDP, this is a batch"
    return None


def why_not_terms(regularizer: Regularizer) -> str | None:
    """Return the reason why the engine does not support this regularizer, or None if it does."""
    for leaf in regularizer.leaves():
        if not isinstance(leaf, TabularRegularizer):
            return f"{type(leaf).__name__} is not a table of elementary terms"
    return None


def why_not_game(mdp: LayeredMDP, regularizer: Regularizer) -> str | None:
    """Return the reason why the engine does not play with this MDP and regularizer, or None."""
    return why_not_terms(regularizer) or why_not_model(mdp)


#: The widest dense layer for which the engine is faster than BLAS on the torch path. Measured with
#: 2 to 10 layers and actions, one thread.
WIDEST = 150
#: The largest table of transitions that is made from sparse ones.
LARGEST = 1e7


def pays_off(mdp: LayeredMDP) -> bool:
    """Return whether the engine is expected to be faster than the torch path."""
    return mdp.is_sparse or max(mdp.layer_sizes) <= WIDEST


def why_not(mdp: LayeredMDP, regularizer: Regularizer) -> str | None:
    """Return the reason why the engine does not support a step over this MDP, or None if it does.

    It imports the engine, which raises an ImportError without Numba.
    """
    world = why_not_world(mdp)
    return why_not_terms(regularizer) or world


def why_not_world(mdp: LayeredMDP) -> str | None:
    """Return the reason why the engine does not support this MDP in a step, or None if it does."""
    narrow = later("step.arrays").NARROW
    if mdp.batch_shape:
        if mdp.is_sparse:
            return "the engine works with a single sparse MDP, this is a batch"
        if max(mdp.layer_sizes) > narrow:
            return (
                f"the engine takes a batch of MDPs with layers of up to {narrow} states, "
                f"this one has {max(mdp.layer_sizes)}"
            )
    return why_not_model(mdp, batch=True)


def prefers_rows(mdp: LayeredMDP, steep: bool = False) -> bool:
    """Return whether the engine uses sparse transitions and conjugate gradients.

    The alternative is dense transitions and a factorization of every layer. Sparse transitions stay
    sparse. For dense ones, a model predicts both times in nanoseconds per Newton step. It was
    fitted to measurements from (3,3,3) to layers of 60 states. Where the times are close, the
    factorization is used. It is also used if psi has convex terms of q(s), which can be so `steep`
    that conjugate gradients need hundreds of iterations.
    """
    if steep and (widest := max(mdp.layer_sizes)) <= WIDEST and mdp.num_pairs * widest <= LARGEST:
        return False
    if mdp.is_sparse:
        return True
    sizes, num_actions = mdp.layer_sizes, mdp.num_actions
    products = sum(m * n * (num_actions * n + m + n) for m, n in pairwise(sizes))
    products += sum(2 * n**3 for n in sizes)
    entries = sum(int(layer.probabilities.count_nonzero()) for layer in mdp.layers[:-1])
    pairs = mdp.num_states * mdp.num_actions
    return 12 * entries + 110 * pairs < (0.25 * products + 150 * pairs) / 1.5


def solves_in_logs(evaluator: Evaluator, mdp: LayeredMDP) -> bool:
    """Return whether the torch path solves the step in logarithms.

    If kappa > 0, it forms a matrix over the states of each layer: not for wide layers.
    """
    return evaluator.closed or (evaluator.in_logs and max(mdp.layer_sizes) <= SQUARE)


def prefers_iterations(mdp: LayeredMDP, elements: int, exact: bool) -> bool:
    """Return whether conjugate gradients are expected to be faster than `LayeredFactorization`.

    Sparse transitions always use conjugate gradients. For dense ones, the times are predicted by
    models that were fitted to measurements with one thread. Near the crossover both methods take
    similar times, so an error of a factor of two costs little. `experiments.wide --sections
    crossover` measures the times again.

    Args:
        elements: the number of elements in the batch.
        exact: whether systems will be solved to rounding, not `inexact`.
    """
    if mdp.is_sparse:
        return True
    products = sum(2 * m * n * (mdp.num_actions * n + m + n) for m, n in pairwise(mdp.layer_sizes))
    products += sum(4 * n**3 for n in mdp.layer_sizes)
    factorization = 0.08e-9 * products * elements + (0.4e-3 + 0.04e-3 * elements) * mdp.horizon
    entries = sum(layer.probabilities.numel() for layer in mdp.layers[:-1])
    shared = elements > 1 and not mdp.batch_shape  # then the products with P are matrix-matrix
    passes = 0.2e-9 * entries * elements if shared else 0.6e-9 * entries
    iteration = passes + 12e-9 * mdp.num_pairs * elements + 0.04e-3 * mdp.horizon
    return (40 if exact else 15) * iteration < factorization
