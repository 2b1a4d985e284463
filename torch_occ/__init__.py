"""FTRL over occupancy measures in PyTorch, differentiable and exact (Jin and Luo, 2020).

What is needed on the first day. The rest is in packages: `rivals`, learners from the literature;
`limits`, the least regret of any learner; `theory`, the paper; `reference`, the step in cvxpy; and
what the packages `mdp`, `game` and `tuning` list.
"""

# isort: skip_file
# The imports follow the order of the packages: each line needs only those above it.

import importlib as _importlib
from typing import Any as _Any

from torch_occ._support.choices import former as _former
from torch_occ._support.version import VERSION as __version__  # noqa: F401, N811

# The model
from torch_occ.mdp.layered import LayeredMDP as LayeredMDP
from torch_occ.mdp.graphs import GraphMDP as GraphMDP
from torch_occ.mdp.occupancy import interior_point as interior_point
from torch_occ.mdp.occupancy import occupancy as occupancy
from torch_occ.mdp.occupancy import optimal_policy as optimal_policy
from torch_occ.mdp.occupancy import policy_of as policy_of
from torch_occ.mdp.occupancy import uniform_policy as uniform_policy

# Parameters with one value per layer, state or pair
from torch_occ.regularizers.parameters import PerLayer as PerLayer
from torch_occ.regularizers.parameters import PerState as PerState
from torch_occ.regularizers.parameters import PerPair as PerPair

# Learning rates
from torch_occ.regularizers.schedules import Schedule as Schedule
from torch_occ.regularizers.schedules import Constant as Constant
from torch_occ.regularizers.schedules import InverseSqrt as InverseSqrt
from torch_occ.regularizers.schedules import Polynomial as Polynomial

# Regularizers: the base classes, and the built-in ones
from torch_occ.regularizers.base import Regularizer as Regularizer
from torch_occ.regularizers.base import SeparableRegularizer as SeparableRegularizer
from torch_occ.regularizers.base import StatewiseRegularizer as StatewiseRegularizer
from torch_occ.regularizers.base import JointRegularizer as JointRegularizer
from torch_occ.regularizers.catalog import Tsallis as Tsallis
from torch_occ.regularizers.catalog import HybridTsallis as HybridTsallis
from torch_occ.regularizers.catalog import HybridComplement as HybridComplement
from torch_occ.regularizers.catalog import Shannon as Shannon
from torch_occ.regularizers.catalog import ConditionalEntropy as ConditionalEntropy
from torch_occ.regularizers.catalog import LogBarrier as LogBarrier
from torch_occ.regularizers.catalog import jin_luo as jin_luo

# The step
from torch_occ.step.solution import Solution as Solution
from torch_occ.step.solution import Status as Status
from torch_occ.step.solution import Budgets as Budgets
from torch_occ.step.solution import InfeasibleError as InfeasibleError
from torch_occ.step.ftrl import FTRLStep as FTRLStep
from torch_occ.step.utilities import UtilityStep as UtilityStep
from torch_occ.step.checking import check_regularizer as check_regularizer
from torch_occ.step.solution import SolveError as SolveError

# Losses for networks
from torch_occ.learning.losses import fenchel_young_loss as fenchel_young_loss
from torch_occ.learning.losses import expected_cost as expected_cost
from torch_occ.learning.losses import negative_log_likelihood as negative_log_likelihood
from torch_occ.learning.unconstrained import unconstrain as unconstrain

# Losses of the game, and their estimators
from torch_occ.game.losses import LossProcess as LossProcess
from torch_occ.game.losses import BernoulliLosses as BernoulliLosses
from torch_occ.game.losses import UniformLosses as UniformLosses
from torch_occ.game.losses import TableLosses as TableLosses
from torch_occ.game.losses import SwitchingLosses as SwitchingLosses
from torch_occ.game.losses import RandomWalkLosses as RandomWalkLosses
from torch_occ.game.losses import GreedyAdversary as GreedyAdversary
from torch_occ.game.losses import StochasticallyConstrained as StochasticallyConstrained
from torch_occ.game.losses import Corrupted as Corrupted
from torch_occ.game.estimators import Estimator as Estimator
from torch_occ.game.estimators import Feedback as Feedback
from torch_occ.game.estimators import ImportanceWeighted as ImportanceWeighted
from torch_occ.game.estimators import ImplicitExploration as ImplicitExploration
from torch_occ.game.estimators import ReducedVariance as ReducedVariance
from torch_occ.game.estimators import FullInformation as FullInformation

# Learners and the game
from torch_occ.game.learners import Learner as Learner
from torch_occ.game.learners import FTRL as FTRL
from torch_occ.game.shifted import ShiftedFTRL as ShiftedFTRL
from torch_occ.game.learners import FixedPolicy as FixedPolicy
from torch_occ.game.learners import FollowTheLeader as FollowTheLeader
from torch_occ.game.learners import OptimisticValueIteration as OptimisticValueIteration
from torch_occ.game.callbacks import Callback as Callback
from torch_occ.game.callbacks import ProgressBar as ProgressBar
from torch_occ.game.callbacks import TensorBoard as TensorBoard
from torch_occ.game.history import History as History
from torch_occ.game.simulate import simulate as simulate
from torch_occ.game.simulate import compare_learners as compare_learners

# Games with imperfect information
from torch_occ.games.tree import ExtensiveGame as ExtensiveGame
from torch_occ.games.tree import dilated_entropy as dilated_entropy
from torch_occ.games.play import self_play as self_play

# Forecasts of the regret, and tuning
from torch_occ.tuning.forecast import forecast as forecast
from torch_occ.tuning.leaps import leap as leap
from torch_occ.tuning.tune import tune as tune
from torch_occ.tuning.tune import recommended as recommended

# Sweeps over many games
from torch_occ.sweeps import grid as grid
from torch_occ.sweeps import sweep as sweep

#: Packages that are imported when they are first used.
_PACKAGES = ("limits", "reference", "rivals", "theory")

#: Where names of version 0.2 are now. They still work here, with a warning, until version 0.4.
_MOVED = {
    "mdp": "Plan RewardMDP flow_adjoint flow_residual reachability",
    "limits": "LowerBound lower_bound",
    "game": "CentredEstimator LearnerComparison Mean UncertifiedWarning comparator",
    "rivals": (
        "CountingLearner EULER KLUCB MultiLayerUCBVI PSRL StrongEuler Thompson UCBVI "
        "UOBREPS UnknownFTRL Widths empirical_transitions"
    ),
    "tuning": "Evaluation Forecast ForecastObjective Leaps Tuned World stack",
    "sweeps": "Failure SweepResult",
}

#: Names that were removed, and what to use instead.
_GONE = {
    "CorrectedFTRL": "it had linear regret where losses change once; use occ.ShiftedFTRL(mdp)",
    "AdaptiveFTRL AdaptiveRates Rates StabilityPenaltyMatching": (
        "use occ.ShiftedFTRL(mdp), or occ.FTRL.tsallis(mdp)"
    ),
    "Hints MeanHints GradientHints": "use occ.ShiftedFTRL(mdp), whose hints are means",
    "Estimate Gradients": "experiments/meta_gradients.py has gradients through a run",
    "finite_differences": "differentiate occ.forecast, or play occ.simulate twice, same seeds",
    "leap_smoothly": "use occ.leap for the regret and occ.forecast for its gradient",
    "run_gradients": "differentiate occ.forecast; experiments/meta_gradients.py has the run's own",
    "KLProjection Projection": "occ.rivals.UOBREPS projects; use cvxpy for a projection by itself",
    "self_bounding SelfBounding": "use occ.theory.self_bounding_condition",
    "RewardMap": "imported MDPs have mdp.reward_range, mdp.loss and mdp.regret_in_rewards",
    "OSSB": "occ.rivals.Thompson has less regret; occ.limits.lower_bound has the limit",
    "Bonus": "occ.rivals.UnknownFTRL(mdp, psi, widths=..., bonus=True) has that of its widths",
    "upper_occupancy": "occ.rivals.UOBREPS and UnknownFTRL use such bounds",
    "PolicyOptimization": "use occ.FTRL.tsallis, which has less regret",
    "predict Prediction": "use occ.forecast where it is reliable, and occ.leap elsewhere",
    "refine tune_and_refine Recipe Refined Guard Verdict": "use occ.tune",
}


def __getattr__(name: str) -> _Any:
    if name in _PACKAGES:
        return _importlib.import_module(f"torch_occ.{name}")
    return _former(__name__, name, _MOVED, _GONE)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
