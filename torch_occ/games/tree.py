"""Games with imperfect information for two players, and the strategies of each as an MDP.

The strategies of a player with perfect recall form a treeplex: x(I, a) is the product of the
player's own probabilities on the way to the information set I and its action a. A treeplex is the
flow polytope of a layered MDP. Its states are the information sets; after (I, a) comes one of the
next information sets, with equal shares; and q(I, a) = w(I) x(I, a), where w(I) is the product of
the shares on the way to I. Pairs without a next information set lead to an absorbing end.

So every regularizer, step and learner of this package works for games. With
`loss(I, a) = -sum over ends z after (I, a) of chance(z) x_other(z) payoff(z) / w(I)`, the product
⟨q, loss⟩ is the expected loss of the player.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ.mdp.checks import check_table, check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import ConditionalEntropy
from torch_occ.regularizers.parameters import PerState
from torch_occ.regularizers.schedules import Constant

# -- A plain description of a game -----------------------------------------------------------------


class Chance(NamedTuple):
    """A move of chance: (probability, what follows) for each outcome."""

    outcomes: Sequence[tuple[float, Any]]


class Decision(NamedTuple):
    """A move of player 0 or 1, who knows the information set: what follows each action, by name.

    All decisions of an information set have the same actions in the same order.
    """

    player: int
    information_set: Hashable
    moves: Mapping[Hashable, Any]


class End(NamedTuple):
    """The end of the game, with the payoffs of both players; by default the game is zero-sum."""

    payoff: float
    second: float | None = None


class _Known(NamedTuple):
    """An information set of a player."""

    number: int  # in order of discovery
    actions: tuple[Hashable, ...]
    parent: tuple[int, int]  # the own information set and action before it; (-1, 0) for none
    path: tuple[Any, ...]  # the first history that leads there


_Sets = dict[Hashable, _Known]


def _visit(known: _Sets, node: Decision, parent: tuple[int, int], path: tuple[Any, ...]) -> int:
    """The number of the node's information set; refuse what perfect recall forbids."""
    names = tuple(node.moves)
    if node.player not in (0, 1) or not names:
        raise ValueError(
            f"player: {node.player!r} has {len(names)} actions after {[*path]}; expected "
            "player 0 or 1, since a game has two players, and an action"
        )
    found = known.setdefault(node.information_set, _Known(len(known), names, parent, path))
    if (found.actions, found.parent) != (names, parent):
        trouble = f"has the actions {list(found.actions)} and {list(names)}"
        if found.actions == names:
            trouble = "forgets what the player did or knew before (imperfect recall)"
        raise ValueError(
            f"information_set: {node.information_set!r} of player {node.player} {trouble}, after "
            f"{[*found.path]} and after {[*path]}; give these histories different ones"
        )
    return found.number


def _walk(root: Any, expand: Callable[[Any], Any]) -> tuple[tuple[_Sets, _Sets], list[Any]]:
    """The information sets of both players, and the ends: payoffs, last own pairs, and chance."""
    sets: tuple[_Sets, _Sets] = {}, {}
    ends: list[Any] = []
    # What stands for a node, its path, the last own pairs, and chance.
    stack: list[Any] = [(root, (), ((-1, 0), (-1, 0)), 1.0)]
    while stack:
        given, path, own, chance = stack.pop()
        node, following = expand(given), []
        if isinstance(node, End):
            payoff = (node.payoff,) if node.second is None else (node.payoff, node.second)
            if not all(hasattr(x, "__float__") and math.isfinite(x) for x in payoff):
                raise ValueError(f"payoff: {payoff} after {[*path]}; expected finite numbers")
            ends.append(((*payoff, -node.payoff)[:2], own, chance))
        elif isinstance(node, Chance):
            odds = [p for p, _ in node.outcomes]
            if not (all(p >= 0 for p in odds) and abs(math.fsum(odds) - 1) < 1e-9):
                raise ValueError(
                    f"outcomes: probabilities {odds} after {[*path]}; expected a distribution"
                )
            for i, (p, x) in enumerate(node.outcomes):
                following.append((x, (*path, i), own, chance * p))
        elif isinstance(node, Decision):
            second = node.player == 1
            i = _visit(sets[second], node, own[second], path)
            for a, (name, x) in enumerate(node.moves.items()):
                pairs = (own[0], (i, a)) if second else ((i, a), own[1])
                following.append((x, (*path, name), pairs, chance))
        else:
            kind = type(node).__name__
            raise TypeError(f"root: expected Chance, Decision or End after {[*path]}, got {kind}")
        stack += reversed(following)
    return sets, ends


# -- The strategies of one player ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Treeplex:
    """The strategies of a player as a layered MDP; see the module."""

    mdp: LayeredMDP  # its states are the information sets, and an absorbing end in some layers
    weights: Tensor  # (S,), w(I); 1 for ends
    is_end: Tensor  # (S,), which states are absorbing ends
    parent: Tensor  # (S,), the pair before each state, flat; -1 in the first layer and for ends
    names: tuple[Hashable, ...]  # the information set of each state; None for ends
    actions: tuple[tuple[Hashable, ...], ...]  # the names of the actions of each state

    def sequences(self, q: Tensor) -> Tensor:
        """x = q / w, the sequence form, `(*batch, S, A)`; 0 at ends."""
        return torch.where(self.is_end[:, None], 0.0, q / self.weights[:, None])

    def occupancy(self, x: Tensor) -> Tensor:
        """q of a sequence form x, `(*batch, S, A)`."""
        return occupancy(self.mdp, policy_of(self.mdp, x))


def _treeplex(known: _Sets) -> tuple[Treeplex, Tensor]:
    """The treeplex, and the state of each information set."""
    names, sets = [*known, None], [*known.values(), _Known(-1, (), (-1, 0), ())]  # the last: an end
    width = max(1, *(len(x.actions) for x in sets))
    children: dict[tuple[int, int], list[int]] = {}
    for x in sets[:-1]:
        children.setdefault(x.parent, []).append(x.number)
    layer = children.pop((-1, 0), [-1])
    order, weights, parent = [*layer], [1.0 / len(layer)] * len(layer), [-1] * len(layer)
    initial, tables = torch.tensor(weights, dtype=torch.float64), []
    while layer:
        begin, following, alone = len(order) - len(layer), list[int](), list[int]()
        entries = list[tuple[int, int, float]]()  # row, column, share; `alone` lead to an end
        for s, i in enumerate(layer):
            for a in range(max(1, len(sets[i].actions))):
                row, after = s * width + a, children.get((i, a), [])
                alone += [] if after else [row]
                for j in after:
                    entries.append((row, len(following), 1.0 / len(after)))
                    following.append(j)
                    weights.append(weights[begin + s] / len(after))
                    parent.append(begin * width + row)
        entries += [(row, len(following), 1.0) for row in alone]
        *at, shares = torch.tensor(entries, dtype=torch.float64).T
        place, size = torch.stack(at).long(), (len(layer) * width, len(following) + bool(alone))
        tables.append(torch.sparse_coo_tensor(place, shares, size, check_invariants=True))
        if following and alone:
            following.append(-1)
            weights.append(1.0)
            parent.append(-1)
        order += following
        layer = following
    counts = torch.tensor([max(1, len(sets[i].actions)) for i in order])
    mdp = LayeredMDP(tables, actions=torch.arange(width) < counts[:, None], initial=initial)
    w, shown = torch.tensor(weights, dtype=torch.float64), tuple(names[i] for i in order)
    actions = tuple(sets[i].actions for i in order)
    plex = Treeplex(mdp, w, torch.tensor(order) < 0, torch.tensor(parent), shown, actions)
    return plex, torch.tensor([len(order) if i < 0 else i for i in order]).argsort()


def dilated_entropy(treeplex: Treeplex) -> Regularizer:
    """The dilated entropy with unit weights, sum_I x(I) sum_a pi(a|I) log pi(a|I).

    `ConditionalEntropy()` is the dilated entropy with the weights w(I). Both steps have a closed
    form: soft value iteration, here with a temperature for every information set.
    """
    return ConditionalEntropy() / Constant(PerState(treeplex.mdp, treeplex.weights))


# -- The game --------------------------------------------------------------------------------------


class ExtensiveGame:
    """A game for two players with perfect recall, zero-sum or not.

    Strategies are occupancy measures q of `treeplex(player).mdp`, as steps and learners make them.
    For the Z ends, in the order of the description, depth first, it has the `payoffs` `(Z, 2)`, the
    probability `chance` `(Z,)` that chance allows the end, and `last_pairs`, for each player the
    last pair before the end, flat, `(Z,)`, or -1.

    Args:
        root: the first node of the description: a `Chance`, a `Decision` or an `End`.
        expand: makes a node from what stands in the description in its place.

    Raises:
        ValueError: if a player has imperfect recall (the message shows two histories), there are
            more than two players, histories in an information set have different actions, or a
            payoff or a probability is wrong.
    """

    def __init__(self, root: Any, *, expand: Callable[[Any], Any] = lambda node: node) -> None:
        sets, ends = _walk(root, expand)
        payoffs, last, chance = zip(*ends, strict=True)
        self.payoffs = torch.tensor(payoffs, dtype=torch.float64)
        self.chance = torch.tensor(chance, dtype=torch.float64)
        self.openspiel: Any = None  # the game of OpenSpiel that it was read from
        self.treeplexes, self.last_pairs = [], []
        for own, pairs in zip(sets, torch.tensor(last).unbind(1), strict=True):
            plex, state = _treeplex(own)
            flat = state[pairs[:, 0]] * plex.mdp.num_actions + pairs[:, 1]
            self.treeplexes.append(plex)
            self.last_pairs.append(flat.where(pairs[:, 0] >= 0, -1))

    @classmethod
    def from_openspiel(cls, game: Any) -> ExtensiveGame:
        """Read a game of OpenSpiel, given by its name, for example "kuhn_poker", or as an object.

        A ValueError says why it cannot be read.
        """
        with extra("games", "from_openspiel needs OpenSpiel"):
            import pyspiel  # type: ignore[import-not-found]
        game = pyspiel.load_game(game) if isinstance(game, str) else game
        players, turns = game.num_players(), pyspiel.GameType.Dynamics.SEQUENTIAL
        if players != 2 or game.get_type().dynamics != turns:
            raise ValueError(
                f"game: {game} has {players} players; expected two who move in turns, as in "
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
        """The same game with other finite payoffs `(Z, 2)`, which may require gradients."""
        wrong = (~payoffs.isfinite()).nonzero()
        if payoffs.shape != self.payoffs.shape or len(wrong):
            place, shape = wrong[:1].tolist(), tuple(self.payoffs.shape)
            raise ValueError(f"payoffs: expected finite numbers {shape}, not finite at {place}")
        found = object.__new__(ExtensiveGame)
        found.__dict__.update(self.__dict__, payoffs=payoffs)
        return found

    def treeplex(self, player: int) -> Treeplex:
        """The strategies of a player, 0 or 1."""
        check_that(player in (0, 1), "player", "0 or 1", repr(player))
        return self.treeplexes[player]

    def reach(self, player: int, q: Tensor) -> Tensor:
        """x of the player's last pair before each end, `(*batch, Z)`."""
        plex = self.treeplex(player)
        check_table(f"q of player {player}", q, plex.mdp)
        x = torch.nn.functional.pad((q / plex.weights[:, None]).flatten(-2), (0, 1), value=1.0)
        return x[..., self.last_pairs[player]]

    def loss(self, player: int, q_other: Tensor) -> Tensor:
        """The loss of a player `(*batch, S, A)` against the other's strategy; see the module.

        What happens before the player decides anything is charged to every pair of layer 0.
        """
        plex, pairs = self.treeplex(player), self.last_pairs[player]
        odds = -self.chance * self.payoffs[:, player]
        size, flow = plex.mdp.actions.numel(), odds * self.reach(1 - player, q_other)
        loss = flow.new_zeros(*flow.shape[:-1], size + 1)
        loss = loss.index_add(-1, torch.where(pairs < 0, size, pairs), flow)
        table = loss[..., :-1].unflatten(-1, plex.mdp.actions.shape) / plex.weights[:, None]
        first = plex.mdp.actions & (plex.mdp.layer == 0)[:, None]
        return table + torch.where(first, loss[..., -1, None, None], 0.0)

    def value(self, q0: Tensor, q1: Tensor) -> Tensor:
        """The expected payoffs of both players, `(*batch, 2)`."""
        return (self.chance * self.reach(0, q0) * self.reach(1, q1)) @ self.payoffs

    def best_response(self, player: int, q_other: Tensor) -> tuple[Tensor, Tensor]:
        """The best policy against the other's strategy, `(*batch, S, A)`, and its payoff."""
        mdp = self.treeplex(player).mdp
        plan = optimal_policy(mdp, self.loss(player, q_other))
        return plan.policy, -(mdp.initial * plan.value[..., : mdp.layer_sizes[0]]).sum(-1)

    def exploitability(self, q0: Tensor, q1: Tensor) -> Tensor:
        """What the players would gain by best responses, on average over both, `(*batch,)`.

        It is zero at Nash equilibria, and differentiable where best responses are unique.
        """
        best = self.best_response(0, q1)[1] + self.best_response(1, q0)[1]
        return (best - self.value(q0, q1).sum(-1)) / 2

    def __repr__(self) -> str:
        sets = " and ".join(str(int((~plex.is_end).sum())) for plex in self.treeplexes)
        name = "" if self.openspiel is None else f"{self.openspiel}, "
        return f"ExtensiveGame({name}{sets} information sets, {len(self.payoffs)} ends)"


class GamePolicy(NamedTuple):
    """A policy for each player, `(*batch, S, A)`."""

    game: ExtensiveGame
    policies: tuple[Tensor, ...]

    def to_openspiel(self, element: int = 0) -> Any:
        """A `TabularPolicy` of OpenSpiel, for one element of a batch (of seeds)."""
        if self.game.openspiel is None:
            raise ValueError("to_openspiel: the game was not read from OpenSpiel")
        from open_spiel.python.policy import TabularPolicy  # type: ignore[import-untyped]

        found = TabularPolicy(self.game.openspiel)
        found.action_probability_array[:] = 0.0
        for plex, policy in zip(self.game.treeplexes, self.policies, strict=True):
            rows = policy.detach().reshape(-1, *policy.shape[-2:])[element]
            for name, actions, row in zip(plex.names, plex.actions, rows, strict=True):
                if actions:
                    place = found.state_lookup[name]
                    found.action_probability_array[place, list(actions)] = row[: len(actions)]
        return found
