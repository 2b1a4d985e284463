"""The regret without playing, and the search for parameters of a regularizer.

compiled_leaps  leaps of many episodes in compiled kernels, for built-in regularizers and estimators
forecast        the forecast: the regret along the mean path, by quadrature over few episodes
leaps           leaping: the regret of particles that play many episodes per step
objective       the objective of a tuning: regret in several worlds, relative to a reference
recommended     what to use: a recommended learner, and the recipe of tuning
refine          a local search on noisy values: trials, response surfaces, points that they suggest
space           the space in which parameters are tuned: one unconstrained coordinate per number
tune            `tune`: gradients of an objective from several starts, with TensorBoard
"""

from torch_occ.tuning.forecast import Forecast as Forecast
from torch_occ.tuning.leaps import Leaps as Leaps
from torch_occ.tuning.leaps import Prediction as Prediction
from torch_occ.tuning.leaps import predict as predict
from torch_occ.tuning.objective import Evaluation as Evaluation
from torch_occ.tuning.objective import ForecastObjective as ForecastObjective
from torch_occ.tuning.objective import Guard as Guard
from torch_occ.tuning.objective import Verdict as Verdict
from torch_occ.tuning.objective import World as World
from torch_occ.tuning.objective import stack as stack
from torch_occ.tuning.recommended import Recipe as Recipe
from torch_occ.tuning.refine import Refined as Refined
from torch_occ.tuning.tune import Tuned as Tuned
