"""Which learners have a compiled player.

The type must be the learner's own: a class that derives from a learner may play another game.
"""

from __future__ import annotations

from torch_occ.game.learners.adaptive.corrected import CorrectedFTRL
from torch_occ.game.learners.adaptive.learner import AdaptiveFTRL
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.baselines import (
    FixedPolicy,
    FollowTheLeader,
    OptimisticValueIteration,
)
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.learners.kl_ucb import KLUCB
from torch_occ.game.learners.multilayer import MultiLayerUCBVI
from torch_occ.game.learners.planners.euler import EULER, StrongEuler
from torch_occ.game.learners.planners.psrl import PSRL
from torch_occ.game.learners.planners.ucbvi import UCBVI
from torch_occ.game.learners.thompson import Thompson
from torch_occ.game.learners.unknown import UnknownFTRL
from torch_occ.game.learners.uob_reps import UOBREPS
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.adaptive import AdaptivePlayer
from torch_occ.game.players.baselines import EmpiricalPlayer
from torch_occ.game.players.corrected import CorrectedPlayer
from torch_occ.game.players.engine import EnginePlayer
from torch_occ.game.players.ftrl import FTRLPlayer
from torch_occ.game.players.indices import IndexPlayer
from torch_occ.game.players.planning import MultiLayerPlayer, OptimisticPlayer, PosteriorPlayer
from torch_occ.game.players.unknown import UnknownPlayer
from torch_occ.game.players.uob_reps import UOBREPSPlayer
from torch_occ.mdp.layered import LayeredMDP

PLAYERS: dict[type[Learner], type[EnginePlayer]] = {
    FixedPolicy: EnginePlayer,
    FollowTheLeader: EmpiricalPlayer,
    OptimisticValueIteration: EmpiricalPlayer,
    KLUCB: IndexPlayer,
    Thompson: IndexPlayer,
    FTRL: FTRLPlayer,
    AdaptiveFTRL: AdaptivePlayer,
    CorrectedFTRL: CorrectedPlayer,
    UnknownFTRL: UnknownPlayer,
    UOBREPS: UOBREPSPlayer,
    UCBVI: OptimisticPlayer,
    EULER: OptimisticPlayer,
    StrongEuler: OptimisticPlayer,
    PSRL: PosteriorPlayer,
    MultiLayerUCBVI: MultiLayerPlayer,
}


def why_not_play(mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> str | None:
    """The reason why the engine cannot play this game, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    if type(learner) not in PLAYERS:
        return f"the engine does not know the learner {type(learner).__name__}"
    return PLAYERS[type(learner)].why_not(mdp, learner)


def engine_player(mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> EnginePlayer:
    """The player for a learner; `why_not_play` must have returned None for it."""
    return PLAYERS[type(learner)](mdp, learner, losses)
