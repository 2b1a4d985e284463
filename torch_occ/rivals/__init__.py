"""Learners from the literature, to compare with; imported on demand, compiled.

beliefs     counts, epochs and confidence sets of learners that do not know the transitions
exploring   IXOMD, Balanced and Adaptive FTRL, for bandit feedback in games
kl_ucb      KL-UCB for known transitions: optimism by relative entropy
thompson    posterior sampling: Thompson sampling, and PSRL for unknown transitions
ucbvi       UCBVI, EULER, StrongEuler, multi-layer UCBVI: optimism for unknown transitions
unknown     FTRL over the occupancy measures of transitions that are learned
uob_reps    UOB-REPS: mirror descent over a confidence set of transitions, and its projection
"""

try:
    import numba as _numba  # noqa: F401
except ImportError as error:
    raise ImportError("torch_occ.rivals is compiled, and needs numba: pip install numba") from error

from torch_occ.rivals.beliefs import CountingLearner as CountingLearner
from torch_occ.rivals.beliefs import Widths as Widths
from torch_occ.rivals.beliefs import empirical_transitions as empirical_transitions
from torch_occ.rivals.exploring import ExploringFTRL as ExploringFTRL
from torch_occ.rivals.exploring import adaptive_ftrl as adaptive_ftrl
from torch_occ.rivals.exploring import balanced_ftrl as balanced_ftrl
from torch_occ.rivals.exploring import ixomd as ixomd
from torch_occ.rivals.kl_ucb import KLUCB as KLUCB
from torch_occ.rivals.thompson import PSRL as PSRL
from torch_occ.rivals.thompson import Thompson as Thompson
from torch_occ.rivals.ucbvi import EULER as EULER
from torch_occ.rivals.ucbvi import UCBVI as UCBVI
from torch_occ.rivals.ucbvi import MultiLayerUCBVI as MultiLayerUCBVI
from torch_occ.rivals.ucbvi import StrongEuler as StrongEuler
from torch_occ.rivals.unknown import UnknownFTRL as UnknownFTRL
from torch_occ.rivals.uob_reps import UOBREPS as UOBREPS
