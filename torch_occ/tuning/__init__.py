"""The regret without playing, and the search for parameters of a regularizer.

compiled_leaps  leaps of many episodes in compiled kernels, for built-in regularizers and estimators
forecast        sums over very many episodes from few evaluations
leaps           the course of a leaping particle: phases of constant means, and episodes where
objective       the objective of a meta-tuner: forecast regret in several environments, relative to
recommended     the recipe of tuning: gradients of the forecast, then a local search with values by
refine          response surfaces: quadratics with mixed terms, fitted to a noisy function around a
space           the space in which parameters are tuned: one unconstrained coordinate per number
tune            a tuning in TensorBoard
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
