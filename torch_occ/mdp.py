"""The layered MDP: states in layers, known transitions, and nothing else.

The paper's model (`sec:probform`): layers S_0, ..., S_L, transitions only from one layer to the next, and a single
terminal state s_L. Two generalizations cost nothing and are allowed throughout: the first layer may have several states with an
initial distribution, and every state may have its own set of actions.

Non-terminal states are numbered in layer order, so that every quantity of the package is one `(*batch, S, A)` tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_occ.layers import DenseLayer, Layer, SparseLayer
from torch_occ.unroll import ABSORBING, outcomes_of, unroll
from torch_occ.validation import broadcast, check_actions, check_probabilities, check_shapes

if TYPE_CHECKING:
    import gymnasium

    from torch_occ.rewards import RewardMDP

#: Up to this many states one dense matrix beats a loop over layers, for a single problem; half as many for a batch.
DENSE_STATES = 128


@dataclass(frozen=True, eq=False, repr=False)
class LayeredMDP:
    """A finite episodic MDP with known transitions, validated and immutable.

    Args:
        transitions: one tensor a layer k = 0..L-1, `P_k[s, a, s'] = P(s' | s, a)` of shape `(*batch, S_k, A, S_{k+1})`; the last
            one leads to the single terminal state, so its shape is `(*batch, S_{L-1}, A, 1)`. They may require gradients. A layer
            may also be a sparse tensor `(S_k * A, S_{k+1})` of any layout, one row a pair; it is never made dense.
        actions: boolean mask `(S, A)` of the actions that each state has; all of them by default. What `transitions` says
            about a masked pair is ignored.
        initial: distribution `(*batch, S_0)` over the first layer; may be left out when that layer has one state.
        origin: for an unrolled MDP, the state of the original MDP behind each state `(S,)`, or `ABSORBING`.
    """

    layers: tuple[Layer, ...]
    actions: Tensor
    initial: Tensor
    origin: Tensor

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
                raise ValueError(f"initial: layer 0 has {first} states, so a distribution of shape ({first},) over them is needed")
            initial = like.new_ones(1)
        if actions is None:
            actions = torch.ones(num_states, num_actions, dtype=torch.bool, device=like.device)
        if origin is None:
            origin = torch.arange(num_states, device=like.device)
        _set(self, actions=actions.clone(), initial=initial.clone(), origin=origin.clone(), layers=layers)
        check_actions(self)
        _set(self, layers=tuple(layer.mask(mask) for layer, mask in zip(layers, self.split(self.actions, -2), strict=True)))
        check_probabilities(self)
        for name in _LAYOUT:
            getattr(self, name)
        _ = self._joint, self.reachable

    @property
    def transitions(self) -> tuple[Tensor, ...]:
        """P of each layer: a table `(*batch, S_k, A, S_{k+1})`, or a sparse (COO) tensor `(S_k * A, S_{k+1})`."""
        return tuple(layer.tensor for layer in self.layers)

    @property
    def probabilities(self) -> tuple[Tensor, ...]:
        """All that a derivative can be taken in: the initial distribution, and the table or the entries of each layer."""
        return (self.initial, *(layer.probabilities for layer in self.layers))

    @cached_property
    def is_sparse(self) -> bool:
        """Whether a layer is stored sparsely; then nothing of the size of a dense one is ever made."""
        return any(isinstance(layer, SparseLayer) for layer in self.layers)

    # -- sizes ------------------------------------------------------------------------------------------------------------

    @cached_property
    def horizon(self) -> int:
        """L, the number of decisions in an episode."""
        return len(self.layers)

    @cached_property
    def layer_sizes(self) -> tuple[int, ...]:
        """|S_0|, ..., |S_{L-1}|."""
        return tuple(layer.sizes[0] for layer in self.layers)

    @cached_property
    def layer_slices(self) -> tuple[slice, ...]:
        """Where each layer's states stand among all states."""
        ends = tuple(accumulate(self.layer_sizes))
        return tuple(slice(end - size, end) for end, size in zip(ends, self.layer_sizes, strict=True))

    @cached_property
    def num_states(self) -> int:
        """S, the number of non-terminal states."""
        return sum(self.layer_sizes)

    @cached_property
    def num_actions(self) -> int:
        """A, the largest number of actions that a state can have."""
        return self.layers[0].sizes[1]

    @cached_property
    def num_pairs(self) -> int:
        """The number of state-action pairs that exist."""
        return int(self.actions.sum())

    @cached_property
    def layer(self) -> Tensor:
        """k(s) of every state, `(S,)`."""
        sizes = torch.tensor(self.layer_sizes, device=self.device)
        return torch.repeat_interleave(torch.arange(self.horizon, device=self.device), sizes)

    @cached_property
    def missing(self) -> dict[str, Tensor | None]:
        """Where the arguments of `torch_occ.marginals` do not exist, as masks; None where all do."""
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
        """`(A, A)`, one off the diagonal and zero on it: `q @ other_actions` is q(s) - q(s, a) without cancellation."""
        return 1 - torch.eye(self.num_actions, dtype=self.dtype, device=self.device)

    @cached_property
    def action_groups(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """States by their number n of actions: for each n, the states `(G,)` and their actions `(G, n)`."""
        counts = self.actions.sum(-1)
        groups = []
        for n in counts.unique().tolist():
            states = (counts == n).nonzero().squeeze(-1)
            groups.append((states, self.actions[states].nonzero()[:, 1].reshape(-1, n)))
        return tuple(groups)

    @cached_property
    def batch_shape(self) -> torch.Size:
        """Leading dimensions of the transitions: a batch of MDPs of one layout."""
        return broadcast(self.initial.shape[:-1], *(layer.batch_shape for layer in self.layers))

    @property
    def joint_transitions(self) -> Tensor:
        """All layers in one tensor `(*batch, S, A, S)`: P(s' | s, a) over the non-terminal states, zero elsewhere."""
        if self.is_sparse:
            raise ValueError("mdp: its transitions are sparse and are not made dense unasked; use mdp.to_dense() if it is small")
        return self.join_transitions()

    @cached_property
    def _joint(self) -> Tensor | None:
        # Kept only for a small model of constants: a graph must not be kept, nor a tensor of a transform that has ended.
        constant = self.num_states <= DENSE_STATES and not any(p.requires_grad for p in self.probabilities[1:])
        return self._join() if constant and not self.is_sparse else None

    def join_transitions(self) -> Tensor:
        """`joint_transitions`, of sparse layers too."""
        return self._join() if self._joint is None else self._joint

    def _join(self) -> Tensor:
        rows = []
        for k, (layer, here) in enumerate(zip(self.layers, self.layer_slices, strict=True)):
            kernel = layer.dense
            to_terminal = k == self.horizon - 1
            kernel = torch.zeros_like(kernel[..., :0]) if to_terminal else kernel
            kernel = torch.nn.functional.pad(kernel, (here.stop, self.num_states - here.stop - kernel.shape[-1]))
            rows.append(kernel.expand(*self.batch_shape, *kernel.shape[-3:]))
        return torch.cat(rows, -3)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].probabilities.dtype

    @property
    def device(self) -> torch.device:
        return self.layers[0].probabilities.device

    def split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Cut a tensor with a state dimension into its layers."""
        return x.split(self.layer_sizes, dim)

    def locate(self, state: int) -> str:
        """`layer k, state i` for error messages; i counts within the layer."""
        k = int(self.layer[state])
        return f"layer {k}, state {state - self.layer_slices[k].start}"

    def __repr__(self) -> str:
        batch = f", batch={tuple(self.batch_shape)}" if self.batch_shape else ""
        return (
            f"LayeredMDP(horizon={self.horizon}, layers={list(self.layer_sizes)}, num_actions={self.num_actions}, "
            f"num_pairs={self.num_pairs}{batch})"
        )

    # -- derived models ---------------------------------------------------------------------------------------------------

    def with_transitions(self, transitions: Sequence[Tensor], initial: Tensor | None = None) -> LayeredMDP:
        """The same layout with other probabilities, not validated: for use inside `torch.func` transforms."""
        other = replace_fields(self, layers=tuple(layer_of(p, self.num_actions) for p in transitions))
        return other if initial is None else replace_fields(other, initial=initial)

    def with_probabilities(self, initial: Tensor, *probabilities: Tensor) -> LayeredMDP:
        """The inverse of `probabilities`: other numbers in the same places, not validated."""
        changed = (layer.with_probabilities(p) for layer, p in zip(self.layers, probabilities, strict=True))
        return replace_fields(self, layers=tuple(changed), initial=initial)

    def to_dense(self) -> LayeredMDP:
        """The same model with every layer as a table; for small MDPs, which dense linear algebra solves faster."""
        if not self.is_sparse:
            return self
        return LayeredMDP([layer.dense for layer in self.layers], actions=self.actions, initial=self.initial, origin=self.origin)

    def to_sparse(self) -> LayeredMDP:
        """The same model with every layer as a sparse tensor of its probabilities that are not zero."""
        if any(layer.batch_shape for layer in self.layers):
            raise ValueError(f"mdp: a sparse layer holds a single MDP, this is a batch of shape {tuple(self.batch_shape)}")
        layers = [layer.tensor if isinstance(layer, SparseLayer) else layer.dense.flatten(0, 1).to_sparse() for layer in self.layers]
        return LayeredMDP(layers, actions=self.actions, initial=self.initial, origin=self.origin)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LayeredMDP:
        """The same model on another device or in another floating-point type."""
        return self.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else None))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> LayeredMDP:
        """The same model with every tensor converted, as `nn.Module._apply` does it."""
        return replace_fields(
            self,
            layers=tuple(layer.map_tensors(function) for layer in self.layers),
            initial=function(self.initial),
            actions=function(self.actions),
            origin=function(self.origin),
        )

    @cached_property
    def reachable(self) -> Tensor:
        """Which states some policy reaches, `(S,)`; in a batch, in every element."""
        flags = [self.initial.detach() > 0]
        for layer in self.layers[:-1]:
            somewhere = flags[-1].to(self.dtype).unsqueeze(-1).expand(*flags[-1].shape, self.num_actions)
            flags.append(layer.with_probabilities(layer.probabilities.detach()).arrive(somewhere) > 0)
        return torch.cat([flag.reshape(-1, flag.shape[-1]).all(0) for flag in flags])

    def prune(self) -> LayeredMDP:
        """The MDP without the states that no policy reaches. `origin` tells which states were kept."""
        if bool(self.reachable.all()):
            return self
        keep = self.split(self.reachable, 0)
        kept_next = (*keep[1:], keep[0].new_ones(1))
        return LayeredMDP(
            [layer.restrict(here, there).tensor for layer, here, there in zip(self.layers, keep, kept_next, strict=True)],
            actions=self.actions[self.reachable],
            initial=self.initial[..., keep[0]],
            origin=self.origin[self.reachable],
        )

    def lift(self, table: Tensor) -> Tensor:
        """A table `(*batch, original S, A)` of the original MDP on the states of this one; zero in the absorbing end."""
        lifted = table.index_select(-2, self.origin.clamp(min=0))
        return torch.where((self.origin == ABSORBING).unsqueeze(-1), 0.0, lifted)

    # -- constructors -----------------------------------------------------------------------------------------------------

    @classmethod
    def random(
        cls,
        horizon: int,
        width: int,
        num_actions: int,
        *,
        seed: int = 0,
        concentration: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> LayeredMDP:
        """One start state, then layers of `width` states; rows of P drawn from a symmetric Dirichlet.

        `concentration` 1 is uniform on the simplex; towards 0 the transitions become nearly deterministic.
        """
        for name, number in (("horizon", horizon), ("width", width), ("num_actions", num_actions)):
            if number < 1:
                raise ValueError(f"{name}: expected at least 1, got {number}")
        if not concentration > 0:
            raise ValueError(f"concentration: expected a positive number, got {concentration}")
        generator = torch.Generator().manual_seed(seed)
        sizes = [1] + [width] * (horizon - 1)
        transitions = []
        for size, next_size in zip(sizes, [*sizes[1:], 1], strict=True):
            shape = (size, num_actions, next_size)
            transitions.append(_dirichlet(shape, concentration, generator).to(dtype))
        return cls(transitions)

    @classmethod
    def from_tables(
        cls,
        transition: Any,
        horizon: int,
        initial: Tensor | int = 0,
        *,
        terminal: Sequence[int] = (),
        actions: Tensor | None = None,
    ) -> LayeredMDP:
        """Unroll an ordinary finite MDP for `horizon` steps.

        Layer k holds the states that can be occupied after k steps. A terminal state ends the episode: it becomes an absorbing
        end of one action, which waits until the horizon. States that no policy reaches at a step are not created.
        `mdp.origin` maps every layered state back, and `mdp.lift(loss)` turns a loss table `(S, A)` into a layered one.

        Args:
            transition: `(S, A, S)`, dense or sparse, or a sparse matrix `(S * A, S)` of torch or SciPy; the layers are stored likewise.
                Rows of terminal states are ignored.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states.
            actions: boolean mask `(S, A)` of available actions; all by default.
        """
        sparse = not isinstance(transition, Tensor) or transition.layout != torch.strided
        return cls(**unroll(outcomes_of(transition, tuple(terminal), actions), horizon, initial, sparse=sparse))

    @classmethod
    def from_arrays(
        cls,
        transition: Any,
        reward: Any,
        horizon: int,
        initial: Tensor | int = 0,
        *,
        terminal: Sequence[int] = (),
        action_axis: int | None = None,
    ) -> RewardMDP:
        """Unroll the arrays of another MDP package, rewards included.

        Args:
            transition: `(A, S, S)` as in pymdptoolbox, `(S, A, S)`, or one `(S, S)` matrix for every action, dense or sparse (SciPy).
            reward: `(S,)`, `(S, A)`, one for every transition in the same order of axes, or one `(S, S)` matrix for every action.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states: to enter one ends the episode, with the reward of that step.
            action_axis: which axis of `transition` counts the actions, 0 or 1; needed if there are as many actions as states.
        """
        from torch_occ.importers import from_arrays

        return from_arrays(transition, reward, horizon, initial, terminal=terminal, action_axis=action_axis)

    @classmethod
    def from_gymnasium(
        cls,
        env: gymnasium.Env[Any, Any] | str,
        horizon: int,
        initial: Tensor | int | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        verify: int = 10_000,
        seed: int = 0,
    ) -> RewardMDP:
        """Unroll a Gymnasium environment that publishes its table (`env.unwrapped.P`), rewards included.

        A terminated outcome leads to the absorbing end; duplicate next states add up. `mdp.origin` maps every layered state back to the
        environment's, `mdp.loss` holds its losses, and `mdp.reward_map` the way back to rewards.

        The environment is reset and played, to refuse a table that is not true; so pass one that nobody else is using.

        Args:
            env: an environment or its id.
            initial: a distribution `(S,)` or the index of the start state; the environment's own by default.
            options: what `gymnasium.make` takes besides the id.
            verify: how many steps to play in the check; 0 for none.
            seed: of that check.
        """
        from torch_occ.importers import from_gymnasium

        return from_gymnasium(env, horizon, initial, options=options, verify=verify, seed=seed)


def replace_fields(mdp: LayeredMDP, **fields: Any) -> LayeredMDP:
    """A copy with other fields that skips validation, for changes which cannot break it."""
    other = object.__new__(LayeredMDP)
    names = ("layers", "actions", "initial", "origin")
    _set(other, **({name: getattr(mdp, name) for name in names} | fields))
    if "actions" not in fields:
        other.__dict__.update({name: getattr(mdp, name) for name in _LAYOUT})
    other.__dict__.setdefault("_joint", None)
    return other


#: Derived properties that the probabilities do not change; made at construction, before any transform can wrap them.
_LAYOUT = ("layer_sizes", "layer_slices", "layer", "missing", "action_groups", "other_actions")


def _set(mdp: LayeredMDP, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(mdp, name, value)


def layer_of(tensor: Tensor, num_actions: int) -> Layer:
    """A layer stored as the tensor is."""
    return DenseLayer(tensor) if tensor.layout == torch.strided else SparseLayer.from_tensor(tensor, num_actions)


def _dirichlet(shape: tuple[int, ...], concentration: float, generator: torch.Generator) -> Tensor:
    """Symmetric Dirichlet rows from an explicit generator, in log space so that small concentrations do not underflow.

    Gamma(c) = Gamma(c + 1) * U^(1/c); the first factor stays away from zero.
    """
    shape_plus_one = torch.full(shape, concentration + 1.0, dtype=torch.float64)
    log_gamma = torch._standard_gamma(shape_plus_one, generator=generator).log()
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator).clamp(min=2.0**-60)
    return (log_gamma + uniform.log() / concentration).softmax(-1)
