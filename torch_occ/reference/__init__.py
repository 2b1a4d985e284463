"""The FTRL step in cvxpy and cvxpylayers, and a comparison with torch_occ by residuals.

comparison        torch_occ and cvxpylayers on the same problem: q and all gradients
cvxpy_layer       the problem in cvxpy, and as a layer of cvxpylayers
cvxpy_projection  the Kullback-Leibler projection in cvxpy
judging           residuals of the equations that a correct answer satisfies
"""

from torch_occ.reference.comparison import ask as ask
from torch_occ.reference.comparison import compare as compare
from torch_occ.reference.cvxpy_layer import ACCURATE_CLARABEL as ACCURATE_CLARABEL
from torch_occ.reference.cvxpy_layer import ACCURATE_SCS as ACCURATE_SCS
from torch_occ.reference.cvxpy_layer import ALL_SETTINGS as ALL_SETTINGS
from torch_occ.reference.cvxpy_layer import DEFAULT as DEFAULT
from torch_occ.reference.cvxpy_layer import LSMR as LSMR
from torch_occ.reference.cvxpy_layer import MOREAU as MOREAU
from torch_occ.reference.cvxpy_layer import CvxpyLayer as CvxpyLayer
from torch_occ.reference.cvxpy_layer import Settings as Settings
from torch_occ.reference.cvxpy_layer import atoms as atoms
from torch_occ.reference.cvxpy_layer import flow_constraints as flow_constraints
from torch_occ.reference.cvxpy_layer import gather as gather
from torch_occ.reference.cvxpy_layer import largest as largest
from torch_occ.reference.cvxpy_layer import solve_cvxpy as solve_cvxpy
from torch_occ.reference.cvxpy_layer import spread as spread
from torch_occ.reference.cvxpy_layer import state_in_cvxpy as state_in_cvxpy
from torch_occ.reference.cvxpy_projection import project_cvxpy as project_cvxpy
from torch_occ.reference.judging import Answer as Answer
from torch_occ.reference.judging import Comparison as Comparison
from torch_occ.reference.judging import Equations as Equations
from torch_occ.reference.judging import differentiable_inputs as differentiable_inputs
from torch_occ.reference.judging import judge as judge
