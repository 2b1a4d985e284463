"""The engine as a player of `simulate`: the same game as torch_occ.episodes, from the same random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.arrays import exponents_of, kinds_of, model_of, terms_of, weights_of, why_not
from torch_occ.engine.compiling import patiently
from torch_occ.engine.episodes import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    REDUCED_VARIANCE,
    Rules,
    Tally,
    play,
)
from torch_occ.engine.layout import Terms, make_work
from torch_occ.engine.threads import for_each
from torch_occ.estimators import Estimator, FullInformation, ImplicitExploration, ImportanceWeighted, ReducedVariance
from torch_occ.learners import FTRL, Learner
from torch_occ.losses import LossProcess
from torch_occ.occupancy import interior_point

if TYPE_CHECKING:
    from torch_occ.simulate import Simulation

_ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: IMPORTANCE_WEIGHTED,
    ImplicitExploration: IMPLICIT_EXPLORATION,
    ReducedVariance: REDUCED_VARIANCE,
    FullInformation: FULL_INFORMATION,
}

#: What `Tally.scalars` holds, in the words of `Simulation.sums`.
_SCALARS = ("expected", "realised", "newton_steps", "uncertified", "dual_residual", "flow_residual")


def why_not_play(learner: Learner, losses: LossProcess) -> str | None:
    """The reason why the engine cannot play this game, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    if type(learner) is not FTRL:
        return f"the engine plays FTRL, not {type(learner).__name__}"
    if type(learner.estimator) not in _ESTIMATORS:
        return f"the engine does not know the estimator {type(learner.estimator).__name__}"
    if any(parameter.dim() for parameter in learner.step.regularizer.parameters()):
        return "the regularizer has batched parameters"
    return why_not(learner.mdp, learner.step.regularizer)


class EnginePlayer:
    """Plays whole segments in compiled code, the seeds side by side in threads."""

    name = "engine"
    chunks = 16  # at once, if memory allows: what Python does for each should not be seen next to what the engine does

    def __init__(self, learner: FTRL) -> None:
        self.learner = learner
        self.model = model_of(learner.mdp)
        self.middle = interior_point(learner.mdp).detach().numpy().flatten()

    def play(self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None) -> None:
        """Episodes run.t+1, ...: means `(n or 1, N or 1, S, A)`, numbers `(N, n, L, 3)`, tables `(N, n, S, A)`."""
        learner, n = self.learner, numbers.shape[1]
        t = torch.arange(run.t + 1, run.t + 1 + n, dtype=torch.float64)
        with torch.no_grad():
            found = terms_of(learner.step.regularizer, t)
            weights = weights_of(found, t.shape).contiguous().numpy()
            terms = Terms(*kinds_of(found), exponents_of(found, torch.Size()).numpy())
        rules, state, sums = self._rules(run.losses.noise, t), learner.state, run.sums
        per_pair = [x.numpy().reshape(len(run.seeds), -1) for x in (state["q"], state["cumulative_loss"])]
        per_pair += [sums[name].numpy().reshape(len(run.seeds), -1) for name in ("cumulative_occupancy", "total_mean")]
        scalars = torch.stack([sums[name] for name in _SCALARS], -1).numpy()
        charged = [np.ascontiguousarray(mean.flatten(-2).numpy()) for mean in means.unbind(1)]  # (n or 1, S * A) each
        drawn = numbers.contiguous().numpy()
        seen = None if tables is None else tables.flatten(-2).contiguous().numpy()
        unseen = np.zeros((0, 0))

        def play_seed(seed: int) -> None:
            tally = Tally(*(x[seed] for x in (*per_pair, scalars)))
            inputs = (weights, charged[min(seed, len(charged) - 1)], drawn[seed], unseen if seen is None else seen[seed])
            play(self.model, terms, *inputs, rules, tally, self.middle, np.zeros((2, len(self.middle))), np.zeros(0), make_work(self.model))

        try:
            with patiently:
                for_each(play_seed, len(run.seeds))
        finally:  # Ctrl-C comes after the last seed
            for name, column in zip(_SCALARS, scalars.T, strict=True):
                sums[name] = torch.from_numpy(column.copy())
            run.t += n
            run.since += n
            run.q = state["q"]

    def _rules(self, noise: str, t: Tensor) -> Rules:
        estimator, setting, options = self.learner.estimator, torch.zeros_like(t), self.learner.step.options
        if isinstance(estimator, ImplicitExploration):
            setting = torch.full_like(t, estimator.bias)
        elif isinstance(estimator, ReducedVariance):
            setting = estimator.threshold(t)
        tolerance = np.finfo(np.float64).eps ** (2 / 3) if options.tolerance is None else options.tolerance
        return Rules(NOISE[noise], _ESTIMATORS[type(estimator)], setting.numpy(), float(tolerance), options.max_steps)
