"""Thompson sampling for known transitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_occ.engine.draws import beta, episode_key
from torch_occ.engine.lanes import lane
from torch_occ.engine.layout import PAIR, TRIAL, Work
from torch_occ.engine.learners import plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import Learner


class CompiledThompson(NamedTuple):
    """`Thompson`."""

    visits: PerPair
    losses: PerPair
    seeds: Any
    choice: PerState


class Thompson(Learner):
    """Plays the optimal policy for mean losses drawn from their posterior, anew in every episode.

    The mean of a pair with N observations is drawn from Beta(1 + sum of losses,
    1 + N - sum of losses): the posterior of Bernoulli losses under a uniform prior (Thompson,
    1933). For L = 1 it attains the limit of regret (Kaufmann, Korda and Munos, 2012). Losses in
    [0, 1] that are not 0 or 1 are treated as if they were; then there is no guarantee. `PSRL` does
    the same with unknown transitions.

    The random numbers are a function of the run's seed and the episode (torch_occ.engine.draws).
    """

    compiled = CompiledThompson

    def start(self, num_seeds: int) -> None:
        self.state = {"visits": self._zeros(num_seeds), "losses": self._zeros(num_seeds)}


@propose.register(CompiledThompson)
def _propose_by_sample(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(learner.seeds)):
        own, loss = lane(learner, n), lane(work.pairs, n)
        key = episode_key(learner.seeds[n], game.before + t + 1)
        for i in range(len(own.visits)):
            loss[TRIAL, i] = 0.0
            if game.model.exists[PAIR, i]:
                failures = max(own.visits[i] - own.losses[i], 0.0)
                loss[TRIAL, i] = beta(key, i, 1.0 + own.losses[i], 1.0 + failures)
    plan(game.model, learner.choice, work)


@observe.register(CompiledThompson)
def _observe_losses(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for k in range(game.pairs.shape[1]):
            own.visits[game.pairs[n, k]] += 1.0
            own.losses[game.pairs[n, k]] += game.losses[n, k]
