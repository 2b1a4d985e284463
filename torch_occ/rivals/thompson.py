"""Posterior sampling: Thompson sampling for known transitions, PSRL for unknown ones.

The random numbers are a function of the run's seed and the episode (torch_occ.engine.draws).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ.engine.draws import beta, episode_key, gamma, key_of
from torch_occ.engine.lanes import lane
from torch_occ.engine.layout import PAIR, TRIAL, Floats, Ints, Model, Work, routine
from torch_occ.engine.learners import observe_averages, plan
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.learners import EmpiricalLearner
from torch_occ.rivals.beliefs import PlanningLearner, observe_transitions
from torch_occ.step.arrays import model_of

#: The fields that both compiled forms share. `observe` writes `mean` and `root`, which nothing
#: reads.
_SAMPLING: dict[str, Any] = {
    **dict.fromkeys(("visits", "losses", "mean", "root"), PerPair),
    "seeds": Any,
    "choice": PerState,
}
CompiledThompson: Any = NamedTuple("CompiledThompson", [*_SAMPLING.items()])  # type: ignore[misc]


class Thompson(EmpiricalLearner):
    """Plays the optimal policy for mean losses drawn from their posterior, anew in every episode.

    The mean of a pair with N observations is drawn from Beta(1 + sum of losses,
    1 + N - sum of losses): the posterior of Bernoulli losses under a uniform prior (Thompson,
    1933). For L = 1 it attains the limit of regret (Kaufmann, Korda and Munos, 2012). Losses in
    [0, 1] that are not 0 or 1 are treated as if they were; then there is no guarantee.
    """

    compiled = CompiledThompson
    engine_only = True


@propose.register(CompiledThompson)
def _propose_by_sample(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(learner.seeds)):
        draw_losses(game, t, lane(learner, n), learner.seeds[n], lane(work.pairs, n))
    plan(game.model, learner.choice, work)


observe.register(CompiledThompson)(observe_averages)


@routine(inline=True)
def draw_losses(game: Game, t: int, learner: Any, seed: Any, loss: Floats) -> np.uint64:
    """Draw the mean losses of pairs into row TRIAL, for one seed; return the key of the episode."""
    key = episode_key(seed, game.before + t + 1)
    for i in range(len(learner.visits)):
        loss[TRIAL, i] = 0.0
        if game.model.exists[PAIR, i]:
            failures = max(learner.visits[i] - learner.losses[i], 0.0)
            loss[TRIAL, i] = beta(key, i, 1.0 + learner.losses[i], 1.0 + failures)
    return key


# -- unknown transitions ---------------------------------------------------------------------------


#: Of `PSRL`; the transitions of the model `drawn` are from the posterior.
_FIELDS = _SAMPLING | {"counts": Floats, "entry": Ints, "drawn": Model}
CompiledPSRL: Any = NamedTuple("CompiledPSRL", [*_FIELDS.items()])  # type: ignore[misc]


class PSRL(PlanningLearner):
    """Posterior sampling (Osband, Russo and Van Roy, 2013): plan in a model drawn at random.

    Before every episode, the mean loss of each pair is drawn from Beta(1 + sum of losses,
    1 + N - sum of losses), and its transitions from Dirichlet(1/n + counts), with n the number of
    states of the next layer. The policy is optimal for this model. The prior fits Bernoulli losses;
    other losses in [0, 1] are treated as if they were. The guarantee is on average over the prior,
    for losses that have the same mean in every episode; there is none against an adversary.
    """

    compiled = CompiledPSRL

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"drawn": model_of(self.mdp, dense=True)}


@propose.register(CompiledPSRL)
def _propose_in_sample(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(learner.seeds)):
        own = lane(learner, n)
        key = draw_losses(game, t, own, learner.seeds[n], lane(work.pairs, n))
        draw_transitions(key, own)
    plan(learner.drawn, learner.choice, work)


observe.register(CompiledPSRL)(observe_transitions)


@routine(inline=True)
def draw_transitions(key: np.uint64, learner: Any) -> None:
    """Draw transitions for one seed. Their items follow those of the losses, two for each pair."""
    entry, drawn = learner.entry, learner.drawn.next_state
    for i in range(len(learner.visits)):
        size, total = entry[i + 1] - entry[i], 0.0
        if learner.drawn.exists[PAIR, i] and size > 1:
            for j in range(size):
                own = key_of(key, 2 * len(learner.visits) + entry[i] + j)
                drawn[i, j] = gamma(own, learner.counts[entry[i] + j] + 1.0 / size)
                total += drawn[i, j]
            share = 1.0 / total
            for j in range(size):
                drawn[i, j] *= share
