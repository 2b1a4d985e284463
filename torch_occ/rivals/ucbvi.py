"""UCBVI, EULER and StrongEuler: optimistic planning with averages, for unknown transitions."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.lanes import Shared, lane
from torch_occ.engine.layout import Floats, Ints, Model, Work, kernel, routine
from torch_occ.engine.learners import average, count_visit
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals import planning
from torch_occ.rivals.beliefs import count_transitions
from torch_occ.rivals.planning import (
    LOWER,
    PlanningLearner,
    check_delta,
    needed_episodes,
    plan_with_bounds,
)
from torch_occ.step.arrays import model_of

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


class Bounds(NamedTuple):
    """The result of planning."""

    policy: Tensor  # (N, S, A), deterministic
    lower: Tensor  # (N, S, A), Q_lower, infinite on masked pairs
    upper: Tensor  # (N, S, A), Q_upper, infinite on masked pairs
    value: Tensor  # (N, S), V_lower


class OptimisticLearner(PlanningLearner):
    """Plays the policy of smallest lower bounds, planned before every episode.

    Lower bounds hold with a probability that depends on `delta`; see the learners.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    #: The smallest lower bound, whether lower bounds never fall, and known changes of losses.
    floor, monotone, corruption = 0.0, False, 0.0
    #: The number of the bonus in torch_occ.rivals.planning.
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
        mdp, model, found = self.mdp, model_of(self.mdp), []
        log = self.log(torch.tensor([float(t)], dtype=torch.float64)).numpy()
        sums = [self.state[name].flatten(1).numpy() for name in ("visits", "losses", "counts")]
        least = self.state.get("lower", torch.zeros_like(self.state["visits"])).flatten(1).numpy()
        for n in range(len(least)):
            scratch = np.zeros((3, least.shape[1]))
            bounds, values = np.full((2, least.shape[1]), np.inf), np.zeros((3, mdp.num_states))
            choice = np.zeros(mdp.num_states)
            fixed = (self.bonus, self.monotone, float(self.floor), float(self.corruption))
            form = CompiledOptimist(
                *(x[n] for x in sums),
                least[n].copy(),
                *(*fixed, log, super().settings()["entry"], *scratch, bounds, values, choice),
            )
            plan_once(model, form)
            found.append((choice[:, None] == np.arange(bounds.shape[1]), *bounds, values[LOWER]))
        chosen, lower, upper, value = (
            torch.from_numpy(np.stack(x)) for x in zip(*found, strict=True)
        )
        pairs = (len(least), mdp.num_states, mdp.num_actions)
        return Bounds(
            chosen.any(1).double().view(pairs), lower.view(pairs), upper.view(pairs), value
        )


class UCBVI(OptimisticLearner):
    """Optimistic planning with averages (Azar, Osband and Munos, 2017), for stochastic losses.

    Bonuses, with the N visits of a pair before the episode:

    - `"hoeffding"`, UCBVI-CH as printed: 7 L ln(5 S A L T / delta) / sqrt(N). The bonus exceeds
      every value until N is about (7 ln(...))^2, so it does not learn in fewer than about a million
      episodes.
    - `"bernstein"`, UCBVI-BF as printed, plus a term for unknown losses
      (torch_occ.rivals.planning).
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
        codes = (planning.UCBVI_HOEFFDING, planning.UCBVI_BERNSTEIN, planning.SHARP_HOEFFDING)
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

    The bonus is in torch_occ.rivals.planning: empirical Bernstein bounds for the losses
    and for the optimal value of the next state, with the logarithm ln(2 S A t^2 / delta). It has
    the form of the paper; the constants are derived here from the inequality of Maurer and Pontil
    (2009), because the printed ones could not be looked up. Four bounds per pair and number of
    visits must hold, so the lower and upper bounds hold in every episode with probability at least
    1 - 7 delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    compiled = CompiledOptimist
    bonus = planning.EULER


class StrongEuler(OptimisticLearner):
    """EULER with strong optimism (after Simchowitz and Jamieson, 2019).

    The bonus is in torch_occ.rivals.planning. With it, not only the lower bounds
    are optimistic: no pair has a positive surplus Q_lower - loss - P V_lower, on which the analysis
    with gaps rests. Clipping of surpluses belongs to that analysis, not to the algorithm. The
    constants are derived here as those of `EULER`. With n states in the next layer, the bounds hold
    in every episode with probability at least 1 - (7 + 3.3 n) delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    compiled = CompiledOptimist
    bonus = planning.STRONG_EULER
