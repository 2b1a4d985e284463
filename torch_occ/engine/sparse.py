"""The two sweeps of torch_occ.iterative over sparse transitions, compiled: every probability is read once on the way back and once on the
way forth, and nothing else of its size is touched.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numba
import numpy as np
import torch
from torch import Tensor

from torch_occ.iterative import Swept
from torch_occ.layers import SparseLayer
from torch_occ.mdp import LayeredMDP
from torch_occ.states import SeparableStates
from torch_occ.validation import broadcast


class Entries:
    """All layers in one table: `next` and `probability` of pair i stand from `starts[i]` to `starts[i + 1]`."""

    def __init__(self, mdp: LayeredMDP) -> None:
        starts, following, probabilities, count = [np.zeros(1, dtype=np.int64)], [], [], 0
        for layer, there in zip(mdp.layers[:-1], mdp.layer_slices[1:], strict=True):
            assert isinstance(layer, SparseLayer)
            starts.append(count + layer.pattern.starts[1:].numpy().astype(np.int64))
            following.append(layer.pattern.next.numpy() + np.int32(there.start))
            probabilities.append(layer.probabilities.detach().flatten().numpy())
            count += len(following[-1])
        last = mdp.layer_sizes[-1] * mdp.num_actions  # these lead to the terminal state, which has no row
        self.starts = np.concatenate([*starts, np.full(last, count, dtype=np.int64)])
        self.next = np.concatenate(following) if following else np.zeros(0, dtype=np.int32)
        self.probability = np.concatenate(probabilities) if probabilities else np.zeros(0)


_ENTRIES: WeakKeyDictionary[LayeredMDP, Entries] = WeakKeyDictionary()


def applies(mdp: LayeredMDP) -> bool:
    """Whether the kernel can read this MDP."""
    sparse = all(isinstance(layer, SparseLayer) for layer in mdp.layers[:-1])
    return sparse and not mdp.batch_shape and mdp.device.type == "cpu" and mdp.dtype == torch.float64


class CompiledSweeps:
    """The same as torch_occ.iterative.TorchSweeps, for separable Hessians of a single MDP; a batch is a loop."""

    def __init__(self, states: SeparableStates, mdp: LayeredMDP) -> None:
        if mdp not in _ENTRIES:
            _ENTRIES[mdp] = Entries(mdp)
        self.entries = _ENTRIES[mdp]
        self.pairs = tuple(states.p.shape[-2:])
        self.states = [part.detach() for part in (states.p, states.inverse, states.total, states.softest.squeeze(-1))]

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        p, inverse, total, softest = self.states
        given = [(z, 1), (p, 2)] + [(part, dims) for part, dims in ((x, 2), (r, 1)) if part is not None]
        batch = broadcast(*(part.shape[: part.dim() - dims] for part, dims in given))
        v, within, du = z.new_empty(*batch, *self.pairs[:1]), z.new_empty(*batch, *self.pairs), z.new_zeros(*batch, *self.pairs[:1])
        if r is not None:
            du.copy_(r)
        force = z.new_zeros(1, *self.pairs) if x is None else _flat(x, batch, 2)
        _sweep(  # type: ignore[call-arg]
            self.entries.starts,
            self.entries.next,
            self.entries.probability,
            *(_flat(part, batch, dims).numpy() for part, dims in ((p, 2), (inverse, 2), (total, 1), (softest, 1))),
            _flat(z, batch, 1).numpy(),
            force.numpy(),
            x is not None,
            *(part.view(-1, *part.shape[len(batch) :]).numpy() for part in (v, within, du)),
        )
        return Swept(v, within, du)


def _flat(part: Tensor, batch: torch.Size, dims: int) -> Tensor:
    """One batch dimension: of size one if all elements share it."""
    event = part.shape[part.dim() - dims :]
    if part.numel() == event.numel():
        return part.detach().reshape(1, *event).contiguous()
    return part.detach().expand(*batch, *event).reshape(-1, *event).contiguous()


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sweep(starts, following, probability, p, inverse, total, softest, z, x, forced, v, within, du):  # type: ignore[no-untyped-def]
    num_states, num_actions = within.shape[1:]
    for b in range(len(v)):
        i, j, k = b % len(p), b % len(z), b % len(x)
        for s in range(num_states - 1, -1, -1):
            value = z[j, s]
            for a in range(num_actions):
                ahead = 0.0
                for entry in range(starts[s * num_actions + a], starts[s * num_actions + a + 1]):
                    ahead += probability[entry] * v[b, following[entry]]
                value += p[i, s, a] * ahead
                within[b, s, a] = x[k, s, a] - ahead if forced else -ahead
            v[b, s] = value
            # R of these forces, relative to the one at the softest action; see torch_occ.states.
            reference, mean = within[b, s, softest[i, s]], 0.0
            for a in range(num_actions):
                within[b, s, a] -= reference
                mean += inverse[i, s, a] * within[b, s, a]
            mean /= total[i, s]
            for a in range(num_actions):
                within[b, s, a] = (within[b, s, a] - mean) * inverse[i, s, a]
        for s in range(num_states):
            change = du[b, s]
            for a in range(num_actions):
                flow = within[b, s, a] + p[i, s, a] * change
                for entry in range(starts[s * num_actions + a], starts[s * num_actions + a + 1]):
                    du[b, following[entry]] += probability[entry] * flow
