"""The compiled players of learners that plan with estimated transitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.multilayer import MultiLayerUCBVI
from torch_occ.game.learners.optimism import OptimisticLearner
from torch_occ.game.learners.planners.euler import EULER, StrongEuler
from torch_occ.game.learners.planners.ucbvi import UCBVI
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.engine import EnginePlayer, OverTime, few_states
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import PAIR, Floats, Work, make_work
from torch_occ.kernels.play import planning
from torch_occ.kernels.play.baselines import Seen, make_seen
from torch_occ.kernels.play.episodes import Tally
from torch_occ.kernels.play.multilayer import Stack, play_stack
from torch_occ.kernels.play.planning import Planner, entries, play_planner
from torch_occ.kernels.play.posterior import play_posterior
from torch_occ.mdp.layered import LayeredMDP

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation

_UCBVI = {
    "hoeffding": planning.UCBVI_HOEFFDING,
    "bernstein": planning.UCBVI_BERNSTEIN,
    "sharp": planning.SHARP_HOEFFDING,
}


class CountingPlayer(EnginePlayer):
    """What the players here share: visits, counts and sums of losses."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        super().__init__(mdp, learner, losses)
        self.entry = entries(self.model)

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        losses = self.learner.state["losses"]
        return torch.zeros_like(losses), losses

    def rows(self, name: str) -> Floats:
        """A tensor of the learner's state, one row per seed; kernels change it in place."""
        return self.learner.state[name].flatten(1).numpy()

    def make(self, lanes: int | None) -> tuple[Work, Seen]:
        """Scratch memory of a group of seeds."""
        seen = make_seen(self.model, allocator(lanes))
        return make_work(self.model, allocator(lanes)), seen._replace(entry=self.entry)


class OptimisticPlayer(CountingPlayer):
    """Plays `UCBVI`, `EULER` and `StrongEuler`."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, OptimisticLearner)
        super().__init__(mdp, learner, losses)
        self.optimist = learner
        self.in_lanes = few_states(self.model)
        self.logs = OverTime(learner.log)
        self.corruption = 0.0
        if isinstance(learner, UCBVI):
            self.bonus, self.corruption = _UCBVI[learner.kind], learner.corruption
        else:
            codes = {EULER: planning.EULER, StrongEuler: planning.STRONG_EULER}
            self.bonus = codes[type(learner)]

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, mdp = self.optimist, self.optimist.mdp
        rules, logs = self.rules(run.losses.noise, t), self.logs(t.start, t.stop)
        visits, counts = self.rows("visits"), self.rows("counts")
        lower = self.rows("lower") if learner.monotone else None
        settings = (learner.monotone, float(learner.floor), float(self.corruption))
        size = (float(mdp.num_states), float(mdp.num_actions))

        lanes = self.lanes(run)
        rows = [visits, counts] if lower is None else [visits, counts, lower]

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            (work, blank), bounds, values = self.scratch(group, lambda: self.make_all(lanes))
            with self.rows_of(run, group, rows) as own:
                if lower is not None:
                    bounds[planning.LOWER] = own[2]
                losses = tally.cumulative_loss
                seen = blank._replace(visits=own[0], losses=losses, counts=own[1])
                planner = Planner(
                    self.bonus,
                    *settings,
                    *size,
                    seen,
                    bounds,
                    values,
                    self.model.exists[PAIR],
                )
                play_planner(
                    self.model,
                    planner,
                    logs,
                    means,
                    numbers,
                    rules,
                    tally,
                    work,
                    width_of(lanes),
                )
                if lower is not None:
                    own[2][:] = bounds[planning.LOWER]

        return play_group

    def make_all(self, lanes: int | None) -> tuple[tuple[Work, Seen], Floats, Floats]:
        """Scratch memory of a group of seeds; the last two are `bounds` and `values`."""
        made, new, num_pairs = self.make(lanes), allocator(lanes), self.model.exists.shape[1]
        return made, new(2, num_pairs), new(3, num_pairs // self.model.num_actions)


class PosteriorPlayer(CountingPlayer):
    """Plays `PSRL`."""

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        rules, visits, counts = self.rules(run.losses.noise, t), *map(self.rows, _SEEN)

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, blank = self.scratch(seed, lambda: self.make(None))
            losses = tally.cumulative_loss
            play_posterior(
                self.model,
                run.seeds[seed],
                run.t,
                means,
                numbers,
                rules,
                tally,
                blank._replace(visits=visits[seed], losses=losses, counts=counts[seed]),
                work,
            )

        return play_seed


class MultiLayerPlayer(CountingPlayer):
    """Plays `MultiLayerUCBVI`."""

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        mdp = self.learner.mdp
        q = torch.zeros(count, mdp.num_states, mdp.num_actions, dtype=mdp.dtype)
        return q, torch.zeros_like(q)

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, rules = self.learner, self.rules(run.losses.noise, t)
        assert isinstance(learner, MultiLayerUCBVI)
        names = ("visits", "losses", "counts")
        sums = [learner.state[name].flatten(2).numpy() for name in names]  # (N, R, ...)
        possible = learner.state["possible"].flatten(2).numpy()
        num_pairs, num_states = possible.shape[-1], learner.mdp.num_states

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            rows = [np.concatenate([x[seed], x[seed].sum(0, keepdims=True)]) for x in sums]
            stack = Stack(
                run.seeds[seed],
                learner.log,
                learner.corruption,
                rows[0],
                rows[1],
                rows[2],
                np.zeros_like(rows[0]),
                np.zeros_like(rows[0]),
                possible[seed],
                self.entry,
                np.zeros((2, num_pairs)),
                np.zeros((3, num_states)),
                np.zeros(num_pairs, np.bool_),
                np.zeros(8),
            )
            play_stack(
                self.model, stack, run.t, means, numbers, rules, tally, make_work(self.model)
            )
            for x, found in zip(sums, rows, strict=True):
                x[seed] = found[:-1]

        return play_seed


#: The state of the learner that its kernel changes, besides the losses.
_SEEN = ("visits", "counts")
