"""The episode loop: learner x losses x seeds -> History.

Episodes are played by torch_occ.episodes or by the compiled engine, all seeds together. Random numbers and means come in chunks of
episodes; a run can be saved and continued at a chunk's edge, and ends with exactly the numbers of an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torch_occ.callbacks import Callback
from torch_occ.contracts import Contract, UncertifiedWarning
from torch_occ.episodes import TorchPlayer
from torch_occ.estimators import Feedback
from torch_occ.files import write_atomically
from torch_occ.fingerprints import fingerprint
from torch_occ.history import History
from torch_occ.learners import FTRL, Learner
from torch_occ.losses import LossProcess
from torch_occ.mdp import LayeredMDP
from torch_occ.newton import Status
from torch_occ.occupancy import interior_point
from torch_occ.regret import comparator
from torch_occ.streams import CHUNK, Purpose, uniforms
from torch_occ.validation import Backend, engine_takes


class Player(Protocol):
    """Plays a segment of episodes for all seeds and adds it up in the simulation."""

    name: str
    chunks: int  # to play at once
    reacts: bool  # plays the adversary too: it asks for the means of the first episode only

    def play(self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None) -> None: ...


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

    The run plays a copy of the learner (`Learner.copy`), and the given one is left as it is. Callbacks see the copy as `run.learner`;
    its state after the last episode is there in `on_end`.

    Args:
        checkpoints: episodes at which the curves have a point; 20 a decade by default, and the last.
        save_to: a file in which the run is kept, so that it can continue after an interruption.
        save_every: seconds between two saves.
        resume: continue from `save_to` if it exists.
        config: anything that JSON can hold, kept in the history.
        backend: "engine" is compiled and plays the learners of this package, FTRL with built-in regularizers; "torch" plays everything;
            "auto" takes the engine where it can. `history.backend` says which one played.

    Ctrl-C ends the run cleanly with the results so far (`history.finished` is then False).

    Raises:
        ValueError: an argument is not valid, or a learner, a loss process or an estimator returned what cannot be right, for example
            a q that is no occupancy measure; with the episode, the seed, the layer and the state.

    Warns:
        UncertifiedWarning: a step could not be certified; at the first one, and with their number at the end.
    """
    simulation = Simulation(mdp, learner, losses, episodes, seeds, checkpoints, config or {}, backend)
    if save_to is not None and resume and Path(save_to).exists():
        simulation.load(save_to)
    for callback in callbacks:
        callback.on_start(simulation)
    saved = time.monotonic()
    try:
        while simulation.t < episodes:
            for _ in simulation.play_chunk():
                for callback in callbacks:
                    callback.on_checkpoint(simulation)
            for callback in callbacks:
                callback.on_chunk(simulation)
            if save_to is not None and (time.monotonic() - saved > save_every or simulation.t == episodes):
                simulation.save(save_to)
                saved = time.monotonic()
    except KeyboardInterrupt:
        pass
    simulation.warn_of_all()
    history = simulation.history()
    for callback in callbacks:
        callback.on_end(simulation, history)
    return history


def choose_player(backend: Backend, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> Player:
    """The player for a learner; an error that says why if the engine was asked for and cannot play."""

    def why_not() -> str | None:
        from torch_occ.engine.player import why_not_play

        return why_not_play(learner, losses)

    if not engine_takes(backend, why_not):
        return TorchPlayer(mdp)
    from torch_occ.engine.player import engine_player

    return engine_player(learner, losses)


def _copy(learner: Learner) -> Learner:
    """The run's own learner: nothing that it does is seen by the caller, or by another run in another thread."""
    try:
        return learner.copy()
    except Exception as error:
        name = type(learner).__name__
        raise TypeError(f"learner: {name} cannot be copied ({error}), and a run plays a copy; override {name}.copy") from error


def log_spaced(episodes: int, per_decade: int = 20) -> list[int]:
    """Integers from 1 to `episodes`, evenly spaced in the logarithm."""
    exponents = np.arange(0, np.log10(max(episodes, 1)), 1 / per_decade)
    return sorted({*np.round(10**exponents).astype(int).tolist(), episodes})


#: Bytes of random numbers held at once.
_MEMORY = 1 << 25

_CURVES = ("regret", "realised_regret", "comparator", "corruption", "newton_steps", "dual_residual", "flow_residual", "uncertified")


class Simulation:
    """A run in progress: what callbacks look at, and what a saved file restores."""

    def __init__(
        self,
        mdp: LayeredMDP,
        learner: Learner,
        losses: LossProcess,
        episodes: int,
        seeds: Sequence[int],
        checkpoints: Sequence[int] | None,
        config: dict[str, Any],
        backend: Backend = "auto",
    ) -> None:
        if episodes < 1:
            raise ValueError(f"episodes: expected at least 1, got {episodes}")
        if losses.length is not None and losses.length < episodes:
            raise ValueError(f"losses: the table has {losses.length} episodes, but {episodes} were asked for")
        self.mdp, self.losses, self.episodes = mdp, losses, episodes
        self.seeds, self.config = tuple(int(seed) for seed in seeds), config
        if not self.seeds:
            raise ValueError("seeds: expected at least one")
        if learner.mdp is not mdp:
            raise ValueError("learner: was made for another MDP than the one to simulate; make both with the same LayeredMDP")
        json.dumps(config)  # a TypeError now rather than after the run
        self.checkpoints = sorted(set(log_spaced(episodes) if checkpoints is None else checkpoints))
        if not self.checkpoints:
            raise ValueError("checkpoints: expected at least one episode")
        if self.checkpoints[0] < 1 or self.checkpoints[-1] > episodes:
            raise ValueError(f"checkpoints: expected episodes from 1 to {episodes}, got {self.checkpoints[0]} to {self.checkpoints[-1]}")
        self.learner = learner = _copy(learner)
        self.contract = Contract(mdp, learner, losses, self.seeds)
        n = len(self.seeds)
        zeros = torch.zeros(n, mdp.num_states, mdp.num_actions, dtype=mdp.dtype, device=mdp.device)
        learner.start(n)
        self.t = 0
        self.seconds = 0.0
        self.q = interior_point(mdp).detach().expand_as(zeros).clone()
        self.process_state = losses.start(mdp, self.seeds)
        names = ("expected", "realised", "newton_steps", "dual_residual", "flow_residual", "uncertified")
        failed = ("first_uncertified", "first_status")  # the episode of the first step without certificate, 0 if none, and its status
        self.sums = {name: zeros[:, 0, 0].clone() for name in names + failed}
        self.sums |= {"cumulative_occupancy": zeros.clone(), "total_mean": zeros.clone()}
        self.warned = False  # of the first step without certificate
        self.since = 0  # episodes since the last checkpoint
        self.recorded: list[int] = []
        self.times: list[float] = []
        self.curves: dict[str, list[Tensor]] = {name: [] for name in _CURVES}
        self.player = choose_player(backend, mdp, learner, losses)
        if backend == "torch" and isinstance(learner, FTRL):
            learner.step.use("torch")
        self.segment = 0  # the episode before the last means
        self.fingerprint = self._fingerprint()

    def play_chunk(self) -> Iterator[int]:
        """Play to a chunk's edge or the end; yields at every checkpoint, once its numbers are recorded."""
        begun, mdp, origin, first_chunk = time.monotonic(), self.mdp, self.t - self.t % CHUNK, self.t // CHUNK
        table = (mdp.num_states, mdp.num_actions)
        doubles = CHUNK * len(self.seeds) * (3 * mdp.horizon + (math.prod(table) if self.learner.full_information else 0))
        count = max(1, min(self.player.chunks, _MEMORY // (8 * doubles), -(-(self.episodes - origin) // CHUNK)))
        chunks, until = range(first_chunk, first_chunk + count), min(origin + count * CHUNK, self.episodes)
        numbers = uniforms(self.seeds, Purpose.EPISODES, chunks, (mdp.horizon, 3)).to(mdp.device, mdp.dtype)
        tables = None
        if self.learner.full_information:
            tables = uniforms(self.seeds, Purpose.TABLES, chunks, table).to(mdp.device, mdp.dtype)
        due = [t for t in self.checkpoints if self.t < t <= until]
        while self.t < until:
            first = self.segment = self.t
            if self.player.reacts:  # to the next checkpoint, from means for the first of these episodes
                n, asked = min([t for t in due if t > first] + [until]) - first, 1
            else:
                n = asked = min(self.losses.stride, until - first)
            found = self.losses.means(mdp, self.process_state, first + 1, asked, self.q)
            means, self.process_state = self.contract.means(found, first + 1, asked)
            for stop in (*(t for t in due if first < t < first + n), first + n):
                rows, i = slice(self.t - origin, stop - origin), self.t - first
                part = means if len(means) == 1 else means[i : i + stop - self.t]
                self.player.play(self, part, numbers[:, rows], None if tables is None else tables[:, rows])
                self._warn_of_first()
                if stop in due:
                    self.seconds += time.monotonic() - begun
                    begun = time.monotonic()
                    self._record()
                    yield self.t
        self.seconds += time.monotonic() - begun

    def tally(self, mean: Tensor, feedback: Feedback) -> None:
        """Add up one episode, in which `self.q` was played and the means were `(N, S, A)`."""
        sums = self.sums
        sums["expected"] += (self.q * mean).sum((-2, -1))
        sums["realised"] += feedback.losses.sum(-1)
        sums["cumulative_occupancy"] += self.q
        sums["total_mean"] += mean
        found = self.contract.diagnostics(self.t, self.learner.diagnostics())
        if found:
            sums["newton_steps"] += found["newton_steps"]
            sums["uncertified"] += found["uncertified"]
            for name in ("dual_residual", "flow_residual"):
                sums[name] = torch.maximum(sums[name], found[name])
            if bool(found["uncertified"].any()):
                first = (sums["first_uncertified"] == 0) & (found["uncertified"] != 0)
                sums["first_uncertified"][first] = float(self.t)
                if "status" in found:
                    sums["first_status"][first] = found["status"][first].to(self.q.dtype)

    def _warn_of_first(self) -> None:
        first = self.sums["first_uncertified"]
        if self.warned or not bool(first.any()):
            return
        self.warned = True
        t, i = min((t, i) for i, t in enumerate(first.long().tolist()) if t)
        status = Status(int(self.sums["first_status"][i]))
        why = f": {status.name}, {status.advice}" if status else ""
        warnings.warn(
            f"{type(self.learner).__name__}: the step of episode {t}, seed {self.seeds[i]}, was not certified{why}. "
            "The run goes on; history.uncertified counts such steps",
            UncertifiedWarning,
            stacklevel=4,
        )

    def warn_of_all(self) -> None:
        """Warn if steps were not certified, with their number. For the end of a run."""
        if count := int(self.sums["uncertified"].sum()):
            warnings.warn(
                f"{type(self.learner).__name__}: {count:,} of {self.t * len(self.seeds):,} steps were not certified; "
                "their q, and with it the regret, may be wrong",
                UncertifiedWarning,
                stacklevel=3,
            )

    def _record(self) -> None:
        sums = self.sums
        best = comparator(self.mdp, sums["total_mean"])
        growth = self.process_state.get("corruption_so_far")
        spent = torch.zeros_like(best) if growth is None else growth[:, self.t - self.segment - 1]
        now = {
            "regret": sums["expected"] - best,
            "realised_regret": sums["realised"] - best,
            "comparator": best,
            "corruption": spent,
            "newton_steps": sums["newton_steps"] / max(self.since, 1),
            "dual_residual": sums["dual_residual"],
            "flow_residual": sums["flow_residual"],
            "uncertified": sums["uncertified"],
        }
        for name in _CURVES:
            self.curves[name].append(now[name].clone())
        for name in ("newton_steps", "dual_residual", "flow_residual"):
            sums[name] = torch.zeros_like(sums[name])
        self.since = 0
        self.recorded.append(self.t)
        self.times.append(self.seconds)

    def history(self) -> History:
        """Everything recorded so far."""
        n = len(self.seeds)
        curves = {name: torch.stack(rows, -1) if rows else self.q.new_zeros(n, 0) for name, rows in self.curves.items()}
        return History(
            episodes=torch.tensor(self.recorded),
            wall_time=torch.tensor(self.times, dtype=torch.float64),
            cumulative_occupancy=self.sums["cumulative_occupancy"].clone(),
            total_mean=self.sums["total_mean"].clone(),
            last_q=self.q.clone(),
            seeds=self.seeds,
            backend=self.player.name,
            finished=self.recorded[-1:] == self.checkpoints[-1:] and self.t == self.episodes,
            config=self.config,
            **curves,
        )

    # -- saving -----------------------------------------------------------------------------------------------------------

    _KEPT = ("t", "seconds", "q", "process_state", "sums", "since", "recorded", "times", "curves")

    def save(self, path: str | Path) -> None:
        """Write the whole state, atomically. Call it at a chunk's edge only."""
        state = {name: getattr(self, name) for name in self._KEPT}
        state |= {"learner": self.learner.state, "fingerprint": self.fingerprint}
        write_atomically(path, lambda file: torch.save(state, file))

    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote, if it belongs to this very configuration."""
        state = torch.load(path, weights_only=True)
        if state.pop("fingerprint") != self.fingerprint:
            raise ValueError(
                f"{path}: belongs to a run of another configuration (MDP, learner, losses, seeds or checkpoints); name another file"
            )
        self.learner.state = state.pop("learner")
        for name, value in state.items():
            setattr(self, name, value)

    def _fingerprint(self) -> str:
        """A hash of everything that decides the numbers of the run."""
        run = (self.mdp, self.learner, self.losses, self.seeds, self.episodes, self.checkpoints, self.player.name, CHUNK)
        return fingerprint(*run)
