"""FTRL with hints and with learning rates that adapt along the run.

    q_t = argmin over q in Omega of ⟨q, Lhat_{t-1} + m_t⟩ + sum b_t(s,a) psi_t(q(s,a)),
    lhat_t = m_t + 1_t (loss_t - m_t) / q_t

m_t are hints (torch_occ.game.learners.adaptive.hints), b_t = 1 / eta_t are rates
(torch_occ.game.learners.adaptive.rates). Without both, this is `FTRL` with importance weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.contracts import check_estimate
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.adaptive.hints import Hints, MeanHints
from torch_occ.game.learners.adaptive.rates import AdaptiveRates, Rates, StabilityPenaltyMatching
from torch_occ.game.learners.ftrl import FTRL, note
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer, Scaled
from torch_occ.regularizers.catalog import LogBarrier, TabularRegularizer, Tsallis
from torch_occ.regularizers.places import PerPair
from torch_occ.regularizers.schedules import Constant
from torch_occ.regularizers.terms import Log


class AdaptiveFTRL(FTRL):
    """FTRL with hints and with rates that adapt along the run.

    Args:
        mdp: the MDP.
        regularizer: psi_t; with rates usually without a schedule, for example `LogBarrier()`.
        hints: predictions of the next loss; by default there are none. They need a log-barrier:
            the estimates of pairs that cost less than predicted are negative and as large as m/q,
            and only a log-barrier keeps the step stable then.
        rates: by default b_t = 1.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if there are hints, and the regularizer has no log-barrier; or if the rates do
            not fit the regularizer.
    """

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        *,
        hints: Hints | None = None,
        rates: Rates | None = None,
    ) -> None:
        for name, value, kind in (("hints", hints, Hints), ("rates", rates, Rates)):
            if not isinstance(value, kind | None):
                raise TypeError(f"{name}: expected an occ.{kind.__name__}, got {value!r}")
        if hints is not None:
            _check_barrier(regularizer)
        self.hints, self.rates, first = hints, rates, 1.0
        self.unscaled = regularizer  # psi without b_t
        if rates is not None:
            first = rates.start(mdp, regularizer)
            rate = PerPair(mdp, first) if rates.per_pair else first
            regularizer = regularizer * Constant(rate)
            self.max_episodes = rates.episodes
        self.first = first
        super().__init__(mdp, regularizer)

    @classmethod
    def optimistic(
        cls,
        mdp: LayeredMDP,
        episodes: int,
        first: float | None = None,
        hints: Hints | None = None,
    ) -> AdaptiveFTRL:
        """Optimistic FTRL with a log-barrier (Li, Tsuchiya and Yamanishi, 2026).

        Args:
            episodes: T, on which the rates depend.
            first: 1 / eta_1, by default 2 L as in the paper; 1 has less regret in practice.
            hints: `MeanHints()` by default.
        """
        hints = MeanHints() if hints is None else hints
        return cls(mdp, LogBarrier(), hints=hints, rates=AdaptiveRates(episodes, first))

    @classmethod
    def matching(cls, mdp: LayeredMDP, first: float = 1.0) -> AdaptiveFTRL:
        """The 1/2-Tsallis entropy with `StabilityPenaltyMatching`."""
        return cls(mdp, Tsallis(), rates=StabilityPenaltyMatching(first))

    def start(self, num_seeds: int) -> None:
        if isinstance(self.step.regularizer, Scaled) and self.rates is not None:
            self.set_rate(torch.full_like(self._rate(), self.first))
        super().start(num_seeds)
        zero = self._zeros(num_seeds)
        if self.rates is not None:
            inverse = zero + self.first
            self.state["inverse_rate"] = (
                inverse if self.rates.per_pair else inverse[:, 0, 0].clone()
            )
        if self.hints is not None:
            self._keep(self.hints.start(zero))

    def _rate(self) -> Tensor:
        """b_t in the step, which is a parameter of its regularizer."""
        scaled = self.step.regularizer
        assert isinstance(scaled, Scaled)
        assert isinstance(scaled.factor, Constant)
        return scaled.factor.rate

    def set_rate(self, b: Tensor) -> None:
        """Give the step the inverse rates b_t of all seeds."""
        self._rate().data = b

    def _keep(self, state: dict[str, Tensor]) -> None:
        self.state |= {f"hint_{name}": value for name, value in state.items()}

    def _hint_state(self) -> dict[str, Tensor]:
        return {
            name.removeprefix("hint_"): value
            for name, value in self.state.items()
            if name.startswith("hint_")
        }

    def hint(self) -> Tensor | None:
        """m_t, `(N, S, A)`, zero on masked pairs; None without hints."""
        if self.hints is None:
            return None
        return torch.where(self.mdp.actions, self.hints.predict(self._hint_state()), 0.0)

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        state, hint = self.state, self.hint()
        if self.rates is not None:
            self.set_rate(state["inverse_rate"])
        loss = state["cumulative_loss"]
        loss = loss if hint is None else loss + hint
        solution = self.step.solve(loss, float(t), warm_start=state["q"], check=False)
        state["q"] = solution.q
        note(state, solution)
        return solution.q

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        hint, losses = self.hint(), feedback.losses
        losses = losses if hint is None else losses - feedback.gather(hint)
        excess = feedback.scatter(losses / feedback.gather(q), q)
        estimate = excess if hint is None else excess + hint
        check_estimate(self.mdp, self.estimator, estimate, t, len(q))
        self.state["cumulative_loss"] = self.state["cumulative_loss"] + estimate
        if self.rates is not None:
            b = self.state["inverse_rate"]
            self.state["inverse_rate"] = self.rates.update(self.mdp, b, q, excess)
        if self.hints is not None:
            self._keep(self.hints.observe(self._hint_state(), feedback))


def _check_barrier(regularizer: Regularizer) -> None:
    """Refuse hints with a regularizer that is known to have no log-barrier on the pairs."""
    for leaf in regularizer.leaves():
        if not isinstance(leaf, TabularRegularizer):
            return  # it may have one
        for term in leaf.table():
            if term.argument == "pair" and isinstance(term.function, Log):
                return
    raise ValueError(
        "hints: they need a log-barrier, and this regularizer has none. An estimate is as small as "
        "-m / q, and without a barrier one such estimate moves nearly all of q to its pair. Add an "
        "occ.LogBarrier, or use AdaptiveFTRL.optimistic(mdp, episodes)"
    )
