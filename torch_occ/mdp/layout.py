"""The layout of a layered MDP: its layers, states and actions, without probabilities."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


class Layout:
    """Sizes, numbering and masks. Non-terminal states are numbered in layer order."""

    actions: Tensor  # (S, A), boolean: the actions of each state

    @cached_property
    def layer_sizes(self) -> tuple[int, ...]:
        """|S_0|, ..., |S_{L-1}|."""
        raise NotImplementedError

    @cached_property
    def num_actions(self) -> int:
        """A, the largest number of actions that a state can have."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every tensor."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """The device of every tensor."""
        return self.actions.device

    @cached_property
    def horizon(self) -> int:
        """L, the number of decisions in an episode."""
        return len(self.layer_sizes)

    @cached_property
    def layer_slices(self) -> tuple[slice, ...]:
        """The slice of each layer's states among all states."""
        ends = tuple(accumulate(self.layer_sizes))
        return tuple(
            slice(end - size, end) for end, size in zip(ends, self.layer_sizes, strict=True)
        )

    @cached_property
    def num_states(self) -> int:
        """S, the number of non-terminal states."""
        return sum(self.layer_sizes)

    @cached_property
    def num_pairs(self) -> int:
        """The number of state-action pairs that exist."""
        return int(self.actions.sum())

    @cached_property
    def layer(self) -> Tensor:
        """The layer k(s) of every state, `(S,)`."""
        sizes = torch.tensor(self.layer_sizes, device=self.device)
        return torch.repeat_interleave(torch.arange(self.horizon, device=self.device), sizes)

    @cached_property
    def missing(self) -> dict[str, Tensor | None]:
        """Masks of pairs or states where an argument of a regularizer does not exist, by its name.

        None means that it exists everywhere. See `torch_occ.regularizers.arguments`.
        """
        in_state = self.actions.sum(-1)
        in_layer = torch.cat([count.sum().expand_as(count) for count in self.split(in_state, -1)])
        absent = ~self.actions
        masks = {
            "pair": absent,
            "rest": absent | (in_state == 1).unsqueeze(-1),
            "state": torch.zeros_like(in_state, dtype=torch.bool),
            "complement": absent | (in_layer == 1).unsqueeze(-1),
        }
        return {name: mask if bool(mask.any()) else None for name, mask in masks.items()}

    @cached_property
    def other_actions(self) -> Tensor:
        """`(A, A)`, one off the diagonal and zero on it.

        `q @ other_actions` is q(s) - q(s, a) without cancellation.
        """
        return 1 - torch.eye(self.num_actions, dtype=self.dtype, device=self.device)

    @cached_property
    def action_groups(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """States by their number n of actions: the states `(G,)` and their actions `(G, n)`."""
        counts = self.actions.sum(-1)
        groups = []
        for n in map(int, counts.unique()):  # torch 2.6 has no `tolist` under its transforms
            states = (counts == n).nonzero().squeeze(-1)
            groups.append((states, self.actions[states].nonzero()[:, 1].reshape(-1, n)))
        return tuple(groups)

    def split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Split a tensor with a state dimension into its layers."""
        return x.split(self.layer_sizes, dim)

    def layout_difference(self, other: Layout) -> str | None:
        """How this layout differs from another one, or None if they are the same."""
        if self.layer_sizes != other.layer_sizes:
            return f"layers of {[*self.layer_sizes]} states instead of {[*other.layer_sizes]}"
        if self.num_actions != other.num_actions:
            return f"{self.num_actions} actions instead of {other.num_actions}"
        if (self.dtype, self.device) != (other.dtype, other.device):
            return f"{self.dtype} on {self.device} instead of {other.dtype} on {other.device}"
        changed = (self.actions != other.actions).nonzero()
        if len(changed):
            state, action = changed[0].tolist()
            which = "an" if bool(self.actions[state, action]) else "no"
            return f"{which} action {action} in {self.locate(state)}"
        return None

    def locate(self, state: int) -> str:
        """`layer k, state i` for error messages; i counts within the layer."""
        k = int(self.layer[state])
        return f"layer {k}, state {state - self.layer_slices[k].start}"
