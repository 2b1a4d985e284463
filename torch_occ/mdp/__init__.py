"""The layered MDP, its occupancy measures, and where MDPs come from.

checks     the conditions that a valid layered MDP satisfies
graphs     a directed acyclic graph as a layered MDP: its paths are the deterministic policies
importers  importers of MDPs: arrays of other packages and tables of Gymnasium, which are checked
layered    the layered MDP: states in layers, and known transitions
layers     one layer of transitions, dense or sparse: its two maps, and sums in a fixed order
occupancy  omega, the set of occupancy measures, and operations along its layers
rewards    rewards as losses: the map between them, and a layered MDP with rewards
unroll     unrolling: from an ordinary finite MDP to layers
"""

from torch_occ.mdp.occupancy import Plan as Plan
from torch_occ.mdp.occupancy import flow_adjoint as flow_adjoint
from torch_occ.mdp.occupancy import flow_residual as flow_residual
from torch_occ.mdp.occupancy import reachability as reachability
from torch_occ.mdp.rewards import RewardMap as RewardMap
from torch_occ.mdp.rewards import RewardMDP as RewardMDP
