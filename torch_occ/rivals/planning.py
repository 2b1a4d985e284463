"""Optimistic planning: bonuses, and backward induction with lower and upper values.

A planner knows averages: the visits N of every pair, its average loss, and the shares in which the
states of the next layer followed it. For layer k, with values V of layer k + 1,

    Q_lower = max(floor, average loss + P V_lower - b),   V_lower(s) = min_a Q_lower(s, a)
    Q_upper = min(L - k, average loss + P V_upper + b),   V_upper(s) = Q_upper at the action played

where P are the shares and b >= 0 is a bonus. The policy plays an action of smallest Q_lower.
Losses are in [0, 1], so a value of layer k lies in [0, L - k]. A pair without visits has the bounds
`floor` and L - k.

The bonuses are functions of a `Stage`, all that is known about one layer. `log` is the logarithm of
a confidence level. n is the number of states of the next layer, H = L - 1 - k the largest value of
the next layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import Learner
from torch_occ.game.simulate import whole
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import total
from torch_occ.mdp.occupancy import cheapest_of
from torch_occ.rivals.beliefs import num_transitions, split_transitions, visited_transitions


class Averages(NamedTuple):
    """What was observed so far."""

    visits: Tensor  # (N, S, A)
    loss: Tensor  # (N, S, A), the average loss of a pair; any number where it was not visited
    shares: tuple[Tensor, ...]  # per layer (N, S_k, A, S_{k+1}), how often a state came next

    @classmethod
    def of(cls, mdp: LayeredMDP, visits: Tensor, losses: Tensor, counts: Tensor) -> Averages:
        """The averages of visits and sums of losses `(N, S, A)` and of flat counts `(N, M)`."""
        once = visits.clamp(min=1)
        layers = zip(split_transitions(mdp, counts), mdp.split(once, -2), strict=True)
        return cls(visits, losses / once, tuple(m / n.unsqueeze(-1) for m, n in layers))


class Stage(NamedTuple):
    """One layer while it is planned: its averages, and the values of the next layer."""

    left: int  # L - k
    visits: Tensor  # (N, S_k, A)
    loss: Tensor  # (N, S_k, A)
    shares: Tensor  # (N, S_k, A, n)
    lower: Tensor  # (N, 1, 1, n), V_lower of the next layer; zero at the terminal state
    upper: Tensor  # (N, 1, 1, n)
    arrivals: Tensor  # (N, 1, 1, n), the visits of the states of the next layer

    def expected(self, values: Tensor) -> Tensor:
        """The mean of values `(N, 1 or S_k, 1 or A, n)` at the next state, `(N, S_k, A)`."""
        return total(self.shares * values, -1)

    def variance(self) -> Tensor:
        """The variance of V_lower at the next state, `(N, S_k, A)`."""
        return self.expected((self.lower - self.expected(self.lower).unsqueeze(-1)) ** 2)

    def distance(self) -> Tensor:
        """The norm of V_upper - V_lower in L2 of the next state, `(N, S_k, A)`."""
        return self.expected((self.upper - self.lower) ** 2).sqrt()

    @property
    def num_next(self) -> int:
        """n."""
        return self.shares.shape[-1]


Bonus = Callable[[Stage], Tensor]


class Bounds(NamedTuple):
    """The result of planning."""

    policy: Tensor  # (N, S, A), deterministic
    lower: Tensor  # (N, S, A), Q_lower, infinite on masked pairs
    upper: Tensor  # (N, S, A), Q_upper, infinite on masked pairs
    value: Tensor  # (N, S), V_lower
    possible: Tensor  # (N, S, A), the allowed actions whose Q_lower is at most the smallest Q_upper


def plan(
    mdp: LayeredMDP,
    averages: Averages,
    bonus: Bonus,
    *,
    floor: float = 0.0,
    least: Tensor | None = None,
    allowed: Tensor | None = None,
    also: Sequence[tuple[Averages, Bonus]] = (),
) -> Bounds:
    """Backward induction with a bonus.

    Args:
        mdp: only its layout is used.
        floor: the smallest value of Q_lower.
        least: earlier lower bounds `(N, S, A)`; Q_lower does not fall below them.
        allowed: the actions that may be played, `(N, S, A)`; all by default.
        also: other data with their own bonuses. The tightest bounds of all data count.
    """
    actions = mdp.split(mdp.actions if allowed is None else allowed & mdp.actions, -2)
    previous = None if least is None else mdp.split(least, -2)
    lower = upper = averages.visits.new_zeros(len(averages.visits), 1)  # the terminal state
    found: list[tuple[Tensor, ...]] = []
    for k in reversed(range(mdp.horizon)):
        low, high = _bounds(mdp, k, averages, bonus, lower, upper, floor)
        for data, other in also:
            tighter = _bounds(mdp, k, data, other, lower, upper, floor)
            low, high = torch.maximum(low, tighter[0]), torch.minimum(high, tighter[1])
        low = low if previous is None else torch.maximum(low, previous[k])
        exists = mdp.split(mdp.actions, -2)[k]
        low, high = (torch.where(exists, x, torch.inf) for x in (low, high))
        lowest, highest = (torch.where(actions[k], x, torch.inf) for x in (low, high))
        choice = cheapest_of(actions[k], lowest)
        possible = actions[k] & (low <= highest.amin(-1, keepdim=True))
        lower, upper = lowest.amin(-1), torch.where(choice > 0, high, 0.0).amax(-1)
        found.insert(0, (choice, low, high, lower, possible))
    parts = list(zip(*found, strict=True))
    return Bounds(*(torch.cat(part, 1) for part in parts))


def _bounds(
    mdp: LayeredMDP,
    k: int,
    averages: Averages,
    bonus: Bonus,
    lower: Tensor,  # (N, n), of the next layer
    upper: Tensor,  # (N, n)
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Q_lower and Q_upper of layer k, `(N, S_k, A)`, by one set of data."""
    left, visits = mdp.horizon - k, mdp.split(averages.visits, -2)
    arrivals = total(visits[k + 1], -1) if left > 1 else torch.zeros_like(lower)
    after = (x[:, None, None] for x in (lower, upper, arrivals))
    loss, seen = mdp.split(averages.loss, -2)[k], visits[k] > 0
    stage = Stage(left, visits[k], loss, averages.shares[k], *after)
    b = bonus(stage)
    low = (stage.loss + stage.expected(stage.lower) - b).clamp(min=floor)
    high = (stage.loss + stage.expected(stage.upper) + b).clamp(max=float(left))
    return torch.where(seen, low, floor), torch.where(seen, high, float(left))


# -- bonuses ---------------------------------------------------------------------------------------


def ucbvi_hoeffding(stage: Stage, log: float, horizon: int, corruption: float = 0.0) -> Tensor:
    """7 L log / sqrt(N), as printed for UCBVI-CH (Azar, Osband and Munos, 2017), + `changed_bonus`.

    It was derived for known losses. It also covers averages of losses in [0, 1].
    """
    b = 7.0 * horizon * log / stage.visits.clamp(min=1).sqrt()
    return b + changed_bonus(stage, corruption)


def ucbvi_bernstein(
    stage: Stage, log: float, horizon: int, num_states: int, num_actions: int
) -> Tensor:
    """The bonus of UCBVI-BF (Azar, Osband and Munos, 2017), as printed, plus one for the losses.

    sqrt(8 log Var(V) / N) + 14 L log / (3 N)
        + sqrt(8 / N sum_y P(y) min(100^2 L^3 S^2 A log^2 / N(y), L^2))

    The last term is left out in the last layer, whose next state is certain. The print assumes
    known losses. `loss_bonus` covers unknown ones.
    """
    n = stage.visits.clamp(min=1)
    b = (8.0 * log * stage.variance() / n).sqrt() + 14.0 * horizon * log / (3.0 * n)
    if stage.left > 1:
        scale = 1e4 * horizon**3 * num_states**2 * num_actions * log**2
        spread = (scale / stage.arrivals.clamp(min=1)).clamp(max=float(horizon**2))
        spread = torch.where(stage.arrivals > 0, spread, float(horizon**2))
        b = b + (8.0 / n * stage.expected(spread)).sqrt()
    return b + loss_bonus(stage, log)


def sharp_hoeffding(stage: Stage, log: float, corruption: float | Tensor = 0.0) -> Tensor:
    """(L - k) sqrt(log / (2 N)) + `changed_bonus`: Hoeffding's inequality for loss + V*(s').

    This sum of the loss and the optimal value of the next state is in [0, L - k], and its samples
    are independent, since V* is fixed. If V_lower <= V* holds in the next layer, then
    average loss + P V_lower - b <= Q* holds in this one.
    """
    b = stage.left * (log / (2.0 * stage.visits.clamp(min=1))).sqrt()
    return b + changed_bonus(stage, corruption)


def changed_bonus(stage: Stage, corruption: float | Tensor) -> Tensor:
    """min(1, C / (2 N)) for losses that were changed.

    C is twice the sum over episodes and layers of the largest change (`occ.Corrupted`), so an
    average of N losses has moved by at most C / (2 N).
    """
    return (corruption / (2.0 * stage.visits.clamp(min=1))).clamp(max=1.0)


def loss_bonus(stage: Stage, log: float) -> Tensor:
    """The empirical Bernstein bound of Maurer and Pontil (2009) for the average loss.

    sqrt(2 v log / (N - 1)) + 7 log / (3 (N - 1)) with v = average (1 - average), which is at least
    the empirical variance of losses in [0, 1]. Infinite for N = 1.
    """
    rest = stage.visits - 1
    variance = (stage.loss * (1 - stage.loss)).clamp(min=0.0)
    return torch.where(
        rest > 0, (2.0 * variance * log / rest).sqrt() + 7.0 * log / (3.0 * rest), torch.inf
    )


def euler(stage: Stage, log: float) -> Tensor:
    """`loss_bonus`, plus a bound of |(P - P_true) V*| that uses V_lower <= V* <= V_upper.

    sqrt(2 Var(V_lower) log / (N - 1)) + sqrt(2 log / (N - 1)) |V_upper - V_lower| +
    7 H log / (3 (N - 1)), where |.| is the norm in L2 of the next state. It holds since the
    standard deviation of V* is at most that of V_lower plus |V* - V_lower|. It is zero where the
    next state is certain, n = 1.
    """
    b = loss_bonus(stage, log)
    if stage.num_next == 1:
        return b
    rest = (stage.visits - 1).clamp(min=1)
    deviation = stage.variance().sqrt() + stage.distance()
    return b + (2.0 * log / rest).sqrt() * deviation + 7.0 * (stage.left - 1) * log / (3.0 * rest)


def strong_euler(stage: Stage, log: float) -> Tensor:
    """`euler`, plus a bound of |(P - P_true)(V* - V_lower)|: strong optimism.

    sqrt(2 n log / (N - 1)) |V_upper - V_lower| + 7 n H log / (3 (N - 1)). With it, the surplus
    Q_lower - loss - P_true V_lower of every pair is at most zero.
    """
    b, n = euler(stage, log), stage.num_next
    if n == 1:
        return b
    rest = (stage.visits - 1).clamp(min=1)
    return (
        b
        + (2.0 * n * log / rest).sqrt() * stage.distance()
        + 7.0 * n * (stage.left - 1) * log / (3.0 * rest)
    )


# -- What learners share that plan with averages and do not know the transitions -------------------
#
# They count transitions and add up observed losses. `PlanningLearner` keeps these sums.
# `OptimisticLearner` plays the policy of torch_occ.rivals.planning for its bonus.


class PlanningLearner(Learner):
    """Base class of learners that plan with averages; it knows only the layout of the MDP.

    Its state, for N seeds: `visits` and `losses` `(N, S, A)`, the number of visits of each pair and
    the sum of its losses; `counts` `(N, M)`, the visits by next state
    (torch_occ.rivals.beliefs).
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
