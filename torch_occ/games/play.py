"""Self-play: two learners, their average and last strategies, and their exploitability."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torch_occ._support.choices import later, summary_writer
from torch_occ.game.callbacks import Callback
from torch_occ.game.estimators import (
    Feedback,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
)
from torch_occ.game.history import Curves, History
from torch_occ.game.learners import FTRL, FixedPolicy, FollowTheLeader, Learner
from torch_occ.game.losses import BernoulliLosses
from torch_occ.game.shifted import ShiftedFTRL
from torch_occ.game.simulate import simulate
from torch_occ.games.tree import ExtensiveGame, GamePolicy, Treeplex
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, interior_point
from torch_occ.regularizers.catalog import ConditionalEntropy
from torch_occ.regularizers.parameters import PerState
from torch_occ.regularizers.schedules import Constant

# -- Learners for games ----------------------------------------------------------------------------


class OptimisticFTRL(FTRL):
    """FTRL with the last estimated loss counted twice; last iterates may then converge."""

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.state["last"] = self._zeros(num_seeds)

    def loss(self, t: int) -> Tensor:
        return self.state["cumulative_loss"] + self.state["last"]

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        before = self.state["cumulative_loss"]
        super().observe(t, q, feedback)
        self.state["last"] = self.state["cumulative_loss"] - before


class ExploringFTRL(FTRL):
    """FTRL for bandit feedback with losses in [0, 1], compiled only.

    psi is the conditional entropy over the rates eta scale(I). A loss is estimated by
    loss / (q + eta scale(I)) on visited pairs. If `adaptive`, both are divided by 1 + the sum of
    w / (q + ...) over the visits of I so far, an estimate of how often chance and the other player
    allowed it.

    Args:
        scale: one number for each state, `(S,)`.
    """

    compiled = lambda: later("games.compiled").CompiledExploring  # noqa: E731
    engine_only = True

    def __init__(
        self, treeplex: Treeplex, scale: Tensor, eta: float, adaptive: bool = False
    ) -> None:
        rates = Constant(PerState(treeplex.mdp, eta * scale))
        super().__init__(treeplex.mdp, ConditionalEntropy() / rates)
        self.scale, self.eta, self.adaptive = scale, eta, adaptive

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.state["visits"] = self._zeros(num_seeds)

    def settings(self) -> dict[str, Any]:
        scale = self.scale[:, None].expand(self.mdp.actions.shape)
        return super().settings() | {"scale": scale.flatten().numpy()}


def _rate(treeplex: Treeplex, episodes: int) -> float:
    """1 / sqrt(number of actions times episodes)."""
    return 1.0 / math.sqrt(int(treeplex.mdp.actions[~treeplex.is_end].sum()) * episodes)


def ixomd(treeplex: Treeplex, episodes: int, factor: float = 1.0) -> FTRL:
    """IXOMD (Kozuno, Ménard, Munos and Valko, 2021).

    Read: the dilated entropy with unit weights, a constant rate, and implicit exploration in x,
    loss / (x + gamma). Derived: with a constant rate, mirror descent from the uniform policy and
    FTRL have the same iterates. Rate and gamma are factor / sqrt(number of actions times episodes);
    the paper's differ from it by logarithms.
    """
    return ExploringFTRL(treeplex, treeplex.weights, factor * _rate(treeplex, episodes))


def adaptive_ftrl(treeplex: Treeplex, episodes: int, factor: float = 1.0) -> FTRL:
    """Adaptive FTRL (Fiegel et al., 2023).

    Read: IXOMD with rates and gamma divided as `ExploringFTRL` does. Derived: the divisor grows
    with the episodes, so both begin at factor sqrt(episodes / number of actions).
    """
    eta = factor * episodes * _rate(treeplex, episodes)
    return ExploringFTRL(treeplex, treeplex.weights, eta, adaptive=True)


def balanced_ftrl(treeplex: Treeplex, episodes: int, factor: float = 1.0) -> FTRL:
    """Balanced FTRL (Fiegel et al., 2023).

    Read: weights w*(I), products of shares in proportion to the number of actions at and below the
    next information sets; the dilated entropy with these weights; and gamma / w*(I) in place of
    gamma. Derived: over q = w x both are multiplied by w / w*.
    """
    mdp, w, real = treeplex.mdp, treeplex.weights, ~treeplex.is_end
    flow, actions = LayeredFlow(mdp), (mdp.actions & real[:, None]).double()
    below = flow.backward(actions, actions.sum(-1) / w)  # the actions at and below, over w
    ahead = flow.lookahead(below)
    ratio = below / (mdp.initial * below[: mdp.layer_sizes[0]]).sum()  # w* / w; here of layer 0
    for here in mdp.layer_slices[1:]:
        arrived = flow.inflow((w * ratio)[:, None] * actions / ahead.where(ahead > 0, 1.0))
        ratio[here] = (below / w * arrived)[here]
    scale = (1 / ratio).where(real, 1.0)
    return ExploringFTRL(treeplex, scale, factor * _rate(treeplex, episodes))


# -- Both players as one learner, and what a run leaves --------------------------------------------


class Match(Learner):
    """Two learners that play a game, as one learner of an MDP without choices, for `simulate`.

    The MDP has enough layers for the random numbers of a history. The state has that of both
    learners, their last q and the sums of q, and the curves.
    """

    def __init__(self, game: ExtensiveGame, learners: Sequence[Learner], full: bool) -> None:
        row = torch.ones(1, 1, 1, dtype=torch.float64)
        super().__init__(LayeredMDP([row] * max(1, -(-game.depth // 3))))
        self.game, self.full = game, full
        self.learners = [_prepared(game, i, learner, full) for i, learner in enumerate(learners)]
        payoffs = game.payoffs.detach()
        most, least = payoffs.amax(0), payoffs.amin(0)
        losses = (most - payoffs) / (most - least).clamp(min=1e-300)  # in [0, 1]
        self.losses = losses.T.contiguous().numpy()

    def copy(self) -> Match:
        found = copy.copy(self)
        found.learners = [learner.copy() for learner in self.learners]
        return found

    def start(self, num_seeds: int) -> None:
        self.sums, self.curves = [], {}
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
        """Plays both learners; see torch_occ.game.simulate.Player."""
        return later("games.compiled").MatchPlayer(self, backend)

    def diagnostics(self) -> dict[str, Tensor]:
        found = [x for x in (learner.diagnostics() for learner in self.learners) if x]
        if len(found) < 2:
            return found[0] if found else {}
        both = {name: torch.maximum(x, found[1][name]) for name, x in found[0].items()}
        return both | {"newton_steps": found[0]["newton_steps"] + found[1]["newton_steps"]}

    def strategies(self, t: int) -> dict[str, Tensor]:
        """The average strategies after t episodes and the last ones, by their names in a history."""
        found = {}
        for i, sums in enumerate(self.sums):
            found[f"average_q{i}"] = sums["cumulative_occupancy"].sum(1) / max(t, 1)
            found[f"last_q{i}"] = sums["q"].clone()
        return found

    def record(self, t: int) -> None:
        """Add a point to the curves."""
        game, x = self.game, self.strategies(t)
        now = {
            "exploitability": game.exploitability(x["average_q0"], x["average_q1"]),
            "last_exploitability": game.exploitability(x["last_q0"], x["last_q1"]),
            "payoff": game.value(x["average_q0"], x["average_q1"])[..., 0],
        }
        for name, value in now.items():
            new = value.detach()[:, None]
            self.curves[name] = torch.cat([self.curves.get(name, new[:, :0]), new], 1)


def _prepared(game: ExtensiveGame, player: int, learner: Any, full: bool) -> Learner:
    """A copy of a learner for this feedback; refuse what would be silently wrong."""
    kind = type(learner)
    if not isinstance(learner, Learner):
        raise TypeError(
            f"learners: expected an occ.Learner for player {player}, got {kind.__name__}"
        )
    if learner.mdp is not game.treeplex(player).mdp:
        raise ValueError(
            f"learners: that of player {player} was made for another MDP; make it with "
            f"game.treeplex({player}).mdp"
        )
    found = learner.copy()
    if full and isinstance(found, FTRL) and not isinstance(found, ShiftedFTRL | ExploringFTRL):
        found.estimator = FullInformation()
        return found
    weights = isinstance(found, FTRL) and type(found.estimator) in (
        ImportanceWeighted,
        ImplicitExploration,
    )
    foreign = not kind.__module__.startswith("torch_occ.")
    fits = isinstance(found, FollowTheLeader) if full else weights
    if not (foreign or fits or isinstance(found, FixedPolicy)):
        raise ValueError(
            f"learners: {kind.__name__} cannot play a game with "
            f"{'full information' if full else 'bandit feedback'}; use occ.FTRL"
            + ("" if full else " with importance weights or implicit exploration")
        )
    return found


@dataclass(repr=False)
class GameHistory(Curves):
    """Curves of self-play over C checkpoints for N seeds, as in `occ.History`."""

    shown = ("exploitability", "last_exploitability")

    episodes: Tensor  # (C,)
    exploitability: Tensor  # (N, C), of the average strategies
    last_exploitability: Tensor  # (N, C), of the strategies of the last episode
    payoff: Tensor  # (N, C), of player 0, with the average strategies
    newton_steps: Tensor  # (N, C), of both players, as the three that follow
    dual_residual: Tensor  # (N, C)
    flow_residual: Tensor  # (N, C)
    uncertified: Tensor  # (N, C)
    wall_time: Tensor  # (C,), seconds
    average_q0: Tensor  # (N, S, A), the average strategy of player 0
    average_q1: Tensor
    last_q0: Tensor
    last_q1: Tensor
    seeds: tuple[int, ...]
    backend: str
    finished: bool
    config: dict[str, Any]

    #: The game; a history from a file does not know it.
    game: ClassVar[ExtensiveGame]

    @property
    def average_policy(self) -> GamePolicy:
        """The policies of the average strategies."""
        return GamePolicy.of(self.game, (self.average_q0, self.average_q1))

    @property
    def last_policy(self) -> GamePolicy:
        """The policies of the last episode."""
        return GamePolicy.of(self.game, (self.last_q0, self.last_q1))


class _Recorder(Callback):
    """Records the curves of a match, and writes them for TensorBoard if a directory is given."""

    def __init__(self, directory: str | Path | None) -> None:
        self.directory = directory

    def on_start(self, run: Any) -> None:
        self.run = run
        if self.directory is not None:
            self.writer = summary_writer(self.directory, purge_step=run.t + 1)

    def on_checkpoint(self, run: Any) -> None:
        run.learner.record(run.t)
        if self.directory is not None:
            steps = {
                f"solver/{name}": run.curves[name][-1] for name in ("uncertified", "dual_residual")
            }
            game = {f"game/{name}": x[:, -1] for name, x in run.learner.curves.items()}
            for name, x in (game | steps).items():
                self.writer.add_scalar(name, float(x.mean()), run.t)

    def on_end(self, run: Any, history: Any) -> None:
        if self.directory is not None:
            self.writer.close()


def self_play(
    game: ExtensiveGame,
    learners: Sequence[Learner] | Callable[[Treeplex], Learner],
    episodes: int,
    seeds: Sequence[int] = (0,),
    *,
    feedback: Literal["full", "bandit"] = "full",
    tensorboard: str | Path | None = None,
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
        tensorboard: a directory for the curves.
        options: those of `occ.simulate`: callbacks, checkpoints, save_to and others.

    Returns:
        The history: `exploitability` of the average strategies and of the last, certificates,
        `average_policy` and `last_policy`.

    Raises:
        ValueError, TypeError, KeyboardInterrupt: as `occ.simulate`.
    """
    if feedback not in ("full", "bandit"):
        raise ValueError(f"feedback: expected full or bandit, got {feedback!r}")
    if callable(learners):
        learners = [learners(plex) for plex in game.treeplexes]
    if len(learners) != 2:
        raise ValueError(f"learners: expected one for each of two players, got {len(learners)}")
    match, recorder = Match(game, learners, feedback == "full"), _Recorder(tensorboard)
    losses = BernoulliLosses(torch.zeros(match.mdp.num_states, 1, dtype=torch.float64))
    options["callbacks"] = [recorder, *options.get("callbacks", ())]

    def history_of(played: History) -> GameHistory:
        own, names = recorder.run.learner, {field.name for field in fields(GameHistory)}
        kept = {name: x for name, x in vars(played).items() if name in names}
        found = GameHistory(**kept, **own.curves, **own.strategies(recorder.run.t))
        found.game = game
        return found

    try:
        return history_of(simulate(match.mdp, match, losses, episodes, seeds, **options))
    except BaseException as error:
        if isinstance(getattr(error, "result", None), History):
            error.result = history_of(error.result)
        raise
