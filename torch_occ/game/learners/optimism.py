"""What learners share that plan with averages and do not know the transitions.

They count transitions and add up observed losses. `PlanningLearner` keeps these sums.
`OptimisticLearner` plays the policy of torch_occ.game.learners.planning for its bonus.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.arguments import whole
from torch_occ.game.beliefs.counts import num_transitions, visited_transitions
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.planning import Averages, Bonus, Bounds, plan
from torch_occ.mdp.layered import LayeredMDP


class PlanningLearner(Learner):
    """Base class of learners that plan with averages; it knows only the layout of the MDP.

    Its state, for N seeds: `visits` and `losses` `(N, S, A)`, the number of visits of each pair and
    the sum of its losses; `counts` `(N, M)`, the visits by next state
    (torch_occ.game.beliefs.counts).
    """

    def __init__(self, mdp: LayeredMDP) -> None:
        super().__init__(mdp.blind())

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds)
        counts = pairs.new_zeros(num_seeds, num_transitions(self.mdp))
        self.state = {"visits": pairs, "losses": pairs.clone(), "counts": counts}

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        state, ones = self.state, torch.ones_like(feedback.losses)
        places = visited_transitions(self.mdp, feedback)
        state["counts"] = state["counts"].scatter_add(-1, places, ones)
        state["visits"] = state["visits"] + feedback.scatter(ones, state["visits"])
        state["losses"] = state["losses"] + feedback.scatter(feedback.losses, state["visits"])


class OptimisticLearner(PlanningLearner):
    """Plays the policy of smallest lower bounds, planned before every episode.

    A learner writes `bonus`, and `log` if its logarithm is another one. Lower bounds hold with a
    probability that depends on `delta`; see the learners.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    #: The smallest lower bound, and whether lower bounds never fall.
    floor, monotone = 0.0, False

    def __init__(self, mdp: LayeredMDP, delta: float = 0.1) -> None:
        super().__init__(mdp)
        self.delta = check_delta(type(self).__name__, delta)

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        if self.monotone:
            self.state["lower"] = self._zeros(num_seeds)

    def log(self, t: Tensor) -> Tensor:
        """The logarithm in the bonus of episodes t, ln(2 S A t^2 / delta)."""
        return (2.0 * self.mdp.num_pairs / self.delta * t**2).log()

    def bonus(self, log: float) -> Bonus:
        """The bonus for a value of the logarithm."""
        raise NotImplementedError(f"{type(self).__name__}: write bonus(log) -> Bonus")

    def averages(self) -> Averages:
        """The averages of all episodes so far."""
        state = self.state
        return Averages.of(self.mdp, state["visits"], state["losses"], state["counts"])

    @torch.no_grad()
    def plan(self, t: int) -> Bounds:
        """The lower and upper bounds before episode t, and the policy."""
        log = float(self.log(torch.tensor(float(t), dtype=torch.float64)))
        least = self.state["lower"] if self.monotone else None
        return plan(self.mdp, self.averages(), self.bonus(log), floor=self.floor, least=least)

    def propose_policy(self, t: int) -> Tensor:
        found = self.plan(t)
        if self.monotone:
            self.state["lower"] = torch.where(self.mdp.actions, found.lower, 0.0)
        return found.policy


def needed_episodes(algorithm: str, episodes: int | None, why: str) -> int:
    """The number of episodes that an algorithm needs.

    Raises:
        TypeError: if it is no whole number.
        ValueError: if there is none, or if it is not positive.
    """
    if episodes is None:
        raise ValueError(f"episodes: {algorithm} needs the number of episodes, {why}")
    return whole(f"episodes of {algorithm}", episodes)


def check_delta(algorithm: str, delta: float) -> float:
    """Return `delta` if it is in (0, 1); otherwise raise a ValueError that names the algorithm."""
    if not 0 < delta < 1:
        raise ValueError(
            f"delta: {algorithm} needs a probability between 0 and 1, the one with which its "
            f"bounds may fail, for example 0.1; got {delta}"
        )
    return delta
