"""Optimistic planning: bonuses, and backward induction with lower and upper values, compiled.

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
- EULER, a bound of |(P - P_true) V*| that uses V_lower <= V* <= V_upper, zero where n = 1:
  sqrt(2 log / (N - 1)) (sd(V_lower) + |V_upper - V_lower|) + 7 H log / (3 (N - 1)). It holds since
  the standard deviation of V* is at most that of V_lower plus |V* - V_lower|.
- STRONG_EULER, in addition a bound of |(P - P_true)(V* - V_lower)|:
  sqrt(2 n log / (N - 1)) |V_upper - V_lower| + 7 n H log / (3 (N - 1)). With it, the surplus
  Q_lower - loss - P_true V_lower of every pair is at most zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ.engine.lanes import anywhere, sqrt, where
from torch_occ.engine.layout import PAIR, Model, routine
from torch_occ.engine.learners import cheapest_pair
from torch_occ.game.learners import Learner
from torch_occ.game.simulate import whole
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.beliefs import entries, num_transitions

UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING, EULER, STRONG_EULER = 0, 1, 2, 3, 4

# Rows of `bounds` (2, S * A) and of `values` (3, S); the last is the b' of UCBVI.
LOWER, UPPER, SPREAD = 0, 1, 2


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

    def settings(self) -> dict[str, Any]:
        return {"entry": entries(self.mdp)}


@routine(inline=True)
def plan_with_bounds(
    model: Model, data: Any, more: Any, both: bool, corruption: Any, log: float, learner: Any
) -> None:
    """Backward induction with a bonus, for the learner's choice, bounds and values.

    Args:
        data: visits, mean, root and counts.
        more: other data; if `both`, then the tightest bounds of both count.
        corruption: C of both data.
        log: the logarithm in the bonus.
        learner: has the settings bonus, monotone and floor, the earlier `lower` bounds, and
            `allowed`, which is positive where a pair may be played.
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
    layers, first, values, bonus = (
        len(model.start) - 1,
        model.start[k + 1],
        learner.values,
        learner.bonus,
    )
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
                if bonus == STRONG_EULER:
                    b += sqrt(2.0 * size * each) * distance
                    b += 7.0 / 3.0 * size * (left - 1.0) * each
            b = where(n < 2.0, np.inf, b)
    low = where(known, max(loss + lower - b, learner.floor), learner.floor)
    return low, where(known, min(loss + upper + b, left), left)


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
