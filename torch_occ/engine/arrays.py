"""From torch objects to the arrays that the compiled kernels read, and the question whether they can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from torch_occ.catalog import TabularRegularizer
from torch_occ.engine.newton import COMPLEMENT, LOG, PAIR, POWER, REST, STATE, X_LOG_X, Floats, Model, Terms
from torch_occ.mdp import LayeredMDP
from torch_occ.regularizers import Regularizer
from torch_occ.terms import Power, Term, XLogX

_ARGUMENTS = {"pair": PAIR, "rest": REST, "state": STATE, "complement": COMPLEMENT}


def why_not(mdp: LayeredMDP, regularizer: Regularizer) -> str | None:
    """The reason why the engine cannot solve this step, or None if it can."""
    if mdp.device.type != "cpu" or mdp.dtype != torch.float64:
        return f"the engine works in float64 on the CPU, the MDP is {mdp.dtype} on {mdp.device}"
    if mdp.batch_shape:
        return "the engine works with a single MDP, this is a batch"
    if mdp.is_sparse:
        return "the engine needs dense transitions (mdp.to_dense()), these are sparse"
    for leaf in regularizer.leaves():
        if not isinstance(leaf, TabularRegularizer):
            return f"{type(leaf).__name__} is not a table of elementary terms"
        if any(parameter.dim() for parameter in leaf.parameters()):
            return f"{type(leaf).__name__} has batched parameters"
    return None


def model_of(mdp: LayeredMDP) -> Model:
    """The MDP as arrays."""
    widest = max(mdp.layer_sizes)
    next_state = np.zeros((mdp.num_states, mdp.num_actions, widest))
    for here, p in zip(mdp.layer_slices[:-1], mdp.transitions[:-1], strict=True):
        next_state[here, :, : p.shape[-1]] = p.detach().numpy()

    def exists(name: str) -> np.ndarray:
        missing = mdp.missing[name]
        return np.ones(tuple(mdp.actions.shape), dtype=np.bool_) if missing is None else ~missing.numpy()

    start = np.array([0, *(layer.stop for layer in mdp.layer_slices)], dtype=np.int64)
    return Model(start, next_state, exists("pair"), exists("rest"), exists("complement"), mdp.initial.detach().numpy().copy())


def terms_of(regularizer: Regularizer, t: Tensor) -> tuple[Terms, Floats]:
    """The elementary terms, and their weights at every t `(n,)` as `(n, K)`."""
    found: list[Term] = []
    with torch.no_grad():
        for part, weight in regularizer.parts(t):
            assert isinstance(part, TabularRegularizer)
            table, _ = part.constant(weight)
            found += table.terms
        weights = torch.stack([torch.as_tensor(term.weight, dtype=t.dtype).expand_as(t) for term in found], -1)
    functions = [POWER if isinstance(term.function, Power) else X_LOG_X if isinstance(term.function, XLogX) else LOG for term in found]
    exponents = [float(torch.as_tensor(term.function.p).detach()) if isinstance(term.function, Power) else 0.0 for term in found]
    terms = Terms(_ints([_ARGUMENTS[term.argument] for term in found]), _ints(functions), np.array(exponents, dtype=np.float64))
    return terms, np.ascontiguousarray(weights.numpy())


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)
