"""The least regret of any learner.

graves_lai  the Graves-Lai constant of an MDP with known transitions, by cutting planes
separation  families of loss distributions: how much information an observation carries about its
"""

from torch_occ.limits.graves_lai import LowerBound as LowerBound
from torch_occ.limits.graves_lai import lower_bound as lower_bound
