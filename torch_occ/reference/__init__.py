"""The same step in cvxpy and cvxpylayers, and a check by residuals.

cvxpy_step  the FTRL step in cvxpy, and as a layer of cvxpylayers
judging     residuals of an answer in the equations that it must satisfy
"""

from torch_occ.reference.cvxpy_step import ACCURATE_CLARABEL as ACCURATE_CLARABEL
from torch_occ.reference.cvxpy_step import ACCURATE_SCS as ACCURATE_SCS
from torch_occ.reference.cvxpy_step import ALL_SETTINGS as ALL_SETTINGS
from torch_occ.reference.cvxpy_step import DEFAULT as DEFAULT
from torch_occ.reference.cvxpy_step import LSMR as LSMR
from torch_occ.reference.cvxpy_step import MOREAU as MOREAU
from torch_occ.reference.cvxpy_step import CvxpyLayer as CvxpyLayer
from torch_occ.reference.cvxpy_step import Settings as Settings
from torch_occ.reference.cvxpy_step import atoms as atoms
from torch_occ.reference.cvxpy_step import flow_constraints as flow_constraints
from torch_occ.reference.cvxpy_step import gather as gather
from torch_occ.reference.cvxpy_step import largest as largest
from torch_occ.reference.cvxpy_step import solve_cvxpy as solve_cvxpy
from torch_occ.reference.cvxpy_step import spread as spread
from torch_occ.reference.cvxpy_step import state_in_cvxpy as state_in_cvxpy
from torch_occ.reference.judging import Answer as Answer
from torch_occ.reference.judging import Comparison as Comparison
from torch_occ.reference.judging import Equations as Equations
from torch_occ.reference.judging import ask as ask
from torch_occ.reference.judging import compare as compare
from torch_occ.reference.judging import differentiable_inputs as differentiable_inputs
from torch_occ.reference.judging import judge as judge
