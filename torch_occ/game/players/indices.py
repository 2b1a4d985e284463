"""The compiled players of learners at the limit of regret: KL-UCB, Thompson sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torch_occ.game.learners.thompson import Thompson
from torch_occ.game.players.baselines import EmpiricalPlayer
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import Floats
from torch_occ.kernels.play.episodes import Tally
from torch_occ.kernels.play.indices import KL_UCB, SERIES_ROWS, THOMPSON, play_indices

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class IndexPlayer(EmpiricalPlayer):
    """Plays `KLUCB` and `Thompson`."""

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        rules, logs = self.rules(run.losses.noise, t), self.logs(t.start, t.stop)
        kind = THOMPSON if isinstance(self.learner, Thompson) else KL_UCB
        visits = self.learner.state["visits"].numpy().reshape(len(run.seeds), -1)
        before, lanes = run.t, self.lanes(run)
        each = lanes or 1
        seeds = np.array([seed % 2**64 for seed in run.seeds], np.uint64)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, blank = self.scratch(group, lambda: self.make(lanes))
            with self.rows_of(run, group, [visits]) as own:
                play_indices(
                    self.model,
                    kind,
                    seeds[group * each : (group + 1) * each],
                    before,
                    logs,
                    means,
                    numbers,
                    rules,
                    tally,
                    blank._replace(visits=own[0], losses=tally.cumulative_loss),
                    allocator(lanes)(SERIES_ROWS, visits.shape[1]),
                    work,
                    width_of(lanes),
                )

        return play_group
