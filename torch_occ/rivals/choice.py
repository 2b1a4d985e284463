"""Which learners have a compiled player.

The type must be the learner's own: a class that derives from a learner may play another game.
"""

from __future__ import annotations

from typing import Any

from torch_occ.game.learners import Learner
from torch_occ.game.losses import LossProcess
from torch_occ.game.players import EnginePlayer, form_of
from torch_occ.game.players_old import LoopPlayer
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals.kl_ucb import KLUCB
from torch_occ.rivals.multilayer import MultiLayerUCBVI
from torch_occ.rivals.players import (
    IndexPlayer,
    MultiLayerPlayer,
    OptimisticPlayer,
    PosteriorPlayer,
    UnknownPlayer,
    UOBREPSPlayer,
)
from torch_occ.rivals.psrl import PSRL
from torch_occ.rivals.thompson import Thompson
from torch_occ.rivals.ucbvi import EULER, UCBVI, StrongEuler
from torch_occ.rivals.unknown import UnknownFTRL
from torch_occ.rivals.uob_reps import UOBREPS

PLAYERS: dict[type[Learner], type[LoopPlayer]] = {
    KLUCB: IndexPlayer,
    Thompson: IndexPlayer,
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
    if form_of(learner) is not None:
        return learner.why_not_compiled(mdp)
    if type(learner) not in PLAYERS:
        return f"the engine does not know the learner {type(learner).__name__}"
    return PLAYERS[type(learner)].why_not(mdp, learner)


def engine_player(mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> Any:
    """The player for a learner; `why_not_play` must have returned None for it."""
    if form_of(learner) is not None:
        return EnginePlayer(mdp, learner, losses)
    return PLAYERS[type(learner)](mdp, learner, losses)
