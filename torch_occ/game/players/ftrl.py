"""The compiled player of FTRL with a built-in regularizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ.game.estimators import (
    Estimator,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
    ReducedVariance,
)
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.engine import EnginePlayer, OverTime, terms_in
from torch_occ.kernels.lanes.arrays import allocator, width_of
from torch_occ.kernels.layout import Floats, Terms, Work, suits_lanes
from torch_occ.kernels.play.episodes import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    REDUCED_VARIANCE,
    Rules,
    Tally,
    play,
)
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.step.compiled.inputs import exponents_of, kinds_of, terms_of, weights_of, why_not

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation

ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: IMPORTANCE_WEIGHTED,
    ImplicitExploration: IMPLICIT_EXPLORATION,
    ReducedVariance: REDUCED_VARIANCE,
    FullInformation: FULL_INFORMATION,
}


class FTRLPlayer(EnginePlayer):
    """Plays FTRL with a built-in regularizer, in lanes if `suits_lanes`."""

    @staticmethod
    def why_not(mdp: LayeredMDP, learner: Learner) -> str | None:
        assert isinstance(learner, FTRL)
        if learner.step.constraints is not None:
            return "the compiled episode loop does not know budgets"
        if type(learner.estimator) not in ESTIMATORS:
            return f"the engine does not know the estimator {type(learner.estimator).__name__}"
        if learner.step.regularizer.batched():
            return "the regularizer has batched parameters"
        return why_not(mdp, learner.step.regularizer)

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, FTRL)
        super().__init__(mdp, learner, losses)
        self.ftrl = learner
        self.middle = interior_point(learner.mdp).detach().numpy().flatten()
        self.valid: list[Any] = []  # the last values of the parameters that were valid
        regularizer, own = learner.step.regularizer, learner.estimator
        with torch.no_grad():
            found = terms_of(regularizer, torch.ones(1, dtype=torch.float64))
            pairs = learner.mdp.actions.shape
            exponents = exponents_of(found, pairs).numpy()
        self.in_lanes = suits_lanes(self.model)
        self.terms = Terms(*kinds_of(found), exponents)
        self.weights = OverTime(
            lambda t: weights_of(terms_of(regularizer, t), pairs).expand(len(t), -1)
        )
        if isinstance(own, ReducedVariance):
            self.setting = OverTime(own.threshold)
        else:
            bias = own.bias if isinstance(own, ImplicitExploration) else 0.0
            self.setting = OverTime(lambda t: torch.full_like(t, bias))

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        return self.ftrl.state["q"], self.ftrl.state["cumulative_loss"]

    def check(self) -> None:
        """Check the parameters if they have changed; a callback may have done that."""
        values = [parameter.tolist() for parameter in self.ftrl.step.parameters()]
        if values != self.valid:
            self.ftrl.step.check_parameters()
            self.valid = values

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        self.check()
        weights = self.weights(t.start - 1, t.stop)  # begins one episode earlier
        rules, lanes = self.rules(run.losses.noise, t), self.lanes(run)
        width = lanes or 1
        seen = np.zeros((len(run.seeds), 0, 0))
        if tables is not None:
            seen = tables.flatten(-2).contiguous().numpy()
        terms, new = terms_in(self.terms, lanes), allocator(lanes)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            play(
                self.model,
                terms,
                weights,
                run.t,
                means,
                numbers,
                seen[group * width : (group + 1) * width],
                rules,
                tally,
                self.middle,
                new(len(self.middle)),
                new(weights.shape[1]),
                new(0),
                self.work(group, lanes, numbers),
                width_of(lanes),
            )

        return play_group

    def work(self, group: int, lanes: int | None, numbers: Floats) -> Work:
        """The scratch memory of a group of seeds, with the factors of the last episode."""
        return self.scratch(group, lambda: self.new_work(lanes, numbers))

    def rules(self, noise: str, t: range) -> Rules:
        options = self.ftrl.step.options
        limits = (options.tolerance_in(torch.float64), options.max_steps)
        return Rules(
            self.reacts,
            NOISE[noise],
            ESTIMATORS[type(self.ftrl.estimator)],
            self.setting(t.start, t.stop),
            *limits,
        )
