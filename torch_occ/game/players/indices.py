"""The compiled player of learners with an index per pair: KL-UCB and Thompson sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torch_occ.game.learners.thompson import Thompson
from torch_occ.game.players.baselines import EmpiricalPlayer
from torch_occ.kernels.layout import Floats, make_work
from torch_occ.kernels.play.episodes import Tally
from torch_occ.kernels.play.indices import KL_UCB, THOMPSON, play_indices

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

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            play_indices(
                self.model,
                kind,
                run.seeds[seed],
                run.t,
                logs,
                means,
                numbers,
                rules,
                tally,
                visits[seed],
                np.zeros(visits.shape[1]),
                make_work(self.model),
            )

        return play_seed
