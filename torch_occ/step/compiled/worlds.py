"""The MDPs of a batch of steps as the kernels read them: one for all elements, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import carries_derivative
from torch_occ.kernels.layout import NARROW, Bools, Floats, Ints, Model
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import DenseLayer
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.compiled.inputs import model_of, summed, table_of, why_not_model, why_not_terms

#: The widest dense layer for which the engine is faster than BLAS on the torch path. Measured with
#: 2 to 10 layers and actions, one thread.
WIDEST = 150


def pays_off(mdp: LayeredMDP) -> bool:
    """Return whether the engine is expected to be faster than the torch path."""
    return mdp.is_sparse or max(mdp.layer_sizes) <= WIDEST


def why_not(mdp: LayeredMDP, regularizer: Regularizer) -> str | None:
    """Return the reason why the engine does not support a step over this MDP, or None if it does.

    Other than in a game, the MDP may be a batch, or be differentiated.
    """
    return why_not_terms(regularizer) or why_not_world(mdp)


def why_not_world(mdp: LayeredMDP) -> str | None:
    """Return the reason why the engine does not support this MDP in a step, or None if it does."""
    if mdp.batch_shape:
        if mdp.is_sparse:
            return "the engine works with a single sparse MDP, this is a batch"
        if max(mdp.layer_sizes) > NARROW:
            return (
                f"the engine takes a batch of MDPs with layers of up to {NARROW} states, "
                f"this one has {max(mdp.layer_sizes)}"
            )
    return why_not_model(mdp, batch=True)


class World:
    """An MDP or a batch of MDPs.

    Args:
        mdp: supported, see `why_not_world`.
    """

    def __init__(self, mdp: LayeredMDP) -> None:
        self.mdp, self.batch_shape = mdp, mdp.batch_shape
        differentiated = any(carries_derivative(p) for p in mdp.probabilities)
        # The tensors that may be differentiated: none, or the probabilities.
        self.tensors: tuple[Tensor, ...] = mdp.probabilities if differentiated else ()

    @cached_property
    def model(self) -> Model:
        """The MDP as arrays; of a batch, the first one."""
        if not self.batch_shape:
            return model_of(self.mdp)
        dims = (1, *(layer.event_dims for layer in self.mdp.layers))
        pairs = zip(self.mdp.probabilities, dims, strict=True)
        first = [p.detach().reshape(-1, *p.shape[p.dim() - dim :])[0] for p, dim in pairs]
        return model_of(self.mdp.with_probabilities(*first), dense=True)

    @cached_property
    def tables(self) -> tuple[Floats, Floats, Bools]:
        """Of a batch of M: transitions `(M, S * A, widest)`, initial distributions, `conserved`."""
        count, (num_pairs, widest) = self.batch_shape.numel(), self.model.next_state.shape
        next_state = table_of(self.mdp).reshape(count, num_pairs, widest)
        first = self.mdp.initial.detach().expand(*self.batch_shape, -1)
        initial: Floats = first.reshape(count, -1).contiguous().numpy()
        # The same rule as in torch_occ.step.shaping.conserves_mass.
        width = np.repeat(self.mdp.layer_sizes[1:], self.mdp.layer_sizes[:-1])
        bound = (64 + width.repeat(self.mdp.num_actions)) * np.finfo(np.float64).eps
        off = np.abs(next_state[:, : len(bound)].sum(-1) - 1) > bound
        exists = self.model.exists[0, : len(bound)]
        return next_state, initial, ~(off & exists).any(-1)

    def owners(self, batch: torch.Size) -> Ints:
        """The MDP of every element of a batch."""
        numbers = np.arange(self.batch_shape.numel()).reshape(self.batch_shape)
        return np.ascontiguousarray(np.broadcast_to(numbers, batch).ravel())

    def pull_back(
        self, q: Tensor, v: Tensor, u: Tensor, m: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return derivatives with respect to the probabilities, of their shapes.

        (-u, m) is lambda of torch_occ.step.implicit. The equations contain P in -E'v and E q, and
        the initial distribution in b.
        """
        slices, layers = self.mdp.layer_slices, self.mdp.layers
        found: list[Tensor | None] = [None] * len(needed)
        if needed[0]:
            found[0] = summed(m[..., slices[0]], self.mdp.initial)
        for k, layer in enumerate(layers):
            if needed[k + 1]:
                bar = torch.zeros_like(layer.probabilities)
                if k + 1 < len(layers):
                    here, there = slices[k], slices[k + 1]
                    bar = q[..., here, :, None] * m[..., None, None, there]
                    bar = bar + u[..., here, :, None] * v[..., None, None, there]
                    bar = summed(bar, layer.probabilities)
                found[k + 1] = bar
        return found

    def push_forward(
        self, q: Tensor, v: Tensor, tangents: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Return (dP v, dP'q + db), what tangents of the probabilities add to x and r."""
        x, r = torch.zeros_like(q), torch.zeros_like(v)
        slices = self.mdp.layer_slices
        if tangents[0] is not None:
            r[..., slices[0]] += tangents[0]
        for here, there, tangent in zip(slices[:-1], slices[1:], tangents[1:-1], strict=True):
            if tangent is not None:
                layer = DenseLayer(tangent)
                x[..., here, :] += layer.ahead(v[..., there])
                r[..., there] += layer.arrive(q[..., here, :])
        return torch.where(self.mdp.actions, x, 0.0), r
