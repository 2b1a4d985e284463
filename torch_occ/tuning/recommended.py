"""What to take without tuning: one learner for each kind of world."""

from __future__ import annotations

from typing import Literal, get_args

from torch_occ.game.estimators import ReducedVariance
from torch_occ.game.learners.adaptive.corrected import CorrectedFTRL
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.learners.thompson import Thompson
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.catalog import ConditionalEntropy, LogBarrier
from torch_occ.regularizers.schedules import InverseSqrt

Kind = Literal["any", "stochastic", "adversarial"]

#: gamma and beta of "adversarial", chosen on training MDPs by experiments/both_worlds.py.
ADVERSARIAL = (0.2663, 1.0)

#: A rate so small that the baseline is 1/2 wherever q is not tiny.
EVERYWHERE = 0.001


def recommended(mdp: LayeredMDP, world: Kind = "any") -> Learner:
    """Return a learner with constants that were good on MDPs on which they were not chosen.

    - "any": nothing is known about the losses. `CorrectedFTRL`, with its defaults.
    - "stochastic": losses are independent with the same means in every episode. Thompson sampling.
      Its regret may be linear in any other world.
    - "adversarial": losses react to the learner. FTRL with the conditional entropy,
      eta_t = 0.2663 / sqrt(t), a log-barrier of weight 1, and estimates with a baseline of 1/2.
      The baseline is for losses that are spread over [0, 1].

    docs/meta_tuning.md has the measurements.

    Raises:
        ValueError: if the world is not one of these.
    """
    if world not in get_args(Kind):
        expected = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"world: expected one of {expected}, got {world!r}")
    if world == "stochastic":
        return Thompson(mdp)
    if world == "any":
        return CorrectedFTRL(mdp)
    gamma, beta = ADVERSARIAL
    estimator = ReducedVariance(InverseSqrt(EVERYWHERE))
    return FTRL(mdp, ConditionalEntropy() / InverseSqrt(gamma) + LogBarrier(beta), estimator)
