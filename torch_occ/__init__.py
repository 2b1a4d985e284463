"""torch_occ: the FTRL step over occupancy measures as a differentiable PyTorch layer (Jin and Luo, 2020)."""

# The model
# Regularizers: the built-in ones, and what a new one is derived from
from torch_occ.catalog import ConditionalEntropy as ConditionalEntropy
from torch_occ.catalog import HybridComplement as HybridComplement
from torch_occ.catalog import HybridTsallis as HybridTsallis
from torch_occ.catalog import LogBarrier as LogBarrier
from torch_occ.catalog import Shannon as Shannon
from torch_occ.catalog import Tsallis as Tsallis
from torch_occ.catalog import jin_luo as jin_luo
from torch_occ.ftrl import FTRLStep as FTRLStep
from torch_occ.ftrl import SolveError as SolveError
from torch_occ.mdp import LayeredMDP as LayeredMDP
from torch_occ.newton import Solution as Solution
from torch_occ.newton import Status as Status
from torch_occ.occupancy import Plan as Plan
from torch_occ.occupancy import flow_adjoint as flow_adjoint
from torch_occ.occupancy import flow_residual as flow_residual
from torch_occ.occupancy import interior_point as interior_point
from torch_occ.occupancy import occupancy as occupancy
from torch_occ.occupancy import optimal_policy as optimal_policy
from torch_occ.occupancy import policy_of as policy_of
from torch_occ.occupancy import reachability as reachability
from torch_occ.occupancy import uniform_policy as uniform_policy
from torch_occ.regularizers import JointRegularizer as JointRegularizer
from torch_occ.regularizers import Regularizer as Regularizer
from torch_occ.regularizers import SeparableRegularizer as SeparableRegularizer
from torch_occ.regularizers import StatewiseRegularizer as StatewiseRegularizer
from torch_occ.schedules import Constant as Constant
from torch_occ.schedules import InverseSqrt as InverseSqrt
from torch_occ.schedules import Polynomial as Polynomial
from torch_occ.schedules import Schedule as Schedule
