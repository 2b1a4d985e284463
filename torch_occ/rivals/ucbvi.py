"""UCBVI: value iteration with upper confidence bounds, for unknown transitions."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.planning import (
    Bonus,
    OptimisticLearner,
    euler,
    needed_episodes,
    sharp_hoeffding,
    strong_euler,
    ucbvi_bernstein,
    ucbvi_hoeffding,
)

Kind = Literal["hoeffding", "bernstein", "sharp"]


class UCBVI(OptimisticLearner):
    """Optimistic planning with averages (Azar, Osband and Munos, 2017), for stochastic losses.

    Bonuses, with the N visits of a pair before the episode:

    - `"hoeffding"`, UCBVI-CH as printed: 7 L ln(5 S A L T / delta) / sqrt(N). The bonus exceeds
      every value until N is about (7 ln(...))^2, so it does not learn in fewer than about a million
      episodes.
    - `"bernstein"`, UCBVI-BF as printed, plus a term for unknown losses
      (`torch_occ.rivals.planning.ucbvi_bernstein`).
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
        self.kind, self.corruption, self.floor = bonus, corruption, floor
        self.max_episodes = None if bonus == "sharp" else episodes
        self.monotone = bonus != "sharp"

    def log(self, t: Tensor) -> Tensor:
        if self.max_episodes is None:
            return super().log(t)
        steps = float(self.mdp.horizon * self.max_episodes)  # their T counts steps
        return torch.full_like(t, math.log(5 * self.mdp.num_pairs * steps / self.delta))

    def bonus(self, log: float) -> Bonus:
        mdp, changed = self.mdp, self.corruption
        if self.kind == "hoeffding":
            return lambda stage: ucbvi_hoeffding(stage, log, mdp.horizon, changed)
        if self.kind == "bernstein":
            size = (mdp.horizon, mdp.num_states, mdp.num_actions)
            return lambda stage: ucbvi_bernstein(stage, log, *size)
        return lambda stage: sharp_hoeffding(stage, log, changed)


# -- EULER and StrongEuler: optimistic planning with variances, for unknown transitions ------------


class EULER(OptimisticLearner):
    """Optimistic planning with empirical variances (after Zanette and Brunskill, 2019).

    The bonus is `torch_occ.rivals.planning.euler`: empirical Bernstein bounds for the losses
    and for the optimal value of the next state, with the logarithm ln(2 S A t^2 / delta). It has
    the form of the paper; the constants are derived here from the inequality of Maurer and Pontil
    (2009), because the printed ones could not be looked up. Four bounds per pair and number of
    visits must hold, so the lower and upper bounds hold in every episode with probability at least
    1 - 7 delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    def bonus(self, log: float) -> Bonus:
        return lambda stage: euler(stage, log)


class StrongEuler(OptimisticLearner):
    """EULER with strong optimism (after Simchowitz and Jamieson, 2019).

    The bonus is `torch_occ.rivals.planning.strong_euler`. With it, not only the lower bounds
    are optimistic: no pair has a positive surplus Q_lower - loss - P V_lower, on which the analysis
    with gaps rests. Clipping of surpluses belongs to that analysis, not to the algorithm. The
    constants are derived here as those of `EULER`. With n states in the next layer, the bounds hold
    in every episode with probability at least 1 - (7 + 3.3 n) delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    def bonus(self, log: float) -> Bonus:
        return lambda stage: strong_euler(stage, log)
