"""FTRL over the occupancy measures of transitions that are learned.

    q_t = argmin over q in Omega(P_i) of ⟨q, L_t⟩ + psi_t(q),     the policy is q_t(s, a) / q_t(s),

where P_i are the empirical transitions of epoch i. Jin, Huang and Luo (2021) prove their bound for
widths, bonus, upper occupancy bounds and a new start in every epoch (`jin_huang_luo`). The plug-in,
which is the default, has none of these and no proof.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ.engine import layout as at
from torch_occ.engine.lanes import Shared, power, where
from torch_occ.engine.layout import Model, Solver, Work, routine
from torch_occ.engine.learners import take_step
from torch_occ.engine.play import Game, PerPair, Tally, observe, occupy_by, propose
from torch_occ.game.learners import FTRL
from torch_occ.game.players import solver_settings
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, uniform_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import LogBarrier, Tsallis
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.rivals import beliefs
from torch_occ.rivals.beliefs import CountingLearner, Widths
from torch_occ.step.arrays import WeightsOverTime, model_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.ways import why_not_game

#: What `UnknownFTRL` has beside the fields of all counting learners. Weight k of psi is
#: `powers[0, k]` * time ** `powers[1, k]`.
_OWN: dict[str, Any] = {
    "cumulative_loss": PerPair,
    "solver": Solver,  # its middle belongs to the believed model, as does q
    "believed": Model,
    "powers": Shared,  # (2, K or K * S * A)
    "restart": bool,
    "uniform": PerPair,  # the uniform policy
    "bonus": PerPair,
    "loss": PerPair,  # of the step
    "fresh": PerPair,  # the q with which an epoch begins
}
_FIELDS = beliefs.COUNTING | _OWN
CompiledUnknown: Any = NamedTuple("CompiledUnknown", [*_FIELDS.items()])  # type: ignore[misc]


class UnknownFTRL(CountingLearner):
    """FTRL for unknown transitions, over the occupancy measures of the empirical ones.

    The loss of the step is L_t = sum of estimates - (number of estimates) * bonus, with the bonus
    of the current epoch. The sum is over all episodes before t, or with `restart` over those of
    the epoch, and psi is taken at t, or with `restart` at the number of the episode in the epoch.
    Estimates are importance weights.

    Args:
        mdp: only its layout is kept (`mdp.blind()`).
        regularizer: psi_t of the package, whose weights are powers of t.
        widths: confidence widths. Estimates then divide by the upper occupancy bound u_t (Comp-UOB)
            instead of q_t.
        bonus: whether the bonus of `widths` is subtracted from every estimate.
        restart: whether a new FTRL instance begins in every epoch.

    Raises:
        TypeError, ValueError: if an argument is wrong, or `widths` are missing.
    """

    compiled = CompiledUnknown
    fingerprint_ignores = (*CountingLearner.fingerprint_ignores, "valid")
    bias = 0.0  # of the estimates

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        *,
        widths: Widths | None = None,
        bonus: bool = False,
        restart: bool = False,
    ) -> None:
        super().__init__(mdp)
        for name, value, kind, example in (
            ("regularizer", regularizer, Regularizer, "jin_luo(mdp)"),
            ("widths", widths, Widths | None, 'rivals.Widths.of("practical", mdp)'),
        ):
            fine = isinstance(value, kind)
            check_that(fine, name, f"for example occ.{example}", repr(value), TypeError)
        if widths is None and bonus:
            raise ValueError(
                "widths: a bonus needs confidence widths, for example "
                'occ.rivals.Widths.of("practical", mdp)'
            )
        self.step = FTRLStep(self.mdp, regularizer)
        self.valid: list[Any] = []  # the last parameters that `check_settings` found valid
        self.widths, self.bonus, self.restart = widths, bonus, restart
        self.max_episodes = None if widths is None else widths.episodes or None

    @classmethod
    def practical(cls, mdp: LayeredMDP, regularizer: Regularizer | None = None) -> UnknownFTRL:
        """Small widths and bonuses, upper occupancy bounds, no restarts; without any guarantee.

        The regularizer is by default Tsallis() / InverseSqrt(1) + LogBarrier(1).
        """
        default = Tsallis() / InverseSqrt(1.0) + LogBarrier(1.0)
        psi = default if regularizer is None else regularizer
        return cls(mdp, psi, widths=Widths.of("practical", mdp), bonus=True)

    @classmethod
    def jin_huang_luo(cls, mdp: LayeredMDP, episodes: int | None = None) -> UnknownFTRL:
        """The algorithm of Jin, Huang and Luo (2021) with the constants that they print.

        psi_t = -sqrt(tau) sum sqrt(q) - 128 L^4 sum log q with tau the number of the episode in its
        epoch, and delta = T^-3. Two things differ, and both help: one pseudo-count, and no bonus
        where the next state is certain.

        Raises:
            ValueError: if the number of episodes is missing.
        """
        if episodes is None or episodes < 2:
            raise ValueError(
                "episodes: the algorithm of Jin, Huang and Luo needs the number of episodes T, at "
                f"least 2, for its confidence level T^-3; got {episodes}"
            )
        psi = Tsallis() / InverseSqrt(1.0) + LogBarrier(128.0 * mdp.horizon**4)
        widths = Widths.of("jin_huang_luo", mdp, episodes, float(episodes) ** -3)
        return cls(mdp, psi, widths=widths, bonus=True, restart=True)

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.step.check_parameters()
        zero = self.state["cumulative_loss"] = self._zeros(num_seeds)
        uniform = uniform_policy(self.mdp).expand_as(zero)
        self.state["q"] = occupancy(self.believed(), uniform, in_order=True)

    def believed(self) -> LayeredMDP:
        """The MDP over whose occupancy measures the step is taken, a batch of N."""
        return self.mdp.with_transitions(self.transitions())

    def why_not_compiled(self, mdp: LayeredMDP) -> str | None:
        regularizer = self.step.regularizer
        if regularizer.batched():
            return "the regularizer has batched parameters"
        reason = why_not_game(mdp, regularizer)
        if reason is None and not WeightsOverTime(regularizer, mdp.actions.shape).are_powers:
            reason = "the weights of the regularizer are not powers of t"
        return reason

    def settings(self) -> dict[str, Any]:
        mdp, regularizer = self.mdp, self.step.regularizer
        return super().settings() | {
            "solver": solver_settings(self.step)["solver"],
            "believed": model_of(mdp, dense=True)._replace(conserved=True),
            "powers": WeightsOverTime(regularizer, mdp.actions.shape).powers(),
            "uniform": uniform_policy(mdp).numpy().flatten(),
        }

    check_settings = FTRL.check_settings


# -- compiled --------------------------------------------------------------------------------------


@propose.register(CompiledUnknown)
def _propose_believed(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        if learner.confidence.bounded:
            beliefs.bound_transitions(game.model, learner)
        believe(learner, work)
    set_time(float(game.before + t + 1), learner, work)
    take_step(learner.believed, game, t, learner.loss, learner, tally, work)
    beliefs.write_policy(game.model.num_actions, learner.uniform, learner)


@observe.register(CompiledUnknown)
def _observe_unknown(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    beliefs.estimate_losses(game, learner.confidence.bounded, learner)
    for i in range(len(learner.q)):
        learner.cumulative_loss[i] += learner.estimate[i]
    if beliefs.count_episode(game, t, learner):
        believe(learner, work)
        renew(learner, work)


@routine(inline=True)
def believe(learner: Any, work: Work) -> None:
    """Write the believed models, their interior points, and the bonus."""
    model, entry, widths = learner.believed, learner.entry, learner.confidence.widths
    layers, num_actions = len(model.start) - 1, model.num_actions
    for k in range(layers):
        reach = widths.share * float(layers - 1 - k if widths.remaining else layers)
        for i in range(model.start[k] * num_actions, model.start[k + 1] * num_actions):
            total = 0.0
            for e in range(entry[i], entry[i + 1] if model.exists[at.PAIR, i] else entry[i]):
                total += learner.widths[e]
                if k + 1 < layers:
                    model.next_state[i, e - entry[i]] = learner.belief[e]
                    model.arrivals[e - entry[i], i] = learner.belief[e]
            if learner.confidence.bonus:
                learner.bonus[i] = reach * min(widths.share * total, 1.0)
    occupy_by(model, learner.uniform, False, learner.solver.middle, work)


@routine(inline=True)
def renew(learner: Any, work: Work) -> None:
    """Start epochs with q of the last policy, or with `restart` of the uniform one."""
    model, new = learner.believed, learner.begun[0] > 0.0
    if not learner.restart:
        occupy_by(model, learner.policy, False, learner.fresh, work)
    for i in range(len(learner.q)):
        if learner.restart:
            learner.cumulative_loss[i] = where(new, 0.0, learner.cumulative_loss[i])
            learner.fresh[i] = learner.solver.middle[i]
        learner.q[i] = where(new, learner.fresh[i], learner.q[i])
    work.notes[at.ERROR] = where(new, np.inf, work.notes[at.ERROR])
    work.notes[at.RECENT] = where(new, 0.0, work.notes[at.RECENT])
    work.notes[at.GUESSED] = where(new, 0.0, work.notes[at.GUESSED])


@routine(inline=True)
def set_time(t: float, learner: Any, work: Work) -> None:
    """Set the loss of the step and the weights of psi at episode t."""
    powers, weights, most = learner.powers, learner.solver.weights, 0.0
    counted = t - where(learner.restart, learner.epoch_start[0], 1.0)
    for i in range(len(learner.loss)):
        learner.loss[i] = learner.cumulative_loss[i] - counted * learner.bonus[i]
    time = counted + 1.0
    for k in range(powers.shape[1]):
        before = weights[k]
        weights[k] = powers[0, k] * power(time, powers[1, k])
        change = abs(weights[k] - before)
        most = max(most, where(change > 0.0, change / abs(before), 0.0))
    work.notes[at.ERROR] += most
