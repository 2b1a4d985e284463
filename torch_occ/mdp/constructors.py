"""Where layered MDPs come from: random numbers, tables, arrays of other packages, Gymnasium."""

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
        """One start state, then layers of `width` states; rows of P drawn from a symmetric
        Dirichlet.

        `concentration` 1 is uniform on the simplex; towards 0 the transitions become nearly
        deterministic.
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

        Layer k holds the states that can be occupied after k steps. A terminal state ends the
        episode: it becomes an absorbing end of one action, which waits until the horizon. States
        that no policy reaches at a step are not created. `mdp.origin` maps every layered state
        back, and `mdp.lift(loss)` turns a loss table `(S, A)` into a layered one.

        Args:
            transition: `(S, A, S)`, dense or sparse, or a sparse matrix `(S * A, S)` of torch or
                SciPy; the layers are stored likewise. Rows of terminal states are ignored.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states.
            actions: boolean mask `(S, A)` of available actions; all by default.
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
        """Unroll the arrays of another MDP package, rewards included.

        Args:
            transition: `(A, S, S)` as in pymdptoolbox, `(S, A, S)`, or one `(S, S)` matrix for
                every action, dense or sparse (SciPy).
            reward: `(S,)`, `(S, A)`, one for every transition in the same order of axes, or one
                `(S, S)` matrix for every action.
            initial: a distribution `(S,)` or the index of the start state.
            terminal: indices of terminal states: to enter one ends the episode, with the reward of
                that step.
            action_axis: which axis of `transition` counts the actions, 0 or 1; needed if there are
                as many actions as states.
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
        """Unroll a Gymnasium environment that publishes its table (`env.unwrapped.P`), rewards
        included.

        A terminated outcome leads to the absorbing end; duplicate next states add up. `mdp.origin`
        maps every layered state back to the environment's, `mdp.loss` holds its losses, and
        `mdp.reward_map` the way back to rewards.

        The environment is reset and played, to refuse a table that is not true; so pass one that
        nobody else is using.

        Args:
            env: an environment or its id.
            initial: a distribution `(S,)` or the index of the start state; the environment's own by
                default.
            options: what `gymnasium.make` takes besides the id.
            verify: how many steps to play in the check; 0 for none.
            seed: of that check.
        """
        return later("mdp.importers").from_gymnasium(
            env, horizon, initial, options=options, verify=verify, seed=seed
        )
