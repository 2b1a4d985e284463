"""Self-play: two learners, their average and last strategies, and their exploitability."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import later, summary_writer
from torch_occ._support.constants import CHUNK, log_spaced
from torch_occ._support.files import Kept, State, copied, markdown
from torch_occ._support.fingerprints import fingerprints
from torch_occ._support.processes import asked_to_stop, explain, sigterm_raises
from torch_occ._support.streams import Purpose, uniforms
from torch_occ.game.callbacks import Callback, tell
from torch_occ.game.checks import UncertifiedWarning
from torch_occ.game.estimators import (
    Estimator,
    Feedback,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
)
from torch_occ.game.history import Curves, Mean
from torch_occ.game.learners import FTRL, FixedPolicy, Learner
from torch_occ.game.simulate import check_callbacks, check_seeds, integers, whole
from torch_occ.games.tree import ExtensiveGame, GamePolicy, Treeplex, dilated_entropy
from torch_occ.mdp.occupancy import (
    cheapest,
    interior_point,
    occupancy,
    optimal_policy,
    policy_of,
)
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import ConditionalEntropy
from torch_occ.regularizers.schedules import Constant

# -- Learners for games ----------------------------------------------------------------------------


class FictitiousPlay(Learner):
    """The best response to the other's average strategy: no regularizer, full information."""

    compiled = lambda: later("games.compiled").CompiledFictitious  # noqa: E731
    full_information = True

    def start(self, num_seeds: int) -> None:
        self.state = {"cumulative_loss": self._zeros(num_seeds)}

    def propose(self, t: int) -> Tensor:
        plan = optimal_policy(self.mdp, self.state["cumulative_loss"])
        return occupancy(self.mdp, cheapest(self.mdp, plan.Q))

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        assert feedback.table is not None
        self.state["cumulative_loss"] = self.state["cumulative_loss"] + feedback.table


class TreeFTRL(FTRL):
    """FTRL over a treeplex, with optimism, exploration in x, and adaptive rates.

    Args:
        treeplex: that of the player.
        regularizer: psi_t.
        optimistic: take the step at the cumulative loss plus the last loss once more. Last iterates
            may then converge.
        exploration: gamma of implicit exploration: the estimate is loss / (x + gamma) / w.
        adaptive: divide the rates, and gamma, of an information set by 1 + the sum of
            1 / (x + gamma) over its visits so far, an estimate of how often chance and the other
            player allowed it. It needs a regularizer with weights per state, such as
            `dilated_entropy(treeplex)`, and plays in the engine only.
    """

    compiled = lambda: later("games.compiled").CompiledTree  # noqa: E731

    def __init__(
        self,
        treeplex: Treeplex,
        regularizer: Regularizer,
        *,
        optimistic: bool = False,
        exploration: float = 0.0,
        adaptive: bool = False,
    ) -> None:
        super().__init__(treeplex.mdp, regularizer)
        if not 0.0 <= exploration < math.inf:
            raise ValueError(f"exploration: expected a nonnegative number, got {exploration}")
        if adaptive and not (self.step.closed and regularizer.places()):
            raise ValueError(
                "adaptive: rates per state need an entropy with weights per state, for example "
                "occ.dilated_entropy(treeplex)"
            )
        self.optimistic, self.adaptive, self.exploration = optimistic, adaptive, exploration
        self.weights = treeplex.weights

    @classmethod
    def ixomd(cls, treeplex: Treeplex, episodes: int, factor: float = 1.0) -> Self:
        """IXOMD (Kozuno, Ménard, Munos and Valko, 2021), for losses in [0, 1].

        Read: the dilated entropy with unit weights, a constant rate, implicit exploration in x.
        Derived: with a constant rate, mirror descent from the uniform policy and FTRL have the same
        iterates. The rate and gamma are factor / sqrt(number of actions times episodes); the
        paper's differ from it by logarithms.
        """
        eta = factor / math.sqrt(cls._actions(treeplex) * episodes)
        return cls(treeplex, dilated_entropy(treeplex) / Constant(eta), exploration=eta)

    @classmethod
    def balanced(cls, treeplex: Treeplex, episodes: int, factor: float = 1.0) -> Self:
        """Balanced FTRL (Fiegel et al., 2023), for a treeplex with balanced shares.

        Read: shares in proportion to the number of actions below, and weights and gamma that
        follow from them. Derived: over q = w x this is `ConditionalEntropy` with a constant rate,
        and implicit exploration with one bias for all pairs of q.
        """
        eta = factor / math.sqrt(cls._actions(treeplex) * episodes)
        found = cls(treeplex, ConditionalEntropy() / Constant(eta))
        found.estimator = ImplicitExploration(eta)
        return found

    @classmethod
    def adapting(cls, treeplex: Treeplex, episodes: int, factor: float = 1.0) -> Self:
        """Adaptive FTRL (Fiegel et al., 2023): see `adaptive`.

        Read: rates and gamma divided by 1 + the estimated visits. Derived: the visits grow with
        the episodes, so both begin at factor * sqrt(episodes / number of actions).
        """
        eta = factor * math.sqrt(episodes / cls._actions(treeplex))
        psi = dilated_entropy(treeplex) / Constant(eta)
        return cls(treeplex, psi, exploration=eta, adaptive=True)

    @staticmethod
    def _actions(treeplex: Treeplex) -> int:
        return int(treeplex.mdp.actions[~treeplex.is_end].sum())

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.state |= {"last": self._zeros(num_seeds), "visits": self._zeros(num_seeds)}

    def loss(self, t: int) -> Tensor:
        last = self.state["last"] if self.optimistic else 0.0
        return self.state["cumulative_loss"] + last

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        if feedback.table is None:
            floor = self._floor().expand_as(q)
            found = feedback.scatter(
                feedback.losses / (feedback.gather(q) + feedback.gather(floor)), q
            )
        else:
            found = feedback.table
        self.state["last"] = found
        self.state["cumulative_loss"] = self.state["cumulative_loss"] + found

    def _floor(self) -> Tensor:
        """The bias of implicit exploration, `(S, A)`."""
        bias = getattr(self.estimator, "bias", 0.0) + self.exploration * self.weights[:, None]
        return bias.expand(self.mdp.actions.shape).contiguous()

    @property
    def engine_only(self) -> bool:
        return self.adaptive

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        scale = self.weights[:, None].expand(self.mdp.actions.shape)
        return found | {
            "floor": self._floor().flatten().numpy(),
            "scale": scale.flatten().numpy(),
        }


# -- The history -----------------------------------------------------------------------------------


@dataclass(repr=False)
class GameHistory(Curves):
    """Curves of self-play over C checkpoints for N seeds; strategies are in q of equal shares."""

    episodes: Tensor  # (C,)
    exploitability: Tensor  # (N, C), of the average strategies
    last_exploitability: Tensor  # (N, C), of the last ones
    payoff: Tensor  # (N, C), of player 0 under the average strategies
    newton_steps: Tensor  # (N, C), so far, of both players, as those that follow
    dual_residual: Tensor  # (N, C), largest so far
    uncertified: Tensor  # (N, C), steps so far that could not be certified
    wall_time: Tensor  # (C,), seconds
    average_q0: Tensor  # (N, S, A)
    average_q1: Tensor
    last_q0: Tensor
    last_q1: Tensor
    seeds: tuple[int, ...]
    backend: str
    feedback: str
    finished: bool

    game: ExtensiveGame | None = None  # not in a file; see `load`

    @property
    def average_policy(self) -> GamePolicy:
        """The policies of the average strategies, `(N, S, A)`."""
        return GamePolicy.of(self._known(), (self.average_q0, self.average_q1))

    @property
    def last_policy(self) -> GamePolicy:
        """The policies of the last episode, `(N, S, A)`."""
        return GamePolicy.of(self._known(), (self.last_q0, self.last_q1))

    def _known(self) -> ExtensiveGame:
        if self.game is None:
            raise ValueError("game: a history from a file does not know its game; set history.game")
        return self.game

    def _fields(self) -> dict[str, Any]:
        return {name: x for name, x in super()._fields().items() if name != "game"}

    def final(self, curve: str = "exploitability") -> Mean:
        return super().final(curve)

    def __repr__(self) -> str:
        line = f"GameHistory: {len(self.seeds)} seeds, feedback {self.feedback}, {self.backend}"
        line += "" if self.finished else ", not finished"
        curves = (self.exploitability, self.last_exploitability)
        rows = [
            [f"{t:,}", *(str(Mean.of(x[:, i])) for x in curves)]
            for i, t in enumerate(self.episodes.tolist())
            if i == len(self.episodes) - 1 or math.log10(t).is_integer()
        ]
        names = ["episode", "exploitability", "of the last"]
        return f"{line}\n{markdown(names, rows, left=())}" if rows else line


class GameBoard(Callback):
    """Writes the curves of self-play for TensorBoard; steps are episodes."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def on_start(self, run: Any) -> None:
        self.writer = summary_writer(self.directory, purge_step=run.t + 1 if run.t else None)

    def on_checkpoint(self, run: Any) -> None:
        for name, rows in run.curves.items():
            group = (
                "game" if name in ("exploitability", "last_exploitability", "payoff") else "solver"
            )
            self.writer.add_scalar(f"{group}/{name}", float(rows[-1].mean()), run.t)

    def on_end(self, run: Any, history: Any) -> None:
        self.writer.close()


# -- A run -----------------------------------------------------------------------------------------

#: The largest number of chunks of episodes with random numbers in memory.
CHUNKS = 64

_STEPS = ("newton_steps", "uncertified", "dual_residual", "flow_residual")
_CURVES = ("exploitability", "last_exploitability", "payoff", *_STEPS[:3])


class GameRun:
    """Self-play in progress: what callbacks read, and what a saved file restores."""

    def __init__(
        self,
        game: ExtensiveGame,
        learners: Sequence[Learner],
        episodes: int,
        seeds: Sequence[int],
        feedback: str,
        checkpoints: Sequence[int] | None,
    ) -> None:
        self.game, self.episodes, self.feedback = game, whole("episodes", episodes), feedback
        self.seeds = integers("seeds", seeds)
        check_seeds(self.seeds)
        points = log_spaced(self.episodes) if checkpoints is None else checkpoints
        self.checkpoints = sorted({*integers("checkpoints", points)})
        if not self.checkpoints or not 1 <= self.checkpoints[0] <= self.checkpoints[-1] <= episodes:
            raise ValueError(f"checkpoints: expected episodes from 1 to {self.episodes}")
        self.plexes = [_plex_of(game, i, learner) for i, learner in enumerate(learners)]
        self.learners = [_prepared(learner, feedback) for learner in learners]
        self.t, self.seconds, n = 0, 0.0, len(self.seeds)
        self.sums: list[dict[str, Tensor]] = []
        for learner in self.learners:
            learner.seeds = self.seeds
            learner.start(n)
            q = interior_point(learner.mdp).detach().expand(n, -1, -1).clone()
            zero = q.new_zeros(n)
            names = (*_STEPS, "first_uncertified", "first_status")
            own = {"q": q, "cumulative_occupancy": torch.stack([q, q], 1) * 0}
            self.sums.append(own | {name: zero.clone() for name in names})
        self.recorded: list[int] = []
        self.times: list[float] = []
        self.curves: dict[str, list[Tensor]] = {name: [] for name in _CURVES}
        payoffs, full = game.payoffs.detach(), feedback == "full"
        losses = -payoffs
        if not full:  # in [0, 1]
            least, most = payoffs.amin(0), payoffs.amax(0)
            losses = (most - payoffs) / (most - least).clamp(min=1e-300)
        scales = [
            plex.weights[:, None].expand(plex.mdp.actions.shape).flatten().numpy()
            for plex in self.plexes
        ]
        table = np.ascontiguousarray(losses.T.numpy())
        tree = game.tree
        self.match = later("games.compiled").Match(tree, table, scales, self.learners, full)
        self.depth = 0 if full else game.depth

    def play_chunk(self) -> Iterator[int]:
        """Play some chunks of episodes; yield t at every checkpoint, after it is recorded."""
        begun, origin = time.monotonic(), self.t - self.t % CHUNK
        fits = (1 << 22) // (CHUNK * len(self.seeds) * max(self.depth, 1))
        count = max(1, min(CHUNKS, fits)) if self.depth else 1
        until = min(origin + count * CHUNK, self.episodes)
        chunks = range(origin // CHUNK, origin // CHUNK + count)
        if self.depth:
            drawn = uniforms(self.seeds, Purpose.EPISODES, chunks, (self.depth,)).numpy()
        else:
            drawn = np.zeros((len(self.seeds), count * CHUNK, 0))
        while self.t < until:
            ahead = [t for t in self.checkpoints if t > self.t]
            stop = min([until, self.t + self.match.most, *ahead[:1]])
            numbers = np.ascontiguousarray(drawn[:, self.t - origin : stop - origin])
            self.match.play(self.t, numbers, self.sums)
            self.t = stop
            if self.t in self.checkpoints:
                self.seconds += time.monotonic() - begun
                begun = time.monotonic()
                self._record()
                yield self.t
        self.seconds += time.monotonic() - begun

    def strategies(self, average: bool) -> list[Tensor]:
        """The strategies of both players in q of equal shares, `(N, S, A)`."""
        found = []
        for i, (plex, own) in enumerate(zip(self.plexes, self.sums, strict=True)):
            q = own["cumulative_occupancy"].sum(1) / max(self.t, 1) if average else own["q"].clone()
            equal = self.game.treeplex(i)
            if plex is not equal:
                q = occupancy(equal.mdp, policy_of(equal.mdp, q))
            found.append(q)
        return found

    @torch.no_grad()
    def _record(self) -> None:
        average, last = self.strategies(True), self.strategies(False)
        first, second = self.sums
        now = {
            "exploitability": self.game.exploitability(*average),
            "last_exploitability": self.game.exploitability(*last),
            "payoff": self.game.value(*average)[..., 0],
            "newton_steps": first["newton_steps"] + second["newton_steps"],
            "uncertified": first["uncertified"] + second["uncertified"],
            "dual_residual": torch.maximum(first["dual_residual"], second["dual_residual"]),
        }
        for name, x in now.items():
            self.curves[name].append(x.detach().clone())
        self.times.append(self.seconds)
        self.recorded.append(self.t)

    def history(self) -> GameHistory:
        """The history so far."""
        n = len(self.seeds)
        curves = {
            name: torch.stack(rows, -1) if rows else torch.zeros(n, 0)
            for name, rows in self.curves.items()
        }
        average, last = self.strategies(True), self.strategies(False)
        return GameHistory(
            episodes=torch.tensor(self.recorded),
            wall_time=torch.tensor(self.times, dtype=torch.float64),
            average_q0=average[0],
            average_q1=average[1],
            last_q0=last[0],
            last_q1=last[1],
            seeds=self.seeds,
            backend="engine" if self.match.compiled else "torch",
            feedback=self.feedback,
            finished=self.t == self.episodes,
            game=self.game,
            **curves,
        )

    def state(self) -> State:
        """A copy of the whole state, to be taken at the end of a chunk."""
        names = ("t", "seconds", "recorded", "times", "curves", "sums")
        now = {name: copied(getattr(self, name)) for name in names}
        return now | {"learners": [copied(learner.state) for learner in self.learners]}

    def restore(self, state: State) -> None:
        """Continue from a result of `state`."""
        own = copied(state)
        for learner, kept in zip(self.learners, own.pop("learners"), strict=True):
            learner.state = kept
        for name, value in own.items():
            setattr(self, name, value)


def _plex_of(game: ExtensiveGame, player: int, learner: Any) -> Treeplex:
    """The treeplex that a learner was made for."""
    if not isinstance(learner, Learner):
        raise TypeError(
            f"learners: expected an occ.Learner for player {player}, got {type(learner).__name__}"
        )
    for shares in ("uniform", "balanced"):
        plex = game.treeplex(player, shares)
        if learner.mdp is plex.mdp:
            return plex
    raise ValueError(
        f"learners: that of player {player} was made for another MDP; make it with "
        f"game.treeplex({player}).mdp"
    )


def _prepared(learner: Learner, feedback: str) -> Learner:
    """A copy of a learner for this feedback; refuse what would be silently wrong."""
    name, found = type(learner).__name__, learner.copy()
    if feedback == "full":
        if isinstance(found, FTRL):
            found.estimator = FullInformation()
        elif not (found.full_information or isinstance(found, FixedPolicy)):
            raise ValueError(f"learners: {name} does not learn from full information")
        return found
    known: tuple[type[Estimator], ...] = (ImportanceWeighted, ImplicitExploration)
    weighted = isinstance(found, FTRL) and type(found.estimator) in known
    if type(found).__module__.startswith("torch_occ.") and not (
        (weighted and type(found) in (FTRL, TreeFTRL)) or isinstance(found, FixedPolicy)
    ):
        raise ValueError(
            f"learners: {name} cannot play a game with bandit feedback: the probability of a visit "
            "also depends on the other player, and is not q. Use occ.FTRL or occ.games.TreeFTRL, "
            "with importance weights or implicit exploration"
        )
    return found


def self_play(
    game: ExtensiveGame,
    learners: Sequence[Learner] | Callable[[Treeplex], Learner],
    episodes: int,
    seeds: Sequence[int] = (0,),
    *,
    feedback: Literal["full", "bandit"] = "full",
    callbacks: Sequence[Callback] = (),
    checkpoints: Sequence[int] | None = None,
    save_to: str | Path | None = None,
) -> GameHistory:
    """Let two learners play a game against each other, for every seed.

    Args:
        learners: one for each player, made for `game.treeplex(player).mdp`; or a function that
            makes a learner from a treeplex. The run plays copies.
        feedback: "full" shows each player its whole loss against the other's strategy, in units
            of payoffs; `FTRL` then uses it instead of an estimate. "bandit" plays a history per
            episode; the loss at its end is (most - payoff) / (most - least), in [0, 1].
        checkpoints: episodes at which the curves have a point; by default 20 per decade, and the
            last.
        save_to: a file in which the run is saved, so that the same call continues it.

    Returns:
        The history: `exploitability` of the average strategies and of the last, certificates,
        `average_policy` and `last_policy`.

    Raises:
        ValueError, TypeError: if an argument is wrong, or `save_to` belongs to another run.
        KeyboardInterrupt: after Ctrl-C, as in `simulate`.

    Warns:
        UncertifiedWarning: if steps could not be certified.
    """
    if feedback not in ("full", "bandit"):
        raise ValueError(f"feedback: expected full or bandit, got {feedback!r}")
    if callable(learners):
        learners = [learners(game.treeplex(i)) for i in (0, 1)]
    if len(learners) != 2:
        raise ValueError(f"learners: expected one for each of two players, got {len(learners)}")
    watching = check_callbacks(callbacks)
    run = GameRun(game, learners, episodes, seeds, feedback, checkpoints)
    kept = None
    if save_to is not None:
        marks = fingerprints(
            game=(*game.tree, game.payoffs.detach()),
            learners=run.learners,
            seeds=run.seeds,
            episodes=(run.episodes, run.checkpoints, feedback),
        )
        kept = Kept(save_to, "run", marks, 60.0)
        found = kept.load()
        if found is not None:
            run.restore(found)
        kept.try_first(run.state())
    for callback in watching:
        callback.on_start(run)  # type: ignore[arg-type]
    with sigterm_raises(kept is not None) as silence:
        try:
            while run.t < run.episodes:
                for _ in run.play_chunk():
                    tell(watching, "on_checkpoint", run)
                tell(watching, "on_chunk", run)
                if kept is not None:
                    kept.keep(run.state(), last=run.t == run.episodes)
        except BaseException as error:
            silence()
            saved_to = None if kept is None else kept.rescue()
            if asked_to_stop(error):
                history = run.history()
                tell(watching, "on_end", run, history)
                explain(error, f"at episode {run.t} of {run.episodes}", history, saved_to)
            raise
    history = run.history()
    failed = int(sum(own["uncertified"].sum() for own in run.sums))
    if failed:
        warnings.warn(
            f"self_play: {failed:,} of {2 * run.t * len(run.seeds):,} steps were not certified; "
            "their q may be wrong",
            UncertifiedWarning,
            stacklevel=2,
        )
    tell(watching, "on_end", run, history)
    return history
