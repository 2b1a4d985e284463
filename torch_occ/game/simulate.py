"""`simulate`: play a learner against losses for all seeds, with callbacks and saved runs."""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_occ._support.choices import Backend, check_backend, engine_takes, later, wants_bar
from torch_occ._support.constants import BLOCK, CHUNK, log_spaced
from torch_occ._support.files import Kept, State, copied
from torch_occ._support.fingerprints import fingerprints
from torch_occ._support.processes import stoppable
from torch_occ._support.streams import Purpose, check_memory, uniforms
from torch_occ.game.callbacks import Callback, ProgressBar, tell
from torch_occ.game.checks import Contract, warn_of_all, warn_of_first
from torch_occ.game.estimators import Feedback
from torch_occ.game.history import History, LearnerComparison, comparator
from torch_occ.game.learners import FTRL, Learner
from torch_occ.game.losses import LossProcess, check_noise, mean_square, second_moments
from torch_occ.mdp.checks import check_kind, check_that, check_type, integers, whole
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import invert
from torch_occ.mdp.occupancy import interior_point, occupancy, policy_of

# -- What `simulate` is given, checked before the first episode: each error says what to pass ------


def check_players(mdp: LayeredMDP, learner: Any, losses: Any, episodes: int) -> None:
    """Raise an error unless the learner and the losses can play this MDP for so many episodes."""
    check_kind("learner", learner, Learner, ", for example occ.FTRL")
    check_kind("losses", losses, LossProcess, ", for example occ.BernoulliLosses(mean)")
    name = type(learner).__name__
    if not hasattr(learner, "mdp"):
        raise TypeError(f"learner: {name} has no mdp; call super().__init__(mdp) in __init__")
    blind = learner.mdp.is_blind
    if learner.proposes_policy and type(learner).propose is not Learner.propose:
        raise TypeError(
            f"learner: {name} has both propose and propose_policy; write one of them, propose if "
            "it knows the transitions"
        )
    if not blind and learner.mdp is not mdp:
        raise ValueError(
            "learner: was made for another MDP than the one to simulate; make both with the same "
            "LayeredMDP"
        )
    if blind and not learner.proposes_policy and not learner.engine_only:
        raise TypeError(
            f"learner: {name} does not know the transitions (its mdp is blind), so it cannot "
            "propose q; write propose_policy instead of propose"
        )
    # A blind learner is for every MDP with its layout.
    difference = learner.mdp.layout_difference(mdp)
    if difference is None and not torch.equal(learner.mdp.initial, mdp.initial):
        difference = "another initial distribution"
    if difference is not None:
        raise ValueError(
            f"learner: {name} was made for another layout than that of the MDP to simulate: it has "
            f"{difference}; make both with the same LayeredMDP"
        )
    if learner.max_episodes is not None and episodes > learner.max_episodes:
        raise ValueError(
            f"episodes: {name} was made for {learner.max_episodes} episodes, but {episodes} were "
            "asked for; its confidence level does not hold beyond. Make it with "
            f"episodes={episodes}"
        )
    if type(losses).draw is LossProcess.draw:
        check_noise(losses.noise)
    fine, name = isinstance(losses.stride, int) and losses.stride >= 1, type(losses).__name__
    expected = f"{name}.stride to be a positive integer"
    check_that(fine, "losses", expected, repr(losses.stride))
    if losses.length is not None and losses.length < episodes:
        raise ValueError(
            f"losses: the table has {losses.length} episodes, but {episodes} were asked for"
        )


# -- A run in progress: its sums and curves, which callbacks read, and its state in a file ---------
#
# Random numbers and means come in chunks of episodes. A run can be saved and continued at the end
# of a chunk. It then ends with exactly the numbers of an uninterrupted run.


class TorchPlayer:
    """Plays any learner, one episode of all seeds at a time."""

    name = "torch"
    chunks = 1  # per call
    most = CHUNK  # episodes per call
    reacts = False  # whether it plays the adversary, and needs the means of the first episode only

    def __init__(self, mdp: LayeredMDP) -> None:
        self.mdp = mdp
        self.first = mdp.initial.cumsum(-1)

    def play(
        self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None, rows: range
    ) -> None:
        """Play episodes run.t + 1, ..., run.t + n, and add their results to the simulation.

        Args:
            means: mean losses `(n or 1, N or 1, S, A)`.
            numbers: uniform numbers of the chunk, `(N, chunk, L, 3)`.
            tables: uniform numbers `(N, chunk, S, A)` for whole loss tables, or None.
            rows: the n episodes in the chunk.
        """
        for i in rows:
            run.t += 1
            run.since += 1
            proposed, policy = self.ask(run)
            mean = means[min(i - rows.start, len(means) - 1)].expand_as(policy)
            table = None if tables is None else run.losses.draw(mean, tables[:, i])
            # A copy: the learner may change it, and the process keeps the original.
            table = mean.clone() if table is mean else table
            feedback = self.walk(run, policy, mean, table, numbers[:, i])
            run.contract.drawn(run.t, feedback)
            run.tally(mean, feedback)
            run.learner.observe(run.t, proposed, feedback)

    def ask(self, run: Simulation) -> tuple[Tensor, Tensor]:
        """Set `run.q`; return what the learner proposes, q or a policy, and the policy."""
        learner, n = run.learner, len(run.seeds)
        if not learner.proposes_policy:
            q = learner.propose(run.t)
            run.contract.proposal(run.t, q)
            q = q.detach().expand(n, *q.shape[1:])
            run.q = q.clone()  # the learner may change its own tensor later
            return q, policy_of(self.mdp, run.q)
        policy = learner.propose_policy(run.t)
        run.contract.policy(run.t, policy)
        policy = policy.detach().expand(n, *policy.shape[1:])
        run.q = occupancy(self.mdp, policy, in_order=True)
        return policy, policy.clone()

    def walk(
        self, run: Simulation, policy: Tensor, mean: Tensor, table: Tensor | None, numbers: Tensor
    ) -> Feedback:
        """Sample one trajectory per seed, with numbers for action, loss and next state.

        The last layer has no next state, so its third number decides the first state.
        """
        every = torch.arange(len(policy), device=policy.device)
        local = invert(self.first.expand(len(policy), -1), numbers[:, -1, 2])
        seen = []
        for k, (here, layer) in enumerate(zip(self.mdp.layer_slices, self.mdp.layers, strict=True)):
            state = here.start + local
            action = invert(policy[every, state].cumsum(-1), numbers[:, k, 0])
            if table is None:
                loss = run.losses.draw(mean[every, state, action], numbers[:, k, 1])
            else:
                loss = table[every, state, action]
            if k + 1 < self.mdp.horizon:
                local = layer.draw(local, action, numbers[:, k, 2])
            seen.append((state, action, loss))
        states, actions, losses = (torch.stack(x, -1) for x in zip(*seen, strict=True))
        return Feedback(states, actions, losses, table)


def choose_player(backend: Backend, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> Any:
    """The player, as `TorchPlayer`; a ValueError if the engine must play and cannot."""
    if learner.player is not None:
        return learner.player(check_backend(backend))

    def why_not() -> str | None:
        return later("game.players").why_not_play(mdp, learner, losses)

    if learner.engine_only and learner.compiled is not None:
        name = type(learner).__name__
        if check_backend(backend) == "torch":
            raise ValueError(
                f"backend: {name} plays in the engine only, and not in torch; use backend='auto'"
            )
        reason = why_not()
        if reason is not None:
            raise ValueError(f"learner: {name} plays in the engine only, but {reason}")
    elif not engine_takes(backend, why_not):
        return TorchPlayer(mdp)
    return later("game.players").EnginePlayer(mdp, learner, losses)


#: The largest number of bytes of random numbers in memory.
_MEMORY = 1 << 25

#: The largest number of chunks, over all seeds, that are lost after Ctrl-C.
_RUNS = 2048

#: What learners report of their steps.
_STEPS = ("newton_steps", "dual_residual", "flow_residual", "uncertified")

_CURVES = ("regret", "realised_regret", "comparator", "corruption", *_STEPS)


class Simulation:
    """A run in progress: what callbacks read, and what a saved file restores."""

    def __init__(
        self,
        mdp: LayeredMDP,
        learner: Learner,
        losses: LossProcess,
        episodes: int,
        seeds: Sequence[int],
        checkpoints: Sequence[int] | None,
        backend: Backend = "auto",
    ) -> None:
        episodes = whole("episodes", episodes)
        check_players(mdp, learner, losses, episodes)
        self.mdp, self.losses, self.episodes = mdp, losses, episodes
        self.seeds, self.config = integers("seeds", seeds), dict[str, Any]()
        if not self.seeds:
            raise ValueError("seeds: expected at least one")
        check_that(max(self.seeds) < 2**64, "seeds", "integers below 2**64", max(self.seeds))
        for seed in Counter(self.seeds) - Counter({*self.seeds}):
            raise ValueError(
                f"seeds: {seed} occurs twice; equal seeds play equal runs, which intervals would "
                "count as independent ones"
            )
        points = log_spaced(episodes) if checkpoints is None else checkpoints
        self.checkpoints = sorted({*integers("checkpoints", points)})
        if not self.checkpoints:
            raise ValueError("checkpoints: expected at least one episode")
        least, most = self.checkpoints[0], self.checkpoints[-1]
        expected = f"episodes from 1 to {episodes}"
        check_that(1 <= least <= most <= episodes, "checkpoints", expected, f"{least} to {most}")
        table, n = (mdp.num_states, mdp.num_actions), len(self.seeds)
        self.per_episode = 3 * mdp.horizon + learner.full_information * math.prod(table)  # numbers
        check_memory(n, self.per_episode)
        try:
            self.learner = learner = learner.copy()
        except Exception as error:
            name = type(learner).__name__
            raise TypeError(
                f"learner: {name} cannot be copied ({error}), and a run plays a copy; override "
                f"{name}.copy"
            ) from error
        self.contract = Contract(mdp, learner, losses, self.seeds)
        zeros = torch.zeros(n, *table, dtype=mdp.dtype, device=mdp.device)
        learner.seeds = self.seeds
        learner.start(n)
        self.t = 0
        self.seconds = 0.0
        self.q = interior_point(mdp).detach().expand_as(zeros).clone()
        self.process_state = losses.start(mdp, self.seeds)
        if not isinstance(self.process_state, dict):
            kind = type(self.process_state).__name__
            raise TypeError(
                f"losses: {type(losses).__name__}.start returned {kind}; expected a dict of "
                "tensors, {} if there is nothing to remember"
            )
        # The episode of the first step without certificate (0 if none), and its status.
        failed = ("first_uncertified", "first_status")
        self.sums = {name: zeros[:, 0, 0].clone() for name in (*_STEPS, *failed)}
        self.parts = dict.fromkeys(("expected", "realised"), zeros[:, None, 0, :1])
        self.parts |= dict.fromkeys(("cumulative_occupancy", "total_mean"), zeros[:, None])
        self.parts = {name: torch.cat([x, x], 1) for name, x in self.parts.items()}
        self._add_parts()
        self.warned = False  # whether there was a warning of an uncertified step
        self.since = 0  # episodes since the last checkpoint
        self.recorded: list[int] = []
        self.times: list[float] = []
        self.curves: dict[str, list[Tensor]] = {name: [] for name in _CURVES}
        self.monitors: list[Callable[[int], dict[int, dict[str, float]]]] = []  # for TensorBoard
        self.player = choose_player(backend, mdp, learner, losses)
        if backend == "torch" and isinstance(learner, FTRL):
            learner.step.use("torch")
        self.segment = 0  # the episode before the last means
        self.at_checkpoint = self._tables()  # the tables at the last checkpoint

    def play_chunk(self) -> Iterator[int]:
        """Play some chunks; yield t at every checkpoint, after it is recorded."""
        begun, mdp, origin = time.monotonic(), self.mdp, self.t - self.t % CHUNK
        first_chunk = self.t // CHUNK
        table = (mdp.num_states, mdp.num_actions)
        fits = _MEMORY // (8 * CHUNK * len(self.seeds) * self.per_episode)
        left = -(-(self.episodes - origin) // CHUNK)
        count = max(1, min(self.player.chunks, _RUNS // len(self.seeds), fits, left))
        chunks = range(first_chunk, first_chunk + count)
        until = min(origin + count * CHUNK, self.episodes)

        def draw(purpose: Purpose, shape: tuple[int, int]) -> Tensor:
            return uniforms(self.seeds, purpose, chunks, shape).to(mdp.device, mdp.dtype)

        numbers = draw(Purpose.EPISODES, (mdp.horizon, 3))
        tables = draw(Purpose.TABLES, table) if self.learner.full_information else None
        due = {t for t in self.checkpoints if self.t < t <= until}
        while self.t < until:
            first = self.segment = self.t
            if self.player.reacts:
                # Play to the next checkpoint with the means of the first of these episodes.
                n, asked = self._next_stop(until) - first, 1
            else:
                n = asked = min(self.losses.stride, until - first)
            found = self.losses.means(mdp, self.process_state, first + 1, asked, self.q)
            means, self.process_state = self.contract.means(found, first + 1, asked)
            while self.t < first + n:
                stop = self._next_stop(first + n)
                rows = range(self.t - origin, stop - origin)
                part = means if len(means) == 1 else means[self.t - first : stop - first]
                self.player.play(self, part, numbers, tables, rows)
                self._add_parts()
                self.warned = self.warned or warn_of_first(self)
                if stop in due:
                    self.seconds += time.monotonic() - begun
                    begun = time.monotonic()
                    self._record()
                    yield self.t
        self.seconds += time.monotonic() - begun

    def _next_stop(self, latest: int) -> int:
        """The last episode of the player's next call, at most the next checkpoint."""
        i = bisect_right(self.checkpoints, self.t)
        return min(latest, self.t + self.player.most, *self.checkpoints[i : i + 1])

    def tally(self, mean: Tensor, feedback: Feedback) -> None:
        """Add the results of one episode, in which `self.q` was played, to the sums."""
        sums, parts = self.sums, self.parts
        parts["expected"][:, 1, 0] += (self.q * mean).sum((-2, -1))
        parts["realised"][:, 1, 0] += feedback.losses.sum(-1)
        parts["cumulative_occupancy"][:, 1] += self.q
        parts["total_mean"][:, 1] += mean
        if self.t % BLOCK == 0:
            for x in parts.values():  # as torch_occ.engine.play.close_block
                before, block = x.unbind(1)
                total = before + block
                added = total - before
                x.copy_(torch.stack([total, before - (total - added) + (block - added)], 1))
        if "second_moment" in sums:
            sums["second_moment"] += second_moments(mean, mean_square(mean, self.losses.noise))
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

    def _add_parts(self) -> None:
        """Set the sums that are kept in two parts, `(N, 2, ...)`: complete blocks, and the last."""
        for name, (before, block) in ((name, x.unbind(1)) for name, x in self.parts.items()):
            self.sums[name] = before + block if before.dim() > 2 else (before + block)[:, 0]

    def ask_for_second_moments(self) -> None:
        """Sum E[loss_i loss_j] for i <= j over all further episodes, in `sums["second_moment"]`.

        Callbacks call this in `on_start`.
        """
        pairs = self.mdp.num_states * self.mdp.num_actions
        if "second_moment" not in self.sums:
            self.sums["second_moment"] = self.q.new_zeros(len(self.seeds), pairs, pairs)

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
            **{name: sums[name] for name in _STEPS},
            "newton_steps": sums["newton_steps"] / max(self.since, 1),
        }
        for name in _CURVES:
            self.curves[name].append(now[name].clone())
        for name in _STEPS[:3]:
            sums[name] = torch.zeros_like(sums[name])
        self.since = 0
        self.at_checkpoint = self._tables()
        self.times.append(self.seconds)
        self.recorded.append(self.t)  # last, so that an interrupted checkpoint does not count

    def _tables(self) -> dict[str, Tensor]:
        """Copies of the tables that are part of a history."""
        tables = {name: self.sums[name] for name in ("cumulative_occupancy", "total_mean")}
        return tables | {"last_q": self.q.clone()}

    def history(self, *, interrupted: bool = False) -> History:
        """The history so far; if interrupted, with the tables of the last checkpoint."""
        n, points = len(self.seeds), len(self.recorded)
        none = self.q.new_zeros(n, 0)
        curves = {
            name: torch.stack(rows[:points], -1) if points else none  # (N, C)
            for name, rows in self.curves.items()
        }
        return History(
            episodes=torch.tensor(self.recorded),
            wall_time=torch.tensor(self.times[:points], dtype=torch.float64),
            **(self.at_checkpoint if interrupted else self._tables()),
            seeds=self.seeds,
            backend=self.player.name,
            finished=not interrupted and self.t == self.episodes,
            config=self.config,
            **curves,
        )

    # -- saving --------------------------------------------------------------------------------

    def state(self) -> State:
        """A copy of the whole state, to be taken at the end of a chunk."""
        now = {name: getattr(self, name) for name in ("t", "seconds", "since", "at_checkpoint")}
        changing = ("q", "process_state", "sums", "parts", "recorded", "times")
        now |= {name: copied(getattr(self, name)) for name in changing}
        # The points of a curve never change, so lists of them are copied, not the points.
        now |= {"curves": {name: [*rows] for name, rows in self.curves.items()}}
        return now | {"learner": copied(self.learner.state)}

    def restore(self, state: State) -> None:
        """Continue from a result of `state`, in this process or another."""
        own = copied(state)
        self.learner.state = own.pop("learner")
        for name, value in own.items():
            setattr(self, name, value)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of everything that decides the numbers of the run."""
        names = ("mdp", "learner", "losses", "seeds", "episodes", "checkpoints")
        parts = {name: getattr(self, name) for name in names}
        return fingerprints(**parts, backend=(self.player.name, CHUNK))


# -- `simulate`: play a learner against losses for all seeds, with callbacks and saved runs --------


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
    progress: bool | None = None,
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
        progress: show a progress bar; by default on a terminal, after two seconds.

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
    check_type("callbacks", callbacks, Iterable, "a list, for example [occ.ProgressBar()]")
    watching = list(callbacks)
    for callback in watching:
        check_kind("callbacks", callback, Callback)
    if wants_bar(progress) and not any(isinstance(x, ProgressBar) for x in watching):
        watching.append(ProgressBar(type(learner).__name__, after=0.0 if progress else 2.0))
    simulation = Simulation(mdp, learner, losses, episodes, seeds, checkpoints, backend)
    try:
        json.dumps(config)
    except TypeError as error:
        raise TypeError(
            f"config: {error}; it may hold numbers, strings, lists and dictionaries of these"
        ) from None
    simulation.config = config or {}
    kept = None
    if save_to is not None:
        kept = Kept(save_to, "run", simulation.fingerprints, save_every)
        kept.begin(simulation, resume)
    for callback in watching:
        callback.on_start(simulation)

    def stopped() -> tuple[str, History]:
        partial = simulation.history(interrupted=True)
        tell(watching, "on_end", simulation, partial)
        return f"at episode {simulation.t} of {episodes}", partial

    with stoppable(kept, stopped):
        while simulation.t < episodes:
            for _ in simulation.play_chunk():
                tell(watching, "on_checkpoint", simulation)
            tell(watching, "on_chunk", simulation)
            if kept is not None:
                kept.keep(simulation.state(), last=simulation.t == episodes)
    warn_of_all(simulation)
    history = simulation.history()
    tell(watching, "on_end", simulation, history)
    return history


def compare_learners(
    mdp: LayeredMDP,
    learners: Mapping[str, Learner],
    losses: LossProcess,
    episodes: int,
    seeds: Sequence[int] = tuple(range(8)),
    *,
    baseline: str | None = None,
    **options: Any,
) -> LearnerComparison:
    """Play every learner on the same seeds.

    Args:
        learners: by the name that tables and figures show.
        losses: the loss process that all of them play against.
        seeds: at least two, because intervals need two.
        baseline: the learner that the others are compared with; the first by default.
        options: further options of `simulate`: `checkpoints`, `callbacks`, `backend`, `progress`.

    Returns:
        The histories, with paired differences, a figure and tables.

    Raises:
        ValueError: if there are fewer than two learners or seeds, or if no learner has the name of
            the baseline.
    """
    check_type("learners", learners, Mapping, 'a dictionary, {"name": learner, ...}')
    if "save_to" in options:
        raise ValueError("save_to: a file holds one run; simulate each learner with its own file")
    names, seeds = list(learners), list(seeds)
    check_that(len(names) >= 2, "learners", "at least two to compare", names)
    check_that(len(seeds) >= 2, "seeds", "at least two, which intervals need", seeds)
    baseline = names[0] if baseline is None else baseline
    check_that(baseline in learners, "baseline", f"one of {names}", repr(baseline))
    histories = {
        name: simulate(mdp, learner, losses, episodes, seeds, **options)
        for name, learner in learners.items()
    }
    return LearnerComparison(histories, baseline)
