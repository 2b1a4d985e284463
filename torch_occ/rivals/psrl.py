"""PSRL: posterior sampling for unknown transitions and losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ.engine.draws import beta, episode_key, gamma, key_of
from torch_occ.engine.lanes import lane
from torch_occ.engine.layout import PAIR, PLAN, TRIAL, Floats, Ints, Model, Work, routine
from torch_occ.engine.learners import cheapest_pair
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.rivals.beliefs import count_transitions, num_transitions
from torch_occ.rivals.planning import PlanningLearner


class CompiledPSRL(NamedTuple):
    """`PSRL`."""

    visits: PerPair
    losses: PerPair
    counts: Floats  # (M,)
    seeds: Any
    entry: Ints
    drawn: Floats  # (M,), transitions drawn from the posterior, up to a factor
    choice: PerState


class PSRL(PlanningLearner):
    """Posterior sampling (Osband, Russo and Van Roy, 2013): plan in a model drawn at random.

    Before every episode, the mean loss of each pair is drawn from Beta(1 + sum of losses,
    1 + N - sum of losses), and its transitions from Dirichlet(1/n + counts), with n the number of
    states of the next layer. The policy is optimal for this model. The prior fits Bernoulli losses;
    other losses in [0, 1] are treated as if they were. The guarantee is on average over the prior,
    for losses that have the same mean in every episode; there is none against an adversary.

    The random numbers are a function of the run's seed and the episode (torch_occ.engine.draws).
    """

    compiled = CompiledPSRL

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"drawn": np.ones(num_transitions(self.mdp))}


@propose.register(CompiledPSRL)
def _propose_in_sample(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(learner.seeds)):
        key = episode_key(learner.seeds[n], game.before + t + 1)
        draw_model(game.model, key, lane(learner, n), lane(work.pairs, n))
    plan_in_sample(game.model, learner, work)


@observe.register(CompiledPSRL)
def _observe_sums(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for k in range(game.pairs.shape[1]):
            own.visits[game.pairs[n, k]] += 1.0
            own.losses[game.pairs[n, k]] += game.losses[n, k]
        count_transitions(game, n, own.counts, own.entry)


@routine(inline=True)
def draw_model(model: Model, key: np.uint64, learner: CompiledPSRL, loss: Floats) -> None:
    """Draw losses into row TRIAL, and transitions, for one seed.

    The items of the transitions follow those of the losses, two for each pair.
    """
    visits, losses, entry = learner.visits, learner.losses, learner.entry
    for i in range(len(visits)):
        if model.exists[PAIR, i]:
            failures, size = max(visits[i] - losses[i], 0.0), entry[i + 1] - entry[i]
            loss[TRIAL, i] = beta(key, i, 1.0 + losses[i], 1.0 + failures)
            if size > 1:
                for e in range(entry[i], entry[i + 1]):
                    own = key_of(key, 2 * len(visits) + e)
                    learner.drawn[e] = gamma(own, learner.counts[e] + 1.0 / size)


@routine(inline=True)
def plan_in_sample(model: Model, learner: CompiledPSRL, work: Work) -> None:
    """Backward induction with the losses and transitions that were drawn."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    Q, V, drawn, entry = work.pairs, work.states, learner.drawn, learner.entry
    for k in range(layers - 1, -1, -1):
        for s in range(start[k], start[k + 1]):
            first, stop = s * num_actions, (s + 1) * num_actions
            for i in range(first, stop):
                if k + 1 < layers and model.exists[PAIR, i]:
                    weighted, total = 0.0, 0.0
                    for e in range(entry[i], entry[i + 1]):
                        total += drawn[e]
                        weighted += drawn[e] * V[PLAN, start[k + 1] + e - entry[i]]
                    Q[TRIAL, i] += weighted / total
            V[PLAN, s], learner.choice[s] = cheapest_pair(model.exists[PAIR], Q, TRIAL, first, stop)
