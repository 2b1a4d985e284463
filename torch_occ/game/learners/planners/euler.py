"""EULER and StrongEuler: optimistic planning with variances, for unknown transitions."""

from __future__ import annotations

from torch_occ.game.learners.optimism import OptimisticLearner
from torch_occ.game.learners.planning import Bonus, euler, strong_euler


class EULER(OptimisticLearner):
    """Optimistic planning with empirical variances (after Zanette and Brunskill, 2019).

    The bonus is `torch_occ.game.learners.planning.euler`: empirical Bernstein bounds for the losses
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

    The bonus is `torch_occ.game.learners.planning.strong_euler`. With it, not only the lower bounds
    are optimistic: no pair has a positive surplus Q_lower - loss - P V_lower, on which the analysis
    with gaps rests. Clipping of surpluses belongs to that analysis, not to the algorithm. The
    constants are derived here as those of `EULER`. With n states in the next layer, the bounds hold
    in every episode with probability at least 1 - (7 + 3.3 n) delta.

    Raises:
        ValueError: if `delta` is not in (0, 1).
    """

    def bonus(self, log: float) -> Bonus:
        return lambda stage: strong_euler(stage, log)
