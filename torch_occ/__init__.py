"""FTRL over occupancy measures in PyTorch, differentiable and exact (Jin and Luo, 2020).

The model: `LayeredMDP` and its occupancy measures.
The step: a regularizer and `FTRLStep`.
The game: losses, learners and `simulate`.
"""

# isort: skip_file
# The imports follow the order of the packages: each line needs only those above it.

import typing as _typing

from torch_occ._support.version import VERSION as __version__  # noqa: F401, N811

# The model
from torch_occ.mdp.layered import LayeredMDP as LayeredMDP
from torch_occ.mdp.rewards import RewardMap as RewardMap
from torch_occ.mdp.rewards import RewardMDP as RewardMDP
from torch_occ.mdp.graphs import GraphMDP as GraphMDP
from torch_occ.mdp.occupancy import Plan as Plan
from torch_occ.mdp.occupancy import flow_adjoint as flow_adjoint
from torch_occ.mdp.occupancy import flow_residual as flow_residual
from torch_occ.mdp.occupancy import interior_point as interior_point
from torch_occ.mdp.occupancy import occupancy as occupancy
from torch_occ.mdp.occupancy import optimal_policy as optimal_policy
from torch_occ.mdp.occupancy import policy_of as policy_of
from torch_occ.mdp.occupancy import reachability as reachability
from torch_occ.mdp.occupancy import uniform_policy as uniform_policy

# The least regret of any learner
from torch_occ.limits.graves_lai import LowerBound as LowerBound
from torch_occ.limits.graves_lai import lower_bound as lower_bound

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
from torch_occ.step.limits import Budgets as Budgets
from torch_occ.step.limits import InfeasibleError as InfeasibleError
from torch_occ.step.ftrl import FTRLStep as FTRLStep
from torch_occ.step.checks import SolveError as SolveError
from torch_occ.step.projection import KLProjection as KLProjection
from torch_occ.step.projection import Projection as Projection

# Losses for learning
from torch_occ.learning.losses import fenchel_young_loss as fenchel_young_loss
from torch_occ.learning.losses import expected_cost as expected_cost
from torch_occ.learning.losses import negative_log_likelihood as negative_log_likelihood
from torch_occ.learning.unconstrained import unconstrain as unconstrain

# Losses and their estimators
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
from torch_occ.game.estimators import CentredEstimator as CentredEstimator
from torch_occ.game.estimators import ImportanceWeighted as ImportanceWeighted
from torch_occ.game.estimators import ImplicitExploration as ImplicitExploration
from torch_occ.game.estimators import ReducedVariance as ReducedVariance
from torch_occ.game.estimators import FullInformation as FullInformation

# Transitions that are learned
from torch_occ.rivals.beliefs import empirical_transitions as empirical_transitions
from torch_occ.rivals.beliefs import Bonus as Bonus
from torch_occ.rivals.beliefs import Widths as Widths
from torch_occ.rivals.beliefs import upper_occupancy as upper_occupancy

# Learners and the game
from torch_occ.game.learners import Learner as Learner
from torch_occ.rivals.beliefs import CountingLearner as CountingLearner
from torch_occ.game.learners import FTRL as FTRL
from torch_occ.game.adaptive import Hints as Hints
from torch_occ.game.adaptive import MeanHints as MeanHints
from torch_occ.game.adaptive import GradientHints as GradientHints
from torch_occ.game.adaptive import Rates as Rates
from torch_occ.game.adaptive import AdaptiveRates as AdaptiveRates
from torch_occ.game.adaptive import (
    StabilityPenaltyMatching as StabilityPenaltyMatching,
)
from torch_occ.game.adaptive import AdaptiveFTRL as AdaptiveFTRL
from torch_occ.game.adaptive import CorrectedFTRL as CorrectedFTRL
from torch_occ.rivals.unknown import UnknownFTRL as UnknownFTRL
from torch_occ.rivals.uob_reps import UOBREPS as UOBREPS
from torch_occ.game.learners import FixedPolicy as FixedPolicy
from torch_occ.game.learners import FollowTheLeader as FollowTheLeader
from torch_occ.game.learners import OptimisticValueIteration as OptimisticValueIteration
from torch_occ.rivals.kl_ucb import KLUCB as KLUCB
from torch_occ.rivals.thompson import Thompson as Thompson
from torch_occ.rivals.ucbvi import UCBVI as UCBVI
from torch_occ.rivals.ucbvi import EULER as EULER
from torch_occ.rivals.ucbvi import StrongEuler as StrongEuler
from torch_occ.rivals.psrl import PSRL as PSRL
from torch_occ.rivals.multilayer import MultiLayerUCBVI as MultiLayerUCBVI
from torch_occ.game.callbacks import Callback as Callback
from torch_occ.game.callbacks import ProgressBar as ProgressBar
from torch_occ.game.callbacks import TensorBoard as TensorBoard
from torch_occ.game.history import History as History
from torch_occ.game.history import Mean as Mean
from torch_occ.game.history import SelfBounding as SelfBounding
from torch_occ.game.history import comparator as comparator
from torch_occ.game.history import self_bounding as self_bounding
from torch_occ.game.checks import UncertifiedWarning as UncertifiedWarning
from torch_occ.game.simulate import simulate as simulate
from torch_occ.game.comparing import LearnerComparison as LearnerComparison
from torch_occ.game.comparing import compare_learners as compare_learners

# Forecasts of the regret, and tuning
from torch_occ.tuning.forecast import Forecast as Forecast
from torch_occ.tuning.forecast import forecast as forecast
from torch_occ.tuning.leaps import Leaps as Leaps
from torch_occ.tuning.leaps import Prediction as Prediction
from torch_occ.tuning.leaps import leap as leap
from torch_occ.tuning.leaps import predict as predict
from torch_occ.tuning.objective import Evaluation as Evaluation
from torch_occ.tuning.objective import ForecastObjective as ForecastObjective
from torch_occ.tuning.objective import World as World
from torch_occ.tuning.objective import stack as stack
from torch_occ.tuning.objective import Guard as Guard
from torch_occ.tuning.objective import Verdict as Verdict
from torch_occ.tuning.tune import Tuned as Tuned
from torch_occ.tuning.tune import tune as tune
from torch_occ.tuning.refine import Refined as Refined
from torch_occ.tuning.refine import refine as refine
from torch_occ.tuning.recommended import Recipe as Recipe
from torch_occ.tuning.recommended import tune_and_refine as tune_and_refine
from torch_occ.tuning.recommended import recommended as recommended

# The paper, executable
from torch_occ import theory as theory

# Sweeps over many games
from torch_occ.sweeps import Failure as Failure
from torch_occ.sweeps import SweepResult as SweepResult
from torch_occ.sweeps import grid as grid
from torch_occ.sweeps import sweep as sweep

#: Names that were removed, and what to use instead.
_GONE = {
    "Estimate": "experiments/meta_gradients.py has estimates of gradients through a run",
    "Gradients": "experiments/meta_gradients.py has estimates of gradients through a run",
    "finite_differences": "differentiate occ.forecast, or play occ.simulate twice, same seeds",
    "leap_smoothly": "use occ.leap for the regret and occ.forecast for its gradient",
    "run_gradients": "differentiate occ.forecast; experiments/meta_gradients.py has the run's own",
    "OSSB": "occ.Thompson has less regret; occ.lower_bound has the limit and its allocation",
    "PolicyOptimization": "use occ.FTRL.tsallis, which has less regret",
}

if not _typing.TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> object:
        if name in _GONE:
            raise AttributeError(f"torch_occ.{name} was removed: {_GONE[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
