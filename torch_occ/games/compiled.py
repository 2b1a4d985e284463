"""The player of self-play: the learners of this package in a kernel, others in Python.

With bandit feedback an end is drawn, and each player sees its own pairs on the way; the loss is put
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
from torch_occ._support.streams import invert
from torch_occ.engine import play as loop
from torch_occ.engine.layout import Floats, Ints, Work, kernel, routine
from torch_occ.game.estimators import Feedback
from torch_occ.game.players import EnginePlayer, form_of, state_rows
from torch_occ.mdp.occupancy import occupancy


class Side(NamedTuple):
    """One player of one seed, as torch_occ.engine.play sees it, and the Z ends of the game."""

    game: loop.Game
    tally: loop.Tally
    last: Ints  # (Z,), the last pair of the player before the end, or -1
    path: Ints  # (Z, L), all of them, by layer, or -1
    losses: Floats  # (Z,)
    learner: Any
    work: Work


@kernel
def play_both(odds: Floats, numbers: Floats, first: Side, second: Side) -> None:
    """Play n episodes with uniform numbers `(n,)`; end z has the probability odds(z) q(z) q(z)."""
    for t in range(len(numbers)):
        move(t, first)
        move(t, second)
        end, rest = 0, min(numbers[t], 1 - 2.0**-50)
        for z in range(len(odds)):
            mass = odds[z] * chance_of(first, z) * chance_of(second, z)
            if mass > 0.0:
                end = z
                if rest < mass:
                    break
                rest -= mass
        learn(t, first, end)
        learn(t, second, end)


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
def chance_of(side: Side, end: int) -> float:
    """q of the last pair before an end; 1 if there is none."""
    return side.tally.q[side.last[end]] if side.last[end] >= 0 else 1.0


@routine(inline=True)
def learn(t: int, side: Side, end: int) -> None:
    """Write the trajectory to an end, with the loss on the last pair, and observe."""
    game, q = side.game, side.tally.q
    for k in range(game.pairs.shape[1]):
        pair = side.path[end, k]
        game.states[0, k] = pair // game.model.num_actions
        game.losses[0, k] = side.losses[end] if pair == side.last[end] else 0.0
        if pair < 0:
            pair, game.losses[0, k] = game.model.start[k + 1] * game.model.num_actions - 1, 0.0
            while not q[pair] > 0.0:  # the layer has the mass 1
                pair -= 1
        game.pairs[0, k] = pair
    loop.observe(game, t, side.tally, side.learner, side.work)


class MatchPlayer:
    """Plays a `Match`: bandit feedback in the kernel if it knows both learners."""

    chunks, reacts = 32, False

    def __init__(self, match: Any, backend: str) -> None:
        self.match, none = match, None  # no losses
        known = all(form_of(x) and x.why_not_compiled(x.mdp) is None for x in match.learners)
        self.compiled = known and backend != "torch" and not match.full
        for learner in match.learners:
            if learner.engine_only and not self.compiled:
                raise ValueError(
                    f"learners: {type(learner).__name__} plays in the engine only, with bandit "
                    "feedback and against a learner that the engine knows"
                )
        self.name = "engine" if self.compiled else "torch"
        self.sides = [EnginePlayer(x.mdp, x, none) for x in match.learners if self.compiled]
        self.most = min((side.most for side in self.sides), default=64)

    def play(self, run: Any, means: Tensor, numbers: Tensor, tables: None) -> None:
        """Play episodes run.t + 1, ...; see torch_occ.game.simulate.Player."""
        begun, n = time.monotonic(), numbers.shape[1]
        drawn = numbers[:, :, 0, 0].contiguous()
        if not self.compiled:
            for uniform in drawn.unbind(1):
                run.t, run.since = run.t + 1, run.since + 1
                self._play_round(run, uniform)
            return
        given = []
        for side in self.sides:
            side.learner.check_settings()
            over = {name: f(run.t, run.t + 1 + n) for name, f in side.over_time.items()}
            given.append((state_rows(side.form, side.learner.state), over))
        self._run(run, drawn.numpy(), given)
        run.t, run.since = run.t + n, run.since + n
        for side in self.sides:
            side.adapt(n, time.monotonic() - begun)
        self.most = min(side.most for side in self.sides)

    def _run(self, run: Any, numbers: Floats, given: Any) -> None:
        """Call the kernel for every seed, in threads."""
        match, none = self.match, np.zeros((len(numbers), 2, 1))
        shared = state_rows(loop.Tally, {k: x for k, x in run.sums.items() if x.dim() == 1})
        shared |= dict.fromkeys(("total_mean", "expected", "realised"), none)
        shared["second_moment"] = none[:, :0, :0]
        own = [state_rows(loop.Tally, sums) for sums in match.sums]

        def play_seed(seed: int) -> None:
            sides = []
            for i, player in enumerate(self.sides):
                path = np.zeros((2, 1, match.paths[i].shape[1]), np.int64)
                no = np.zeros((1, 1)), np.zeros((1, 1, 1, 3)), np.zeros((1, 1, 0))
                seen = *path, path[0] * 1.0, np.zeros((1, 0))
                game = loop.Game(player.model, *no, run.t, 0, False, *seen)
                tally = loop.Tally(**{name: x[seed] for name, x in (shared | own[i]).items()})
                work, fields = player.memory(seed, 1, None)
                states, over = given[i]
                fields = fields | over | {name: x[seed] for name, x in states.items()}
                learner = player.form(*(fields[name] for name in player.form._fields))
                ends = (
                    match.game.last_pairs[i].numpy(),
                    match.paths[i].numpy(),
                    match.losses[i].numpy(),
                )
                sides.append(Side(game, tally, *ends, learner, work))
            play_both(match.odds.numpy(), numbers[seed], *sides)

        for_each(play_seed, len(numbers))

    @torch.no_grad()
    def _play_round(self, run: Any, numbers: Tensor) -> None:
        """One episode of learners that the kernel does not know, or of full information."""
        match, game, qs, shown = self.match, self.match.game, [], []
        for x in match.learners:
            q = occupancy(x.mdp, x.propose_policy(run.t)) if x.proposes_policy else x.propose(run.t)
            qs.append(q.detach().expand(len(numbers), -1, -1).clone())
        if not match.full:
            reached = game.chance * game.reach(0, qs[0]) * game.reach(1, qs[1])
            end = invert(reached.cumsum(-1), numbers)
        for i, (x, q, sums) in enumerate(zip(match.learners, qs, match.sums, strict=True)):
            sums["q"] = q
            sums["cumulative_occupancy"][:, 1] += q
            table = game.loss(i, qs[1 - i]) if match.full else None
            if table is not None:  # as if every pair had been visited
                pairs, losses = torch.arange(q[0].numel()).expand(len(q), -1), table.flatten(-2)
            else:
                path, count = match.paths[i][end], q.shape[-1]
                likely = [part.flatten(-2).argmax(-1) for part in x.mdp.split(q, -2)]
                likely = torch.stack(likely, -1) + torch.tensor(
                    [k.start * count for k in x.mdp.layer_slices]
                )
                pairs = path.where(path >= 0, likely)
                last = path == game.last_pairs[i][end, None]
                losses = match.losses[i][end, None].where(last, 0.0)
            shown.append(Feedback(pairs // q.shape[-1], pairs % q.shape[-1], losses, table))
        run.tally(0 * run.q, Feedback(*[torch.zeros(len(numbers), 1)] * 3, None))
        for learner, q, feedback in zip(match.learners, qs, shown, strict=True):
            learner.observe(run.t, q, feedback)
