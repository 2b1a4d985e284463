"""The compiled player of UOB-REPS."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_occ.game.contracts import DIAGNOSTICS
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.uob_reps import UOBREPS
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.engine import EnginePlayer
from torch_occ.kernels.layout import Floats, make_work
from torch_occ.kernels.play.beliefs import Belief, Confidence
from torch_occ.kernels.play.episodes import IMPLICIT_EXPLORATION, NOISE, Rules, Tally
from torch_occ.kernels.play.unknown import Course, Memory
from torch_occ.kernels.play.uob_reps import Mirror, play_uob_reps
from torch_occ.kernels.projection.arrays import Reference, layers_of, make_scratch
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.compiled.inputs import model_of

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class UOBREPSPlayer(EnginePlayer):
    """Plays `UOBREPS`."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, UOBREPS)
        super().__init__(mdp, learner, losses)
        self.uob_reps = learner
        self.dense = model_of(learner.mdp, dense=True)
        self.layers = layers_of(self.dense)
        source = learner.widths.source
        self.confidence = Confidence(
            float(learner.pseudo_count),
            True,
            source.c1,
            source.c2,
            np.array(source.fewer, dtype=np.float64),
            source.variance,
            np.array(learner.widths.iota),
            0.0,
            0.0,
            False,
            1.0,
        )
        self.course = Course(np.zeros((2, 0)), False, 0.0, 0.0, True)  # estimates divide by u

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        q = torch.zeros_like(self.uob_reps.state["q"])
        return q, torch.zeros_like(q)

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        state = self.uob_reps.state
        names = ("counts", "visits", "epoch_visits", "belief", "widths")
        believed = {name: state[name].flatten(1).numpy() for name in names}
        # q, its transitions and their bounds, which the kernel changes in place
        own = [state[name].flatten(1).numpy() for name in ("q", "rows", "lower", "upper")]
        epoch = self._columns("epochs", "epoch_start")
        last = self._columns(*DIAGNOSTICS)
        rules, before = self.rules(run.losses.noise, t), run.t
        num_pairs, widest = self.dense.next_state.shape
        num_states = num_pairs // self.dense.num_actions

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            model = self.dense._replace(
                next_state=self.dense.next_state.copy(), arrivals=self.dense.arrivals.copy()
            )
            belief = Belief(
                believed["counts"][seed],
                believed["visits"][seed],
                believed["epoch_visits"][seed],
                believed["belief"][seed],
                believed["widths"][seed],
                epoch[seed],
                np.zeros(num_pairs),
                self.layers.entry,
                np.zeros((2, num_pairs, widest)),
                np.zeros(num_pairs),
                np.zeros(num_states),
                np.zeros(widest, np.int64),
            )
            q, policy, uniform, middle, loss, estimate = np.zeros((6, num_pairs))
            none, path = np.zeros(0), np.zeros(len(self.dense.start) - 1, np.int64)
            memory = Memory(
                q, none, policy, uniform, middle, loss, estimate, np.zeros((2, 0)), path, none
            )
            play_uob_reps(
                self.model,
                model,
                self.course,
                self.confidence,
                belief,
                memory,
                Mirror(
                    self.uob_reps.learning_rate,
                    self.layers,
                    Reference(*(x[seed] for x in own)),
                    last[seed],
                    make_scratch(self.layers),
                ),
                before,
                means,
                numbers[0],
                np.zeros((0, 0)),
                rules,
                tally,
                make_work(self.model),
            )

        return play_seed

    def _columns(self, *names: str) -> Floats:
        """Numbers of the state, one row per seed; the state becomes views of them."""
        state = self.uob_reps.state
        table = torch.stack([state[name] for name in names], -1)
        state.update(zip(names, table.unbind(-1), strict=True))
        return table.numpy()

    def rules(self, noise: str, t: range) -> Rules:
        options = self.uob_reps.project.options
        return Rules(
            self.reacts,
            NOISE[noise],
            IMPLICIT_EXPLORATION,
            np.full(len(t), self.uob_reps.bias),
            options.tolerance_in(torch.float64),
            options.max_steps,
        )
