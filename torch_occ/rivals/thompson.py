"""Thompson sampling for known transitions."""

from __future__ import annotations

from torch import Tensor

from torch_occ.game.learners import EmpiricalLearner
from torch_occ.rivals.sampling import betas


class Thompson(EmpiricalLearner):
    """Plays the optimal policy for mean losses drawn from their posterior, anew in every episode.

    The mean of a pair with N observations is drawn from Beta(1 + sum of losses,
    1 + N - sum of losses): the posterior of Bernoulli losses under a uniform prior (Thompson,
    1933). For L = 1 it attains the limit of regret (Kaufmann, Korda and Munos, 2012). Losses in
    [0, 1] that are not 0 or 1 are treated as if they were; then there is no guarantee. `PSRL` does
    the same with unknown transitions.

    The random numbers are a function of the run's seed and the episode
    (torch_occ.rivals.sampling).
    """

    def index(self, t: int) -> Tensor:
        visits, losses = self.state["visits"], self.state["losses"]
        seeds = self.seeds or range(len(visits))
        return betas(seeds, t, 1 + losses, 1 + (visits - losses).clamp(min=0))
