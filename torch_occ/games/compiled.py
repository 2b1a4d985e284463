"""The player of self-play: the learners of this package in a kernel, others in Python.

With bandit feedback a history is drawn, and each player sees its own pairs on it; the loss is put
on the last of them. In layers that a player does not get to it sees a likely pair with the loss 0,
which no importance weight changes.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.constants import BLOCK
from torch_occ._support.processes import for_each
from torch_occ.engine import learners as forms
from torch_occ.engine import play as loop
from torch_occ.engine.lanes import Shared
from torch_occ.engine.layout import Floats, Work, kernel, make_work, routine
from torch_occ.game.estimators import Feedback
from torch_occ.game.players import EnginePlayer, form_of, state_rows
from torch_occ.games.tree import CHANCE, END, Tree
from torch_occ.mdp.occupancy import occupancy
from torch_occ.step.arrays import model_of


class Side(NamedTuple):
    """One player of one seed, as torch_occ.engine.play sees it."""

    game: loop.Game
    tally: loop.Tally
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
                chosen = loop.index_drawn(tree.share, begin, tree.first[node + 1] - begin, uniform)
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
    loop.propose(side.game, t, side.tally, side.learner, side.work)
    loop.occupy(side.game.model, side.tally.q, side.learner, side.work)
    for i in range(len(side.tally.q)):
        side.tally.cumulative_occupancy[1, i] += side.tally.q[i]
    if (side.game.before + t + 1) % BLOCK == 0:
        loop.close_block(side.tally.cumulative_occupancy)


@routine(inline=True)
def choose_pair(side: Side, state: int, k: int, uniform: float) -> int:
    """Draw the action of a player in the k-th of its states, and note the pair."""
    count = side.game.model.num_actions
    chosen = loop.index_drawn(side.tally.q, state * count, count, uniform)
    side.game.states[0, k], side.game.pairs[0, k] = state, state * count + chosen
    return chosen


@routine(inline=True)
def learn(t: int, side: Side, k: int, loss: float) -> None:
    """Put the loss on the last of k pairs, fill the layers that follow, and observe."""
    game, q = side.game, side.tally.q
    for layer in range(game.pairs.shape[1]):
        game.losses[0, layer] = loss if layer == k - 1 else 0.0
        if layer >= k:
            pair = game.model.start[layer + 1] * game.model.num_actions - 1
            while not q[pair] > 0.0:  # the layer has the mass 1
                pair -= 1
            game.states[0, layer], game.pairs[0, layer] = -1, pair
    loop.observe(game, t, side.tally, side.learner, side.work)


class CompiledExploring(NamedTuple):
    """`ExploringFTRL`."""

    q: loop.PerPair
    cumulative_loss: loop.PerPair
    visits: loop.PerPair  # how often the others reached the state, estimated
    solver: forms.Solver
    weights: Shared  # (n + 1, K * S * A)
    scale: loop.PerPair
    eta: float
    adaptive: bool


@loop.propose.register(CompiledExploring)
def _propose_exploring(game: Any, t: int, tally: Any, learner: Any, work: Work) -> None:
    forms.weigh(learner.solver, learner.weights, t, work)
    if learner.adaptive:
        for k in range(len(learner.solver.weights)):
            learner.solver.weights[k] *= 1.0 + learner.visits[k % len(learner.q)]
    forms.take_step(game.model, game, t, learner.cumulative_loss, learner, tally, work)


@loop.observe.register(CompiledExploring)
def _observe_exploring(game: Any, t: int, tally: Any, learner: Any, work: Work) -> None:
    count = game.model.num_actions
    for k in range(game.pairs.shape[1]):
        i, bias = game.pairs[0, k], learner.eta * learner.scale[game.pairs[0, k]]
        if learner.adaptive:
            bias /= 1.0 + learner.visits[i]
        weight = 1.0 / (learner.q[i] + bias)
        learner.cumulative_loss[i] += game.losses[0, k] * weight
        if learner.adaptive and game.states[0, k] >= 0:
            for j in range(game.states[0, k] * count, (game.states[0, k] + 1) * count):
                learner.visits[j] += weight * learner.scale[i]


class MatchPlayer:
    """Plays a `Match`: bandit feedback in the kernel if it knows both learners."""

    chunks, reacts = 32, False

    def __init__(self, match: Any, backend: str) -> None:
        self.match, self.models = match, [model_of(x.mdp) for x in match.learners]
        known = all(form_of(x) and x.why_not_compiled(x.mdp) is None for x in match.learners)
        self.compiled = known and backend != "torch" and not match.full
        for learner in match.learners:
            if learner.engine_only and not self.compiled:
                raise ValueError(
                    f"learners: {type(learner).__name__} plays in the engine only, with bandit "
                    "feedback and against a learner that the engine knows"
                )
        self.name, none = "engine" if self.compiled else "torch", None  # no losses
        self.sides = [EnginePlayer(x.mdp, x, none) for x in match.learners if self.compiled]
        self.most = min((side.most for side in self.sides), default=64)

    def play(self, run: Any, means: Tensor, numbers: Tensor, tables: None) -> None:
        """Play episodes run.t + 1, ...; see torch_occ.game.simulate.Player."""
        begun, n, drawn = time.monotonic(), numbers.shape[1], numbers.flatten(-2).numpy()
        for t in range(0 if self.compiled else n):
            run.t, run.since = run.t + 1, run.since + 1
            self._play_round(run, drawn[:, t : t + 1])
        if not self.compiled:
            return
        given = []
        for side in self.sides:
            side.learner.check_settings()
            over = {name: f(run.t, run.t + 1 + n) for name, f in side.over_time.items()}
            given.append((state_rows(side.form, side.learner.state), over))

        def learner_of(i: int, seed: int) -> tuple[Any, Work]:
            work, fields = self.sides[i].memory(seed, 1, None)
            states, over = given[i]
            fields = fields | over | {name: x[seed] for name, x in states.items()}
            form = self.sides[i].form
            return form(*(fields[name] for name in form._fields)), work

        self._run(run, drawn, run.t, learner_of)
        run.t, run.since = run.t + n, run.since + n
        for side in self.sides:
            side.adapt(n, time.monotonic() - begun)
        self.most = min(side.most for side in self.sides)

    def _run(self, run: Any, numbers: Floats, before: int, learner_of: Any) -> list[list[Side]]:
        """Call the kernel for every seed, in threads; return both sides of each."""
        found: list[Any] = [None] * len(numbers)
        shared = state_rows(loop.Tally, {k: x for k, x in run.sums.items() if x.dim() == 1})
        own = [state_rows(loop.Tally, sums) for sums in self.match.sums]
        shared |= dict.fromkeys(
            ("total_mean", "expected", "realised"), np.zeros((len(numbers), 2, 1))
        )
        shared["second_moment"] = np.zeros((len(numbers), 0, 0))

        def play_seed(seed: int) -> None:
            sides = []
            for i, model in enumerate(self.models):
                path = np.zeros((2, 1, len(model.start) - 1), np.int64)
                no = np.zeros((1, 1)), np.zeros((1, 1, 1, 3)), np.zeros((1, 1, 0))
                seen = *path, path[0] * 1.0, np.zeros((1, 0))
                game = loop.Game(model, *no, before, 0, False, *seen)
                tally = loop.Tally(**{name: x[seed] for name, x in (shared | own[i]).items()})
                sides.append(Side(game, tally, *learner_of(i, seed)))
            play_both(self.match.game.tree, self.match.losses, numbers[seed], *sides)
            found[seed] = sides

        for_each(play_seed, len(numbers))
        return found

    @torch.no_grad()
    def _play_round(self, run: Any, numbers: Floats) -> None:
        """One episode of learners that the kernel does not know, or of full information."""
        match, qs, shown = self.match, [], []
        for x in match.learners:
            policy = x.proposes_policy
            q = occupancy(x.mdp, x.propose_policy(run.t)) if policy else x.propose(run.t)
            qs.append(q.detach().expand(len(numbers), -1, -1).contiguous())
        if not match.full:
            flat, works = [q.flatten(-2).numpy() for q in qs], [*map(make_work, self.models)]
            found = self._run(
                run,
                numbers,
                run.t - 1,
                lambda i, seed: (forms.CompiledFixed(flat[i][seed]), works[i]),
            )
        for i, (q, sums) in enumerate(zip(qs, match.sums, strict=True)):
            if match.full:  # as if every pair had been visited
                sums["q"] = q.clone()
                sums["cumulative_occupancy"][:, 1] += q
                table = match.game.loss(i, qs[1 - i])
                pairs, losses = torch.arange(q[0].numel()).expand(len(q), -1), table.flatten(-2)
            else:
                games = [sides[i].game for sides in found]
                pairs = torch.from_numpy(np.concatenate([game.pairs for game in games]))
                losses = torch.from_numpy(np.concatenate([game.losses for game in games]))
                table = None
            shown.append(Feedback(pairs // q.shape[-1], pairs % q.shape[-1], losses, table))
        run.tally(0 * run.q, Feedback(*[torch.zeros(len(numbers), 1)] * 3, None))
        for learner, q, feedback in zip(match.learners, qs, shown, strict=True):
            learner.observe(run.t, q, feedback)
