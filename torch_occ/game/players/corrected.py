"""The compiled player of FTRL on corrected empirical means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torch_occ.game.learners.adaptive.corrected import CorrectedFTRL
from torch_occ.game.players.engine import terms_in
from torch_occ.game.players.ftrl import FTRLPlayer
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import Floats
from torch_occ.kernels.play.corrected import Record, Trust, play_corrected
from torch_occ.kernels.play.episodes import Tally

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class CorrectedPlayer(FTRLPlayer):
    """Plays `CorrectedFTRL` with a built-in regularizer, in lanes if `suits_lanes`."""

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, count = self.ftrl, len(run.seeds)
        assert isinstance(learner, CorrectedFTRL)
        self.check()
        weights = self.weights(t.start - 1, t.stop)  # begins one episode earlier
        rules, before = self.rules(run.losses.noise, t), run.t
        trust = Trust(learner.width, learner.prior, learner.count)
        visits, losses, squares = (
            learner.state[name].numpy().reshape(count, -1)
            for name in ("visits", "losses", "squares")
        )
        layers, lanes = learner.mdp.horizon, self.lanes(run)
        terms, new = terms_in(self.terms, lanes), allocator(lanes)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            visited, lost = np.zeros(layers, np.int64), np.zeros(layers)
            with self.rows_of(run, group, (visits, losses, squares)) as own:
                play_corrected(
                    self.model,
                    terms,
                    weights,
                    before,
                    means,
                    numbers,
                    rules,
                    trust,
                    tally,
                    Record(own[0], own[1], own[2], new(len(self.middle)), visited, lost),
                    self.middle,
                    new(weights.shape[1]),
                    new(0),
                    self.work(group, lanes, numbers),
                    width_of(lanes),
                )

        return play_group
