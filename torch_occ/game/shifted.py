"""FTRL on a shifted loss, with a budget for what the shift may cost.

    q_t = argmin over q in Omega of ⟨q, Lhat_{t-1} + m_t + e_t⟩ + psi_t(q),
    e_t = clip((t - 1) m_t - Lhat_{t-1}, -k_t, k_t) f_t,    k_t = c (1 + B_{t-1} of the layer),
    B_t = sum_{tau <= t} sum sqrt(q_tau / tau) (1 - pi_tau),
    X_t = X_{t-1} + ⟨q_t, e_{t-1} - e_t⟩

m_t is the mean of the observed losses of a pair, Lhat the sum of its estimated losses.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ.game.checks import check_estimate
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import FTRL
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import policy_of
from torch_occ.regularizers.base import Regularizer, Scaled
from torch_occ.regularizers.catalog import Tsallis
from torch_occ.regularizers.schedules import InverseSqrt

Ledger = Literal["hard", "smooth", "frozen"]

#: gamma, c and b, chosen on MDPs 8801 of two shapes (docs/adaptive.md).
GAMMA, CAP, BUDGET = 0.85, 2.0, 4.0


class ShiftedFTRL(FTRL):
    """FTRL whose cumulative loss is moved towards t m, the means, within a budget.

    The regret is at most (8 gamma + 1/gamma + 2 (b + 3c)) sqrt(L S A T) + b + 3 c L against any
    adversary (Theorem A), and O(log T + sqrt(C log T)) where losses are stochastic, with corruption
    C (Theorem B). docs/adaptive.md explains and proves it; `guarantee` says whether the theorems
    hold for the settings, and `torch_occ.theory.shifted` evaluates them.

    Args:
        mdp: the MDP.
        regularizer: psi_t; by default the 1/2-Tsallis entropy with eta_t = 0.85 / sqrt(t).
        cap: c.
        budget: b.
        ledger: what happens when X exceeds b (1 + B). "hard": the shift is 0 from then on.
            "smooth": the shift is multiplied by 1 - X / (b (1 + B)), at least 0. "frozen": X is
            tested before the episode, and the shift stays as it was if it would exceed the limit;
            the step is then taken twice, and 3c in the theorems is c.
        hints: m is added to the loss of the step, and losses are estimated by
            m + (loss - m) 1{visited} / q where q >= 16 eta_t^2, elsewhere by loss 1{visited} / q.
            Hints begin when eta_t <= 1/4. Without hints, m only directs the shift, and 8 gamma in
            Theorem A is 4 gamma. `cap=0` without hints is `FTRL`.

    The state has the shift, the `ledger` X, the `stability` B of each layer, and `refused`, the
    number of episodes in which the ledger was closed.

    Raises:
        ValueError: if `cap` or `budget` is negative or infinite, or the ledger is not one of these.
    """

    compiled = lambda: later("game.players").learners.CompiledShifted  # noqa: E731
    in_game = False  # whether others decide, too, which states are visited; `self_play` sets it

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer | None = None,
        *,
        cap: float = CAP,
        budget: float = BUDGET,
        ledger: Ledger = "hard",
        hints: bool = True,
    ) -> None:
        for name, value in (("cap", cap), ("budget", budget)):
            check_that(0 <= value < math.inf, name, "a finite number of at least 0", value)
        known = get_args(Ledger)
        check_that(ledger in known, "ledger", f"one of {', '.join(map(repr, known))}", repr(ledger))
        if regularizer is None:
            regularizer = Tsallis() / InverseSqrt(GAMMA)
        super().__init__(mdp, regularizer)
        self.cap, self.budget, self.ledger, self.hints = cap, budget, ledger, hints

    @property
    def guarantee(self) -> str:
        """The theorems of docs/adaptive.md that hold, or "none" and the assumption that fails."""
        if rate_of(self.step.regularizer) is not None:
            return "Theorems A and B"
        return (
            "none: Lemma 4 needs the 1/2-Tsallis entropy with eta_t = gamma / sqrt(t); the "
            f"regularizer is {self.step.regularizer}"
        )

    @property
    def threshold(self) -> float:
        """16 gamma^2, with gamma = 1 for other regularizers; hints are for q >= threshold / t."""
        return 16 * (rate_of(self.step.regularizer) or 1.0) ** 2 if self.hints else math.inf

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        zero = self._zeros(num_seeds)
        self.state |= {name: zero.clone() for name in ("visits", "losses", "shift")}
        self.state |= {name: zero[:, 0, 0].clone() for name in ("ledger", "refused")}
        self.state["stability"] = zero.new_zeros(num_seeds, self.mdp.horizon)
        if self.in_game:
            self.state["reach"] = zero.clone()

    def mean(self) -> Tensor:
        """m, `(N, S, A)`."""
        return self.state["losses"] / (1 + self.state["visits"])

    def prediction(self, t: int) -> Tensor:
        """Of the losses of episode t: m; in a game, times the mean of 1{s visited} / q(s)."""
        return self.mean() * (self.state["reach"] / max(t - 1, 1) if self.in_game else 1.0)

    def hint(self, t: int) -> Tensor:
        """The prediction in the loss of the step, 0 before hints begin."""
        return self.prediction(t) * (t >= self.threshold)

    def loss(self, t: int) -> Tensor:
        return self.state["cumulative_loss"] + self.state["shift"] + self.hint(t)

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        state, last = self.state, self.state["shift"]
        room = self.budget * (1 + state["stability"].sum(-1))  # the limit of the ledger
        most = self.cap * (1 + state["stability"])[:, self.mdp.layer].unsqueeze(-1)
        apart = (t - (t >= self.threshold)) * self.prediction(t) - state["cumulative_loss"]
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
        hint = self.mean() * (t >= self.threshold) * (q >= self.threshold / t)
        seen = torch.ones_like(losses) if feedback.reached is None else feedback.reached.to(q)
        odds = feedback.gather(q if feedback.table is None else torch.ones_like(q))
        estimate = feedback.scatter(seen * (losses - feedback.gather(hint)) / odds, q)
        if self.in_game:
            here = feedback.scatter(seen, q).sum(-1, keepdim=True)
            here = here / q.sum(-1, keepdim=True).where(here > 0, 1.0)
            state["reach"], hint = state["reach"] + here, hint * here
        estimate = hint + estimate
        check_estimate(self.mdp, self.estimator, estimate, t, len(q))
        state["cumulative_loss"] = state["cumulative_loss"] + estimate
        for name, x in (("visits", seen), ("losses", losses)):
            state[name] = state[name] + feedback.scatter(x, q)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"rule": get_args(Ledger).index(self.ledger)}


def rate_of(regularizer: Regularizer) -> float | None:
    """gamma of -(sqrt(t) / gamma) sum sqrt(q); None if psi differs."""
    match regularizer:
        case Scaled(regularizer=Tsallis(power=power), factor=InverseSqrt(gamma=gamma), power=-1):
            if gamma.numel() == 1 and float(torch.as_tensor(power).detach()) == 0.5:
                return float(gamma.detach())
    return None
