"""`simulate`: learner x losses x seeds -> History, with callbacks, files and interruptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_occ._support.backends import Backend
from torch_occ._support.interrupts import asked_to_stop, explain, sigterm_raises
from torch_occ._support.saving import Kept
from torch_occ.game.callbacks import Callback, tell
from torch_occ.game.contracts import warn_of_all
from torch_occ.game.history import History
from torch_occ.game.learners import Learner
from torch_occ.game.losses import LossProcess
from torch_occ.game.simulation import Simulation
from torch_occ.mdp.layered import LayeredMDP


def simulate(
    mdp: LayeredMDP,
    learner: Learner,
    losses: LossProcess,
    episodes: int,
    seeds: Sequence[int] = (0,),
    *,
    callbacks: Sequence[Callback] = (),
    checkpoints: Sequence[int] | None = None,
    save_to: str | Path | None = None,
    save_every: float = 60.0,
    resume: bool = True,
    config: dict[str, Any] | None = None,
    backend: Backend = "auto",
) -> History:
    """Play `episodes` episodes for every seed.

    The run plays a copy of the learner (`Learner.copy`), and the given one is left as it is.
    Callbacks see the copy as `run.learner`; its state after the last episode is there in `on_end`.

    Args:
        checkpoints: episodes at which the curves have a point; 20 a decade by default, and the
            last.
        save_to: a file in which the run is kept, so that it can continue after an interruption.
            It is tried before the first episode. If a later save fails, a warning says so, and
            the run goes on.
        save_every: seconds between two saves.
        resume: continue from `save_to` if it exists; otherwise a run saved there is replaced.
        config: anything that JSON can hold, kept in the history.
        backend: "engine" is compiled and plays the learners of this package, FTRL with built-in
            regularizers; "torch" plays everything; "auto" takes the engine where it can.
            `history.backend` says which one played.

    Returns:
        The history of all episodes.

    Raises:
        KeyboardInterrupt: after Ctrl-C, which is felt within a second (or one episode of a huge
            MDP, or while the engine compiles). The run is saved to `save_to` as it was at the
            last chunk's edge, and the same call continues it to the same bits. `error.result` is
            the history up to the last checkpoint, and `error.saved_to` the file, or None.
        SystemExit: likewise, with code 143, after SIGTERM, if there is a `save_to` and the
            program does not handle this signal by itself.
        ValueError: if an argument is wrong, or `save_to` is damaged or belongs to another run; or
            if a learner, a loss process or an estimator returned what cannot be right, for example
            a q that is no occupancy measure; with the episode, the seed, the layer and the state.
        OSError: if `save_to` cannot be written, before the first episode.

    Warns:
        UncertifiedWarning: a step could not be certified; at the first one, and with their number
            at the end.
    """
    simulation = Simulation(
        mdp, learner, losses, episodes, seeds, checkpoints, config or {}, backend
    )
    kept = None if save_to is None else Kept(save_to, "run", simulation.fingerprints, save_every)
    if kept is not None:
        found = kept.load() if resume else None
        if found is not None:
            simulation.restore(found)
        kept.try_first(simulation.state())
    watching = list(callbacks)
    for callback in watching:
        callback.on_start(simulation)
    with sigterm_raises(kept is not None) as silence:
        try:
            while simulation.t < episodes:
                for _ in simulation.play_chunk():
                    tell(watching, "on_checkpoint", simulation)
                tell(watching, "on_chunk", simulation)
                if kept is not None:
                    kept.keep(simulation.state(), last=simulation.t == episodes)
        except BaseException as error:
            silence()
            saved_to = None if kept is None else kept.rescue()
            if asked_to_stop(error):
                partial = simulation.history(interrupted=True)
                tell(watching, "on_end", simulation, partial)
                explain(error, f"at episode {simulation.t} of {episodes}", partial, saved_to)
            raise
    warn_of_all(simulation)
    history = simulation.history()
    tell(watching, "on_end", simulation, history)
    return history
