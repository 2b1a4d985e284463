"""UCBVI, EULER and StrongEuler: optimistic planning with averages, for unknown transitions.

A planner knows averages: the visits N of every pair, its average loss, and the shares in which the
states of the next layer followed it. For layer k, with values V of layer k + 1,

    Q_lower = max(floor, average loss + P V_lower - b),   V_lower(s) = min_a Q_lower(s, a)
    Q_upper = min(L - k, average loss + P V_upper + b),   V_upper(s) = Q_upper at the action played

where P are the shares and b >= 0 is a bonus. The policy plays an action of smallest Q_lower.
Losses are in [0, 1], so a value of layer k lies in [0, L - k]. A pair without visits has the bounds
`floor` and L - k.

The bonuses, with n the number of states of the next layer, H = L - 1 - k the largest value there,
`log` the logarithm of a confidence level, |.| the norm in L2 of the next state:

- UCBVI_HOEFFDING: 7 L log / sqrt(N), as printed for UCBVI-CH (Azar, Osband and Munos, 2017). It was
  derived for known losses, and also covers averages of losses in [0, 1].
- SHARP_HOEFFDING: (L - k) sqrt(log / (2 N)), Hoeffding's inequality for loss + V*(s'). This sum is
  in [0, L - k], and its samples are independent, since V* is fixed. If V_lower <= V* holds in the
  next layer, then average loss + P V_lower - b <= Q* holds in this one.
- Both plus min(1, C / (2 N)) for losses that were changed: C is twice the sum over episodes and
  layers of the largest change (`occ.Corrupted`), so an average of N losses has moved by at most
  C / (2 N).
- The others contain the empirical Bernstein bound of Maurer and Pontil (2009) for the average loss,
  sqrt(2 v log / (N - 1)) + 7 log / (3 (N - 1)) with v = average (1 - average), which is at least
  the empirical variance of losses in [0, 1]. They are infinite for N = 1.
- UCBVI_BERNSTEIN, UCBVI-BF as printed: sqrt(8 log Var(V) / N) + 14 L log / (3 N) +
  sqrt(8 / N sum_y P(y) min(100^2 L^3 S^2 A log^2 / N(y), L^2)). The last term is left out in the
  last layer, whose next state is certain. The print assumes known losses.
- EULER_BONUS, a bound of |(P - P_true) V*| that uses V_lower <= V* <= V_upper, zero where n = 1:
  sqrt(2 log / (N - 1)) (sd(V_lower) + |V_upper - V_lower|) + 7 H log / (3 (N - 1)). It holds since
  the standard deviation of V* is at most that of V_lower plus |V* - V_lower|.
- STRONG_BONUS, in addition a bound of |(P - P_true)(V* - V_lower)|:
  sqrt(2 n log / (N - 1)) |V_upper - V_lower| + 7 n H log / (3 (N - 1)). With it, the surplus
  Q_lower - loss - P_true V_lower of every pair is at most zero.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.lanes import Shared, anywhere, lane, sqrt, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, Work, kernel, routine
from torch_occ.engine.learners import average, cheapest_pair, count_visit
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.game.simulate import whole
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.beliefs import PlanningLearner, count_transitions, entries
from torch_occ.step.arrays import model_of

UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING, EULER_BONUS, STRONG_BONUS = 0, 1, 2, 3, 4

# Rows of `bounds` (2, S * A) and of `values` (3, S); the last is the b' of UCBVI.
LOWER, UPPER, SPREAD = 0, 1, 2

Kind = Literal["hoeffding", "bernstein", "sharp"]


class CompiledOptimist(NamedTuple):
    """`UCBVI`, `EULER` and `StrongEuler`."""

    visits: PerPair
    losses: PerPair
    counts: Floats  # (M,)
    lower: PerPair  # Q_lower; it is state if lower bounds never fall
    bonus: int
    monotone: bool  # whether lower bounds never fall
    floor: float
    corruption: float
    logs: Shared  # (n + 1,), the logarithm in the bonus
    entry: Ints
    mean: PerPair
    root: PerPair
    allowed: PerPair
    bounds: Annotated[Floats, 2, "pairs"]
    values: Annotated[Floats, 3, "states"]
    choice: PerState


@propose.register(CompiledOptimist)
def _propose_optimistically(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        prepare(learner)
    changed, log = (learner.corruption, 0.0), learner.logs[t + 1]
    plan_with_bounds(game.model, learner, learner, False, changed, log, learner)


@observe.register(CompiledOptimist)
def _observe_transitions(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for k in range(game.pairs.shape[1]):
            count_visit(own, game.pairs[n, k], game.losses[n, k])
        count_transitions(game, n, own.counts, own.entry)


@routine(inline=True)
def prepare(learner: Any) -> None:
    """What follows from the state."""
    average(learner, 0.0)
    for i in range(len(learner.allowed)):
        learner.allowed[i] = 1.0


@kernel
def plan_once(model: Model, learner: CompiledOptimist) -> None:
    """Plan for one seed, with the first of its logarithms."""
    prepare(learner)
    changed, log = (learner.corruption, 0.0), learner.logs[0]
    plan_with_bounds(model, learner, learner, False, changed, log, learner)


@routine(inline=True)
def plan_with_bounds(
    model: Model, data: Any, more: Any, both: bool, corruption: Any, log: float, learner: Any
) -> None:
    """Backward induction with a bonus, for the learner's choice, bounds and values.

    If `both`, the tightest bounds of `data` and `more` count; `corruption` is C of each. A pair may
    be played where `allowed` is positive.
    """
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    bounds, values, widest = learner.bounds, learner.values, float(layers * layers)
    scale = 1e4 * widest * layers * log * log * start[layers] * start[layers] * num_actions
    for k in range(layers - 1, -1, -1):
        for s in range(start[k], start[k + 1]):
            arrived, first, stop = 0.0, s * num_actions, (s + 1) * num_actions
            for i in range(first, stop):
                if model.exists[PAIR, i]:
                    arrived += data.visits[i]
                    low, high = estimate(model, data, corruption[0], log, k, i, learner)
                    if both:
                        lower, upper = estimate(model, more, corruption[1], log, k, i, learner)
                        low, high = max(low, lower), min(high, upper)
                    if learner.monotone:
                        low = max(low, learner.lower[i])
                    learner.lower[i] = low
                    bounds[LOWER, i] = where(learner.allowed[i] > 0.0, low, np.inf)
                    bounds[UPPER, i] = high
            values[SPREAD, s] = where(arrived > 0.0, min(scale / max(arrived, 1.0), widest), widest)
            values[LOWER, s], chosen = cheapest_pair(model.exists[PAIR], bounds, LOWER, first, stop)
            learner.choice[s] = chosen
            for i in range(first, stop):
                if model.exists[PAIR, i]:
                    values[UPPER, s] = where(chosen == float(i), bounds[UPPER, i], values[UPPER, s])


@routine(inline=True)
def estimate(
    model: Model, data: Any, corruption: Any, log: float, k: int, i: int, learner: Any
) -> tuple[Any, Any]:
    """Q_lower and Q_upper of a pair of layer k."""
    layers, first = len(model.start) - 1, model.start[k + 1]
    values, bonus = learner.values, learner.bonus
    size = model.start[k + 2] - first if k + 1 < layers else 0  # 0 if only the terminal state
    n, loss, root, left = data.visits[i], data.mean[i], data.root[i], float(layers - k)
    known, share, rest, entry = n > 0.0, root * root, max(n - 1.0, 1.0), learner.entry[i]
    b, lower, upper, variance, distance, spread = loss - loss, 0.0, 0.0, 0.0, 0.0, 0.0
    if anywhere(known):
        for j in range(size):
            p = data.counts[entry + j] * share
            lower += p * values[LOWER, first + j]
            upper += p * values[UPPER, first + j]
        if bonus == UCBVI_HOEFFDING:
            b = 7.0 * layers * log * root + min(1.0, 0.5 * corruption * share)
        elif bonus == SHARP_HOEFFDING:
            b = left * np.sqrt(0.5 * log) * root + min(1.0, 0.5 * corruption * share)
        else:
            for j in range(size):
                p = data.counts[entry + j] * share
                apart = values[LOWER, first + j] - lower
                variance += p * apart * apart
                if bonus == UCBVI_BERNSTEIN:
                    spread += p * values[SPREAD, first + j]
                else:
                    gap = values[UPPER, first + j] - values[LOWER, first + j]
                    distance += p * gap * gap
            each = log / rest
            b = sqrt(2.0 * max(loss * (1.0 - loss), 0.0) * each) + 7.0 / 3.0 * each
            if bonus == UCBVI_BERNSTEIN:
                b += sqrt(8.0 * log * variance) * root + 14.0 / 3.0 * layers * log * share
                b += sqrt(8.0 * spread) * root
            elif size > 1:
                distance = sqrt(distance)
                b += sqrt(2.0 * each) * (sqrt(variance) + distance)
                b += 7.0 / 3.0 * (left - 1.0) * each
                if bonus == STRONG_BONUS:
                    b += sqrt(2.0 * size * each) * distance
                    b += 7.0 / 3.0 * size * (left - 1.0) * each
            b = where(n < 2.0, np.inf, b)
    low = where(known, max(loss + lower - b, learner.floor), learner.floor)
    return low, where(known, min(loss + upper + b, left), left)


# -- the learners ----------------------------------------------------------------------------------


def needed_episodes(algorithm: str, episodes: int | None, why: str) -> int:
    """The number of episodes that an algorithm needs; raise an error if it is not valid."""
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


class Bounds(NamedTuple):
    """The result of planning."""

    policy: Tensor  # (N, S, A), deterministic
    lower: Tensor  # (N, S, A), Q_lower, infinite on masked pairs
    upper: Tensor  # (N, S, A), Q_upper, infinite on masked pairs
    value: Tensor  # (N, S), V_lower


class OptimisticLearner(PlanningLearner):
    """Plays the policy of smallest lower bounds, planned before every episode."""

    #: The smallest lower bound, whether lower bounds never fall, and known changes of losses.
    floor, monotone, corruption = 0.0, False, 0.0
    bonus: int

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

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"logs": self.log}

    def plan(self, t: int) -> Bounds:
        """The lower and upper bounds before episode t, and the policy."""
        mdp, model, state = self.mdp, model_of(self.mdp), self.state
        log = self.log(torch.tensor([float(t)], dtype=torch.float64)).numpy()
        sums = [state[name].flatten(1).numpy() for name in ("visits", "losses", "counts")]
        least = state.get("lower", torch.zeros_like(state["visits"])).flatten(1).numpy().copy()
        fixed = (self.bonus, self.monotone, float(self.floor), float(self.corruption), log)
        count, pairs = least.shape
        scratch, bounds = np.zeros((count, 3, pairs)), np.full((count, 2, pairs), np.inf)
        values, choice = np.zeros((count, 3, mdp.num_states)), np.zeros((count, mdp.num_states))
        for n in range(count):
            own, found = [x[n] for x in (*sums, least)], (bounds[n], values[n], choice[n])
            form = CompiledOptimist(  # type: ignore[call-arg]
                *own, *fixed, entries(mdp), *scratch[n], *found
            )
            plan_once(model, form)
        chosen = (choice[..., None] == np.arange(pairs)).any(1).astype(np.float64)
        tables = torch.from_numpy(np.stack((chosen, bounds[:, LOWER], bounds[:, UPPER])))
        policy, lower, upper = tables.view(3, *state["visits"].shape)
        return Bounds(policy, lower, upper, torch.from_numpy(values[:, LOWER]))


class UCBVI(OptimisticLearner):
    """Optimistic planning with averages (Azar, Osband and Munos, 2017), for stochastic losses.

    Bonuses, with the N visits of a pair before the episode:

    - `"hoeffding"`, the default, UCBVI-CH as printed: 7 L ln(5 S A L T / delta) / sqrt(N). The
      bonus exceeds every value until N is about (7 ln(...))^2, so it does not learn in fewer than
      about a million episodes: at T = 10,000 it has more regret than the uniform policy
      (docs/rivals.md). Take `"sharp"` to compare with.
    - `"bernstein"`, UCBVI-BF as printed, plus a term for unknown losses.
    - `"sharp"`: (L - k) sqrt(ln(2 S A t^2 / delta) / (2 N)) in layer k, Hoeffding's inequality for
      the loss plus the optimal value of the next state. It is derived here, not printed: it gives
      the same optimism as UCBVI-CH with about a fiftieth of the bonus. For L = 1 and floor = -inf
      it is UCB1 with this logarithm.

    With the first two, lower bounds never fall, as printed. With probability 1 - delta, the lower
    bounds of `"hoeffding"` and `"bernstein"` (by their paper) and of `"sharp"` (by induction) are
    below the optimal values in every episode up to T, if losses are independent and have the same
    mean in every episode.

    Args:
        episodes: T; `"hoeffding"` and `"bernstein"` need it, `"sharp"` does not.
        corruption: C, for losses that were changed: twice the sum over episodes and layers of the
            largest change, as `occ.Corrupted` counts it. The bonus grows by min(1, C / (2 N)),
            which keeps the bounds valid, since an average of N losses moves by at most C / (2 N).
            It must be known: a larger C costs regret in proportion, a smaller one may make regret
            linear. Only for `"hoeffding"` and `"sharp"`.
        floor: the smallest lower bound, at most 0; -inf for L = 1 only.

    Raises:
        ValueError: if an argument is not valid, or not known to the bonus; if more episodes are
            played than `episodes`.
    """

    compiled = CompiledOptimist

    def __init__(
        self,
        mdp: LayeredMDP,
        episodes: int | None = None,
        *,
        bonus: Kind = "hoeffding",
        delta: float = 0.1,
        corruption: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        if bonus not in get_args(Kind):
            raise ValueError(f"bonus: expected one of {', '.join(get_args(Kind))}, got {bonus!r}")
        super().__init__(mdp, delta)
        if bonus != "sharp":
            why = "which is in its logarithm; only bonus='sharp' does without"
            episodes = needed_episodes(f"UCBVI with bonus={bonus!r}", episodes, why)
        if not 0 <= corruption < math.inf:
            raise ValueError(
                f"corruption: expected a finite number of at least 0, got {corruption}"
            )
        if corruption and bonus == "bernstein":
            raise ValueError(
                "corruption: UCBVI with bonus='bernstein' estimates variances from the changed "
                "losses, for which no bound is known here; use bonus='sharp' or 'hoeffding'"
            )
        if not floor <= 0 or (math.isinf(floor) and mdp.horizon > 1):
            raise ValueError(
                "floor: expected a number of at most 0, finite if there is more than one layer, "
                f"got {floor}"
            )
        codes = (UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING)
        self.bonus = dict(zip(get_args(Kind), codes, strict=True))[bonus]
        self.corruption, self.floor = corruption, floor
        self.max_episodes = None if bonus == "sharp" else episodes
        self.monotone = bonus != "sharp"

    def log(self, t: Tensor) -> Tensor:
        if self.max_episodes is None:
            return super().log(t)
        steps = float(self.mdp.horizon * self.max_episodes)  # their T counts steps
        return torch.full_like(t, math.log(5 * self.mdp.num_pairs * steps / self.delta))


class EULER(OptimisticLearner):
    """Optimistic planning with empirical variances (after Zanette and Brunskill, 2019).

    The bonus has empirical Bernstein bounds for the losses and for the optimal value of the next
    state, with the logarithm ln(2 S A t^2 / delta). It has the form of the paper; the constants are
    derived here from the inequality of Maurer and Pontil (2009), because the printed ones could not
    be looked up. Four bounds per pair and number of visits must hold, so the lower and upper bounds
    hold in every episode with probability at least 1 - 7 delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    compiled = CompiledOptimist
    bonus = EULER_BONUS


class StrongEuler(OptimisticLearner):
    """EULER with strong optimism (after Simchowitz and Jamieson, 2019).

    With its bonus, not only the lower bounds are optimistic: no pair has a positive surplus
    Q_lower - loss - P V_lower, on which the analysis with gaps rests. The constants are derived
    here as those of `EULER`. With n states in the next layer, the bounds hold in every episode with
    probability at least 1 - (7 + 3.3 n) delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    compiled = CompiledOptimist
    bonus = STRONG_BONUS
