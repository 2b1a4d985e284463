"""Self-play, compiled: two learners of the package propose, play or are shown losses, and observe.

The learners are those of torch_occ.engine.play, one for each player. A round of full information
shows each player its loss against the other's strategy. With bandit feedback a history is drawn,
and each player sees its own pairs on it; the loss is put on the last of them. Layers that the
player does not get to have a likely pair with the loss 0, which no importance weight changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.constants import BLOCK
from torch_occ._support.processes import for_each
from torch_occ.engine.lanes import Shared
from torch_occ.engine.layout import PAIR, TRIAL, Floats, Work, kernel, make_work, routine
from torch_occ.engine.learners import (
    FULL_INFORMATION,
    CompiledFixed,
    Solver,
    plan,
    take_step,
    weigh,
)
from torch_occ.engine.play import (
    Game,
    PerPair,
    PerState,
    Tally,
    close_block,
    index_drawn,
    observe,
    occupy,
    propose,
)
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import FTRL, Learner
from torch_occ.game.players import EnginePlayer, form_of, state_rows
from torch_occ.games.tree import CHANCE, END, Tree
from torch_occ.step.arrays import model_of


class Board(NamedTuple):
    """The game of both players, and the rounds of one call for one seed."""

    tree: Tree
    losses: Floats  # (2, Z), at the ends
    scales: tuple[Floats, Floats]  # (S * A,) each, 1 / w of the player's pairs
    numbers: Floats  # (n, depth), uniform; (n, 0) under full information


class Side(NamedTuple):
    """One player, as torch_occ.engine.play sees it."""

    game: Game
    tally: Tally
    learner: Any
    work: Work


@kernel
def play_both(board: Board, first: Side, second: Side) -> None:
    """Play n rounds or episodes."""
    for t in range(board.numbers.shape[0]):
        move(t, first)
        move(t, second)
        if board.numbers.shape[1] == 0:
            show(board, 0, second.tally.q, first.game)
            show(board, 1, first.tally.q, second.game)
        else:
            walk_tree(board, t, first, second)
        observe(first.game, t, first.tally, first.learner, first.work)
        observe(second.game, t, second.tally, second.learner, second.work)


@routine(inline=True)
def move(t: int, side: Side) -> None:
    """Let a player propose, and add its strategy to the sum."""
    tally = side.tally
    propose(side.game, t, tally, side.learner, side.work)
    occupy(side.game.model, tally.q, side.learner, side.work)
    for i in range(len(tally.q)):
        tally.cumulative_occupancy[1, i] += tally.q[i]
    if (side.game.before + t + 1) % BLOCK == 0:
        close_block(tally.cumulative_occupancy)


@routine
def show(board: Board, player: int, other: Floats, game: Game) -> None:
    """Write the loss of a player against the other's q; see `ExtensiveGame.loss`."""
    tree, table, always = board.tree, game.table, 0.0
    own = board.scales[0] if player == 0 else board.scales[1]
    theirs = board.scales[1] if player == 0 else board.scales[0]
    for i in range(table.shape[1]):
        table[0, i] = 0.0
    for z in range(len(tree.chance)):
        i, j = tree.pair[player, z], tree.pair[1 - player, z]
        flow = tree.chance[z] * board.losses[player, z]
        if j >= 0:
            flow *= other[j] * theirs[j]
        if i >= 0:
            table[0, i] += flow
        else:
            always += flow
    for i in range(table.shape[1]):
        table[0, i] *= own[i]
    for i in range(game.model.start[1] * game.model.num_actions):
        if game.model.exists[PAIR, i]:
            table[0, i] += always


@routine
def walk_tree(board: Board, t: int, first: Side, second: Side) -> None:
    """Draw a history, and write what both players see of it."""
    tree, node, drawn, met, seen = board.tree, 0, 0, 0, 0
    while tree.player[node] != END:
        kind, begin, uniform = tree.player[node], tree.first[node], board.numbers[t, drawn]
        if kind == CHANCE:
            chosen = index_drawn(tree.share, begin, tree.first[node + 1] - begin, uniform)
        elif kind == 0:
            chosen = choose_pair(first, tree.place[node], met, uniform)
            met += 1
        else:
            chosen = choose_pair(second, tree.place[node], seen, uniform)
            seen += 1
        node, drawn = tree.child[begin + chosen], drawn + 1
    end = tree.place[node]
    close_path(first, met, board.losses[0, end])
    close_path(second, seen, board.losses[1, end])


@routine(inline=True)
def choose_pair(side: Side, state: int, k: int, uniform: float) -> int:
    """Draw the action of a player in the k-th of its states, and note the pair."""
    count = side.game.model.num_actions
    chosen = index_drawn(side.tally.q, state * count, count, uniform)
    side.game.states[0, k], side.game.losses[0, k] = state, 0.0
    side.game.pairs[0, k] = state * count + chosen
    return chosen


@routine(inline=True)
def close_path(side: Side, k: int, loss: float) -> None:
    """Put the loss on the last of k pairs, and fill the layers that follow."""
    game, q, count = side.game, side.tally.q, side.game.model.num_actions
    if k > 0:
        game.losses[0, k - 1] = loss
    for layer in range(k, game.pairs.shape[1]):
        pair = game.model.start[layer + 1] * count - 1
        while not q[pair] > 0.0:  # the layer has the mass 1
            pair -= 1
        game.states[0, layer], game.pairs[0, layer], game.losses[0, layer] = -1, pair, 0.0


# -- learners of this package only -----------------------------------------------------------------


class CompiledTree(NamedTuple):
    """`TreeFTRL`."""

    q: PerPair
    cumulative_loss: PerPair
    last: PerPair  # the last estimate
    visits: PerPair  # how often the others reached the state, estimated; the same for all actions
    floor: PerPair  # the bias of implicit exploration
    scale: PerPair  # w
    solver: Solver
    weights: Shared  # (n + 1, K or K * S * A)
    estimator: int
    optimistic: bool
    adaptive: bool
    loss: PerPair  # of the step


@propose.register(CompiledTree)
def _propose_tree(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    weigh(learner.solver, learner.weights, t, work)
    own, size = learner.solver.weights, len(learner.q)
    if learner.adaptive:
        for k in range(len(own)):
            own[k] *= 1.0 + learner.visits[k % size]
    for i in range(size):
        learner.loss[i] = learner.cumulative_loss[i]
        if learner.optimistic:
            learner.loss[i] += learner.last[i]
    take_step(game.model, game, t, learner.loss, learner, tally, work)


@observe.register(CompiledTree)
def _observe_tree(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    last, count = learner.last, game.model.num_actions
    for i in range(len(last)):
        last[i] = game.table[0, i] if learner.estimator == FULL_INFORMATION else 0.0
    if learner.estimator != FULL_INFORMATION:
        for k in range(game.pairs.shape[1]):
            i, first = game.pairs[0, k], game.states[0, k] * count
            share = 1.0 / (1.0 + learner.visits[i]) if learner.adaptive else 1.0
            weight = 1.0 / (learner.q[i] + share * learner.floor[i])
            last[i] = game.losses[0, k] * weight
            if learner.adaptive and first >= 0:
                for j in range(first, first + count):
                    learner.visits[j] += weight * learner.scale[i]
    for i in range(len(last)):
        learner.cumulative_loss[i] += last[i]


class CompiledFictitious(NamedTuple):
    """`FictitiousPlay`."""

    cumulative_loss: PerPair
    choice: PerState


@propose.register(CompiledFictitious)
def _propose_fictitious(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for i in range(len(learner.cumulative_loss)):
        work.pairs[TRIAL, i] = learner.cumulative_loss[i]
    plan(game.model, learner.choice, work)


@observe.register(CompiledFictitious)
def _observe_fictitious(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for i in range(len(learner.cumulative_loss)):
        learner.cumulative_loss[i] += game.table[0, i]


# -- both players of a run -------------------------------------------------------------------------


class Match:
    """Plays rounds for all seeds: in the kernel, or with learners that only Python knows.

    Args:
        tree: the histories of the game.
        losses: those of both players at the ends, `(2, Z)`.
        weights: w of the pairs of each player, `(S * A,)`.
        learners: started; their states are changed.
        full: whether players are shown their whole loss.
    """

    def __init__(
        self, tree: Tree, losses: Floats, weights: Sequence[Floats], learners: Any, full: bool
    ) -> None:
        self.tree, self.losses, self.learners, self.full = tree, losses, learners, full
        self.scales = (1.0 / weights[0], 1.0 / weights[1])
        self.compiled = all(why_not_known(learner) is None for learner in learners)
        for learner in learners:
            if not self.compiled and learner.engine_only:
                raise ValueError(f"learners: {type(learner).__name__} {why_not_known(learner)}")
        self.models = [model_of(learner.mdp) for learner in learners]
        nothing: Any = None  # there is no loss process
        self.players = [EnginePlayer(x.mdp, x, nothing) for x in learners] if self.compiled else []
        self.most = min((player.most for player in self.players), default=1)

    def play(self, before: int, numbers: Floats, sums: Sequence[dict[str, Tensor]]) -> None:
        """Play episodes before + 1, ... with the numbers `(N, n, depth)`; add to the sums."""
        begun, n = time.monotonic(), numbers.shape[1]
        if self.compiled:
            states = [state_rows(x.form, x.learner.state) for x in self.players]
            over = [
                {k: f(before, before + 1 + n) for k, f in x.over_time.items()} for x in self.players
            ]

            def side(i: int, seed: int, tally: Tally) -> Side:
                player = self.players[i]
                player.learner.check_settings()
                work, fields = player.memory(seed, 1, None)
                fields = fields | over[i] | {name: x[seed] for name, x in states[i].items()}
                own = player.form(*(fields[name] for name in player.form._fields))
                return Side(self.game(i, before), tally, own, work)

            self._run(numbers, sums, side)
            for player in self.players:
                player.adapt(n, time.monotonic() - begun)
            self.most = min(player.most for player in self.players)
            return
        for t in range(n):
            self._play_in_python(before + t + 1, numbers[:, t : t + 1], sums)

    def game(self, i: int, before: int) -> Game:
        """What player i sees of an episode."""
        model = self.models[i]
        layers, pairs = len(model.start) - 1, model.exists.shape[1]
        shown = np.zeros((1, pairs if self.full else 0))
        return Game(
            *(model, np.zeros((1, 1)), np.zeros((1, 1, 1, 3)), np.zeros((1, 1, 0)), before),
            *(0, False, np.zeros((1, layers), np.int64), np.zeros((1, layers), np.int64)),
            *(np.zeros((1, layers)), shown),
        )

    def _run(self, numbers: Floats, sums: Sequence[dict[str, Tensor]], side: Any) -> list[Any]:
        """Call the kernel for every seed, in threads; return both sides of each."""
        found: list[Any] = [None] * len(numbers)
        rows = [state_rows(Tally, each) for each in sums]

        def play_seed(n: int) -> None:
            none = np.zeros((2, 1))
            fixed = {"total_mean": none, "expected": none, "realised": none}
            fixed |= {"second_moment": np.zeros((0, 0))}
            tallies = [Tally(**fixed, **{k: x[n] for k, x in each.items()}) for each in rows]
            found[n] = [side(i, n, tally) for i, tally in enumerate(tallies)]
            board = Board(self.tree, self.losses, self.scales, numbers[n])
            play_both(board, *found[n])

        for_each(play_seed, len(numbers))
        return found

    def _play_in_python(self, t: int, numbers: Floats, sums: Sequence[dict[str, Tensor]]) -> None:
        """One episode of learners that the kernel does not know; it plays their strategies."""
        proposed = []
        for learner, own in zip(self.learners, sums, strict=True):
            q = learner.propose(t).detach()
            proposed.append(q.expand_as(own["q"]).contiguous())
            note_steps(own, learner.diagnostics(), t)
        flat = [q.flatten(-2).numpy() for q in proposed]
        works = [make_work(model) for model in self.models]

        def side(i: int, seed: int, tally: Tally) -> Side:
            return Side(self.game(i, t - 1), tally, CompiledFixed(flat[i][seed]), works[i])

        found = self._run(numbers, sums, side)
        for i, (learner, q) in enumerate(zip(self.learners, proposed, strict=True)):
            games, count = [sides[i].game for sides in found], self.models[i].num_actions
            pairs = torch.from_numpy(np.concatenate([game.pairs for game in games]))
            losses = torch.from_numpy(np.concatenate([game.losses for game in games]))
            table = None
            if self.full:
                table = torch.from_numpy(np.concatenate([game.table for game in games])).view_as(q)
            learner.observe(t, q, Feedback(pairs // count, pairs % count, losses, table))


def why_not_known(learner: Learner) -> str | None:
    """The reason why the kernel cannot play a learner, or None if it can."""
    if form_of(learner) is None:
        return "has no compiled form"
    if isinstance(learner, FTRL) and learner.step.regularizer.places():
        # `OverTime` makes weights for 2,048 episodes at once.
        terms = 2048 * learner.mdp.actions.numel() * 2
        if terms > 1 << 26:
            return "has too many weights that depend on the state"
    return learner.why_not_compiled(learner.mdp)


def note_steps(sums: dict[str, Tensor], found: dict[str, Tensor], t: int) -> None:
    """Add the diagnostics of a step to the sums, as torch_occ.engine.learners.note_solve."""
    if found:
        failed = found["uncertified"] > 0
        fresh = failed & (sums["first_uncertified"] == 0)
        sums["newton_steps"] += found["newton_steps"]
        sums["uncertified"] += found["uncertified"]
        for name in ("dual_residual", "flow_residual"):
            sums[name] = torch.maximum(sums[name], found[name])
        sums["first_uncertified"][fresh] = float(t)
