"""Games with imperfect information for two players, and the strategies of each as an MDP.

The strategies of a player with perfect recall form a treeplex: x(I, a) is the product of the
player's own probabilities on the way to the information set I and its action a. A treeplex is the
flow polytope of a layered MDP. Its states are the information sets; after (I, a) comes one of the
next information sets, with fixed shares; and q(I, a) = w(I) x(I, a), where w(I) is the product of
the shares on the way to I. Pairs without a next information set lead to an absorbing end.

So every regularizer, step and learner of this package works for games. With
`loss(I, a) = -sum over ends z after (I, a) of chance(z) x_other(z) payoff(z) / w(I)`, the product
⟨q, loss⟩ is the expected loss of the player.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ.mdp.checks import check_table
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.mdp.unroll import ABSORBING
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import ConditionalEntropy
from torch_occ.regularizers.parameters import PerState
from torch_occ.regularizers.schedules import Constant

# -- A plain description of a game -----------------------------------------------------------------


@dataclass(frozen=True)
class Chance:
    """A move of chance: (probability, what follows) for each outcome."""

    outcomes: Sequence[tuple[float, Any]]


@dataclass(frozen=True)
class Decision:
    """A move of player 0 or 1, who knows the information set and nothing else.

    Args:
        moves: what follows each action, by the name of the action. All decisions of an information
            set have the same names in the same order.
    """

    player: int
    information_set: Hashable
    moves: Mapping[Hashable, Any]


@dataclass(frozen=True)
class End:
    """The end of the game, with the payoffs of both players; by default the game is zero-sum."""

    payoff: float
    second: float | None = None


CHANCE, END = 2, 3  # the kinds of nodes that are no player's


class Tree(NamedTuple):
    """All histories of a game as arrays, which kernels read; Z of them are ends."""

    player: np.ndarray[Any, Any]  # (nodes + 1,): 0, 1, CHANCE or END; one more behind the last
    place: np.ndarray[Any, Any]  # (nodes + 1,): the state in the player's treeplex, or the end
    first: np.ndarray[Any, Any]  # (nodes + 1,): where its entries in `child` begin
    child: np.ndarray[Any, Any]  # (edges,), nodes
    share: np.ndarray[Any, Any]  # (edges,), the probability of an outcome of chance
    pair: np.ndarray[Any, Any]  # (2, Z): the last pair of each player before the end, or -1
    chance: np.ndarray[Any, Any]  # (Z,): the probability that chance allows the end


@dataclass(eq=False)
class _Player:
    """What the walk through the tree learns of a player: information sets in order of discovery."""

    index: dict[Hashable, int] = field(default_factory=dict)
    actions: list[tuple[Hashable, ...]] = field(default_factory=list)
    parent: list[tuple[int, int]] = field(default_factory=list)  # (information set, action), or -1
    history: list[tuple[Any, ...]] = field(default_factory=list)  # the first that leads there
    depth: list[int] = field(default_factory=list)

    def visit(self, player: int, node: Decision, parent: tuple[int, int], path: list[Any]) -> int:
        """Return the number of the node's information set; refuse what perfect recall forbids."""
        name, names = node.information_set, tuple(node.moves)
        if name not in self.index:
            self.index[name] = len(self.index)
            self.actions.append(names)
            self.parent.append(parent)
            self.history.append(tuple(path))
            self.depth.append(0 if parent[0] < 0 else self.depth[parent[0]] + 1)
            if not names:
                raise ValueError(f"moves: the decision after {_shown(path)} has no action")
            return self.index[name]
        found = self.index[name]
        place = f"information set {name!r} of player {player}"
        both = f"after {_shown(self.history[found])} and after {_shown(path)}"
        if self.actions[found] != names:
            raise ValueError(
                f"moves: {place} has the actions {list(self.actions[found])} and {list(names)}, "
                f"{both}; histories that a player cannot tell apart have the same actions"
            )
        if self.parent[found] != parent:
            raise ValueError(
                f"information_set: {place} forgets what the player did or knew before, {both} "
                "(imperfect recall); give these histories different information sets"
            )
        return found


def _shown(path: Sequence[Any]) -> str:
    return "[" + ", ".join(map(str, path)) + "]"


def _walk(root: Any, expand: Callable[[Any], Any]) -> tuple[list[_Player], Tree, list[Any], int]:
    """Visit all histories, depth first; `expand` turns a handle into a node of the description."""
    players = [_Player(), _Player()]
    nodes: list[tuple[int, int, int]] = []
    child: list[int] = []
    share: list[float] = []
    ends: list[tuple[int, int, int, int, float]] = []
    payoffs: list[tuple[float, float]] = []
    none = (-1, 0)
    path: list[Any] = []
    deepest = 0
    # A handle with the edge that leads to it, its depth, the last own pairs, and chance.
    stack: list[Any] = [(root, -1, 0, None, none, none, 1.0)]
    while stack:
        handle, edge, depth, label, first, second, chance = stack.pop()
        path[max(depth - 1, 0) :] = [label] if depth else []
        node, own, deepest = expand(handle), (first, second), max(deepest, depth)
        if edge >= 0:
            child[edge] = len(nodes)
        if isinstance(node, End):
            payoff = (node.payoff, -node.payoff if node.second is None else node.second)
            if not all(map(math.isfinite, payoff)):
                raise ValueError(f"payoff: {payoff} after {_shown(path)}; expected finite numbers")
            nodes.append((END, len(ends), len(child)))
            ends.append((*first, *second, chance))
            payoffs.append(payoff)
            continue
        if isinstance(node, Chance):
            moves: Any = enumerate(node.outcomes)
            odds = [p for p, _ in node.outcomes]
            wrong = not all(p >= 0 for p in odds) or not abs(math.fsum(odds) - 1) < 1e-9
            if wrong:
                raise ValueError(
                    f"outcomes: the probabilities of chance after {_shown(path)} are {odds}; "
                    "expected nonnegative numbers that sum to 1"
                )
            nodes.append((CHANCE, 0, len(child)))
            following = [(handle, p, i, own) for i, (p, handle) in moves]
        elif isinstance(node, Decision):
            if node.player not in (0, 1):
                raise ValueError(
                    f"player: {node.player!r} moves after {_shown(path)}; expected 0 or 1, since a "
                    "game has two players"
                )
            state = players[node.player].visit(node.player, node, own[node.player], path)
            nodes.append((node.player, state, len(child)))
            following = [
                (
                    handle,
                    1.0,
                    name,
                    ((state, i), second) if node.player == 0 else (first, (state, i)),
                )
                for i, (name, handle) in enumerate(node.moves.items())
            ]
        else:
            raise TypeError(
                f"root: expected a Chance, Decision or End after {_shown(path)}, got "
                f"{type(node).__name__}"
            )
        for place, (handle, p, label, own) in reversed([*enumerate(following, len(child))]):
            stack.append((handle, place, depth + 1, label, *own, chance * p))
        child += [0] * len(following)
        share += [p for _, p, _, _ in following]
    nodes.append((END, 0, len(child)))  # behind the last
    table = np.array(nodes, np.int64)
    last = np.array([end[:4] for end in ends], np.int64).reshape(-1, 4)
    pairs = np.stack([last[:, :2], last[:, 2:]])  # (2, Z, 2), by information set and action
    numbers = np.array(child, np.int64), np.array(share, np.float64)
    reach = np.array([end[4] for end in ends])
    player, place, first_child = np.ascontiguousarray(table.T)
    tree = Tree(player, place, first_child, *numbers, pairs, reach)
    return players, tree, payoffs, deepest


# -- The strategies of one player ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Treeplex:
    """The strategies of a player as a layered MDP; see the module.

    Args:
        mdp: its states are the information sets, and an absorbing end in some layers.
        weights: w(I) of each state, `(S,)`; 1 for ends.
        names: the information set of each state; None for ends.
        actions: the names of the actions of each state.
        state: the state of each information set, by its number in the order of discovery.
    """

    mdp: LayeredMDP
    weights: Tensor
    names: tuple[Hashable, ...]
    actions: tuple[tuple[Hashable, ...], ...]
    state: np.ndarray[Any, Any]

    @cached_property
    def is_end(self) -> Tensor:
        """Which states are absorbing ends, `(S,)`."""
        return self.mdp.origin == ABSORBING

    def sequences(self, q: Tensor) -> Tensor:
        """x = q / w, the sequence form, `(*batch, S, A)`; 0 at ends."""
        return torch.where(self.is_end[:, None], 0.0, q / self.weights[:, None])

    def occupancy(self, x: Tensor) -> Tensor:
        """q of a sequence form x `(*batch, S, A)`; what x says of ends is ignored."""
        ends = self.is_end[:, None] & self.mdp.actions
        return occupancy(self.mdp, policy_of(self.mdp, torch.where(ends, 1.0, x)))


def _treeplex(player: _Player, balanced: bool) -> Treeplex:
    count = len(player.actions)
    horizon = max(player.depth, default=0) + 1
    width = max(map(len, player.actions), default=1)
    layers = [[i for i in range(count) if player.depth[i] == k] for k in range(horizon)]
    children: dict[tuple[int, int], list[int]] = {}
    for i, parent in enumerate(player.parent):
        children.setdefault(parent, []).append(i)
    sizes = np.array([len(names) for names in player.actions], np.float64)
    for k in reversed(range(1, horizon)):  # the number of actions at and below
        for i in layers[k]:
            sizes[player.parent[i][0]] += sizes[i]
    share = np.ones(count)
    for family in children.values():
        parts = sizes[family] if balanced else np.ones(len(family))
        share[family] = parts / parts.sum()
    # An end follows a pair without children, and an end.
    ends = [not count] + [False] * (horizon - 1)
    for k in range(1, horizon):
        pairs = ((i, a) for i in layers[k - 1] for a in range(len(player.actions[i])))
        ends[k] = ends[k - 1] or any(pair not in children for pair in pairs)
    state, weights = np.zeros(count, np.int64), [1.0] * count
    order: list[int] = []  # the information set of each state, -1 for ends
    starts = []
    for layer, end in zip(layers, ends, strict=True):
        starts.append(len(order))
        for i in layer:
            state[i] = len(order)
            order.append(i)
            before = player.parent[i][0]
            weights[i] = share[i] * (weights[before] if before >= 0 else 1.0)
        order += [-1] * end
    starts.append(len(order))
    mask = torch.zeros(len(order), width, dtype=torch.bool)
    for s, i in enumerate(order):
        mask[s, : 1 if i < 0 else len(player.actions[i])] = True
    tables = []
    for k in range(horizon):
        rows, columns, values = [], [], []
        here, there = starts[k : k + 2]
        size = starts[k + 2] - there if k + 1 < horizon else 1
        for s in range(here, there):
            for a in range(int(mask[s].sum())):
                after = children.get((order[s], a), []) if order[s] >= 0 else []
                targets = [(int(state[i]) - there, share[i]) for i in after] or [(size - 1, 1.0)]
                rows += [(s - here) * width + a] * len(targets)
                columns += [column for column, _ in targets]
                values += [p for _, p in targets]
        entries = torch.tensor(np.array([rows, columns]))
        numbers = torch.tensor(values, dtype=torch.float64)
        tables.append(
            torch.sparse_coo_tensor(
                entries, numbers, ((there - here) * width, size), check_invariants=True
            )
        )
    origin = torch.tensor([ABSORBING if i < 0 else i for i in order])
    first = torch.tensor([share[i] if i >= 0 else 1.0 for i in order[: starts[1]]])
    mdp = LayeredMDP(tables, actions=mask, initial=first.to(torch.float64), origin=origin)
    names = tuple(player.index)
    return Treeplex(
        mdp,
        torch.tensor([1.0 if i < 0 else weights[i] for i in order], dtype=torch.float64),
        tuple(None if i < 0 else names[i] for i in order),
        tuple(() if i < 0 else player.actions[i] for i in order),
        state,
    )


def dilated_entropy(treeplex: Treeplex) -> Regularizer:
    """The dilated entropy with unit weights, sum_I x(I) sum_a pi(a|I) log pi(a|I).

    `ConditionalEntropy()` is the dilated entropy with the weights w(I). Both have a closed form:
    soft value iteration, here with a temperature for every information set.
    """
    rates = PerState(treeplex.mdp, treeplex.weights)
    return ConditionalEntropy() / Constant(rates)


# -- The game --------------------------------------------------------------------------------------


class BestResponse(NamedTuple):
    """A best response, and its expected payoff."""

    policy: Tensor  # (*batch, S, A), deterministic
    payoff: Tensor  # (*batch,)


class ExtensiveGame:
    """A game for two players with perfect recall, zero-sum or not.

    Strategies are occupancy measures q of `treeplex(player).mdp`, as steps and learners make them.

    Args:
        root: the first node of the description: a `Chance`, a `Decision` or an `End`.

    Raises:
        ValueError: if a player has imperfect recall (the message shows two histories), there are
            more than two players, histories in an information set have different actions, or a
            payoff or a probability is wrong.
    """

    def __init__(self, root: Any, *, expand: Callable[[Any], Any] = lambda node: node) -> None:
        players, tree, payoffs, depth = _walk(root, expand)
        self._players: list[_Player] = players
        self._treeplexes: dict[tuple[int, bool], Treeplex] = {}
        self.payoffs = torch.tensor(payoffs, dtype=torch.float64)  # (Z, 2)
        self.openspiel: Any = None  # the game of OpenSpiel that it was read from
        pairs = np.empty(tree.pair.shape[:2], np.int64)
        place = tree.place.copy()
        for i in (0, 1):
            plex, (states, actions) = self.treeplex(i), tree.pair[i].T
            known = states >= 0
            pairs[i] = -1
            pairs[i, known] = plex.state[states[known]] * plex.mdp.num_actions + actions[known]
            mine = tree.player == i
            place[mine] = plex.state[tree.place[mine]]
        self.tree = tree._replace(pair=pairs, place=place)
        self.depth = depth  # the largest number of moves in a history
        self._chance = torch.from_numpy(tree.chance)
        self._pairs = torch.from_numpy(pairs)

    @classmethod
    def from_openspiel(cls, game: Any) -> ExtensiveGame:
        """Read a game of OpenSpiel, given by its name, for example "kuhn_poker", or as an object.

        Raises:
            ImportError: if OpenSpiel is not installed.
            ValueError: if it is not a game for two players who move in turns.
        """
        with extra("games", "from_openspiel needs OpenSpiel"):
            import pyspiel  # type: ignore[import-not-found]
        if isinstance(game, str):
            game = pyspiel.load_game(game)
        if game.num_players() != 2:
            raise ValueError(f"game: {game} has {game.num_players()} players; expected two")
        if game.get_type().dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
            raise ValueError(
                f"game: the players of {game} do not move in turns; give "
                "pyspiel.convert_to_turn_based(game)"
            )

        def expand(state: Any) -> Chance | Decision | End:
            if state.is_terminal():
                return End(*state.returns())
            if state.is_chance_node():
                return Chance([(p, state.child(a)) for a, p in state.chance_outcomes()])
            player = state.current_player()
            name = state.information_state_string(player)
            return Decision(player, name, {a: state.child(a) for a in state.legal_actions()})

        found = cls(game.new_initial_state(), expand=expand)
        found.openspiel = game
        return found

    def with_payoffs(self, payoffs: Tensor) -> ExtensiveGame:
        """The same game with other payoffs `(Z, 2)`, which may require gradients.

        Raises:
            ValueError: if the shape is wrong or a payoff is not finite.
        """
        if tuple(payoffs.shape) != tuple(self.payoffs.shape):
            expected = tuple(self.payoffs.shape)
            raise ValueError(f"payoffs: expected shape {expected}, got {tuple(payoffs.shape)}")
        wrong = (~payoffs.detach().isfinite()).nonzero()
        if len(wrong):
            end, player = wrong[0].tolist()
            raise ValueError(
                f"payoffs: that of player {player} at end {end} is {payoffs[end, player]}"
            )
        found = object.__new__(ExtensiveGame)
        found.__dict__.update(self.__dict__, payoffs=payoffs)
        return found

    def treeplex(self, player: int, shares: Literal["uniform", "balanced"] = "uniform") -> Treeplex:
        """The strategies of a player.

        Args:
            shares: those of the information sets that may follow a pair: equal, or proportional to
                the number of actions at and below each of them, as in Balanced FTRL. Other methods
                of the game expect q with equal shares; convert by `sequences` and `occupancy`.
        """
        if player not in (0, 1) or shares not in ("uniform", "balanced"):
            raise ValueError(
                f"treeplex: expected a player 0 or 1 and uniform or balanced shares, got {player!r}"
                f" and {shares!r}"
            )
        key = (player, shares == "balanced")
        if key not in self._treeplexes:
            self._treeplexes[key] = _treeplex(self._players[player], key[1])
        return self._treeplexes[key]

    def reach(self, player: int, q: Tensor) -> Tensor:
        """x of the player's last pair before each end, `(*batch, Z)`."""
        plex = self.treeplex(player)
        check_table(f"q of player {player}", q, plex.mdp)
        x = torch.nn.functional.pad((q / plex.weights[:, None]).flatten(-2), (0, 1), value=1.0)
        return x[..., self._pairs[player]]

    def loss(self, player: int, q_other: Tensor) -> Tensor:
        """The loss of a player `(*batch, S, A)` against the other's strategy; see the module.

        Where the player has no decision at all, the payoff is shared by the pairs of layer 0.
        """
        plex, pairs = self.treeplex(player), self._pairs[player]
        flow = -self._chance * self.payoffs[:, player] * self.reach(1 - player, q_other)
        size = plex.mdp.num_states * plex.mdp.num_actions
        loss = flow.new_zeros(*flow.shape[:-1], size + 1)
        loss = loss.index_add(-1, torch.where(pairs < 0, size, pairs), flow)
        table = loss[..., :-1].unflatten(-1, (-1, plex.mdp.num_actions)) / plex.weights[:, None]
        if bool((pairs < 0).any()):
            layer = plex.mdp.actions & (plex.mdp.layer == 0)[:, None]
            table = table + torch.where(layer, loss[..., -1, None, None], 0.0)
        return table

    def value(self, q0: Tensor, q1: Tensor) -> Tensor:
        """The expected payoffs of both players, `(*batch, 2)`."""
        flow = self._chance * self.reach(0, q0) * self.reach(1, q1)
        return flow @ self.payoffs

    def best_response(self, player: int, q_other: Tensor) -> BestResponse:
        """The best response to the other's strategy, by one backward pass."""
        mdp = self.treeplex(player).mdp
        plan = optimal_policy(mdp, self.loss(player, q_other))
        first = plan.value[..., : mdp.layer_sizes[0]]
        return BestResponse(plan.policy, -(mdp.initial * first).sum(-1))

    def exploitability(self, q0: Tensor, q1: Tensor) -> Tensor:
        """What the players would gain by best responses, on average over both, `(*batch,)`.

        It is zero at Nash equilibria, and differentiable where best responses are unique.
        """
        best = self.best_response(0, q1).payoff + self.best_response(1, q0).payoff
        return (best - self.value(q0, q1).sum(-1)) / 2

    @cached_property
    def is_zero_sum(self) -> bool:
        """Whether the payoffs of both players sum to zero at every end."""
        return bool((self.payoffs.detach().sum(-1).abs() < 1e-12).all())

    def __repr__(self) -> str:
        sets = " and ".join(str(len(player.actions)) for player in self._players)
        name = "" if self.openspiel is None else f"{self.openspiel}, "
        return f"ExtensiveGame({name}{sets} information sets, {len(self.payoffs)} ends)"


@dataclass(frozen=True)
class GamePolicy:
    """A policy for each player, `(*batch, S, A)`."""

    game: ExtensiveGame
    policies: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, game: ExtensiveGame, qs: Sequence[Tensor]) -> GamePolicy:
        """The policies of two occupancy measures; uniform where a player never gets."""
        first, second = (policy_of(game.treeplex(i).mdp, q) for i, q in enumerate(qs))
        return cls(game, (first, second))

    def to_openspiel(self, element: int = 0) -> Any:
        """A `TabularPolicy` of OpenSpiel, for one element of a batch (of seeds).

        Raises:
            ValueError: if the game was not read from OpenSpiel.
        """
        if self.game.openspiel is None:
            raise ValueError("to_openspiel: the game was not read from OpenSpiel")
        from open_spiel.python.policy import TabularPolicy  # type: ignore[import-untyped]

        found = TabularPolicy(self.game.openspiel)
        for i, policy in enumerate(self.policies):
            plex = self.game.treeplex(i)
            rows = policy.detach().reshape(-1, *policy.shape[-2:])[element]
            for s, name in enumerate(plex.names):
                if name is not None:
                    row = found.action_probability_array[found.state_lookup[name]]
                    row[:] = 0.0
                    row[list(plex.actions[s])] = rows[s, : len(plex.actions[s])].numpy()
        return found
