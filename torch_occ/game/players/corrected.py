"""The compiled player of FTRL on corrected empirical means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torch_occ.game.learners.adaptive.corrected import CorrectedFTRL
from torch_occ.game.players.ftrl import FTRLPlayer
from torch_occ.kernels.layout import Floats, make_work
from torch_occ.kernels.play.corrected import Record, Trust, play_corrected
from torch_occ.kernels.play.episodes import Tally

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class CorrectedPlayer(FTRLPlayer):
    """Plays `CorrectedFTRL` with a built-in regularizer, one seed after the other."""

    may_use_lanes = False

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
        layers, num_pairs = learner.mdp.horizon, len(self.middle)

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work = self.works[seed] = self.works.get(seed) or make_work(self.model)
            record = Record(
                visits[seed],
                losses[seed],
                squares[seed],
                np.zeros(num_pairs),
                np.zeros(layers, np.int64),
                np.zeros(layers),
            )
            play_corrected(
                self.model,
                self.terms,
                weights,
                before,
                means,
                numbers,
                rules,
                trust,
                tally,
                record,
                self.middle,
                np.zeros(0),
                work,
            )

        return play_seed
