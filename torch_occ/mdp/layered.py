"""The layered MDP: states in layers, and known transitions.

This is the paper's model (`sec:probform`): layers S_0, ..., S_L, transitions only from one layer to
the next, and a single terminal state s_L. Two generalizations are allowed throughout: the first
layer may have several states with an initial distribution, and every state may have its own set of
actions.

Non-terminal states are numbered in layer order, so that every quantity of the package is one
`(*batch, S, A)` tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_occ.mdp.constructors import Constructors
from torch_occ.mdp.layers import DenseLayer, Layer, SparseLayer
from torch_occ.mdp.layout import Layout
from torch_occ.mdp.unrolling import ABSORBING
from torch_occ.mdp.validation import broadcast, check_actions, check_probabilities, check_shapes

#: Up to this many states, one dense matrix is faster than a loop over layers; half as many in a
#: batch.
DENSE_STATES = 128


@dataclass(frozen=True, eq=False, repr=False)
class LayeredMDP(Layout, Constructors):
    """A finite episodic MDP with known transitions, validated and immutable.

    Args:
        transitions: one tensor per layer k = 0..L-1, `P_k[s, a, s'] = P(s' | s, a)` of shape
            `(*batch, S_k, A, S_{k+1})`. The last one leads to the single terminal state, so its
            shape is `(*batch, S_{L-1}, A, 1)`. They may require gradients. A layer may also be a
            sparse tensor `(S_k * A, S_{k+1})` of any layout, with one row per pair; it is never
            made dense.
        actions: boolean mask `(S, A)` of the actions of each state; all by default. The
            transitions of masked pairs are ignored.
        initial: distribution `(*batch, S_0)` over the first layer; optional if that layer has one
            state.
        origin: for an unrolled MDP, the state of the original MDP behind each state `(S,)`, or
            `ABSORBING`.

    Raises:
        ValueError: if an argument is not valid; it names the argument, the place and the value.
    """

    layers: tuple[Layer, ...]
    actions: Tensor
    initial: Tensor
    origin: Tensor
    #: Whether the probabilities are hidden; see `blind`.
    is_blind: ClassVar[bool] = False

    def __init__(
        self,
        transitions: Sequence[Tensor],
        *,
        actions: Tensor | None = None,
        initial: Tensor | None = None,
        origin: Tensor | None = None,
    ) -> None:
        tensors, num_actions = check_shapes(transitions, actions, initial)
        layers = tuple(layer_of(p, num_actions) for p in tensors)
        num_states, first = sum(layer.sizes[0] for layer in layers), layers[0].sizes[0]
        like = layers[0].probabilities
        if initial is None:
            if first != 1:
                raise ValueError(
                    f"initial: layer 0 has {first} states, so a distribution of shape ({first},) "
                    "over them is needed"
                )
            initial = like.new_ones(1)
        if actions is None:
            actions = torch.ones(num_states, num_actions, dtype=torch.bool, device=like.device)
        if origin is None:
            origin = torch.arange(num_states, device=like.device)
        _set(
            self,
            actions=actions.clone(),
            initial=initial.clone(),
            origin=origin.clone(),
            layers=layers,
        )
        check_actions(self)
        _set(
            self,
            layers=tuple(
                layer.mask(mask)
                for layer, mask in zip(layers, self.split(self.actions, -2), strict=True)
            ),
        )
        check_probabilities(self)
        for name in _LAYOUT:
            getattr(self, name)
        _ = self._joint, self.reachable

    @property
    def transitions(self) -> tuple[Tensor, ...]:
        """P of each layer: a table `(*batch, S_k, A, S_{k+1})`, or sparse `(S_k * A, S_{k+1})`."""
        return tuple(layer.tensor for layer in self.layers)

    @property
    def probabilities(self) -> tuple[Tensor, ...]:
        """The tensors with derivatives: the initial distribution, and one per layer."""
        return (self.initial, *(layer.probabilities for layer in self.layers))

    @cached_property
    def is_sparse(self) -> bool:
        """Whether a layer is sparse; then nothing of the size of a dense layer is ever made."""
        return any(isinstance(layer, SparseLayer) for layer in self.layers)

    # -- sizes ---------------------------------------------------------------------------------

    @cached_property
    def layer_sizes(self) -> tuple[int, ...]:
        """|S_0|, ..., |S_{L-1}|."""
        return tuple(layer.sizes[0] for layer in self.layers)

    @cached_property
    def num_actions(self) -> int:
        """A, the largest number of actions that a state can have."""
        return self.layers[0].sizes[1]

    @cached_property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions of the transitions: a batch of MDPs with the same layout."""
        return broadcast(self.initial.shape[:-1], *(layer.batch_shape for layer in self.layers))

    @property
    def joint_transitions(self) -> Tensor:
        """P(s' | s, a) of all layers in one tensor `(*batch, S, A, S)`, zero elsewhere.

        Raises:
            ValueError: if the transitions are sparse.
        """
        if self.is_sparse:
            raise ValueError(
                "mdp: its transitions are sparse and are not made dense unasked; use "
                "mdp.to_dense() if it is small"
            )
        return self.join_transitions()

    @cached_property
    def _joint(self) -> Tensor | None:
        # Cached only for small constant models. A graph must not be kept, nor a tensor of a
        # transform that has ended.
        constant = self.num_states <= DENSE_STATES and not any(
            p.requires_grad for p in self.probabilities[1:]
        )
        return self._join() if constant and not self.is_sparse else None

    def join_transitions(self) -> Tensor:
        """`joint_transitions`, also for sparse layers."""
        return self._join() if self._joint is None else self._joint

    def _join(self) -> Tensor:
        rows = []
        for k, (layer, here) in enumerate(zip(self.layers, self.layer_slices, strict=True)):
            kernel = layer.dense
            to_terminal = k == self.horizon - 1
            kernel = torch.zeros_like(kernel[..., :0]) if to_terminal else kernel
            kernel = torch.nn.functional.pad(
                kernel, (here.stop, self.num_states - here.stop - kernel.shape[-1])
            )
            rows.append(kernel.expand(*self.batch_shape, *kernel.shape[-3:]))
        return torch.cat(rows, -3)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].probabilities.dtype

    @property
    def device(self) -> torch.device:
        return self.layers[0].probabilities.device

    def __repr__(self) -> str:
        batch = f", batch={tuple(self.batch_shape)}" if self.batch_shape else ""
        return (
            f"LayeredMDP(horizon={self.horizon}, layers={list(self.layer_sizes)}, "
            f"num_actions={self.num_actions}, num_pairs={self.num_pairs}{batch})"
        )

    # -- derived models ------------------------------------------------------------------------

    def with_transitions(
        self, transitions: Sequence[Tensor], initial: Tensor | None = None
    ) -> LayeredMDP:
        """The same layout with other probabilities, not validated, for `torch.func` transforms."""
        other = replace_fields(
            self, layers=tuple(layer_of(p, self.num_actions) for p in transitions)
        )
        return other if initial is None else replace_fields(other, initial=initial)

    def with_probabilities(self, initial: Tensor, *probabilities: Tensor) -> LayeredMDP:
        """The inverse of `probabilities`: the same layout with these numbers, not validated."""
        changed = (
            layer.with_probabilities(p) for layer, p in zip(self.layers, probabilities, strict=True)
        )
        return replace_fields(self, layers=tuple(changed), initial=initial)

    def blind(self) -> LayeredMDP:
        """The layout without the probabilities, for learners that do not know the transitions.

        Layers, actions and the initial distribution stay. From every pair, all states of the next
        layer are equally likely. The layers are dense, since the pattern of a sparse layer would
        tell which states can follow. `is_blind` is True.
        """
        if self.is_blind:
            return self
        sizes = (*self.layer_sizes, 1)
        uniform = (
            mask.to(self.dtype).unsqueeze(-1).expand(-1, -1, sizes[k + 1]) / sizes[k + 1]
            for k, mask in enumerate(self.split(self.actions, 0))
        )
        hidden = LayeredMDP(
            [*uniform], actions=self.actions, initial=self.initial.detach(), origin=self.origin
        )
        _set(hidden, is_blind=True)
        return hidden

    def to_dense(self) -> LayeredMDP:
        """The same model with dense layers; small MDPs are solved faster in this form."""
        if not self.is_sparse:
            return self
        return LayeredMDP(
            [layer.dense for layer in self.layers],
            actions=self.actions,
            initial=self.initial,
            origin=self.origin,
        )

    def to_sparse(self) -> LayeredMDP:
        """The same model with sparse layers.

        Raises:
            ValueError: for a batch of MDPs.
        """
        if any(layer.batch_shape for layer in self.layers):
            raise ValueError(
                "mdp: a sparse layer holds a single MDP, this is a batch of shape "
                f"{tuple(self.batch_shape)}"
            )
        layers = [
            layer.tensor
            if isinstance(layer, SparseLayer)
            else layer.dense.flatten(0, 1).to_sparse()
            for layer in self.layers
        ]
        return LayeredMDP(layers, actions=self.actions, initial=self.initial, origin=self.origin)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> LayeredMDP:
        """The same model on another device or in another floating-point type."""
        return self.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else None))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> LayeredMDP:
        """The same model with every tensor converted, like `nn.Module._apply`."""
        other = replace_fields(
            self,
            layers=tuple(layer.map_tensors(function) for layer in self.layers),
            initial=function(self.initial),
            actions=function(self.actions),
            origin=function(self.origin),
        )
        if self.is_blind:
            _set(other, is_blind=True)
        return other

    @cached_property
    def reachable(self) -> Tensor:
        """Whether some policy reaches a state, `(S,)`; in a batch, in every element."""
        flags = [self.initial.detach() > 0]
        for layer in self.layers[:-1]:
            somewhere = (
                flags[-1].to(self.dtype).unsqueeze(-1).expand(*flags[-1].shape, self.num_actions)
            )
            flags.append(
                layer.with_probabilities(layer.probabilities.detach()).arrive(somewhere) > 0
            )
        return torch.cat([flag.reshape(-1, flag.shape[-1]).all(0) for flag in flags])

    def prune(self) -> LayeredMDP:
        """The MDP without unreachable states; `origin` says which states were kept."""
        if bool(self.reachable.all()):
            return self
        keep = self.split(self.reachable, 0)
        kept_next = (*keep[1:], keep[0].new_ones(1))
        return LayeredMDP(
            [
                layer.restrict(here, there).tensor
                for layer, here, there in zip(self.layers, keep, kept_next, strict=True)
            ],
            actions=self.actions[self.reachable],
            initial=self.initial[..., keep[0]],
            origin=self.origin[self.reachable],
        )

    def lift(self, table: Tensor) -> Tensor:
        """Map a table `(*batch, original S, A)` to this MDP; zero in the absorbing end."""
        lifted = table.index_select(-2, self.origin.clamp(min=0))
        return torch.where((self.origin == ABSORBING).unsqueeze(-1), 0.0, lifted)


def replace_fields(mdp: LayeredMDP, **fields: Any) -> LayeredMDP:
    """A copy with other fields, without validation, for changes that cannot be invalid."""
    other = object.__new__(LayeredMDP)
    names = ("layers", "actions", "initial", "origin")
    _set(other, **({name: getattr(mdp, name) for name in names} | fields))
    if "actions" not in fields:
        other.__dict__.update({name: getattr(mdp, name) for name in _LAYOUT})
    other.__dict__.setdefault("_joint", None)
    return other


#: Derived properties that do not depend on probabilities; computed at construction, before a
#: transform can wrap them.
_LAYOUT = ("layer_sizes", "layer_slices", "layer", "missing", "action_groups", "other_actions")


def _set(mdp: LayeredMDP, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(mdp, name, value)


def layer_of(tensor: Tensor, num_actions: int) -> Layer:
    """A layer with the storage of the tensor."""
    return (
        DenseLayer(tensor)
        if tensor.layout == torch.strided
        else SparseLayer.from_tensor(tensor, num_actions)
    )
