"""Constructors of layered MDPs: random, tables, arrays of other packages, Gymnasium, graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from torch_occ._support.backends import later
from torch_occ.mdp.drawing import random_transitions
from torch_occ.mdp.unrolling import outcomes_of, unroll

if TYPE_CHECKING:
    import gymnasium

    from torch_occ.mdp.graphs import GraphMDP
    from torch_occ.mdp.rewards import RewardMDP


class Constructors:
    """Class methods of `LayeredMDP`."""

    def __init__(self, transitions: Sequence[Tensor], **layout: Any) -> None:
        raise NotImplementedError

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

        Returns:
            A `LayeredMDP`.

        Raises:
            ValueError: if a size is less than one, or the concentration is not positive.
        """
        return cls(random_transitions(horizon, width, num_actions, seed, concentration, dtype))

    @classmethod
    def from_tables(
        cls,
        transition: Any,
        horizon: int,
        initial: Tensor | int = 0,
        *,
        terminal: Sequence[int] = (),
        actions: Tensor | None = None,
    ) -> Self:
        """Unroll an ordinary finite MDP for `horizon` steps.

        Layer k holds the states that can be occupied after k steps; other states are left out. A
        terminal state ends the episode: it becomes the absorbing end, which has one action and
        lasts until the horizon. `mdp.origin` maps every layered state back, and `mdp.lift(loss)`
        turns a loss table `(S, A)` into a layered one.

        Args:
            transition: `(S, A, S)`, dense or sparse, or a sparse matrix `(S * A, S)` of torch or
                SciPy; the layers are stored in the same way. Rows of terminal states are ignored.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states.
            actions: boolean mask `(S, A)` of available actions; all by default.

        Returns:
            A `LayeredMDP`.

        Raises:
            ValueError: if an argument is not valid; it names the state and the action.
        """
        sparse = not isinstance(transition, Tensor) or transition.layout != torch.strided
        return cls(
            **unroll(
                outcomes_of(transition, tuple(terminal), actions), horizon, initial, sparse=sparse
            )
        )

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

        Returns:
            A `RewardMDP`.

        Raises:
            ValueError: if an argument is not valid; it names the state and the action.
        """
        return later("mdp.importers").from_arrays(
            transition, reward, horizon, initial, terminal=terminal, action_axis=action_axis
        )

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
        """Unroll a Gymnasium environment that publishes its table (`env.unwrapped.P`).

        A terminated outcome leads to the absorbing end; duplicate next states add up. `mdp.origin`
        maps every layered state back to the environment's state, `mdp.loss` holds the losses, and
        `mdp.reward_map` maps losses back to rewards.

        The environment is reset and played, to refuse a wrong table. So pass an environment that is
        not in use elsewhere.

        Args:
            env: an environment or its id.
            initial: a distribution `(S,)` or the index of the start state; by default that of the
                environment.
            options: options of `gymnasium.make`, if `env` is an id.
            verify: the number of steps to play in the check; 0 for no check.
            seed: of the check.

        Returns:
            A `RewardMDP`.

        Raises:
            ImportError: if Gymnasium, or a package that the environment needs, is not installed.
            ValueError: if the environment publishes no valid table, or contradicts it.
        """
        return later("mdp.importers").from_gymnasium(
            env, horizon, initial, options=options, verify=verify, seed=seed
        )

    @classmethod
    def from_graph(
        cls, graph: Any, source: Any, target: Any, *, dtype: torch.dtype = torch.float64
    ) -> GraphMDP:
        """Make a layered MDP of a directed acyclic graph: its deterministic paths are the graph's.

        The layer of a node is the length of the longest path to it. Edges that skip layers lead to
        states of waiting with one action. `mdp.losses(costs)` turns costs of edges `(*batch, E)`
        into losses `(*batch, S, A)`, `mdp.flows(q)` turns q into flows through the edges. Both are
        differentiable. Edges on no path from the source to the target have no pair; their cost does
        not matter.

        Args:
            graph: a directed graph of networkx, or a sequence of edges (tail, head). Nodes are
                hashable objects. An edge may occur several times.
            source: the node where every path begins.
            target: the node where every path ends.

        Returns:
            A `GraphMDP`.

        Raises:
            ValueError: if a node is unknown, the target cannot be reached, or a path could run
                through a cycle; the message shows it.
        """
        return later("mdp.graphs").from_graph(graph, source, target, dtype)
