"""FTRL on a shifted loss, with a budget for what the shift may cost.

    q_t = argmin over q in Omega of ⟨q, Lhat_{t-1} + e_t⟩ + psi_t(q),
    e_t = clip(t m - Lhat_{t-1}, -k_t, k_t) f_t,    k_t = c (1 + B_{t-1} of the layer),
    B_t = sum_{tau <= t} sum sqrt(q_tau / tau) (1 - pi_tau),
    X_t = X_{t-1} + ⟨q_t, e_{t-1} - e_t⟩

m is the mean of the observed losses of a pair, Lhat the sum of its importance-weighted losses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ.game.checks import check_estimate
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import policy_of
from torch_occ.regularizers.base import Regularizer, Scaled, Sum, TabularRegularizer
from torch_occ.regularizers.catalog import LogBarrier, Tsallis
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.regularizers.terms import Log

Ledger = Literal["hard", "smooth", "frozen"]

#: gamma, c and b, chosen on MDPs 8801 of two shapes (docs/adaptive.md).
GAMMA, CAP, BUDGET = 0.85, 5.0, 10.0


@dataclass(frozen=True)
class MeanHints:
    """Hints of `ShiftedFTRL`: the mean of the observed losses of each pair, with a prior.

        m = (count * prior + sum of losses) / (count + number of visits)

    Raises:
        ValueError: if `prior` is outside [0, 1] or `count` is not positive.
    """

    prior: float = 0.5
    count: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.prior <= 1 and self.count > 0):
            raise ValueError(
                "prior, count: expected a number in [0, 1] and a positive number, got "
                f"{self.prior} and {self.count}"
            )


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
        hints: the mean losses m, with this prior, also predict the next loss: they are added to
            the loss of the step, and losses are estimated by m + (loss - m) / q on visited pairs.
            This needs a log-barrier. Without hints the prior of m is 0, worth one observation.

    The state has the shift, the `ledger` X, the `stability` B of each layer, and `refused`, the
    number of episodes in which the ledger was closed.

    Raises:
        TypeError: if the hints are not `MeanHints`.
        ValueError: if `cap` or `budget` is negative or infinite, or the ledger is not one of these;
            or if there are hints, and the regularizer has no log-barrier.
    """

    compiled = lambda: later("engine.learners").CompiledShifted  # noqa: E731

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
        if not self.hinted or barrier >= 2 * self.mdp.horizon:
            return "Theorems A and B"
        if barrier >= 2:
            return (
                "Theorem A; with hints, Theorem B needs a log-barrier of at least 2 L = "
                f"{2 * self.mdp.horizon}, and this one has {barrier:g}"
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
        "occ.LogBarrier, or give no regularizer"
    )


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
