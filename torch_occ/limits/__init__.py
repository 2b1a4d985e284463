"""The least regret of any learner.

graves_lai  the Graves-Lai constant of an MDP with known transitions, by cutting planes
separation  the most informative alternatives of an MDP: the cutting planes of the limit
"""

from torch_occ.limits.graves_lai import LowerBound as LowerBound
from torch_occ.limits.graves_lai import lower_bound as lower_bound
