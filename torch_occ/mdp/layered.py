"""The layered MDP: states in layers, and known transitions.

This is the paper's model (`sec:probform`): layers S_0, ..., S_L, transitions only from one layer to
the next, and a single terminal state s_L. Beyond the paper, the first layer may have several states
with an initial distribution, and every state its own set of actions. Non-terminal states are
numbered in layer order, so that every quantity is one `(*batch, S, A)` tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import accumulate, pairwise, starmap
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Self,
    SupportsIndex,
    TypeVar,
)
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ._support.private import standard_gamma, versions_of
from torch_occ.mdp import checks
from torch_occ.mdp.checks import Table, as_tensor, broadcast, check_that, check_type
from torch_occ.mdp.layers import DenseLayer, Layer, SparseLayer
from torch_occ.mdp.unroll import ABSORBING, finish, outcomes_of, unroll

if TYPE_CHECKING:
    import gymnasium

    from torch_occ.mdp.graphs import GraphMDP
    from torch_occ.mdp.importers import RewardMDP


#: Up to this many states, one dense matrix is faster than a loop over layers; half as many in a
#: batch.
DENSE_STATES = 128


@dataclass(frozen=True, eq=False, repr=False)
class LayeredMDP:
    """A finite episodic MDP with known transitions, validated and immutable.

    Args:
        transitions: one tensor per layer k = 0..L-1, `P_k[s, a, s'] = P(s' | s, a)` of shape
            `(*batch, S_k, A, S_{k+1})`; the last one leads to the single terminal state. They may
            require gradients. A layer may also be a sparse tensor `(S_k * A, S_{k+1})`, with one
            row per pair; it is never made dense.
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
    #: The joint transitions of small constant models, made of these versions of their parts.
    _joint: ClassVar[tuple[list[int], Tensor] | None] = None

    def __init__(
        self,
        transitions: Sequence[Table],
        *,
        actions: Table | None = None,
        initial: Table | None = None,
        origin: Table | None = None,
    ) -> None:
        mask, start, names = as_tensor(actions), as_tensor(initial), as_tensor(origin)
        tensors, num_actions = checks.check_shapes(transitions, mask, start)
        layers = tuple(layer_of(p, num_actions) for p in tensors)
        num_states, first = sum(layer.sizes[0] for layer in layers), layers[0].sizes[0]
        like = layers[0].probabilities
        if start is None and first != 1:
            raise ValueError(
                f"initial: layer 0 has {first} states, so a distribution of shape ({first},) "
                "over them is needed"
            )
        if mask is None:
            mask = torch.ones(num_states, num_actions, dtype=torch.bool, device=like.device)
        names = torch.arange(num_states, device=like.device) if names is None else names
        self.__dict__.update(
            actions=mask.clone(),
            initial=like.new_ones(1) if start is None else start.clone(),
            origin=names.clone(),
            layers=layers,
        )
        checks.check_actions(self)
        masks = zip(layers, self.split(self.actions, -2), strict=True)
        self.__dict__.update(layers=tuple(layer.mask(mask) for layer, mask in masks))
        checks.check_distributions(self)
        for name in (*_LAYOUT, "reachable"):
            getattr(self, name)
        given = self.probabilities[1:]
        keeps = num_states <= DENSE_STATES and not self.is_sparse
        if keeps and not any(p.requires_grad for p in given):  # a graph must not be kept
            self.__dict__.update(_joint=(versions_of(given), self._join()))

    # -- where MDPs come from -------------------------------------------------------------------

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
    ) -> Self:
        """A random MDP: one start state, then layers of `width` states.

        Rows of P are drawn from a symmetric Dirichlet distribution. `concentration` 1 is uniform on
        the simplex; towards 0 the transitions become nearly deterministic.

        Raises:
            ValueError: if a size is less than one, or the concentration is not positive.
        """
        sizes = {"seed": seed, "horizon": horizon, "width": width, "num_actions": num_actions}
        for name, number in sizes.items():
            check_type(name, number, SupportsIndex, "a whole number")
            check_that(number >= 1 or name == "seed", name, "at least 1", number)
        check_that(-(2**63) <= seed < 2**64, "seed", "an integer below 2**64", seed)
        check_that(concentration > 0, "concentration", "a positive number", concentration)
        generator = torch.Generator().manual_seed(operator.index(seed))
        shapes = [(n, num_actions, m) for n, m in pairwise([1, *[width] * (horizon - 1), 1])]
        return cls([_dirichlet(shape, concentration, generator).to(dtype) for shape in shapes])

    @classmethod
    def from_tables(
        cls,
        transition: Any,
        horizon: int,
        initial: Table | int = 0,
        *,
        terminal: Sequence[int] = (),
        actions: Table | None = None,
    ) -> Self:
        """Unroll an ordinary finite MDP for `horizon` steps.

        Layer k holds the states that can be occupied after k steps. A terminal state ends the
        episode: it becomes the absorbing end, which has one action and lasts until the horizon.
        `mdp.origin` maps every layered state back, and `mdp.lift(loss)` turns a loss table `(S, A)`
        into a layered one.

        Args:
            transition: `(S, A, S)`, an array or a tensor, or a sparse matrix `(S * A, S)` of torch
                or SciPy; the layers are stored in the same way. Rows of terminal states are
                ignored.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states.
            actions: boolean mask `(S, A)` of available actions; all by default.
        """
        transition = as_tensor(transition)
        sparse = not isinstance(transition, Tensor) or transition.layout != torch.strided
        outcomes = finish(outcomes_of(transition), terminal, as_tensor(actions))
        return cls(**unroll(outcomes, horizon, initial, sparse=sparse))

    @classmethod
    def from_arrays(
        cls,
        transition: Any,
        reward: Any,
        horizon: int,
        initial: Table | int = 0,
        *,
        terminal: Sequence[int] = (),
        action_axis: int | None = None,
    ) -> RewardMDP:
        """Unroll the arrays of another MDP package, including rewards.

        Args:
            transition: `(A, S, S)` as in pymdptoolbox, `(S, A, S)`, or one `(S, S)` matrix per
                action, dense or sparse (SciPy).
            reward: `(S,)`, `(S, A)`, one per transition with the same order of axes, or one
                `(S, S)` matrix per action.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states. Entering one ends the episode, with the reward of
                that step.
            action_axis: the axis of `transition` that counts the actions, 0 or 1; required if there
                are as many actions as states.
        """
        make = later("mdp.importers").from_arrays
        return make(transition, reward, horizon, initial, terminal, action_axis)

    @classmethod
    def from_gymnasium(
        cls,
        env: gymnasium.Env[Any, Any] | str,
        horizon: int,
        initial: Table | int | None = None,
        **options: Any,
    ) -> RewardMDP:
        """Unroll a Gymnasium environment that publishes its table (`env.unwrapped.P`).

        A terminated outcome leads to the absorbing end; duplicate next states add up. `mdp.origin`
        maps every layered state back to the environment's state. The table is checked for its
        shape, probabilities and rewards, not by playing.

        Args:
            env: an environment or its id.
            initial: a distribution `(S,)` or the index of the start state; by default that of the
                environment.
            options: of `gymnasium.make`, if `env` is an id, such as `is_slippery=False`.

        Raises:
            ImportError: if Gymnasium, or a package that the environment needs, is not installed.
            ValueError: if the environment publishes no valid table.
        """
        return later("mdp.importers").from_gymnasium(env, horizon, initial, options)

    @classmethod
    def from_graph(
        cls,
        graph: Any,
        source: Any,
        target: Any,
        horizon: int | None = None,
        *,
        penalty: float | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> GraphMDP:
        """Make a layered MDP of a directed graph: its deterministic paths are the graph's.

        The graph is acyclic, and the layer of a node is the length of the longest path to it. Edges
        that skip layers lead to states of waiting with one action. With a horizon, the graph may
        have cycles: layer k has the nodes that a walk visits after k edges, and a walk that has
        arrived waits at the target. Edges on no path from the source to the target have no pair.

        Args:
            graph: a directed graph of networkx, or a sequence of edges (tail, head). Nodes are
                hashable objects. An edge may occur several times.
            source: the node where every path begins.
            target: the node where every path ends.
            horizon: the largest number of edges of a walk; None for all paths of an acyclic graph.
            penalty: what `losses` adds for a walk that has not arrived at the horizon. By default
                there is no such walk.

        Raises:
            ValueError: if a node is unknown, the target cannot be reached within the horizon, or
                there is no horizon and a path could run through a cycle; the message shows it.
        """
        return later("mdp.graphs").from_graph(graph, source, target, horizon, penalty, dtype)

    # -- probabilities --------------------------------------------------------------------------

    @property
    def transitions(self) -> tuple[Tensor, ...]:
        """P of each layer: a table `(*batch, S_k, A, S_{k+1})`, or sparse `(S_k * A, S_{k+1})`."""
        return tuple(layer.tensor for layer in self.layers)

    @cached_property
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
    def horizon(self) -> int:
        """L, the number of decisions in an episode."""
        return len(self.layer_sizes)

    @cached_property
    def layer_slices(self) -> tuple[slice, ...]:
        """The slice of each layer's states among all states."""
        return tuple(starmap(slice, pairwise(accumulate(self.layer_sizes, initial=0))))

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

        None means that it exists everywhere. See `torch_occ.regularizers.terms`.
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
        for n in counts.unique().tolist():
            states = (counts == n).nonzero().squeeze(-1)
            groups.append((states, self.actions[states].nonzero()[:, 1].reshape(-1, n)))
        return tuple(groups)

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
        if self._joint is None or torch.compiler.is_compiling():
            return self._join()
        versions, joint = self._joint
        return joint if versions == versions_of(self.probabilities[1:]) else self._join()

    def _join(self) -> Tensor:
        rows = []
        for k, (layer, here) in enumerate(zip(self.layers, self.layer_slices, strict=True)):
            kernel = layer.dense if k + 1 < self.horizon else layer.dense[..., :0]
            after = self.num_states - here.stop - kernel.shape[-1]
            kernel = torch.nn.functional.pad(kernel, (here.stop, after))
            rows.append(kernel.expand(*self.batch_shape, *kernel.shape[-3:]))
        return torch.cat(rows, -3)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every tensor."""
        return self.layers[0].probabilities.dtype

    @property
    def device(self) -> torch.device:
        """The device of every tensor."""
        return self.layers[0].probabilities.device

    def split(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Split a tensor with a state dimension into its layers."""
        return x.split(self.layer_sizes, dim)

    def layout_difference(self, other: LayeredMDP) -> str | None:
        """How this layout differs from another one, or None if they are the same."""
        if self.layer_sizes != other.layer_sizes:
            return f"layers of {[*self.layer_sizes]} states instead of {[*other.layer_sizes]}"
        if self.num_actions != other.num_actions:
            return f"{self.num_actions} actions instead of {other.num_actions}"
        if (self.dtype, self.device) != (other.dtype, other.device):
            return f"{self.dtype} on {self.device} instead of {other.dtype} on {other.device}"
        for state, action in (self.actions != other.actions).nonzero()[:1].tolist():
            which = "an" if bool(self.actions[state, action]) else "no"
            return f"{which} action {action} in {self.locate(state)}"
        return None

    def locate(self, state: int) -> str:
        """`layer k, state i` for error messages; i counts within the layer."""
        k = int(self.layer[state])
        return f"layer {k}, state {state - self.layer_slices[k].start}"

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
        layers = tuple(layer_of(as_tensor(p), self.num_actions) for p in transitions)
        found, sizes = ([layer.sizes for layer in x] for x in (layers, self.layers))
        check_that(found == sizes, "transitions", f"layers of the shapes {sizes}", found)
        return self._with(layers, self.initial if initial is None else initial)

    def with_probabilities(self, initial: Tensor, *probabilities: Tensor) -> LayeredMDP:
        """The inverse of `probabilities`: the same layout with these numbers, not validated."""
        pairs = zip(self.layers, probabilities, strict=True)
        return self._with(tuple(layer.with_probabilities(p) for layer, p in pairs), initial)

    def _with(self, layers: tuple[Layer, ...], initial: Tensor) -> LayeredMDP:
        other = object.__new__(LayeredMDP)
        kept = {name: getattr(self, name) for name in ("actions", "origin", *_LAYOUT)}
        other.__dict__.update(kept, layers=layers, initial=initial)
        return other

    def blind(self) -> LayeredMDP:
        """The layout without the probabilities, for learners that do not know the transitions.

        From every pair, all states of the next layer are equally likely. The layers are dense,
        since the pattern of a sparse layer would tell which states can follow.
        """
        if self.is_blind:
            return self
        masks = zip(self.split(self.actions, 0), (*self.layer_sizes[1:], 1), strict=True)
        uniform = [mask.to(self.dtype).unsqueeze(-1).expand(-1, -1, n) / n for mask, n in masks]
        initial = self.initial.detach()
        hidden = LayeredMDP(uniform, actions=self.actions, initial=initial, origin=self.origin)
        hidden.__dict__.update(is_blind=True)
        return hidden

    def to_dense(self) -> LayeredMDP:
        """The same model with dense layers; small MDPs are solved faster in this form."""
        return self._again([layer.dense for layer in self.layers]) if self.is_sparse else self

    def to_sparse(self) -> LayeredMDP:
        """The same model with sparse layers; a ValueError for a batch of MDPs."""
        if any(layer.batch_shape for layer in self.layers):
            raise ValueError(
                "mdp: a sparse layer holds a single MDP, this is a batch of shape "
                f"{tuple(self.batch_shape)}"
            )
        pairs = [(x, isinstance(x, SparseLayer)) for x in self.layers]
        return self._again(
            [x.tensor if sparse else x.dense.flatten(0, 1).to_sparse() for x, sparse in pairs]
        )

    def _again(self, transitions: Sequence[Tensor]) -> LayeredMDP:
        given = {"actions": self.actions, "initial": self.initial, "origin": self.origin}
        return LayeredMDP(transitions, **given)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The same model on another device or in another floating-point type.

        The arguments are those of `torch.Tensor.to`: a dtype, a device, both, or a tensor.

        Raises:
            TypeError: if the dtype is not a floating-point type.
        """
        like = self.initial.to(*args, **kwargs)
        fine = like.is_floating_point()
        check_that(fine, "dtype", "a floating-point type", like.dtype, TypeError)
        return self.map_tensors(
            lambda x: x.to(like.device, like.dtype if x.is_floating_point() else None)
        )

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same model with every tensor converted, like `nn.Module._apply`."""

        def converted(x: Any) -> Any:
            if isinstance(x, Layer):
                return x.map_tensors(function)
            if isinstance(x, dict):
                return {name: converted(part) for name, part in x.items()}
            if type(x) is tuple:
                return tuple(map(converted, x))
            return function(x) if isinstance(x, Tensor) else x

        other, of_layers = object.__new__(type(self)), ("probabilities", "_joint")
        kept = {name: x for name, x in vars(self).items() if name not in of_layers}
        other.__dict__.update(converted(kept))
        return other

    @cached_property
    def reachable(self) -> Tensor:
        """Whether some policy reaches a state, `(S,)`; in a batch, in every element."""
        flags = [self.initial.detach() > 0]
        for layer in self.layers[:-1]:
            here = flags[-1].to(self.dtype).unsqueeze(-1)
            fixed = layer.with_probabilities(layer.probabilities.detach())
            flags.append(fixed.arrive(here.expand(*flags[-1].shape, self.num_actions)) > 0)
        return torch.cat([flag.reshape(-1, flag.shape[-1]).all(0) for flag in flags])

    def prune(self) -> LayeredMDP:
        """The MDP without unreachable states; `origin` says which states were kept."""
        if bool(self.reachable.all()):
            return self
        keep = self.split(self.reachable, 0)
        kept = zip(self.layers, keep, (*keep[1:], keep[0].new_ones(1)), strict=True)
        return LayeredMDP(
            [layer.restrict(here, there) for layer, here, there in kept],
            actions=self.actions[self.reachable],
            initial=self.initial[..., keep[0]],
            origin=self.origin[self.reachable],
        )

    def lift(self, table: Tensor) -> Tensor:
        """Map a table `(*batch, original S, A)` to this MDP; zero in the absorbing end."""
        table, last = as_tensor(table), int(self.origin.max())
        expected = f"shape (*batch, S, A) with a row for each of your states, 0 to {last} or more"
        fine = table.dim() > 1 and table.shape[-2] > last
        check_that(fine, "table", expected, tuple(table.shape))
        lifted = table.index_select(-2, self.origin.clamp(min=0))
        return torch.where((self.origin == ABSORBING).unsqueeze(-1), 0.0, lifted)


#: Derived properties that do not depend on probabilities; computed at construction, before a
#: transform can wrap them.
_LAYOUT = ("layer_sizes", "layer_slices", "layer", "missing", "action_groups", "other_actions")


_P = ParamSpec("_P")
_T = TypeVar("_T")


def remembered(
    function: Callable[Concatenate[LayeredMDP, _P], _T],
) -> Callable[Concatenate[LayeredMDP, _P], _T]:
    """A function of an MDP that is computed once, until a probability is changed in place."""
    memory: WeakKeyDictionary[LayeredMDP, tuple[list[int], dict[Any, _T]]] = WeakKeyDictionary()

    @wraps(function)
    def recall(mdp: LayeredMDP, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        versions = versions_of(mdp.probabilities)
        if mdp not in memory or memory[mdp][0] != versions or not versions:
            memory[mdp] = versions, {}
        known, key = memory[mdp][1], (args, *kwargs.items())
        if key not in known:
            known[key] = function(mdp, *args, **kwargs)
        return known[key]

    return recall


def layer_of(tensor: Tensor, num_actions: int) -> Layer:
    """A layer with the storage of the tensor."""
    if tensor.layout == torch.strided:
        return DenseLayer(tensor)
    return SparseLayer.from_tensor(tensor, num_actions)


def _dirichlet(shape: tuple[int, ...], concentration: float, generator: torch.Generator) -> Tensor:
    """Symmetric Dirichlet rows, in logarithms: Gamma(c) = Gamma(c + 1) * U^(1/c) may underflow."""
    shape_plus_one = torch.full(shape, concentration + 1.0, dtype=torch.float64)
    log_gamma = standard_gamma(shape_plus_one, generator).log()
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator).clamp(min=2.0**-60)
    return (log_gamma + uniform.log() / concentration).softmax(-1)
