"""Learners for bandit feedback in games (torch_occ.games): IXOMD, Balanced and Adaptive FTRL."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from torch_occ.engine.lanes import Shared
from torch_occ.engine.layout import Solver, Work
from torch_occ.engine.learners import take_step, weigh
from torch_occ.engine.play import Game, PerPair, Tally, observe, propose
from torch_occ.game.learners import FTRL
from torch_occ.games.tree import Treeplex
from torch_occ.mdp.occupancy import LayeredFlow
from torch_occ.regularizers.catalog import ConditionalEntropy
from torch_occ.regularizers.parameters import PerState
from torch_occ.regularizers.schedules import Constant


class CompiledExploring(NamedTuple):
    """`ExploringFTRL`."""

    q: PerPair
    cumulative_loss: PerPair
    visits: PerPair  # how often the others reached the state, estimated
    solver: Solver
    weights: Shared  # (n + 1, K * S * A)
    scale: PerPair
    eta: float
    adaptive: bool


class ExploringFTRL(FTRL):
    """FTRL with the conditional entropy at rates eta scale(I), and implicit exploration; compiled.

    A loss is estimated by loss / (q + eta scale(I)) on visited pairs. If `adaptive`, eta is divided
    by 1 + the sum of scale(I) / (q + ...) over the visits of I so far, an estimate of how often
    chance and the other player allowed it. `scale` is `(S,)`, by default w. The functions below
    choose these settings as three papers do.
    """

    compiled: ClassVar[Any] = CompiledExploring
    engine_only = True

    def __init__(
        self, plex: Treeplex, eta: float, scale: Tensor | None = None, adaptive: bool = False
    ) -> None:
        self.scale, self.eta = plex.weights if scale is None else scale, eta
        self.adaptive = adaptive
        rates = Constant(PerState(plex.mdp, eta * self.scale))
        super().__init__(plex.mdp, ConditionalEntropy() / rates)

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.state["visits"] = self._zeros(num_seeds)

    def settings(self) -> dict[str, Any]:
        scale = self.scale[:, None].expand(self.mdp.actions.shape)
        return super().settings() | {"scale": scale.flatten().numpy()}


@propose.register(CompiledExploring)
def _propose_exploring(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    weigh(learner.solver, learner.weights, t, work)
    if learner.adaptive:
        for k in range(len(learner.solver.weights)):
            learner.solver.weights[k] *= 1.0 + learner.visits[k % len(learner.q)]
    take_step(game.model, game, t, learner.cumulative_loss, learner, tally, work)


@observe.register(CompiledExploring)
def _observe_exploring(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    count = game.model.num_actions
    for k in range(game.pairs.shape[1]):
        i, state = game.pairs[0, k], game.states[0, k]
        bias = learner.eta * learner.scale[i]
        if learner.adaptive:
            bias /= 1.0 + learner.visits[i]
        weight = 1.0 / (learner.q[i] + bias)
        learner.cumulative_loss[i] += game.losses[0, k] * weight
        if learner.adaptive and state >= 0:  # it is -1 where the player did not get to
            for j in range(state * count, (state + 1) * count):
                learner.visits[j] += weight * learner.scale[i]


def ixomd(plex: Treeplex, episodes: int, factor: float = 1.0) -> FTRL:
    """IXOMD (Kozuno, Ménard, Munos and Valko, 2021), for losses in [0, 1].

    Read: the dilated entropy with unit weights, a constant rate, and implicit exploration in x,
    loss / (x + gamma). Derived: with a constant rate, mirror descent from the uniform policy and
    FTRL have the same iterates. Rate and gamma are factor / sqrt(number of actions times episodes);
    the paper's differ from it by logarithms.
    """
    return ExploringFTRL(plex, factor / math.sqrt(_actions(plex).sum() * episodes))


def adaptive_ftrl(plex: Treeplex, episodes: int, factor: float = 1.0) -> FTRL:
    """Adaptive FTRL (Fiegel et al., 2023).

    Read: IXOMD with rates and gamma divided as in `ExploringFTRL`. Derived: the divisor grows with
    the episodes, so both begin at factor sqrt(episodes / number of actions).
    """
    return ExploringFTRL(plex, factor * math.sqrt(episodes / _actions(plex).sum()), adaptive=True)


def balanced_ftrl(plex: Treeplex, episodes: int, factor: float = 1.0) -> FTRL:
    """Balanced FTRL (Fiegel et al., 2023).

    Read: weights w*(I), products of shares in proportion to the number of actions at and below the
    next information sets; the dilated entropy with these weights; and gamma / w*(I) for gamma.
    Derived: over q = w x both are multiplied by w / w*.
    """
    mdp, w, actions, flow = plex.mdp, plex.weights, _actions(plex), LayeredFlow(plex.mdp)
    below = flow.backward(actions, actions.sum(-1) / w)  # the actions at and below, over w
    ahead = flow.lookahead(below)
    ratio = below / (mdp.initial * below[: mdp.layer_sizes[0]]).sum()  # w* / w, of layer 0
    for here in mdp.layer_slices[1:]:
        arrived = flow.inflow((w * ratio)[:, None] * actions / ahead.where(ahead > 0, 1.0))
        ratio[here] = (below / w * arrived)[here]
    eta = factor / math.sqrt(actions.sum() * episodes)
    return ExploringFTRL(plex, eta, 1 / ratio.where(~plex.is_end, 1.0))


def _actions(plex: Treeplex) -> Tensor:
    """Which actions the information sets have, as numbers, `(S, A)`."""
    return (plex.mdp.actions & ~plex.is_end[:, None]).double()
