"""Games with imperfect information: treeplexes as layered MDPs, self-play, and equilibria.

tree         `ExtensiveGame`, its description, and the strategies of a player as a layered MDP
play         `self_play` and its history
equilibrium  quantal response equilibria as a layer
"""

from torch_occ.games.equilibrium import Equilibrium as Equilibrium
from torch_occ.games.equilibrium import QuantalResponse as QuantalResponse
from torch_occ.games.play import GameHistory as GameHistory
from torch_occ.games.play import self_play as self_play
from torch_occ.games.tree import Chance as Chance
from torch_occ.games.tree import Decision as Decision
from torch_occ.games.tree import End as End
from torch_occ.games.tree import ExtensiveGame as ExtensiveGame
from torch_occ.games.tree import GamePolicy as GamePolicy
from torch_occ.games.tree import Treeplex as Treeplex
from torch_occ.games.tree import dilated_entropy as dilated_entropy
