"""Self-play: two learners, their average and last strategies, and their exploitability."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ._support.processes import for_each
from torch_occ.game import estimators
from torch_occ.game.callbacks import Callback
from torch_occ.game.history import Curves, History
from torch_occ.game.learners import FTRL, FixedPolicy, FollowTheLeader, Learner
from torch_occ.game.losses import BernoulliLosses
from torch_occ.game.simulate import simulate
from torch_occ.games.tree import ExtensiveGame, GamePolicy, Treeplex
from torch_occ.mdp.checks import check_kind, check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import invert
from torch_occ.mdp.occupancy import interior_point, policy_of


class Match(Learner, Callback):
    """Two learners of a game as one learner of an MDP without choices, and what adds to curves."""

    def __init__(self, game: ExtensiveGame, learners: Sequence[Any], full: bool) -> None:
        super().__init__(LayeredMDP([torch.ones(1, 1, 1, dtype=torch.float64)]))
        self.game, self.full, self.odds, self.paths = game, full, game.chance, []
        payoffs, self.learners = game.payoffs.detach(), []
        spread = (payoffs.amax(0) - payoffs.amin(0)).clamp(min=1e-300)
        self.losses = ((payoffs.amax(0) - payoffs) / spread).T.contiguous()  # in [0, 1]
        for i, (plex, pair) in enumerate(zip(game.treeplexes, game.last_pairs, strict=True)):
            self.learners.append(_prepared(plex, i, learners[i], full))
            path, count = torch.full((len(pair), plex.mdp.horizon), -1), plex.mdp.num_actions
            self.odds = self.odds / plex.weights[pair // count].where(pair >= 0, 1.0)
            while bool((pair >= 0).any()):  # the pairs on the way to the ends, by layer
                here = (pair >= 0).nonzero()[:, 0]
                path[here, plex.mdp.layer[pair[here] // count]] = pair[here]
                pair = plex.parent[pair // count].where(pair >= 0, -1)
            self.paths.append(path)

    def copy(self) -> Match:
        found = copy.copy(self)
        found.learners = [learner.copy() for learner in self.learners]
        return found

    def start(self, num_seeds: int) -> None:
        self.sums, self.curves = [], dict[str, Tensor]()
        for learner in self.learners:
            learner.seeds = self.seeds
            learner.start(num_seeds)
            q = interior_point(learner.mdp).expand(num_seeds, -1, -1).clone()
            self.sums.append({"q": q, "cumulative_occupancy": torch.stack([q, q], 1) * 0})

    @property
    def state(self) -> dict[str, Any]:
        learners = [learner.state for learner in self.learners]
        return {"learners": learners, "sums": self.sums, "curves": self.curves}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        if state:
            self.sums, self.curves = state["sums"], state["curves"]
            for learner, own in zip(self.learners, state["learners"], strict=True):
                learner.state = own

    def player(self, backend: str) -> Any:
        return MatchPlayer(self, backend)

    def diagnostics(self) -> dict[str, Tensor]:
        one, other = (learner.diagnostics() for learner in self.learners)
        both = {name: torch.maximum(x, other[name]) for name, x in one.items() if name in other}
        return (one or other) | both

    def monitor(self, mdp: LayeredMDP, q: Tensor) -> dict[str, float]:
        return {name: float(x[:, -1].mean()) for name, x in self.curves.items()}

    def strategies(self, t: int) -> dict[str, Tensor]:
        """The average strategies after t episodes, and the last, by their names in a history."""
        averages = [sums["cumulative_occupancy"].sum(1) / max(t, 1) for sums in self.sums]
        found = {f"average_q{i}": q for i, q in enumerate(averages)}
        return found | {f"last_q{i}": sums["q"].clone() for i, sums in enumerate(self.sums)}

    def on_start(self, run: Any) -> None:
        self.run = run

    def on_checkpoint(self, run: Any) -> None:
        curves, (first, second, *last) = run.learner.curves, run.learner.strategies(run.t).values()
        now = {
            "exploitability": self.game.exploitability(first, second),
            "last_exploitability": self.game.exploitability(*last),
            "payoff": self.game.value(first, second)[..., 0],
        }
        for name, x in now.items():
            new = x.detach()[:, None]
            curves[name] = torch.cat([curves.get(name, new[:, :0]), new], 1)


class MatchPlayer:
    """Plays a `Match`: bandit feedback in the kernel if it knows both learners, the rest in torch.

    With bandit feedback an end is drawn, and each player sees its own pairs on the way; the loss is
    put on the last of them. In layers that a player does not get to it sees a likely pair with the
    loss 0, which no importance weight changes.
    """

    chunks, reacts = 32, False

    def __init__(self, match: Any, backend: str) -> None:
        self.match, players = match, later("game.players")
        known = [players.form_of(x) and not x.why_not_compiled(x.mdp) for x in match.learners]
        self.compiled = all(known) and backend != "torch" and not match.full
        for learner in match.learners:
            if learner.engine_only and not self.compiled:
                reason = "plays bandit feedback only, against a learner that the engine knows"
                raise ValueError(f"learners: {type(learner).__name__} {reason}")
        self.name = "engine" if self.compiled else "torch"
        self.sides = [players.EnginePlayer(x.mdp, x, None) for x in match.learners if self.compiled]
        self.most = min((side.most for side in self.sides), default=64)

    def play(self, run: Any, means: Tensor, numbers: Tensor, tables: None, rows: range) -> None:
        """Play episodes run.t + 1, ...; see torch_occ.game.simulate.TorchPlayer."""
        begun, n = time.monotonic(), len(rows)
        drawn = numbers[:, rows.start : rows.stop, 0, 0].contiguous()
        if not self.compiled:
            for uniform in drawn.unbind(1):
                run.t, run.since = run.t + 1, run.since + 1
                self._play_round(run, uniform)
            return
        self._run(run, drawn.numpy())
        run.t, run.since = run.t + n, run.since + n
        for side in self.sides:
            side.adapt(n, time.monotonic() - begun)
        self.most = min(side.most for side in self.sides)

    def _run(self, run: Any, numbers: Any) -> None:
        """Call the kernel for every seed, in threads."""
        rows, loop = later("game.players").state_rows, later("engine.play")
        match, none, given = self.match, np.zeros((len(numbers), 2, 1)), []
        for x in self.sides:
            x.learner.check_settings()
            after = run.t + 1 + numbers.shape[1]
            over = {name: f(run.t, after) for name, f in x.over_time.items()}
            given.append((rows(x.form, x.learner.state), over))
        shared = rows(loop.Tally, {k: x for k, x in run.sums.items() if x.dim() == 1})
        shared |= dict.fromkeys(("total_mean", "expected", "realised"), none)
        shared["second_moment"] = none[:, :0, :0]
        own = [rows(loop.Tally, sums) for sums in match.sums]

        def play_seed(seed: int) -> None:
            sides = []
            for i, player in enumerate(self.sides):
                path = np.zeros((2, 1, match.paths[i].shape[1]), np.int64)
                no = np.zeros((1, 1)), np.zeros((1, 1, 1, 3)), np.zeros((1, 0, 0))
                seen = *path, path[0] * 1.0, np.zeros((1, 0))
                game = loop.Game(player.model, *no, 0, 0, run.t, 0, False, *seen)
                tally = loop.Tally(**{name: x[seed] for name, x in (shared | own[i]).items()})
                states, over = given[i]
                own_state = {name: x[seed] for name, x in states.items()}
                learner, work = player.filled(seed, 1, None, over | own_state)
                last, way = match.game.last_pairs[i].numpy(), match.paths[i].numpy()
                ends = last, way, match.losses[i].numpy()
                sides.append(loop.Side(game, tally, *ends, learner, work))
            loop.play_both(match.odds.numpy(), numbers[seed], *sides)

        for_each(play_seed, len(numbers))

    @torch.no_grad()
    def _play_round(self, run: Any, numbers: Tensor) -> None:
        """One episode of learners that the kernel does not know, or of full information."""
        match, game, n, shown = self.match, self.match.game, len(numbers), []
        qs = [x.propose(run.t).detach().expand(n, -1, -1).clone() for x in match.learners]
        if not match.full:
            reached = game.chance * game.reach(0, qs[0]) * game.reach(1, qs[1])
            end = invert(reached.cumsum(-1), numbers)
        for i, (x, q, sums) in enumerate(zip(match.learners, qs, match.sums, strict=True)):
            sums["q"] = q
            sums["cumulative_occupancy"][:, 1] += q
            table = game.loss(i, qs[1 - i]) if match.full else None
            if table is not None:  # as if every pair had been visited
                pairs, losses = torch.arange(q[0].numel()).expand(len(q), -1), table.flatten(-2)
                reached = None
            else:
                parts = zip(x.mdp.split(q, -2), x.mdp.layer_slices, strict=True)
                likely = [part.flatten(-2).argmax(-1) + k.start * q.shape[-1] for part, k in parts]
                path, last = match.paths[i][end], game.last_pairs[i][end, None]
                reached = path >= 0
                pairs = path.where(reached, torch.stack(likely, -1))
                losses = match.losses[i][end, None].where(reached & (path == last), 0.0)
            at = pairs // q.shape[-1], pairs % q.shape[-1]
            shown.append(estimators.Feedback(*at, losses, table, reached))
        none = torch.zeros(n, 1)
        run.tally(0 * run.q, estimators.Feedback(none, none, none, None))
        for learner, q, feedback in zip(match.learners, qs, shown, strict=True):
            learner.observe(run.t, q, feedback)


def _prepared(plex: Treeplex, player: int, learner: Any, full: bool) -> Learner:
    """A copy of a learner for this feedback; refuse what would be silently wrong."""
    name, kind = type(learner).__name__, "full information" if full else "bandit feedback"
    check_kind("learners", learner, Learner, f" for player {player}")
    if learner.mdp is not plex.mdp:
        raise ValueError(
            f"learners: that of player {player} was made for another MDP; make it with "
            f"game.treeplex({player}).mdp"
        )
    found: Any = learner.copy()
    found.in_game = not full  # for `ShiftedFTRL`
    fits = isinstance(found, FixedPolicy) or (full and isinstance(found, FollowTheLeader))
    if full and isinstance(found, FTRL):
        found.estimator, fits = estimators.FullInformation(), True
    elif isinstance(found, FTRL):
        known = estimators.ImportanceWeighted, estimators.ImplicitExploration
        fits = type(found.estimator) in known
    if not fits and type(found).__module__.startswith("torch_occ."):
        raise ValueError(
            f"learners: {name} does not learn from {kind} in a game; use occ.FTRL, for bandit "
            "feedback with importance weights or implicit exploration"
        )
    return found


@dataclass(repr=False, kw_only=True)
class GameHistory(Curves):
    """Curves of self-play over C checkpoints for N seeds; the rest as in `occ.History`."""

    shown = ("exploitability", "last_exploitability")

    exploitability: Tensor  # (N, C), of the average strategies
    last_exploitability: Tensor  # (N, C), of the strategies of the last episode
    payoff: Tensor  # (N, C), of player 0, with the average strategies
    average_q0: Tensor  # (N, S, A), the average strategy of player 0
    average_q1: Tensor
    last_q0: Tensor
    last_q1: Tensor
    game: ClassVar[ExtensiveGame]  # a history from a file does not know it

    @property
    def average_policy(self) -> GamePolicy:
        """The policies of the average strategies; uniform where a player never gets."""
        each = zip(self.game.treeplexes, (self.average_q0, self.average_q1), strict=True)
        return GamePolicy(self.game, tuple(policy_of(plex.mdp, q) for plex, q in each))


def self_play(
    game: ExtensiveGame,
    learners: Sequence[Learner] | Callable[[Treeplex], Learner],
    episodes: int,
    seeds: Sequence[int] = (0,),
    *,
    feedback: Literal["full", "bandit"] = "full",
    **options: Any,
) -> GameHistory:
    """Let two learners play a game against each other, for every seed.

    Args:
        learners: one for each player, made for `game.treeplex(player).mdp`; or a function that
            makes a learner from a treeplex. The run plays copies.
        feedback: "full" shows each player its whole loss against the other's strategy, in units
            of payoffs; `FTRL` then uses it instead of an estimate, and `FollowTheLeader` is
            fictitious play. "bandit" plays a history per episode; the loss at its end is
            (most - payoff) / (most - least), in [0, 1].
        options: those of `occ.simulate`: callbacks, checkpoints, save_to and others.

    Returns:
        The history: exploitabilities, certificates, and `average_policy`.

    Raises:
        ValueError, TypeError, KeyboardInterrupt: as `occ.simulate`.
    """
    check_that(feedback in ("full", "bandit"), "feedback", "full or bandit", repr(feedback))
    check_kind("game", game, ExtensiveGame)
    given = [*map(learners, game.treeplexes)] if callable(learners) else [*learners]
    check_that(len(given) == 2, "learners", "one for each of two players", len(given))
    match = Match(game, given, feedback == "full")
    losses = BernoulliLosses(torch.zeros(1, 1, dtype=torch.float64))
    options["callbacks"] = [match, *options.get("callbacks", ())]

    def history_of(played: History) -> GameHistory:
        own, kept = match.run.learner, {x.name: getattr(played, x.name) for x in fields(Curves)}
        found = GameHistory(**kept, **own.curves, **own.strategies(match.run.t))
        found.game = game  # type: ignore[misc]
        return found

    try:
        return history_of(simulate(match.mdp, match, losses, episodes, seeds, **options))
    except BaseException as error:
        if isinstance(getattr(error, "result", None), History):
            error.result = history_of(error.result)  # type: ignore[attr-defined]
        raise
