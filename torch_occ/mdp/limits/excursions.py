"""The ways of leaving the states that optimal policies visit.

A state is visited if some optimal policy visits it, and a pair is free if some optimal policy plays
it: observing it costs no regret. A suboptimal pair of a visited state is an entry. After it, an
episode may pass through hidden states, which no optimal policy visits, until it is back in a
visited state or ends. This part of an episode is an excursion. Only entries and the pairs of hidden
states cost regret or are worth observing; the program of torch_occ.mdp.limits.graves_lai has one
variable for each, the entries first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ.kernels.constants import TIE
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: The most numbers in the dense table of transitions between hidden states.
LARGEST = 50_000_000


@dataclass(frozen=True)
class Excursions:
    """Entries and hidden states of an MDP with mean losses; E entries, U hidden states."""

    num_pairs: int  # S * A
    entries: Ints  # (E,), the number s * A + a of each entry
    hidden: Ints  # (U,), hidden states in layer order
    depth: Ints  # (U,), the layer of each
    mean: Floats  # (E + U * A,), by variable
    gap: Floats  # (E + U * A,), Q(s,a) - V(s)
    exists: Bools  # (E + U * A,); False for masked pairs
    first: Floats  # (E, U), P(hidden state | entry)
    onward: Floats  # (U, A, U), transitions between hidden states
    reach: Floats  # (U, U), the largest probability of getting from one hidden state to another

    @property
    def num_actions(self) -> int:
        return self.onward.shape[1]

    @property
    def pairs(self) -> Ints:
        """The number s * A + a of every variable."""
        actions = np.arange(self.num_actions)
        return np.concatenate(
            [self.entries, (self.hidden[:, None] * self.num_actions + actions).ravel()]
        )

    def table(self, x: Floats) -> Floats:
        """Put a vector of variables on its pairs: `(E + U * A,)` -> `(S * A,)`."""
        found = np.zeros(self.num_pairs)
        found[self.pairs] = np.where(self.exists, x, 0.0)
        return found

    def balance(self) -> Floats:
        """The flow constraints `(U, E + U * A)`: what a hidden state plays minus what arrives."""
        U, A = len(self.hidden), self.num_actions
        played = np.kron(np.eye(U), np.ones(A))
        arriving = np.concatenate([self.first.T, self.onward.reshape(U * A, U).T], 1)
        return np.concatenate([np.zeros((U, len(self.entries))), played], 1) - arriving


def excursions_of(mdp: LayeredMDP, mean: Tensor) -> Excursions:
    """Find the entries and the hidden states; actions with gaps of at most 1e-9 are optimal.

    Raises:
        ValueError: if there are too many hidden states.
    """
    plan = optimal_policy(mdp, torch.where(mdp.actions, mean, 0.0))
    limit = TIE * plan.value.abs().clamp(min=1.0).unsqueeze(-1)
    optimal = mdp.actions & (plan.gaps <= limit)
    visited = _visited(mdp, optimal)
    reachable = mdp.reachable
    entry = mdp.actions & ~optimal & visited.unsqueeze(-1)
    hidden = reachable & ~visited
    count, num_actions = int(hidden.sum()), mdp.num_actions
    if count * num_actions * count > LARGEST:
        raise ValueError(
            f"mdp: {count:,} states are reachable but not visited by an optimal policy; the limit "
            f"of regret is computed with a table of {count:,} x {num_actions} x {count:,} numbers, "
            f"and {LARGEST:,} are the most; use a smaller MDP"
        )
    place = hidden.cumsum(0) - 1  # the number of a hidden state among the hidden ones
    first = np.zeros((int(entry.sum()), count))
    onward = np.zeros((count, num_actions, count))
    number = (entry.flatten().cumsum(0) - 1).view_as(entry)
    for k, here in enumerate(mdp.layer_slices[:-1]):
        there = mdp.layer_slices[k + 1]
        into = hidden[there]
        if not bool(into.any()):
            continue
        columns = place[there][into].numpy()
        rows = mdp.layers[k].dense.detach()[..., into]  # (S_k, A, hidden states of layer k + 1)
        chosen = entry[here]
        first[np.ix_(number[here][chosen].numpy(), columns)] = rows[chosen].numpy()
        out = hidden[here]
        onward[np.ix_(place[here][out].numpy(), np.arange(num_actions), columns)] = rows[
            out
        ].numpy()

    def vector(table: Tensor) -> NDArray[Any]:
        """The variables of a table `(S, A)`."""
        return torch.cat([table[entry], table[hidden].flatten()]).numpy()

    depth = mdp.layer[hidden].numpy()
    return Excursions(
        num_pairs=mdp.num_states * num_actions,
        entries=entry.flatten().nonzero().squeeze(-1).numpy(),
        hidden=hidden.nonzero().squeeze(-1).numpy(),
        depth=depth,
        mean=vector(torch.where(mdp.actions, mean, 0.0)),
        gap=vector(plan.gaps),
        exists=vector(mdp.actions),
        first=first,
        onward=onward,
        reach=_reach(onward, mdp.actions[hidden].numpy(), depth),
    )


def _visited(mdp: LayeredMDP, optimal: Tensor) -> Tensor:
    """Whether some policy with optimal actions only visits a state, `(S,)`."""
    flags = [mdp.initial.detach() > 0]
    played = mdp.split(optimal, -2)
    for layer, actions in zip(mdp.layers[:-1], played[:-1], strict=True):
        mass = (flags[-1].unsqueeze(-1) & actions).to(mdp.dtype)
        flags.append(layer.arrive(mass).detach() > 0)
    return torch.cat(flags)


def _reach(onward: Floats, actions: Bools, depth: Ints) -> Floats:
    """The largest probability, over policies, of getting from one hidden state to another."""
    found = np.eye(len(onward))
    for k in sorted(set(depth.tolist()), reverse=True):
        here = depth == k
        ahead = np.where(actions[here][:, :, None], onward[here] @ found, 0.0)
        found[here] = np.maximum(found[here], ahead.max(1))
    return found
