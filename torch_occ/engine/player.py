"""The engine as a player of `simulate`: the same game as torch_occ.episodes, from the same random numbers."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.arrays import model_of, terms_of, why_not
from torch_occ.engine.episodes import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    REDUCED_VARIANCE,
    Rules,
    Tally,
    play,
    play_alone,
)
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


def why_not_play(learner: Learner, losses: LossProcess) -> str | None:
    """The reason why the engine cannot play this game, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    if type(learner) is not FTRL:
        return f"the engine plays FTRL, not {type(learner).__name__}"
    if type(learner.estimator) not in _ESTIMATORS:
        return f"the engine does not know the estimator {type(learner.estimator).__name__}"
    return why_not(learner.mdp, learner.step.regularizer)


class EnginePlayer:
    """Plays whole segments in compiled code."""

    name = "engine"

    def __init__(self, learner: FTRL) -> None:
        self.learner = learner
        self.model = model_of(learner.mdp)
        self.middle = interior_point(learner.mdp).detach().numpy().copy()

    def play(self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None) -> None:
        """Episodes run.t+1, ...: means `(n or 1, N or 1, S, A)`, numbers `(N, n, L, 3)`, tables `(N, n, S, A)`."""
        learner, n = self.learner, numbers.shape[1]
        t = torch.arange(run.t + 1, run.t + 1 + n, dtype=torch.float64)
        terms, weights = terms_of(learner.step.regularizer, t)
        state, sums = learner.state, run.sums
        names = ("expected", "realised", "newton_steps", "uncertified", "dual_residual", "flow_residual")
        tally = Tally(
            state["cumulative_loss"].numpy(),
            state["q"].numpy(),
            sums["cumulative_occupancy"].numpy(),
            sums["total_mean"].numpy(),
            *(sums[name].numpy() for name in names),
        )
        options = learner.step.options
        tolerance = np.finfo(np.float64).eps ** (2 / 3) if options.tolerance is None else options.tolerance
        threads = torch.get_num_threads()  # numba's threads and torch's share one setting
        with _Patience("torch_occ: compiling the engine, once for this machine; this takes about half a minute ..."):
            (play if len(run.seeds) > 1 else play_alone)(
                self.model,
                terms,
                weights,
                means.contiguous().numpy(),
                numbers.contiguous().numpy(),
                np.zeros((1, 0, 0, 0)) if tables is None else tables.contiguous().numpy(),
                self._rules(run.losses.noise, t),
                tally,
                self.middle,
                float(tolerance),
                options.max_steps,
            )
        torch.set_num_threads(threads)
        run.t += n
        run.since += n
        run.q = state["q"]

    def _rules(self, noise: str, t: Tensor) -> Rules:
        estimator, setting = self.learner.estimator, torch.zeros_like(t)
        if isinstance(estimator, ImplicitExploration):
            setting = torch.full_like(t, estimator.bias)
        elif isinstance(estimator, ReducedVariance):
            setting = estimator.threshold(t)
        return Rules(NOISE[noise], _ESTIMATORS[type(estimator)], setting.numpy())


class _Patience:
    """Says something on standard error if what it surrounds takes longer than a few seconds; the first call of a process only."""

    first = True

    def __init__(self, message: str) -> None:
        self.timer = threading.Timer(3.0, lambda: print(message, file=sys.stderr)) if _Patience.first else None
        _Patience.first = False

    def __enter__(self) -> None:
        if self.timer:
            self.timer.start()

    def __exit__(self, *_: object) -> None:
        if self.timer:
            self.timer.cancel()
