"""Hints: a prediction m_t of the loss function of episode t, made before the episode.

`AdaptiveFTRL` adds m_t to the cumulative loss and estimates the loss by m_t + (loss - m_t) / q on
the visited pairs. So its regret depends on the errors of the hints and not on the losses. To write
new hints, derive from `Hints`. Their state is part of the learner's state.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ.game.checks import check_estimate
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, policy_of
from torch_occ.regularizers.base import Regularizer, Scaled, TabularRegularizer
from torch_occ.regularizers.catalog import LogBarrier, Tsallis
from torch_occ.regularizers.parameters import PerPair
from torch_occ.regularizers.schedules import Constant, InverseSqrt
from torch_occ.regularizers.terms import Log, Power, Term, XLogX


class Hints:
    """Base class. The state is a dictionary of tensors whose first dimension is the seed."""

    def start(self, zero: Tensor) -> dict[str, Tensor]:
        """The first state; `zero` is `(N, S, A)`."""
        return {}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        """m_t, `(N, S, A)`."""
        raise NotImplementedError(f"{type(self).__name__}: write predict(state) -> (N, S, A)")

    def observe(self, state: dict[str, Tensor], feedback: Feedback) -> dict[str, Tensor]:
        """The state after an episode."""
        return state


class MeanHints(Hints):
    """The mean of the observed losses of each pair, with a prior.

        m = (count * prior + sum of losses) / (count + number of visits)

    In a stochastic world the errors are then the noise of the losses, and the regret has their
    variances (Li, Tsuchiya and Yamanishi, 2026).

    Raises:
        ValueError: if `prior` is outside [0, 1] or `count` is not positive.
    """

    def __init__(self, prior: float = 0.5, count: float = 1.0) -> None:
        if not (0 <= prior <= 1 and count > 0):
            raise ValueError(
                "prior, count: expected a number in [0, 1] and a positive number, got "
                f"{prior} and {count}"
            )
        self.prior, self.count = prior, count

    def start(self, zero: Tensor) -> dict[str, Tensor]:
        return {"visits": zero.clone(), "losses": zero.clone()}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        return (self.count * self.prior + state["losses"]) / (self.count + state["visits"])

    def observe(self, state: dict[str, Tensor], feedback: Feedback) -> dict[str, Tensor]:
        visits, ones = state["visits"], torch.ones_like(feedback.losses)
        return {
            "visits": visits + feedback.scatter(ones, visits),
            "losses": state["losses"] + feedback.scatter(feedback.losses, visits),
        }


class GradientHints(Hints):
    """Gradient descent on (m - loss)^2 / 2: m <- (1 - step) m + step loss on the visited pairs.

    The regret then has the path length of the losses (Li, Tsuchiya and Yamanishi, 2026, with
    step = 1/4).

    Raises:
        ValueError: if `prior`, the first m, is outside [0, 1], or `step` outside (0, 1].
    """

    def __init__(self, step: float = 0.25, prior: float = 0.5) -> None:
        if not (0 < step <= 1 and 0 <= prior <= 1):
            raise ValueError(
                f"step, prior: expected numbers in (0, 1] and [0, 1], got {step} and {prior}"
            )
        self.step, self.prior = step, prior

    def start(self, zero: Tensor) -> dict[str, Tensor]:
        return {"hint": zero + self.prior}

    def predict(self, state: dict[str, Tensor]) -> Tensor:
        return state["hint"]

    def observe(self, state: dict[str, Tensor], feedback: Feedback) -> dict[str, Tensor]:
        hint = state["hint"]
        moved = self.step * (feedback.losses - feedback.gather(hint))
        return {"hint": hint + feedback.scatter(moved, hint)}


# -- Learning rates that follow from what was observed, one per pair or one for all ----------------
#
# The regularizer of episode t is that of the learner times b_t = 1 / eta_t: every term is
# multiplied by b_t(s, a). To write new rates, derive from `Rates`; b_t is part of the learner's
# state.


class Rates:
    """Base class."""

    #: Whether there is one rate per pair, b `(N, S, A)`, or one for all pairs, b `(N,)`.
    per_pair = False
    #: The number of episodes that the rates were made for, if they depend on it.
    episodes: int | None = None

    def start(self, mdp: LayeredMDP, regularizer: Regularizer) -> float:
        """b_1; raise a ValueError if the regularizer does not fit."""
        raise NotImplementedError(f"{type(self).__name__}: write start(mdp, regularizer) -> b_1")

    def update(self, mdp: LayeredMDP, b: Tensor, q: Tensor, excess: Tensor) -> Tensor:
        """b_{t+1} from b_t, from q_t and from the estimate of loss - m_t, `(N, S, A)` both."""
        raise NotImplementedError(f"{type(self).__name__}: write update(mdp, b, q, excess) -> b")


class AdaptiveRates(Rates):
    """One rate per pair, for a log-barrier (Li, Tsuchiya and Yamanishi, 2026).

        b_{t+1} = b_t + zeta_t / (b_t log T),
        zeta_t = q_t^2 min{ x^2, (Q - V)^2 },        x = the estimate of loss - m_t,

    with Q and V of x and the policy of q_t. zeta_t is zero on pairs that were not visited.

    Args:
        episodes: T.
        first: b_1; by default 2 L, as in the paper. Smaller values explore less at first.

    Raises:
        ValueError: if a number is not positive.
    """

    per_pair = True

    def __init__(self, episodes: int, first: float | None = None) -> None:
        if not (episodes > 1 and (first is None or 0 < first < math.inf)):
            raise ValueError(
                "episodes, first: expected more than one episode and a positive number, got "
                f"{episodes} and {first}"
            )
        self.episodes, self.first = episodes, first

    def start(self, mdp: LayeredMDP, regularizer: Regularizer) -> float:
        return 2.0 * mdp.horizon if self.first is None else self.first

    def update(self, mdp: LayeredMDP, b: Tensor, q: Tensor, excess: Tensor) -> Tensor:
        assert self.episodes is not None
        policy, flow = policy_of(mdp, q), LayeredFlow(mdp)
        V = flow.backward(policy, (policy * excess).sum(-1))
        advantage = excess + flow.lookahead(V) - V.unsqueeze(-1)
        zeta = q.square() * torch.minimum(excess.square(), advantage.square())
        return b + zeta / (b * math.log(self.episodes))


class StabilityPenaltyMatching(Rates):
    """One rate for all pairs that balances stability and penalty (Ito, Tsuchiya and Honda, 2024).

        b_{t+1} = b_t + z_t / (b_t h_t)

    z_t / b_t bounds the stability and (b_{t+1} - b_t) h_t the penalty of episode t. For phi =
    - sum q^p, with the variance (1 - pi) / q of the advantages, and for phi = sum q log q,

        z_t = sum q^(1-p) (1 - pi) / (2 p (1 - p)),    h_t = sum q(s,a)^p - sum q(s)^p,
        z_t = sum (1 - pi) / 2,                        h_t = - sum q log pi.

    With p = 1/2, z_t / h_t varies little, so b_t is close to a multiple of sqrt(t).

    Args:
        first: b_1.

    Raises:
        ValueError: if `first` is not positive; in `start`, if the regularizer is neither `Tsallis`
            nor `Shannon` without a schedule.
    """

    def __init__(self, first: float = 1.0) -> None:
        if not 0 < first < math.inf:
            raise ValueError(f"first: expected a positive number, got {first}")
        self.first = first
        self.term: Term | None = None

    def start(self, mdp: LayeredMDP, regularizer: Regularizer) -> float:
        self.term = term_of(regularizer)
        return self.first

    def update(self, mdp: LayeredMDP, b: Tensor, q: Tensor, excess: Tensor) -> Tensor:
        assert self.term is not None
        policy, state = policy_of(mdp, q), q.sum(-1)
        others = torch.where(mdp.actions, 1 - policy, 0.0)
        if isinstance(self.term.function, Power):
            p = float(torch.as_tensor(self.term.function.p).detach())
            z = (q ** (1 - p) * others).sum((-2, -1)) / (2 * p * (1 - p))
            h = (q**p).sum((-2, -1)) - (state**p).sum(-1)
        else:
            z = others.sum((-2, -1)) / 2
            h = -torch.xlogy(q, policy).sum((-2, -1))
        return b + z / (b * h.clamp(min=torch.finfo(q.dtype).tiny))


def term_of(regularizer: Regularizer) -> Term:
    """The term of `Tsallis` or `Shannon`.

    Raises:
        ValueError: for any other regularizer, and for an exponent per layer, state or pair.
    """
    if isinstance(regularizer, TabularRegularizer):
        terms, scalar = regularizer.table(), not (regularizer.places() or regularizer.batched())
        function, weight = terms[0].function, terms[0].weight
        expected = {Power: -1.0, XLogX: 1.0}.get(type(function))
        if scalar and len(terms) == 1 and terms[0].argument == "pair" and weight == expected:
            return terms[0]
    raise ValueError(
        "rates: StabilityPenaltyMatching knows occ.Tsallis and occ.Shannon, without a schedule and "
        f"with one exponent, got {regularizer}"
    )


# -- FTRL with hints and with learning rates that adapt along the run ------------------------------
#
#     q_t = argmin over q in Omega of ⟨q, Lhat_{t-1} + m_t⟩ + sum b_t(s,a) psi_t(q(s,a)),
#     lhat_t = m_t + 1_t (loss_t - m_t) / q_t
#
# m_t are hints (torch_occ.game.adaptive), b_t = 1 / eta_t are rates
# (torch_occ.game.adaptive). Without both, this is `FTRL` with importance weights.


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

    compiled = lambda: later("game.players").forms.CompiledAdaptive  # noqa: E731

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

    def loss(self, t: int) -> Tensor:
        hint, total = self.hint(), self.state["cumulative_loss"]
        return total if hint is None else total + hint

    def propose(self, t: int) -> Tensor:
        if self.rates is not None:
            self.set_rate(self.state["inverse_rate"])
        return super().propose(t)

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

    def why_not_compiled(self, mdp: LayeredMDP) -> str | None:
        for found, known in ((self.hints, _HINTS), (self.rates, _RATES)):
            if type(found) not in known:
                return f"the engine does not know {type(found).__name__}"
        return super().why_not_compiled(mdp)

    def settings(self) -> dict[str, Any]:
        found, hints, rates = super().settings(), self.hints, self.rates
        found |= {
            "hints": _HINTS[type(hints)],
            "prior": hints.prior if isinstance(hints, MeanHints) else 0.0,
            "count": hints.count if isinstance(hints, MeanHints) else 1.0,
            "step": hints.step if isinstance(hints, GradientHints) else 0.0,
            "rates": _RATES[type(rates)],
            "log_episodes": math.log(rates.episodes or 1) if rates is not None else 0.0,
        }
        if rates is None:
            found["inverse_rate"] = np.zeros(0)
        elif rates.per_pair:
            solver, pairs = found["solver"], self.mdp.actions.numel()
            weights = np.ones(len(solver.terms.argument) * pairs)
            found["solver"] = solver._replace(weights=weights)
        return found

    def check_settings(self) -> None:
        super().check_settings()
        if self.rates is not None:
            self.set_rate(self.state["inverse_rate"])  # shown by TensorBoard

    def _tuned(self) -> Regularizer:
        return self.unscaled


#: The numbers of hints and rates that the compiled form knows, as in torch_occ.engine.learners.
_HINTS = {type(None): 0, MeanHints: 1, GradientHints: 2}
_RATES = {type(None): 0, AdaptiveRates: 1, StabilityPenaltyMatching: 2}


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


# -- FTRL on the empirical means of the losses, corrected where importance weights contradict t ----
#
#     q_t = argmin over q in Omega of ⟨q, t m + c⟩ + psi_t(q),
#     c = D max{0, 1 - width^2 V / D^2},    D = Lhat - (t - 1) m
#
# m is the mean of the observed losses of a pair, Lhat the sum of its importance-weighted losses,
# and V the sum of their squares, which estimates the variance of Lhat.


#: gamma and width, chosen on MDPs 80 to 90 (docs/adaptive.md).
GAMMA, WIDTH = 0.85, 3.0


class CorrectedFTRL(FTRL):
    """FTRL that trusts empirical means until importance weights contradict them.

    Importance weights are unbiased in every world. But an action that is played with probability
    q ~ 1/t has weights ~ t, so that a few recent observations decide, and the others are wasted.
    The empirical mean m uses all observations alike. It is right if the mean losses do not
    change, and may be wrong otherwise. So the step is taken with t m. The difference D between the
    importance-weighted sum and (t - 1) m is added as far as noise does not explain it: shrunk by
    the factor 1 - width^2 V / D^2 (the non-negative garrote of Breiman, 1995), and left out if that
    is negative. V is the sum of the squared importance-weighted losses. The step is then never
    farther than width sqrt(V) from that of `FTRL` with importance weights, in any coordinate of
    the cumulative loss.

    There is no theorem. It is good with random losses and against an adversary that reacts. Where
    means change from outside, its regret may be linear. docs/adaptive.md has what was measured.

    Args:
        mdp: the MDP.
        regularizer: psi_t; by default the 1/2-Tsallis entropy with eta_t = 0.85 / sqrt(t). It needs
            no log-barrier.
        width: how many standard deviations are put down to noise. 0 is `FTRL` with importance
            weights, up to the mean m, which is added once as a hint.
        prior: m = (count * prior + sum of losses) / (count + number of visits). Zero is optimistic:
            pairs that were seen seldom are tried again.
        count: how many observations the prior is worth.

    Raises:
        ValueError: if `width` is negative or infinite, `prior` is outside [0, 1], or `count` is not
            positive.
    """

    compiled = lambda: later("game.players").forms.CompiledCorrected  # noqa: E731

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer | None = None,
        *,
        width: float = WIDTH,
        prior: float = 0.0,
        count: float = 1.0,
    ) -> None:
        if not 0 <= width < math.inf:
            raise ValueError(f"width: expected a finite number of at least 0, got {width}")
        if not (0 <= prior <= 1 and 0 < count < math.inf):
            raise ValueError(
                "prior, count: expected a number in [0, 1] and a positive number, got "
                f"{prior} and {count}"
            )
        if regularizer is None:
            regularizer = Tsallis() / InverseSqrt(GAMMA)
        super().__init__(mdp, regularizer)
        self.width, self.prior, self.count = width, prior, count

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        zero = self._zeros(num_seeds)
        self.state |= {name: zero.clone() for name in ("visits", "losses", "squares")}

    def loss(self, t: int) -> Tensor:
        """t m + c, the loss of the step of episode t, `(N, S, A)`; zero on masked pairs."""
        state = self.state
        mean = (self.count * self.prior + state["losses"]) / (self.count + state["visits"])
        apart = state["cumulative_loss"] - (t - 1) * mean
        noise = self.width**2 * state["squares"]
        clear = apart.square() > noise
        kept = torch.where(clear, 1 - noise / torch.where(clear, apart, 1.0).square(), 0.0)
        return torch.where(self.mdp.actions, t * mean + apart * kept, 0.0)

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        super().observe(t, q, feedback)
        state, weighted = self.state, feedback.losses / feedback.gather(q)
        seen = {
            "visits": torch.ones_like(weighted),
            "losses": feedback.losses,
            "squares": weighted.square(),
        }
        for name, values in seen.items():
            state[name] = state[name] + feedback.scatter(values, q)
