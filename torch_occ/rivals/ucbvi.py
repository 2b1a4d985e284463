"""UCBVI, EULER, StrongEuler and multi-layer UCBVI: optimistic planning for unknown transitions.

A planner knows averages: the visits N of every pair, its average loss, and the shares in which the
states of the next layer followed it. For layer k, with values V of layer k + 1,

    Q_lower = max(0, average loss + P V_lower - b),       V_lower(s) = min_a Q_lower(s, a)
    Q_upper = min(L - k, average loss + P V_upper + b),   V_upper(s) = Q_upper at the action played

where P are the shares and b >= 0 is a bonus. The policy plays an action of smallest Q_lower.
Losses are in [0, 1], so a value of layer k lies in [0, L - k], the bounds of pairs without visits.

The bonuses, with n the number of states of the next layer, H = L - 1 - k the largest value there,
`log` the logarithm of a confidence level, |.| the norm in L2 of the next state:

- UCBVI_HOEFFDING: 7 L log / sqrt(N), as printed for UCBVI-CH (Azar, Osband and Munos, 2017) for
  known losses; it also covers averages of losses in [0, 1].
- SHARP_HOEFFDING: (L - k) sqrt(log / (2 N)), Hoeffding's inequality for loss + V*(s'), which is in
  [0, L - k]. If V_lower <= V* in the next layer, then average loss + P V_lower - b <= Q* here.
- Both plus min(1, C / (2 N)) for losses that were changed: C is twice the sum over episodes and
  layers of the largest change (`occ.Corrupted`), so an average has moved by at most C / (2 N).
- The others contain the empirical Bernstein bound of Maurer and Pontil (2009) for the average loss,
  sqrt(2 v log / (N - 1)) + 7 log / (3 (N - 1)) with v = average (1 - average), which is at least
  the empirical variance of losses in [0, 1]. They are infinite for N = 1.
- UCBVI_BERNSTEIN, UCBVI-BF as printed: sqrt(8 log Var(V) / N) + 14 L log / (3 N) +
  sqrt(8 / N sum_y P(y) min(100^2 L^3 S^2 A log^2 / N(y), L^2)), not in the last layer.
- EULER_BONUS, a bound of |(P - P_true) V*| that uses V_lower <= V* <= V_upper, zero where n = 1:
  sqrt(2 log / (N - 1)) (sd(V_lower) + |V_upper - V_lower|) + 7 H log / (3 (N - 1)).
- STRONG_BONUS, in addition a bound of |(P - P_true)(V* - V_lower)|:
  sqrt(2 n log / (N - 1)) |V_upper - V_lower| + 7 n H log / (3 (N - 1)).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.draws import episode_key, key_of, uniform
from torch_occ.engine.lanes import Shared, anywhere, lane, power, sqrt, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, Work, routine
from torch_occ.engine.learners import average, cheapest_pair
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.mdp.checks import check_that, whole
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.beliefs import PlanningLearner, count_steps, observe_transitions

UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING, EULER_BONUS, STRONG_BONUS = 0, 1, 2, 3, 4

# Rows of `bounds` (2, S * A) and of `values` (3, S); the last is the b' of UCBVI.
LOWER, UPPER, SPREAD = 0, 1, 2

Kind = Literal["hoeffding", "bernstein", "sharp"]


#: The fields that all compiled forms share. Those of `MultiLayerUCBVI` have a row for each layer,
#: and a last one for the data of all, in `visits`, `losses`, `counts`, `mean` and `root`.
_PLANNING: dict[str, Any] = {
    **dict.fromkeys(("visits", "losses", "mean", "root", "allowed"), PerPair),
    "counts": Floats,  # (M,)
    "lower": PerPair,  # Q_lower
    "bonus": int,
    "monotone": bool,  # whether lower bounds never fall
    "corruption": float,
    "entry": Ints,
    "bounds": Annotated[Floats, 2, "pairs"],
    "values": Annotated[Floats, 3, "states"],
    "choice": PerState,
}

#: The compiled form of `UCBVI`, `EULER` and `StrongEuler`; `logs` has the logarithm in the bonus.
_FIELDS = _PLANNING | {"logs": Shared}
CompiledOptimist: Any = NamedTuple("CompiledOptimist", [*_FIELDS.items()])  # type: ignore[misc]


@propose.register(CompiledOptimist)
def _propose_optimistically(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        average(learner, 0.0)
    changed, log = (learner.corruption, 0.0), learner.logs[t + 1]
    plan_with_bounds(game.model, learner, learner, False, changed, log, learner)


observe.register(CompiledOptimist)(observe_transitions)


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
        if bonus in (UCBVI_HOEFFDING, SHARP_HOEFFDING):
            scale = left * np.sqrt(0.5 * log) if bonus == SHARP_HOEFFDING else 7.0 * layers * log
            b = scale * root + min(1.0, 0.5 * corruption * share)
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
    low = where(known, max(loss + lower - b, 0.0), 0.0)
    return low, where(known, min(loss + upper + b, left), left)


# -- the learners ----------------------------------------------------------------------------------


def needed_episodes(algorithm: str, episodes: int | None, why: str) -> int:
    """The number of episodes that an algorithm needs; raise an error if it is not valid."""
    if episodes is None:
        raise ValueError(f"episodes: {algorithm} needs the number of episodes, {why}")
    return whole(f"episodes of {algorithm}", episodes)


class OptimisticLearner(PlanningLearner):
    """Plays the policy of smallest lower bounds, planned before every episode.

    Its state has, beyond that of `PlanningLearner`, `lower` `(N, S, A)`: Q_lower of the last plan.
    """

    #: Whether lower bounds never fall, and known changes of losses.
    monotone, corruption = False, 0.0
    bonus: int

    def __init__(self, mdp: LayeredMDP, delta: float = 0.1) -> None:
        super().__init__(mdp)
        if not 0 < delta < 1:
            raise ValueError(
                f"delta: {type(self).__name__} needs a probability between 0 and 1, the one with "
                f"which its bounds may fail, for example 0.1; got {delta}"
            )
        self.delta = delta

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.state["lower"] = self._zeros(num_seeds)

    def log(self, t: Tensor) -> Tensor:
        """The logarithm in the bonus of episodes t, ln(2 S A t^2 / delta)."""
        return (2.0 * self.mdp.num_pairs / self.delta * t**2).log()

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"logs": self.log, "allowed": np.ones(self.mdp.actions.numel())}


class UCBVI(OptimisticLearner):
    """Optimistic planning with averages (Azar, Osband and Munos, 2017), for stochastic losses.

    Bonuses, with the N visits of a pair before the episode:

    - `"hoeffding"`, the default, UCBVI-CH as printed: 7 L ln(5 S A L T / delta) / sqrt(N). At
      T = 10,000 it has more regret than the uniform policy (docs/rivals.md).
    - `"bernstein"`, UCBVI-BF as printed, plus a term for unknown losses.
    - `"sharp"`: (L - k) sqrt(ln(2 S A t^2 / delta) / (2 N)) in layer k, derived here: the same
      optimism as UCBVI-CH with about a fiftieth of the bonus.

    With the first two, lower bounds never fall, as printed. With probability 1 - delta, all lower
    bounds are below the optimal values in every episode up to T, if losses are independent and have
    the same mean in every episode.

    Args:
        episodes: T; `"hoeffding"` and `"bernstein"` need it, `"sharp"` does not.
        corruption: C, for losses that were changed, as `occ.Corrupted` counts it. The bonus grows
            by min(1, C / (2 N)), which keeps the bounds valid. A larger C costs regret in
            proportion, a smaller one may make regret linear. Not for `"bernstein"`.

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
    ) -> None:
        codes = (UCBVI_HOEFFDING, UCBVI_BERNSTEIN, SHARP_HOEFFDING)
        kinds = dict(zip(get_args(Kind), codes, strict=True))
        check_that(bonus in kinds, "bonus", f"one of {', '.join(kinds)}", repr(bonus))
        super().__init__(mdp, delta)
        if bonus != "sharp":
            why = "which is in its logarithm; only bonus='sharp' does without"
            episodes = needed_episodes(f"UCBVI with bonus={bonus!r}", episodes, why)
        fine = 0 <= corruption < math.inf
        check_that(fine, "corruption", "a finite number of at least 0", corruption)
        if corruption and bonus == "bernstein":
            raise ValueError(
                "corruption: UCBVI with bonus='bernstein' estimates variances from the changed "
                "losses, for which no bound is known here; use bonus='sharp' or 'hoeffding'"
            )
        self.bonus, self.corruption = kinds[bonus], corruption
        self.max_episodes, self.monotone = (None, False) if bonus == "sharp" else (episodes, True)

    def log(self, t: Tensor) -> Tensor:
        if self.max_episodes is None:
            return super().log(t)
        steps = float(self.mdp.horizon * self.max_episodes)  # their T counts steps
        return torch.full_like(t, math.log(5 * self.mdp.num_pairs * steps / self.delta))


class EULER(OptimisticLearner):
    """Optimistic planning with empirical variances (after Zanette and Brunskill, 2019).

    The bonus has the form of the paper, with the logarithm ln(2 S A t^2 / delta); the constants are
    derived here from the inequality of Maurer and Pontil (2009). Four bounds per pair and number of
    visits must hold, so the lower and upper bounds hold in every episode with probability at least
    1 - 7 delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    compiled = CompiledOptimist
    bonus = EULER_BONUS


class StrongEuler(OptimisticLearner):
    """EULER with strong optimism (after Simchowitz and Jamieson, 2019).

    No pair has a positive surplus Q_lower - loss - P V_lower, on which the analysis with gaps
    rests. The constants are derived here as those of `EULER`. With n states in the next layer, the
    bounds hold in every episode with probability at least 1 - (7 + 3.3 n) delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    compiled = CompiledOptimist
    bonus = STRONG_BONUS


# -- losses of which an unknown part was changed --------------------------------------------------


class Averages(NamedTuple):
    """The data of one layer of `MultiLayerUCBVI`, or of all."""

    visits: Floats  # (S * A,)
    losses: Floats  # (S * A,)
    counts: Floats  # (M,)
    mean: Floats  # (S * A,)
    root: Floats  # (S * A,)


#: What `MultiLayerUCBVI` has beside them; the first layer is the fastest.
_OWN: dict[str, Any] = {
    "possible": PerPair,  # (R, S * A), 1 where the layer found the action possible at its last turn
    "seeds": Any,
    "logarithm": float,
    "layer": Annotated[Floats, 1],  # the layer that plays
    "own": Averages,  # its data
    "left": Floats,  # (R, S * A), 1 where slower layers leave an action to a layer
}
_IN_LAYERS = _PLANNING | _OWN
CompiledLayers: Any = NamedTuple("CompiledLayers", [*_IN_LAYERS.items()])  # type: ignore[misc]


class MultiLayerUCBVI(OptimisticLearner):
    """Multi-layer UCBVI, simplified (after Lykouris, Simchowitz, Slivkins and Sun, 2021).

    The losses are stochastic, but an adversary has changed some of them, by an unknown amount C
    (`occ.Corrupted`). There are R = ceil(log2 T) copies of UCBVI, called layers; layer r is robust
    to C = 2^r. An episode belongs to layer r with probability 2^-r (the rest to layer 1). A layer
    has the tightest bounds of two kinds of data, with the bonus of `UCBVI(bonus="sharp")` plus

    - min(1, (ln(2 L R / delta) + 3) / N) for its own episodes, which are so few that they contain
      at most that many changes per pair if C <= 2^r, with high probability;
    - min(1, 2^r / (2 N)) for the episodes of all layers.

    The slow layers supervise the fast ones: a layer plays the smallest lower bound among the
    actions that every slower layer found possible at its last turn (if they leave none, the slowest
    ones count). It finds those possible whose lower bound is at most the smallest upper bound.

    What is simplified: the paper passes control to slower layers within an episode, its bonuses are
    larger, and it also covers changed transitions. Its guarantee does not carry over. What holds
    here, with probability 1 - delta: no layer with 2^r >= C excludes an optimal action.

    Raises:
        TypeError: if `episodes` is no whole number.
        ValueError: if `episodes` or `delta` is not valid.
    """

    compiled = CompiledLayers
    bonus = SHARP_HOEFFDING

    def __init__(self, mdp: LayeredMDP, episodes: int, delta: float = 0.1) -> None:
        super().__init__(mdp, delta)
        why = "which decides the number of its layers"
        T = self.max_episodes = needed_episodes("MultiLayerUCBVI", episodes, why)
        R = self.layers = max(1, math.ceil(math.log2(T)))
        # In the bonus: a union over data and visits; and twice the changes that a layer sees.
        self.logarithm = math.log(4 * mdp.num_pairs * (R + 1) * T / delta)
        self.corruption = 2 * (math.log(2 * mdp.horizon * R / delta) + 3)

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        for name in ("visits", "losses", "counts"):
            self.state[name] = self.state[name].unsqueeze(1).repeat_interleave(self.layers + 1, 1)
        possible = self.mdp.actions.to(self.mdp.dtype).expand(num_seeds, self.layers, -1, -1)
        self.state["possible"] = possible.clone()

    def settings(self) -> dict[str, Any]:
        found, pairs = super().settings(), self.mdp.actions.numel()
        rows, entries = (self.layers + 1, pairs), found["entry"][-1]
        own = Averages(*map(np.zeros, (pairs, pairs, entries, pairs, pairs)))
        left = self.mdp.actions.expand(self.layers, -1, -1).flatten(1).double().numpy()
        return found | {"mean": np.zeros(rows), "root": np.zeros(rows), "own": own, "left": left}


@propose.register(CompiledLayers)
def _propose_in_layers(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    all_layers = len(learner.possible)
    if t == 0:
        for r in range(all_layers + 1):
            average(data_of(learner, r), 0.0)
    for n in range(len(learner.seeds)):
        if t == 0:
            supervise(game.model.num_actions, all_layers - 1, lane(learner, n))
        take_turn(learner.seeds[n], game.before + t + 1, lane(learner, n))
    own, together = learner.own, data_of(learner, all_layers)
    changed = learner.corruption, power(2.0, learner.layer[0] + 1.0)
    plan_with_bounds(game.model, own, together, True, changed, learner.logarithm, learner)
    for n in range(len(learner.seeds)):
        find_possible(game.model.num_actions, lane(learner, n))


@observe.register(CompiledLayers)
def _observe_in_layers(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for r in (int(own.layer[0]), len(own.possible)):
            count_steps(game, n, data_of(own, r), own.entry)


@routine(inline=True)
def data_of(own: Any, r: int) -> Averages:
    """The data of one layer, or of all layers."""
    return Averages(own.visits[r], own.losses[r], own.counts[r], own.mean[r], own.root[r])


@routine(inline=True)
def take_turn(seed: int, t: int, learner: Any) -> None:
    """Draw the layer of episode t for one seed, and copy its data, since lanes differ in it."""
    number, r, own = uniform(key_of(episode_key(seed, t), 0), 0), 0, learner.own
    while r < len(learner.possible) and number < 0.5 ** (r + 1):
        r += 1
    r %= len(learner.possible)
    learner.layer[0], entry, counts = float(r), learner.entry, learner.counts[r]
    for i in range(len(own.visits)):
        own.visits[i], learner.allowed[i] = learner.visits[r, i], learner.left[r, i]
        own.mean[i], own.root[i] = learner.mean[r, i], learner.root[r, i]
        if own.visits[i] > 0.0:
            for e in range(entry[i], entry[i + 1]):
                own.counts[e] = counts[e]


@routine(inline=True)
def supervise(num_actions: int, slowest: int, own: Any) -> None:
    """Leave to faster layers what all slower ones found possible; if nothing, the slowest count."""
    left, possible = own.left, own.possible
    for first in range(0, len(own.allowed), num_actions):
        for r in range(slowest, 0, -1):
            most = 0.0
            for i in range(first, first + num_actions):
                most = max(most, left[r, i] * possible[r, i])
            for i in range(first, first + num_actions):
                left[r - 1, i] = left[r, i] * (possible[r, i] if most > 0.0 else 1.0)


@routine(inline=True)
def find_possible(num_actions: int, own: Any) -> None:
    """The allowed actions of one seed whose lower bound is at most the smallest upper bound."""
    allowed, bounds, r = own.allowed, own.bounds, int(own.layer[0])
    for first in range(0, len(allowed), num_actions):
        best = np.inf
        for i in range(first, first + num_actions):
            best = min(best, bounds[UPPER, i] if allowed[i] > 0.0 else np.inf)
        for i in range(first, first + num_actions):
            own.possible[r, i] = 1.0 if allowed[i] > 0.0 and bounds[LOWER, i] <= best else 0.0
    supervise(num_actions, r, own)
