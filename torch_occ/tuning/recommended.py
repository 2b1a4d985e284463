"""What to take without tuning: one learner for each kind of world."""

from __future__ import annotations

from typing import Literal, get_args

from torch_occ.game.estimators import ReducedVariance
from torch_occ.game.learners.adaptive.corrected import CorrectedFTRL
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.learners.thompson import Thompson
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.catalog import ConditionalEntropy, LogBarrier, Tsallis
from torch_occ.regularizers.schedules import InverseSqrt

Kind = Literal["any", "stochastic", "varying", "adversarial"]

#: gamma and beta of "varying", chosen on MDPs 80 to 82 (docs/meta_tuning.md).
VARYING = (1.0, 0.5)

#: gamma and beta of "adversarial", chosen on training MDPs by experiments/both_worlds.py.
ADVERSARIAL = (0.2663, 1.0)

#: A rate so small that the baseline is 1/2 wherever q is not tiny.
EVERYWHERE = 0.001


def recommended(mdp: LayeredMDP, world: Kind = "any") -> Learner:
    """Return a learner with constants that were good on MDPs on which they were not chosen.

    - "any": nothing is known about the losses. `CorrectedFTRL`, with its defaults.
      It is good with random losses and against an adversary that reacts, and less so in between.
    - "stochastic": losses are independent with the same means in every episode. Thompson sampling.
      Its regret may be linear in any other world.
    - "varying": means change from outside, as where losses are constrained or corrupted. FTRL with
      the 1/2-Tsallis entropy, eta_t = 1 / sqrt(t), a log-barrier of weight 0.5, and estimates with
      a baseline of 1/2.
    - "adversarial": losses react to the learner. FTRL with the conditional entropy,
      eta_t = 0.2663 / sqrt(t), a log-barrier of weight 1, and the same estimates.

    docs/meta_tuning.md has the measurements. The baselines are for losses that are spread over
    [0, 1].

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
    estimator = ReducedVariance(InverseSqrt(EVERYWHERE))
    if world == "varying":
        gamma, beta = VARYING
        return FTRL(mdp, Tsallis() / InverseSqrt(gamma) + LogBarrier(beta), estimator)
    gamma, beta = ADVERSARIAL
    return FTRL(mdp, ConditionalEntropy() / InverseSqrt(gamma) + LogBarrier(beta), estimator)
