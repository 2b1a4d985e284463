"""The player of self-play: the learners of this package in a kernel, others in Python.

The learners are those of torch_occ.engine.play, one for each player. With bandit feedback a history
is drawn, and each player sees its own pairs on it; the loss is put on the last of them. In layers
that a player does not get to it sees a likely pair with the loss 0, which no weight changes.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.constants import BLOCK
from torch_occ._support.processes import for_each
from torch_occ.engine.lanes import Shared
from torch_occ.engine.layout import Floats, Work, kernel, make_work, routine
from torch_occ.engine.learners import CompiledFixed, Solver, take_step, weigh
from torch_occ.engine.play import (
    Game,
    PerPair,
    Tally,
    close_block,
    index_drawn,
    observe,
    occupy,
    propose,
)
from torch_occ.game.estimators import Feedback
from torch_occ.game.players import EnginePlayer, form_of, state_rows
from torch_occ.games.tree import CHANCE, END, Tree
from torch_occ.mdp.occupancy import occupancy
from torch_occ.step.arrays import model_of


class Side(NamedTuple):
    """One player of one seed, as torch_occ.engine.play sees it."""

    game: Game
    tally: Tally
    learner: Any
    work: Work


@kernel
def play_both(tree: Tree, losses: Floats, numbers: Floats, first: Side, second: Side) -> None:
    """Play n episodes: losses `(2, Z)` at the ends, uniform numbers `(n, depth)`."""
    for t in range(len(numbers)):
        move(t, first)
        move(t, second)
        node, drawn, met, seen = 0, 0, 0, 0
        while tree.player[node] != END:
            kind, begin, uniform = tree.player[node], tree.first[node], numbers[t, drawn]
            if kind == CHANCE:
                chosen = index_drawn(tree.share, begin, tree.first[node + 1] - begin, uniform)
            elif kind == 0:
                chosen = choose_pair(first, tree.place[node], met, uniform)
                met += 1
            else:
                chosen = choose_pair(second, tree.place[node], seen, uniform)
                seen += 1
            node, drawn = tree.child[begin + chosen], drawn + 1
        learn(t, first, met, losses[0, tree.place[node]])
        learn(t, second, seen, losses[1, tree.place[node]])


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


@routine(inline=True)
def choose_pair(side: Side, state: int, k: int, uniform: float) -> int:
    """Draw the action of a player in the k-th of its states, and note the pair."""
    count = side.game.model.num_actions
    chosen = index_drawn(side.tally.q, state * count, count, uniform)
    side.game.states[0, k], side.game.pairs[0, k] = state, state * count + chosen
    return chosen


@routine(inline=True)
def learn(t: int, side: Side, k: int, loss: float) -> None:
    """Put the loss on the last of k pairs, fill the layers that follow, and observe."""
    game, q, count = side.game, side.tally.q, side.game.model.num_actions
    for layer in range(game.pairs.shape[1]):
        game.losses[0, layer] = loss if layer == k - 1 else 0.0
        if layer >= k:
            pair = game.model.start[layer + 1] * count - 1
            while not q[pair] > 0.0:  # the layer has the mass 1
                pair -= 1
            game.states[0, layer], game.pairs[0, layer] = -1, pair
    observe(game, t, side.tally, side.learner, side.work)


class CompiledExploring(NamedTuple):
    """`ExploringFTRL`."""

    q: PerPair
    cumulative_loss: PerPair
    visits: PerPair  # how often the others reached the state, estimated; the same for all actions
    solver: Solver
    weights: Shared  # (n + 1, K * S * A)
    scale: PerPair
    eta: float
    adaptive: bool


@propose.register(CompiledExploring)
def _propose_exploring(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    weigh(learner.solver, learner.weights, t, work)
    if learner.adaptive:
        for k in range(len(learner.solver.weights)):
            learner.solver.weights[k] *= 1.0 + learner.visits[k % len(learner.q)]
    take_step(game.model, game, t, learner.cumulative_loss, learner, tally, work)


@observe.register(CompiledExploring)
def _observe_exploring(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for k in range(game.pairs.shape[1]):
        i, first = game.pairs[0, k], game.states[0, k] * game.model.num_actions
        bias = learner.eta * learner.scale[i]
        if learner.adaptive:
            bias /= 1.0 + learner.visits[i]
        weight = 1.0 / (learner.q[i] + bias)
        learner.cumulative_loss[i] += game.losses[0, k] * weight
        if learner.adaptive and first >= 0:
            for j in range(first, first + game.model.num_actions):
                learner.visits[j] += weight * learner.scale[i]


class MatchPlayer:
    """Plays a `Match`: bandit feedback in the kernel where it knows the learners."""

    chunks, reacts = 32, False

    def __init__(self, match: Any, backend: str) -> None:
        self.match, self.models = match, [model_of(x.mdp) for x in match.learners]
        every = all(form_of(x) and x.why_not_compiled(x.mdp) is None for x in match.learners)
        self.compiled = every and backend != "torch" and not match.full
        for learner in match.learners:
            if learner.engine_only and not self.compiled:
                raise ValueError(
                    f"learners: {type(learner).__name__} plays in the engine only, with bandit "
                    "feedback and against a learner that the engine knows"
                )
        self.name = "engine" if self.compiled else "torch"
        none: Any = None  # there are no losses
        self.sides = [EnginePlayer(x.mdp, x, none) for x in match.learners if self.compiled]
        self.most = min((side.most for side in self.sides), default=64)

    def play(self, run: Any, means: Tensor, numbers: Tensor, tables: None) -> None:
        """Play episodes run.t + 1, ...; see torch_occ.game.simulate.Player."""
        begun, n, drawn = time.monotonic(), numbers.shape[1], numbers.flatten(-2).numpy()
        if not self.compiled:
            for t in range(n):
                run.t, run.since = run.t + 1, run.since + 1
                self._play_round(run, drawn[:, t : t + 1])
            return
        times = range(run.t, run.t + 1 + n)
        made = []
        for side in self.sides:
            side.learner.check_settings()
            over = {name: f(times.start, times.stop) for name, f in side.over_time.items()}
            made.append((state_rows(side.form, side.learner.state), over))

        def learner_of(i: int, seed: int) -> tuple[Any, Work]:
            (states, over), side = made[i], self.sides[i]
            work, fields = side.memory(seed, 1, None)
            fields = fields | over | {name: x[seed] for name, x in states.items()}
            return side.form(*(fields[name] for name in side.form._fields)), work

        self._run(run, drawn, run.t, learner_of)
        run.t, run.since = run.t + n, run.since + n
        for side in self.sides:
            side.adapt(n, time.monotonic() - begun)
        self.most = min(side.most for side in self.sides)

    def _run(self, run: Any, numbers: Floats, before: int, learner_of: Any) -> list[list[Side]]:
        """Call the kernel for every seed, in threads; return both sides of each."""
        found: list[Any] = [None] * len(numbers)
        shared = state_rows(Tally, {k: x for k, x in run.sums.items() if x.dim() == 1})
        own = [state_rows(Tally, sums) for sums in self.match.sums]

        def play_seed(seed: int) -> None:
            none, sides = np.zeros((2, 1)), []
            for i, model in enumerate(self.models):
                shape = (1, len(model.start) - 1)
                seen = (np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape))
                no = (np.zeros((1, 1)), np.zeros((1, 1, 1, 3)), np.zeros((1, 1, 0)))
                game = Game(model, *no, before, 0, False, *seen, np.zeros((1, 0)))
                rows = {name: x[seed] for name, x in (shared | own[i]).items()}
                rows |= {"total_mean": none, "expected": none, "realised": none}
                tally = Tally(**rows, second_moment=np.zeros((0, 0)))
                sides.append(Side(game, tally, *learner_of(i, seed)))
            play_both(self.match.game.tree, self.match.losses, numbers[seed], *sides)
            found[seed] = sides

        for_each(play_seed, len(numbers))
        return found

    @torch.no_grad()
    def _play_round(self, run: Any, numbers: Floats) -> None:
        """One episode of learners that the kernel does not know, or of full information."""
        match, qs, count = self.match, [], len(numbers)
        for learner in match.learners:
            if learner.proposes_policy:
                q = occupancy(learner.mdp, learner.propose_policy(run.t))
            else:
                q = learner.propose(run.t).detach()
            qs.append(q.expand(count, -1, -1).contiguous())
        if match.full:
            shown = [_everything(match.game.loss(i, qs[1 - i])) for i in (0, 1)]
            for sums, q in zip(match.sums, qs, strict=True):
                sums["q"] = q.clone()
                sums["cumulative_occupancy"][:, 1] += q
        else:
            flat, works = [q.flatten(-2).numpy() for q in qs], [*map(make_work, self.models)]
            found = self._run(
                run, numbers, run.t - 1, lambda i, seed: (CompiledFixed(flat[i][seed]), works[i])
            )
            shown = [self._feedback([sides[i].game for sides in found]) for i in (0, 1)]
        run.tally(torch.zeros_like(run.q), Feedback(*[torch.zeros(count, 1)] * 3, None))
        for learner, q, feedback in zip(match.learners, qs, shown, strict=True):
            learner.observe(run.t, q, feedback)

    def _feedback(self, games: list[Game]) -> Feedback:
        pairs = torch.from_numpy(np.concatenate([game.pairs for game in games]))
        losses = torch.from_numpy(np.concatenate([game.losses for game in games]))
        count = games[0].model.num_actions
        return Feedback(pairs // count, pairs % count, losses, None)


def _everything(table: Tensor) -> Feedback:
    """Full information, as if every pair had been visited."""
    pairs = torch.arange(table[0].numel()).expand(len(table), -1)
    count = table.shape[-1]
    return Feedback(pairs // count, pairs % count, table.flatten(-2), table)
