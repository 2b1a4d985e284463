"""The compiled player of policy optimization."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torch_occ.game.learners.dilated import ITERATIONS, PolicyOptimization
from torch_occ.game.players.engine import EnginePlayer
from torch_occ.kernels.layout import Floats, make_work
from torch_occ.kernels.play.dilated import Optimizer, play_policy_optimization
from torch_occ.kernels.play.episodes import Tally

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class PolicyOptimizationPlayer(EnginePlayer):
    """Plays `PolicyOptimization`."""

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        return self.learner.state["q"], self.learner.state["cumulative_loss"]

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, rules = self.learner, self.rules(run.losses.noise, t)
        assert isinstance(learner, PolicyOptimization)
        inverse, layers = learner.state["inverse"].numpy(), learner.mdp.horizon

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            optimizer = Optimizer(
                learner.gamma, learner.scale, ITERATIONS, inverse[seed], np.zeros((2, layers))
            )
            play_policy_optimization(
                self.model, optimizer, means, numbers[0], rules, tally, make_work(self.model)
            )

        return play_seed
