"""`simulate`: play a learner against losses for all seeds, with callbacks and saved runs."""

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
from torch_occ.game.learners.base import Learner
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

    The run plays a copy of the learner (`Learner.copy`); the given learner does not change.
    Callbacks see the copy as `run.learner`, with its final state in `on_end`.

    Args:
        checkpoints: episodes at which the curves have a point; by default 20 per decade, and the
            last.
        save_to: a file in which the run is saved, so that it can continue after an interruption.
            Writing is tested before the first episode. If a later save fails, there is a warning,
            and the run continues.
        save_every: seconds between two saves.
        resume: continue from `save_to` if it exists; otherwise a run saved there is replaced.
        config: anything that JSON can hold; it is stored in the history.
        backend: "engine" is compiled; it plays the learners of this package, with built-in
            regularizers for FTRL. "torch" plays everything. "auto" uses the engine where it can.
            `history.backend` says which one played.

    Returns:
        The history of all episodes.

    Raises:
        KeyboardInterrupt: after Ctrl-C. It takes effect within a second; later only during an
            episode of a huge MDP, or while the engine compiles. The run is saved to `save_to` in
            its state at the end of the last chunk, and the same call continues it to the same
            bits. `error.result` is the history up to the last checkpoint. `error.saved_to` is the
            file, or None.
        SystemExit: after SIGTERM, with code 143, if there is a `save_to` and the program has no
            handler for this signal. The run is saved in the same way.
        ValueError: if an argument is wrong; if `save_to` is damaged or belongs to another run; or
            if a learner, a loss process or an estimator returns something invalid, for example a
            q that is no occupancy measure. The error names the episode, the seed, the layer and
            the state.
        OSError: if `save_to` cannot be written, before the first episode.

    Warns:
        UncertifiedWarning: if steps could not be certified: at the first one, and with their
            number at the end.
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
