"""The layered MDP, its occupancy measures, and where MDPs come from.

checks     the conditions that a valid layered MDP satisfies
graphs     a directed graph as a layered MDP: its paths are the deterministic policies
importers  MDPs with rewards, and their importers: arrays of other packages and tables of Gymnasium
layered    the layered MDP: states in layers, and known transitions
layers     one layer of transitions, dense or sparse: its two maps, and sums in a fixed order
occupancy  omega, the set of occupancy measures, and operations along its layers
unroll     unrolling: from an ordinary finite MDP to layers
"""

from torch_occ.mdp.importers import RewardMDP as RewardMDP
from torch_occ.mdp.occupancy import Plan as Plan
from torch_occ.mdp.occupancy import flow_adjoint as flow_adjoint
from torch_occ.mdp.occupancy import flow_residual as flow_residual
from torch_occ.mdp.occupancy import reachability as reachability
