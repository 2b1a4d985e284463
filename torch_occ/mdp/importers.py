"""MDPs with rewards, and their importers: arrays of other packages and tables of Gymnasium."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ.mdp.checks import Table, check_type, unexpected
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.unroll import ABSORBING, Outcomes, finish, unroll

if TYPE_CHECKING:
    import gymnasium

#: An entry of a table of Gymnasium.
OUTCOME = "(probability, next state, reward, terminated)"


class RewardMDP(LayeredMDP):
    """A `LayeredMDP` with rewards, which are also losses.

        loss = (high - reward) / (high - low)

    The interval from low to high has all rewards and zero, the reward of the absorbing end. Over an
    episode of L steps, return = L high - (high - low) * total loss. `to` keeps the rewards; `prune`
    and `with_transitions` return a plain `LayeredMDP`. Importers make it; see
    `LayeredMDP.from_gymnasium`.

    Args:
        reward: expected rewards `(original S, A)` of the original MDP.
        reward_range: low and high.
        layout: arguments of `LayeredMDP`.
    """

    reward: Tensor  # (S, A), expected rewards, zero where the episode is over
    reward_range: tuple[float, float]

    def __init__(self, *, reward: Tensor, reward_range: tuple[float, float], **layout: Any) -> None:
        super().__init__(**layout)
        reward = torch.where(self.actions, self.lift(reward), 0.0)
        self.__dict__.update(reward=reward, reward_range=reward_range)

    @property
    def loss(self) -> Tensor:
        """The mean losses `(S, A)`, in [0, 1]; at the absorbing end, that of a zero reward."""
        low, high = self.reward_range
        # Rounding may move an expectation of extreme rewards out of the interval by one ulp.
        return ((high - self.reward) / (high - low)).clamp(0.0, 1.0)

    def expected_return(self, q: Tensor) -> Tensor:
        """The expected return ⟨q, reward⟩: `(*batch, S, A)` -> `(*batch,)`."""
        return (q * self.reward).sum((-2, -1))

    def regret_in_rewards(self, regret: Tensor) -> Tensor:
        """Convert the regret of a `History` to rewards: high - low times the regret."""
        return (self.reward_range[1] - self.reward_range[0]) * regret


# Each importer makes a list of outcomes with rewards. `build` unrolls them into layers.


def build(outcomes: Outcomes, rewards: Tensor, horizon: int, initial: Table | int) -> RewardMDP:
    """The layered MDP of a list of outcomes, with a reward `(n,)` for each."""
    for wrong in rewards[~rewards.isfinite()].tolist()[:1]:
        raise ValueError(f"rewards: expected finite numbers, found {wrong}")
    low, high = map(float, torch.nn.functional.pad(rewards, (0, 1)).aminmax())
    reward = outcomes.sums(outcomes.probability * rewards)
    # If all rewards are zero, any interval will do.
    return RewardMDP(
        reward=reward,
        reward_range=(low, high if high > low else low + 1.0),
        **unroll(_wait_once(outcomes, reward), horizon, initial),
    )


def _wait_once(outcomes: Outcomes, reward: Tensor) -> Outcomes:
    """Keep only the first action of states where every action stays, for the same reward."""
    moves = (outcomes.next != outcomes.state) & (outcomes.probability > 0)
    leaves = outcomes.sums(moves.to(reward.dtype)) > 0
    first = outcomes.actions.to(torch.int8).argmax(-1, keepdim=True)
    same = reward == reward.gather(-1, first)
    waits = ((same & ~leaves) | ~outcomes.actions).all(-1, keepdim=True)
    actions = outcomes.actions & ((torch.arange(outcomes.actions.shape[1]) == first) | ~waits)
    return replace(outcomes, actions=actions).select(actions[outcomes.state, outcomes.action])


# -- arrays of other packages ------------------------------------------------------------------


def from_arrays(
    transition: Any,
    reward: Any,
    horizon: int,
    initial: Table | int,
    terminal: Sequence[int],
    action_axis: int | None,
) -> RewardMDP:
    """See `LayeredMDP.from_arrays`."""
    pieces, action_axis = _per_action(transition, action_axis)
    num_states = pieces[0].shape[0]
    for a, piece in enumerate(pieces):
        if piece.shape != (num_states, num_states):
            shape = f"shape ({num_states}, {num_states}); an array may also be (S, A, S)"
            raise ValueError(f"transition: action {a}: got {piece.shape}, expected {shape}")
    # Look up rewards before terminal states are merged into the absorbing end.
    rewards, entries = _rewards(reward, (num_states, len(pieces)), action_axis), []
    for a, piece in enumerate(pieces):
        state, after = piece.nonzero()
        found = (np.asarray(x[state, after], dtype=np.float64) for x in (piece, rewards[a]))
        entries.append((state, np.full(len(state), a), after, *map(np.ravel, found)))
    columns = [torch.from_numpy(np.concatenate(part)) for part in zip(*entries, strict=True)]
    state, action, after = (column.long() for column in columns[:3])
    everything = torch.ones(num_states, len(pieces), dtype=torch.bool)
    alive = finish(Outcomes(state, action, after, columns[3], everything), terminal)
    return build(alive, columns[4][alive.actions[state, action]], horizon, initial)


def _per_action(transition: Any, action_axis: int | None) -> tuple[list[Any], int]:
    """One `(S, S)` matrix per action, dense or sparse, and the axis that counts the actions."""
    if isinstance(transition, Tensor):
        transition = transition.detach().cpu().numpy()
    if not isinstance(transition, np.ndarray) or transition.dtype == object:
        pieces = _matrices(transition)
        if not pieces or any(piece.ndim != 2 for piece in pieces):
            raise ValueError(
                "transition: expected an array of three axes, or one (S, S) matrix for every action"
            )
        return pieces, 0
    shape = transition.shape
    fits = [axis for axis in (0, 1) if len(shape) == 3 and shape[2] == shape[1 - axis] > 0]
    axes = fits if action_axis is None else [axis for axis in fits if axis == action_axis]
    if len(axes) != 1:
        hint = "; both axes may count the actions, so pass action_axis=0 or 1" if axes else ""
        given = "" if action_axis is None else f" with action_axis={action_axis}"
        raise unexpected("transition", f"shape (A, S, S) or (S, A, S){given}", f"{shape}{hint}")
    return list(np.moveaxis(transition, axes[0], 0)), axes[0]


def _matrices(pieces: Any) -> list[Any]:
    return [piece.tocsr() if hasattr(piece, "tocsr") else np.asarray(piece) for piece in pieces]


def _rewards(reward: Any, shape: tuple[int, int], action_axis: int) -> list[Any]:
    """One `(S, S)` matrix of rewards per action, from any form that `from_arrays` accepts."""
    if isinstance(reward, Tensor):
        reward = reward.detach().cpu().numpy()
    num_states, num_actions = shape
    square = (num_states, num_states)
    objects = isinstance(reward, np.ndarray) and reward.dtype == object
    pieces = reward if objects or isinstance(reward, Sequence) else ()
    if objects or any(hasattr(piece, "tocsr") for piece in pieces):
        matrices = _matrices(reward)
        if [each.shape for each in matrices] != [square] * num_actions:
            raise ValueError(
                f"reward: expected {num_actions} matrices of shape {square}, one for every action"
            )
        return matrices
    table = np.asarray(reward, dtype=np.float64)
    cube = (*(shape[::-1] if action_axis == 0 else shape), num_states)
    if table.shape == cube:
        return list(np.moveaxis(table, action_axis, 0))
    if table.shape not in ((num_states,), shape):
        raise unexpected("reward", f"shape ({num_states},), {shape} or {cube}", table.shape)
    columns = np.broadcast_to(table.T, shape[::-1])
    return [np.broadcast_to(column[:, None], square) for column in columns]


# -- Gymnasium ---------------------------------------------------------------------------------


def from_gymnasium(
    env: gymnasium.Env[Any, Any] | str,
    horizon: int,
    initial: Table | int | None,
    options: Mapping[str, Any],
) -> RewardMDP:
    """See `LayeredMDP.from_gymnasium`."""
    env = _make(env, options)
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    if getattr(env.unwrapped, "fickle_passenger", False):
        raise ValueError(
            f"env: {name} with fickle_passenger=True does not do what its table says: the "
            "passenger's change of mind depends on a hidden variable that is not part of the "
            "state; make it with fickle_passenger=False"
        )
    outcomes, rewards = _read_table(env, name)
    limit = env.spec.max_episode_steps if env.spec is not None else None
    if limit is not None and limit < horizon:
        raise ValueError(
            f"horizon: {name} is cut off after {limit} steps, before the horizon of {horizon}; "
            f"make it with max_episode_steps={horizon}"
        )
    if initial is None:
        named = (getattr(env.unwrapped, x, None) for x in ("initial_state_distrib", "isd"))
        published = next((x for x in named if x is not None), None)
        if published is None:
            raise ValueError(
                f"initial: {name} does not publish its initial distribution "
                "(initial_state_distrib); pass one as initial"
            )
        initial = torch.as_tensor(np.asarray(published, dtype=np.float64)).ravel()
    return build(outcomes, rewards, horizon, initial)


def _make(env: Any, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    with extra("gymnasium", "from_gymnasium needs Gymnasium"):
        import gymnasium
    if not isinstance(env, str):
        if options:
            raise ValueError(
                "options: are for making an environment from its id; this one is made already"
            )
        check_type("env", env, gymnasium.Env, "a Gymnasium environment or its id")
        return env
    try:
        return gymnasium.make(env, **options)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        advice = (
            "gymnasium.pprint_registry() lists the ids; import the package that registers it "
            "first if it is not Gymnasium's own"
        )
        raise ValueError(f"env: there is no {env!r}: {error} ({advice})") from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ImportError(f"env: {env!r} needs a package that is not installed: {error}") from error
    except TypeError as error:
        raise ValueError(f"options: {env!r} does not take {dict(options)}: {error}") from error


def _read_table(env: Any, name: str) -> tuple[Outcomes, Tensor]:
    """`env.unwrapped.P`: {state: {action: [(probability, next state, reward, terminated)]}}."""
    from gymnasium.spaces import Discrete

    table = getattr(env.unwrapped, "P", None)
    if table is None:
        raise ValueError(
            f"env: {name} publishes no table of its dynamics (env.unwrapped.P), and they cannot be "
            "read off its code; write its transitions down and use LayeredMDP.from_tables or "
            "from_arrays"
        )
    for space, of in ((env.observation_space, "observation"), (env.action_space, "action")):
        if not isinstance(space, Discrete) or space.start != 0:
            raise ValueError(
                f"env: {name}: the {of} space must be Discrete(n) from 0, got {space}: the table "
                "cannot be matched with it"
            )
    num_states, num_actions = int(env.observation_space.n), int(env.action_space.n)
    lines: list[tuple[float, ...]] = []
    for s in range(num_states):
        with suppress(KeyError, IndexError):  # a state may have no row
            lines += _outcomes_in(table[s], s, f"env: {name}: P[{s}]")
    columns = torch.tensor(lines, dtype=torch.float64).reshape(-1, 6).T
    state, action, after, ended = columns[:4].long()
    place = f"env: {name}: P[%d][%d]: "
    for what, index, size in (("action", action, num_actions), ("next state", after, num_states)):
        for i in ((index < 0) | (index >= size)).nonzero().flatten().tolist()[:1]:
            where = place % (state[i], action[i])
            raise ValueError(
                f"{where}{what} {index[i]} is not one of the {size} {what.split()[-1]}s"
            )
    actions = torch.zeros(num_states, num_actions, dtype=torch.bool)
    actions[state, action] = True
    found = Outcomes(state, action, after, columns[4], actions)
    found.check(f"env: {name}: P")
    stranded = (ended == 0) & (columns[4] > 0) & ~actions.any(-1)[after]
    for s, a, there in torch.stack([state, action, after], -1)[stranded][:1].tolist():
        raise ValueError(
            f"env: {name}: P[{s}][{a}] leads to state {there}, for which the table has no action"
        )
    found = replace(found, next=torch.where(ended > 0, ABSORBING, after))
    return found, columns[5]


def _outcomes_in(rows: Any, state: int, place: str) -> list[tuple[float, ...]]:
    """The outcomes of a state: state, action, next state, whether it ends, probability, reward."""
    try:
        return [
            (state, int(action), int(after), bool(ended), float(probability), float(reward))
            for action, row in (rows.items() if isinstance(rows, Mapping) else enumerate(rows))
            for probability, after, reward, ended in row
        ]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: expected lists of {OUTCOME}, by action: {error}") from error
