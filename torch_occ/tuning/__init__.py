"""The regret without playing, and the search for parameters of a regularizer.

forecast   the regret along the mean path, by quadrature over few episodes
leaps      leaping: particles that play many episodes per step
objective  the objective of a tuning: forecast regret in several worlds
tune       `tune`: gradients of an objective from several starts; and what to take without it
"""

from torch_occ.tuning.forecast import Forecast as Forecast
from torch_occ.tuning.leaps import Leaps as Leaps
from torch_occ.tuning.objective import Evaluation as Evaluation
from torch_occ.tuning.objective import ForecastObjective as ForecastObjective
from torch_occ.tuning.objective import World as World
from torch_occ.tuning.objective import stack as stack
from torch_occ.tuning.tune import Tuned as Tuned
