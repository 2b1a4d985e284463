"""Hints: a prediction m_t of the loss function of episode t, made before the episode.

`AdaptiveFTRL` adds m_t to the cumulative loss and estimates the loss by m_t + (loss - m_t) / q on
the visited pairs. So its regret depends on the errors of the hints and not on the losses. To write
new hints, derive from `Hints`. Their state is part of the learner's state.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ.game.checks import check_estimate
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, policy_of
from torch_occ.regularizers.base import Regularizer, Scaled, Sum, TabularRegularizer
from torch_occ.regularizers.catalog import LogBarrier, Tsallis
from torch_occ.regularizers.parameters import PerPair
from torch_occ.regularizers.schedules import Constant, InverseSqrt
from torch_occ.regularizers.terms import Log


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
        for found, known in ((self.hints, MeanHints), (self.rates, AdaptiveRates)):
            if found is not None and type(found) is not known:
                return f"the engine does not know {type(found).__name__}"
        return super().why_not_compiled(mdp)

    def settings(self) -> dict[str, Any]:
        found, hints, rates = super().settings(), self.hints, self.rates
        found |= {
            "hinted": hints is not None,
            "prior": hints.prior if isinstance(hints, MeanHints) else 0.0,
            "count": hints.count if isinstance(hints, MeanHints) else 1.0,
            "log_episodes": math.log(rates.episodes or 1) if rates is not None else 0.0,
        }
        if rates is None:
            found["inverse_rate"] = np.zeros(0)
        else:
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


# -- FTRL on a shifted loss, with a budget for what the shift may cost -----------------------------
#
#     q_t = argmin over q in Omega of ⟨q, Lhat_{t-1} + e_t⟩ + psi_t(q),
#     e_t = clip(t m - Lhat_{t-1}, -k_t, k_t) f_t,    k_t = c (1 + B_{t-1} of the layer),
#     B_t = sum_{tau <= t} sum sqrt(q_tau / tau) (1 - pi_tau),
#     X_t = X_{t-1} + ⟨q_t, e_{t-1} - e_t⟩
#
# m is the mean of the observed losses of a pair, Lhat the sum of its importance-weighted losses.


Ledger = Literal["hard", "smooth", "frozen"]

#: gamma, c and b, chosen on MDPs 8801 of two shapes (docs/adaptive.md).
GAMMA, CAP, BUDGET = 0.85, 5.0, 10.0


class ShiftedFTRL(FTRL):
    """FTRL whose cumulative loss is moved towards t m, the means, within a budget.

    Importance weights Lhat are right in every world, and noisy: few observations of a rare action
    decide. The means m of all observations are quieter, and wrong where losses change. The step is
    taken with Lhat + e. The shift e leads from Lhat towards t m, and is at most c (1 + B) per
    layer, where B is the stability term of FTRL itself. The ledger X is what the shift has cost.
    Its limit is b (1 + B). So the regret is that of the 1/2-Tsallis entropy, and at most

        (4 gamma + 1/gamma + 2 (b + 3c)) sqrt(L S A T) + b + 3 c L

    against any adversary (Theorem A), and O(log T + sqrt(C log T)) where losses are stochastic,
    with corruption C (Theorem B). docs/adaptive.md has the proofs; `guarantee` says whether they
    hold for the settings, and `torch_occ.theory.shifted` evaluates them.

    Args:
        mdp: the MDP.
        regularizer: psi_t; by default the 1/2-Tsallis entropy with eta_t = 0.85 / sqrt(t), and with
            hints that with eta_t = 1 / sqrt(t) and a log-barrier of weight 0.5.
        cap: c. 0 is `FTRL` with importance weights.
        budget: b.
        ledger: what happens when X exceeds b (1 + B). "hard": the shift is 0 from then on.
            "smooth": the shift is multiplied by 1 - X / (b (1 + B)), at least 0. "frozen": X is
            tested before the episode, and the shift stays as it was if it would exceed the limit;
            the step is then taken twice, and 3c in the theorems is c.
        hints: the mean losses m are also hints, as in `AdaptiveFTRL`, with this prior; without
            hints the prior of m is 0, worth one observation.

    The state has the shift, the `ledger` X, the `stability` B of each layer, and `refused`, the
    number of episodes in which the ledger was closed.

    Raises:
        TypeError: if the hints are not `MeanHints`.
        ValueError: if `cap` or `budget` is negative or infinite, or the ledger is not one of these;
            or if there are hints, and the regularizer has no log-barrier.
    """

    compiled = lambda: later("game.players").forms.CompiledShifted  # noqa: E731

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer | None = None,
        *,
        cap: float = CAP,
        budget: float = BUDGET,
        ledger: Ledger = "hard",
        hints: MeanHints | None = None,
    ) -> None:
        for name, value in (("cap", cap), ("budget", budget)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")
        if ledger not in get_args(Ledger):
            expected = ", ".join(map(repr, get_args(Ledger)))
            raise ValueError(f"ledger: expected one of {expected}, got {ledger!r}")
        if not (hints is None or type(hints) is MeanHints):
            raise TypeError(f"hints: expected an occ.game.MeanHints, got {hints!r}")
        if regularizer is None and hints is None:
            regularizer = Tsallis() / InverseSqrt(GAMMA)
        elif regularizer is None:
            regularizer = Tsallis() / InverseSqrt(1.0) + LogBarrier(0.5)
        super().__init__(mdp, regularizer)
        if hints is not None:
            _check_barrier(regularizer)
        self.cap, self.budget, self.ledger, self.hinted = cap, budget, ledger, hints is not None
        self.prior, self.count = (0.0, 1.0) if hints is None else (hints.prior, hints.count)

    @property
    def guarantee(self) -> str:
        """The theorems of docs/adaptive.md that hold, or "none" and the assumption that fails."""
        parts = root_and_barrier(self.step.regularizer)
        if parts is None:
            return (
                "none: Lemma 4 needs the 1/2-Tsallis entropy with eta_t = gamma / sqrt(t), and at "
                f"most a log-barrier beside it; the regularizer is {self.step.regularizer}"
            )
        _, barrier = parts
        if not self.hinted or barrier >= 4 * self.mdp.horizon:
            return "Theorems A and B"
        if barrier >= 2:
            return (
                "Theorem A; with hints, Theorem B needs a log-barrier of at least 4 L = "
                f"{4 * self.mdp.horizon}, and this one has {barrier:g}"
            )
        return (
            "none: with hints, estimates may be negative, and Lemma 4 needs a log-barrier of at "
            f"least 2; this one has {barrier:g}"
        )

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        zero = self._zeros(num_seeds)
        self.state |= {name: zero.clone() for name in ("visits", "losses", "shift")}
        self.state |= {name: zero[:, 0, 0].clone() for name in ("ledger", "refused")}
        self.state["stability"] = zero.new_zeros(num_seeds, self.mdp.horizon)

    def mean(self) -> Tensor:
        """m, `(N, S, A)`; zero on masked pairs."""
        total = self.count * self.prior + self.state["losses"]
        return torch.where(self.mdp.actions, total / (self.count + self.state["visits"]), 0.0)

    def room(self) -> Tensor:
        """b (1 + B), the limit of the ledger, `(N,)`."""
        return self.budget * (1 + self.state["stability"].sum(-1))

    def loss(self, t: int) -> Tensor:
        total = self.state["cumulative_loss"] + self.state["shift"]
        return total + self.mean() if self.hinted else total

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        state, last, room = self.state, self.state["shift"], self.room()
        most = self.cap * (1 + state["stability"])[:, self.mdp.layer].unsqueeze(-1)
        apart = (t - self.hinted) * self.mean() - state["cumulative_loss"]
        share = torch.ones_like(room)
        if self.ledger == "hard":
            share[(state["ledger"] > room) | (state["refused"] > 0)] = 0.0
        elif self.ledger == "smooth":
            tiny = torch.finfo(room.dtype).tiny
            share = (1 - state["ledger"].clamp(min=0) / room.clamp(min=tiny)).clamp(min=0)
        state["shift"] = torch.minimum(torch.maximum(apart, -most), most) * share[:, None, None]
        q = super().propose(t)
        spent = state["ledger"] + (q * (last - state["shift"])).sum((-2, -1))
        refused = share == 0
        if self.ledger == "frozen" and bool((refused := spent > room).any()):
            wide, first = refused[:, None, None], super().diagnostics()
            state["shift"] = torch.where(wide, last, state["shift"])
            state["q"] = q = torch.where(wide, super().propose(t), q)
            for name, x in first.items():
                again = x + state[name] if name in ("newton_steps", "uncertified") else state[name]
                state[name] = torch.where(refused, again, x)
            spent = torch.where(refused, state["ledger"], spent)
        state["ledger"], state["refused"] = spent, state["refused"] + refused
        return q

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        state, losses = self.state, feedback.losses
        roots = (q / t).sqrt() * (1 - policy_of(self.mdp, q))
        parts = self.mdp.split(roots.sum(-1), -1)
        state["stability"] = state["stability"] + torch.stack([x.sum(-1) for x in parts], -1)
        hint = self.mean() if self.hinted else torch.zeros_like(q)
        excess = (losses - feedback.gather(hint)) / feedback.gather(q)
        estimate = hint + feedback.scatter(excess, q)
        check_estimate(self.mdp, self.estimator, estimate, t, len(q))
        state["cumulative_loss"] = state["cumulative_loss"] + estimate
        for name, seen in (("visits", torch.ones_like(losses)), ("losses", losses)):
            state[name] = state[name] + feedback.scatter(seen, q)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"rule": get_args(Ledger).index(self.ledger)}


def root_and_barrier(regularizer: Regularizer) -> tuple[float, float] | None:
    """gamma and w of -(sqrt(t) / gamma) sum sqrt(q) + w sum log(1 / q); None if psi differs."""
    parts = regularizer.terms if isinstance(regularizer, Sum) else [regularizer]
    gammas, barrier = [], 0.0
    for part in parts:
        numbers = [x for x in part.parameters() if x.numel() == 1]
        if len(numbers) < len(list(part.parameters())):
            return None
        if isinstance(part, LogBarrier):
            barrier += float(part.beta.detach())
        elif (
            isinstance(part, Scaled)
            and isinstance(inner := part.regularizer, Tsallis)
            and isinstance(rate := part.factor, InverseSqrt)
            and part.power == -1
            and float(torch.as_tensor(inner.power).detach()) == 0.5
        ):
            gammas.append(float(rate.gamma.detach()))
        else:
            return None
    return (gammas[0], barrier) if len(gammas) == 1 else None
