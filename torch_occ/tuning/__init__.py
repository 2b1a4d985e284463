"""The regret without playing, and the search for parameters of a regularizer.

forecast   the regret along the mean path, by quadrature over few episodes
leaps      leaping: particles that play many episodes per step
tune       `tune`: gradients of an objective from several starts; and what to take without it
"""

from torch_occ.tuning.forecast import Forecast as Forecast
from torch_occ.tuning.leaps import Leaps as Leaps
from torch_occ.tuning.tune import Evaluation as Evaluation
from torch_occ.tuning.tune import ForecastObjective as ForecastObjective
from torch_occ.tuning.tune import Tuned as Tuned
from torch_occ.tuning.tune import World as World
from torch_occ.tuning.tune import stack as stack
