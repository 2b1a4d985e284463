"""Trials: the objective at one setting in every world, by leaping or by playing.

The cost of leaping grows with log T, and it averages over many particles at once. But it is biased
upwards by some percent where the learner is hardly regularized. Playing is unbiased, with the noise
of a few runs, and its cost grows with T. Both also average over the MDPs of the objective. Many
MDPs with few runs on each are as precise as few MDPs with many runs, and say more about other MDPs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_occ.forecasting.leaping import leap
from torch_occ.game.contracts import uncertified_is_handled
from torch_occ.game.driver import simulate
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.losses import BernoulliLosses, LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.objectives import Evaluation, ForecastObjective, elements

#: A function of a regularizer with scalar parameters and a seed. The same seed gives the same
#: random numbers at every setting.
Trial = Callable[[Regularizer, int], Evaluation]


def by_leaping(
    objective: ForecastObjective, *, particles: int = 64, accuracy: float = 0.7
) -> Trial:
    """The objective with regrets from leaping instead of the mean path."""

    def final(
        mdp: LayeredMDP, losses: Tensor | LossProcess, regularizer: Regularizer, seed: int
    ) -> tuple[Tensor, Tensor]:
        estimator, episodes = objective.estimator, objective.episodes
        run = leap(
            mdp,
            regularizer,
            losses,
            episodes,
            estimator=estimator,
            particles=particles,
            accuracy=accuracy,
            seed=seed,
        )
        return run.regret[:, -1].mean(), ~run.uncertified.any()

    return lambda regularizer, seed: _everywhere(objective, final, regularizer, seed)


def by_playing(objective: ForecastObjective, *, runs: int = 1) -> Trial:
    """The objective with mean regrets of real runs instead of the mean path."""

    def final(
        mdp: LayeredMDP, losses: Tensor | LossProcess, regularizer: Regularizer, seed: int
    ) -> tuple[Tensor, Tensor]:
        process = BernoulliLosses(losses) if isinstance(losses, Tensor) else losses
        seeds = range(1 + seed * runs, 1 + (seed + 1) * runs)
        learner = FTRL(mdp, regularizer, objective.estimator)
        with uncertified_is_handled():
            history = simulate(
                mdp, learner, process, objective.episodes, seeds, checkpoints=[objective.episodes]
            )
        return history.regret[:, -1].mean(), ~history.uncertified.any()

    return lambda regularizer, seed: _everywhere(objective, final, regularizer, seed)


def _everywhere(
    objective: ForecastObjective,
    final: Callable[[LayeredMDP, Tensor | LossProcess, Regularizer, int], tuple[Tensor, Tensor]],
    regularizer: Regularizer,
    seed: int,
) -> Evaluation:
    """The objective from the final regret on every MDP of every world, with its certificate."""
    regrets, certified = [], []
    with torch.no_grad():
        for world in objective.worlds:
            found = [final(mdp, losses, regularizer, seed) for mdp, losses in elements(world)]
            regrets.append(torch.stack([regret for regret, _ in found])[None])
            certified.append(torch.stack([fine for _, fine in found])[None])
    return objective.combine(regrets, certified)
