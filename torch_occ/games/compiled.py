"""The player of self-play: the learners of this package in a kernel, others in Python.

With bandit feedback an end is drawn, and each player sees its own pairs on the way; the loss is put
on the last of them. In layers that a player does not get to it sees a likely pair with the loss 0,
which no importance weight changes.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.processes import for_each
from torch_occ._support.streams import invert
from torch_occ.engine import play as loop
from torch_occ.engine.layout import Floats
from torch_occ.game.estimators import Feedback
from torch_occ.game.players import EnginePlayer, form_of, state_rows
from torch_occ.mdp.occupancy import occupancy


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
        begun, drawn = time.monotonic(), numbers[:, :, 0, 0].contiguous()
        for part in (drawn,) if self.compiled else drawn.split(1, 1):
            if self.compiled:
                self._run(run, part.numpy())
            run.t, run.since = run.t + part.shape[1], run.since + part.shape[1]
            if not self.compiled:
                self._play_round(run, part[:, 0])
        for side in self.sides:
            side.adapt(drawn.shape[1], time.monotonic() - begun)
        self.most = min((side.most for side in self.sides), default=64)

    def _run(self, run: Any, numbers: Floats) -> None:
        """Call the kernel for every seed, in threads."""
        match, none, given = self.match, np.zeros((len(numbers), 2, 1)), []
        for side in self.sides:
            side.learner.check_settings()
            span = (run.t, run.t + 1 + numbers.shape[1])
            over = {name: f(*span) for name, f in side.over_time.items()}
            given.append((state_rows(side.form, side.learner.state), over))
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
                last, way = match.game.last_pairs[i].numpy(), match.paths[i].numpy()
                ends = last, way, match.losses[i].numpy()
                sides.append(loop.Side(game, tally, *ends, learner, work))
            loop.play_both(match.odds.numpy(), numbers[seed], *sides)

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
                path, parts = (
                    match.paths[i][end],
                    zip(x.mdp.split(q, -2), x.mdp.layer_slices, strict=True),
                )
                likely = [part.flatten(-2).argmax(-1) + k.start * q.shape[-1] for part, k in parts]
                pairs = path.where(path >= 0, torch.stack(likely, -1))
                last = (path >= 0) & (path == game.last_pairs[i][end, None])
                losses = match.losses[i][end, None].where(last, 0.0)
            shown.append(Feedback(pairs // q.shape[-1], pairs % q.shape[-1], losses, table))
        run.tally(0 * run.q, Feedback(*[torch.zeros(len(numbers), 1)] * 3, None))
        for learner, q, feedback in zip(match.learners, qs, shown, strict=True):
            learner.observe(run.t, q, feedback)
