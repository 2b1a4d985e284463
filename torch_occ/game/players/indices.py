"""The compiled players of learners at the limit of regret: KL-UCB, Thompson sampling, OSSB."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.ossb import AIM, OSSB
from torch_occ.game.learners.thompson import Thompson
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.baselines import EmpiricalPlayer
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import Floats
from torch_occ.kernels.play.episodes import Tally
from torch_occ.kernels.play.indices import (
    KL_UCB,
    SERIES_ROWS,
    THOMPSON,
    Goals,
    play_goals,
    play_indices,
)
from torch_occ.mdp.layered import LayeredMDP

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


class GoalPlayer(EmpiricalPlayer):
    """Plays `OSSB`. The learner makes the plans; the kernel plays from one to the next."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        super().__init__(mdp, learner, losses)
        self.in_lanes = False

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, rules = self.learner, self.rules(run.losses.noise, t)
        assert isinstance(learner, OSSB)
        state, count, before = learner.state, len(run.seeds), run.t
        visits, *per_pair = (
            state[x].numpy().reshape(count, -1) for x in ("visits", "goals", "tries", "due")
        )
        per_state = [state[name].numpy() for name in ("greedy", "visited")]
        explored = state["explored"].numpy().reshape(count, 1)
        possible = learner.pairs.numpy().ravel()

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, blank = self.scratch(seed, lambda: self.make(None))
            seen, played = blank._replace(visits=visits[seed], losses=tally.cumulative_loss), 0
            goals = Goals(seen, *(x[seed] for x in (*per_pair, *per_state, explored)))
            while True:
                played = play_goals(
                    self.model,
                    possible,
                    float(state["floor"][seed]),
                    AIM,
                    before,
                    played,
                    float(state["next"][seed]),
                    means,
                    numbers,
                    rules,
                    tally,
                    goals,
                    work,
                )
                if played == numbers.shape[1]:
                    return
                learner.renew(before + played + 1, seed)

        return play_seed
