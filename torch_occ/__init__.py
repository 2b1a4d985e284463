"""torch_occ: FTRL over occupancy measures, differentiable and exact, in PyTorch (Jin and Luo, 2020).

The model: LayeredMDP and its occupancy measures. The step: a regularizer and FTRLStep. The game: losses, learners, simulate.
"""

# isort: skip_file
# The order is the package's: each line needs only what stands above it.

# The model
from torch_occ.mdp import LayeredMDP as LayeredMDP
from torch_occ.rewards import RewardMap as RewardMap
from torch_occ.rewards import RewardMDP as RewardMDP
from torch_occ.occupancy import Plan as Plan
from torch_occ.occupancy import flow_adjoint as flow_adjoint
from torch_occ.occupancy import flow_residual as flow_residual
from torch_occ.occupancy import interior_point as interior_point
from torch_occ.occupancy import occupancy as occupancy
from torch_occ.occupancy import optimal_policy as optimal_policy
from torch_occ.occupancy import policy_of as policy_of
from torch_occ.occupancy import reachability as reachability
from torch_occ.occupancy import uniform_policy as uniform_policy

# Learning rates
from torch_occ.schedules import Schedule as Schedule
from torch_occ.schedules import Constant as Constant
from torch_occ.schedules import InverseSqrt as InverseSqrt
from torch_occ.schedules import Polynomial as Polynomial

# Regularizers: what to derive a new one from, and the built-in ones
from torch_occ.regularizers import Regularizer as Regularizer
from torch_occ.regularizers import SeparableRegularizer as SeparableRegularizer
from torch_occ.regularizers import StatewiseRegularizer as StatewiseRegularizer
from torch_occ.regularizers import JointRegularizer as JointRegularizer
from torch_occ.catalog import Tsallis as Tsallis
from torch_occ.catalog import HybridTsallis as HybridTsallis
from torch_occ.catalog import HybridComplement as HybridComplement
from torch_occ.catalog import Shannon as Shannon
from torch_occ.catalog import ConditionalEntropy as ConditionalEntropy
from torch_occ.catalog import LogBarrier as LogBarrier
from torch_occ.catalog import jin_luo as jin_luo

# The step
from torch_occ.status import Status as Status
from torch_occ.newton import Solution as Solution
from torch_occ.ftrl import FTRLStep as FTRLStep
from torch_occ.ftrl import SolveError as SolveError

# Losses and what is seen of them
from torch_occ.losses import LossProcess as LossProcess
from torch_occ.losses import BernoulliLosses as BernoulliLosses
from torch_occ.losses import UniformLosses as UniformLosses
from torch_occ.losses import TableLosses as TableLosses
from torch_occ.losses import SwitchingLosses as SwitchingLosses
from torch_occ.losses import RandomWalkLosses as RandomWalkLosses
from torch_occ.losses import GreedyAdversary as GreedyAdversary
from torch_occ.losses import StochasticallyConstrained as StochasticallyConstrained
from torch_occ.losses import Corrupted as Corrupted
from torch_occ.estimators import Estimator as Estimator
from torch_occ.estimators import Feedback as Feedback
from torch_occ.estimators import CentredEstimator as CentredEstimator
from torch_occ.estimators import ImportanceWeighted as ImportanceWeighted
from torch_occ.estimators import ImplicitExploration as ImplicitExploration
from torch_occ.estimators import ReducedVariance as ReducedVariance
from torch_occ.estimators import FullInformation as FullInformation

# Learners and the game
from torch_occ.learners import Learner as Learner
from torch_occ.learners import FTRL as FTRL
from torch_occ.learners import FixedPolicy as FixedPolicy
from torch_occ.learners import FollowTheLeader as FollowTheLeader
from torch_occ.learners import OptimisticValueIteration as OptimisticValueIteration
from torch_occ.callbacks import Callback as Callback
from torch_occ.callbacks import ProgressBar as ProgressBar
from torch_occ.callbacks import TensorBoard as TensorBoard
from torch_occ.history import History as History
from torch_occ.regret import SelfBounding as SelfBounding
from torch_occ.regret import comparator as comparator
from torch_occ.regret import self_bounding as self_bounding
from torch_occ.simulate import simulate as simulate

# Regret without playing, and tuning by it
from torch_occ.forecast import Forecast as Forecast
from torch_occ.forecast import forecast as forecast
from torch_occ.leaping import Leaps as Leaps
from torch_occ.leaping import Prediction as Prediction
from torch_occ.leaping import leap as leap
from torch_occ.leaping import predict as predict
from torch_occ.smooth_leaps import leap_smoothly as leap_smoothly
from torch_occ.objectives import Evaluation as Evaluation
from torch_occ.objectives import ForecastObjective as ForecastObjective
from torch_occ.objectives import World as World
from torch_occ.objectives import stack as stack
from torch_occ.guard import Guard as Guard
from torch_occ.guard import Verdict as Verdict
from torch_occ.tune import Tuned as Tuned
from torch_occ.tune import tune as tune
from torch_occ.refine import Refined as Refined
from torch_occ.refine import refine as refine
from torch_occ.metagradients import Estimate as Estimate
from torch_occ.metagradients import Gradients as Gradients
from torch_occ.metagradients import finite_differences as finite_differences
from torch_occ.metagradients import run_gradients as run_gradients

# The paper, executable
from torch_occ import theory as theory

# Many games
from torch_occ.sweep import Failure as Failure
from torch_occ.sweep import SweepResult as SweepResult
from torch_occ.sweep import grid as grid
from torch_occ.sweep import sweep as sweep
