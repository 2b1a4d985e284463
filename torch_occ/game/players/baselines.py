"""The compiled player of learners that plan with averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.baselines import OptimisticValueIteration
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.engine import EnginePlayer, OverTime, few_states
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import Floats, Work, make_work
from torch_occ.kernels.play.baselines import Seen, make_seen, play_empirical
from torch_occ.kernels.play.episodes import Tally
from torch_occ.mdp.layered import LayeredMDP

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class EmpiricalPlayer(EnginePlayer):
    """Plays the learners that plan with averages."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        super().__init__(mdp, learner, losses)
        self.in_lanes = few_states(self.model)
        self.logs = OverTime(lambda t: t.clamp(min=2).log())

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        losses = self.learner.state["losses"]
        return torch.zeros_like(losses), losses

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, rules = self.learner, self.rules(run.losses.noise, t)
        logs = self.logs(t.start, t.stop)
        scale, floor = (
            (learner.scale, learner.floor)
            if isinstance(learner, OptimisticValueIteration)
            else (0.0, 0.0)
        )
        visits = learner.state["visits"].numpy().reshape(len(run.seeds), -1)
        lanes = self.lanes(run)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, seen = self.scratch(group, lambda: self.make(lanes))
            with self.rows_of(run, group, [visits]) as own:
                play_empirical(
                    self.model,
                    logs,
                    scale,
                    floor,
                    means,
                    numbers,
                    rules,
                    tally,
                    seen._replace(visits=own[0], losses=tally.cumulative_loss),
                    work,
                    width_of(lanes),
                )

        return play_group

    def make(self, lanes: int | None) -> tuple[Work, Seen]:
        """Scratch memory of a group of seeds."""
        return make_work(self.model, allocator(lanes)), make_seen(self.model, allocator(lanes))
