"""FTRL with a budgeted shift: the lemmas and theorems of docs/adaptive.md, evaluated.

Lemmas 1 and 2 hold along every run of `ShiftedFTRL`; Lemma 4 and the theorems in expectation. With
`ShiftSettings(gamma)`, c = b = 0, they are about `FTRL.tsallis(mdp, gamma)`, which has no
log-barrier. A mapping pi: S -> A is a one-hot policy `(*batch, S, A)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_occ.game.callbacks import Callback
from torch_occ.game.shifted import ShiftedFTRL, rate_of
from torch_occ.game.simulate import Simulation
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.regularizers.catalog import Tsallis
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory.runs import running_weights, tilde
from torch_occ.theory.statements import Statement, episodes, statement
from torch_occ.theory.terms import outside


@dataclass(frozen=True)
class ShiftSettings:
    """The constants of the theorems: gamma, c, b, and whether there are hints.

    `exits` is how many caps the end of the shift may cost: 3, or 1 with a frozen ledger.
    """

    gamma: float
    cap: float = 0.0
    budget: float = 0.0
    exits: int = 3
    hints: bool = False

    @classmethod
    def of(cls, learner: ShiftedFTRL) -> ShiftSettings:
        """The constants of a learner; gamma is NaN if no theorem holds (`learner.guarantee`)."""
        gamma, exits = rate_of(learner.step.regularizer), 1 if learner.ledger == "frozen" else 3
        gamma = math.nan if gamma is None else gamma
        return cls(gamma, learner.cap, learner.budget, exits, learner.hints)

    def limit(self, mdp: LayeredMDP, B: Tensor) -> Tensor:
        """b (1 + B) + 3 c (L + B), the right-hand side of Lemma 2."""
        return self.budget * (1 + B) + self.exits * self.cap * (mdp.horizon + B)

    @property
    def price(self) -> float:
        """b + 3c, what the shift may cost in units of B."""
        return self.budget + self.exits * self.cap


def inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩, `(*batch, S, A)` -> `(*batch,)`."""
    return (x * y).sum((-2, -1))


class ShiftCertificate(Callback):
    """What Lemmas 1 and 2 read, and the terms of Theorem A along a run of `ShiftedFTRL`.

    Lemmas 1 and 2 need `checkpoints=range(1, T + 1)`, `curves` any checkpoints.
    """

    def on_start(self, run: Simulation) -> None:
        if not isinstance(run.learner, ShiftedFTRL):
            raise ValueError(
                f"learner: this certificate is about ShiftedFTRL, not {type(run.learner).__name__}"
            )
        self.learner = run.learner
        self.rows = [self._row(run, torch.zeros_like(run.learner.state["ledger"]))]

    def on_checkpoint(self, run: Simulation) -> None:
        self.rows.append(self._row(run, run.curves["regret"][-1]))

    def _row(self, run: Simulation, regret: Tensor) -> dict[str, Any]:
        names, state = ("cumulative_loss", "shift", "ledger", "stability"), self.learner.state
        kept = {"q": run.q, "total": run.sums["total_mean"], "regret": regret}
        kept |= {name: state[name] for name in names}
        kept |= {"hint": self.learner.hint(run.t + 1), "t": torch.tensor(run.t)}
        return {name: x.clone() for name, x in kept.items()}

    def all(self, name: str) -> Tensor:
        """Everything of a name, at the start and at all C checkpoints, `(C + 1, N, ...)`."""
        return torch.stack([row[name] for row in self.rows])

    @property
    def curves(self) -> dict[str, Tensor]:
        """The terms of Theorem A by name, `(N, C)`, and `episodes` `(C,)`.

        `regret`; `stability`, the bound of Lemma 4 (i), summed; `penalty`; `moved`, which is
        ⟨u, e_T⟩ for the best policy u of a seed; `ledger` X_T; `limit`, the bound of Lemma 2 on the
        last two; `bound_terms`, their sum with stability and penalty; and `bound`. sum sqrt(q_t) is
        taken to be linear in log t between checkpoints. Compare means over seeds.
        """
        mdp, settings = self.learner.mdp, ShiftSettings.of(self.learner)
        gamma, (t, total, q) = settings.gamma, (self.all(x)[1:] for x in ("t", "total", "q"))
        u = occupancy(mdp, optimal_policy(mdp, total).policy)
        roots, best = q.sqrt().sum((-2, -1)), u.sqrt().sum((-2, -1))
        factor = 4 if settings.hints else 2
        stable = running_weights(t, lambda x: factor * gamma / x.sqrt()).to(roots)
        steps = running_weights(t, lambda x: (x.sqrt() - (x - 1).sqrt()) / gamma).to(roots)
        found = {"stability": stable @ roots, "moved": inner(u, self.all("shift")[1:])}
        found["penalty"] = steps @ roots - best * steps.sum(-1, keepdim=True)
        found["ledger"] = self.all("ledger")[1:]
        found["bound_terms"] = torch.stack([*found.values()]).sum(0)
        found["limit"] = settings.limit(mdp, self.all("stability")[1:].sum(-1))
        found["regret"] = self.all("regret")[1:]
        bounds = [theorem_a(mdp, settings, best[0], int(T)).right for T in t]
        found["bound"] = torch.stack(bounds).unsqueeze(-1).expand_as(best)
        return {"episodes": t} | {name: x.T for name, x in found.items()}


def stability_of(step: FTRLStep, q: Tensor, loss: Tensor, estimate: Tensor, t: Tensor) -> Tensor:
    """stab = ⟨q, x⟩ - (min G - min F) with G = F + ⟨., x⟩ and F = ⟨., loss⟩ + psi_t; q minimizes F.

    x is the estimate. Everything is `(*batch, S, A)`, and t and the result are `(*batch,)`.
    """
    least = tilde(step, q, loss + estimate, t)
    after = inner(least, loss + estimate) + step.regularizer(least, t, step.mdp)
    return inner(q, loss + estimate) + step.regularizer(q, t, step.mdp) - after


@torch.no_grad()
def lemma_1(run: ShiftCertificate, u: Tensor) -> tuple[Statement, dict[str, Tensor]]:
    """Lemma 1, along a run and for any u in Omega, `(*batch, S, A)`.

        sum_t ⟨q_t - u, lhat_t⟩ <= sum_t stab_t + penalty + ⟨u, e_T⟩ + X_T

    Returns the statement, and the four terms by name.
    """
    step, mdp, q, shift = run.learner.step, run.learner.mdp, run.all("q")[1:], run.all("shift")[1:]
    total, hint, u = run.all("cumulative_loss"), run.all("hint")[:-1], u.expand_as(q[0])
    t = episodes(len(q), q).unsqueeze(-1).expand(q.shape[:-2])
    loss, estimate = total[:-1] + hint + shift, torch.diff(total, dim=0)
    stability = stability_of(step, q, loss, estimate - hint, t)
    steps = step.regularizer(q[1:], t[1:], mdp) - step.regularizer(q[1:], t[:-1], mdp)
    penalty = step.regularizer(u, t[-1], mdp) - step.regularizer(q[0], t[0], mdp) - steps.sum(0)
    terms = {"stability": stability.sum(0), "penalty": penalty}
    terms |= {"moved": inner(u, shift[-1]), "ledger": run.all("ledger")[-1]}
    left, right = inner(q - u, estimate).sum(0), torch.stack([*terms.values()]).sum(0)
    scale = (inner(q, loss.abs() + estimate.abs()) + t.sqrt()).sum(0)
    return statement("Lemma 1", left, right, mdp.num_pairs, scale=scale), terms


def lemma_2(run: ShiftCertificate, u: Tensor) -> Statement:
    """Lemma 2: ⟨u, e_T⟩ + X_T <= b (1 + B_T) + 3 c (L + B_T), for any u and psi; c if frozen."""
    mdp, B = run.learner.mdp, run.all("stability")[-1].sum(-1)
    left = inner(u, run.all("shift")[-1]) + run.all("ledger")[-1]
    right = ShiftSettings.of(run.learner).limit(mdp, B)
    # The ledger is a sum over episodes.
    return statement("Lemma 2", left, right, mdp.num_pairs, scale=(1 + right) * len(run.rows))


def lemma_3(mdp: LayeredMDP, q: Tensor, mapping: Tensor) -> tuple[Statement, Statement]:
    """Lemma 3, for all q_t `(T, *batch, S, A)`: B_T <= 2 sqrt(L S A T), and

    B_T = sum_t sum sqrt(q_t / t) (1 - pi_t) <= 2 sum_t sum_s sum_{a != pi(s)} sqrt(q_t / t).
    """
    roots = (q / episodes(len(q), q).view(-1, *(1,) * (q.dim() - 1))).sqrt()
    B, terms = (roots * (1 - policy_of(mdp, q))).sum((0, -2, -1)), mdp.num_pairs * len(q)
    root = 2 * math.sqrt(mdp.horizon * mdp.num_pairs * len(q))
    others = statement("Lemma 3, outside", B, 2 * outside(roots, mapping).sum(0), terms)
    return statement("Lemma 3", B, root, terms), others


def lower_order(mdp: LayeredMDP, gamma: float, hints: bool) -> float:
    """The factor of eta_t^2 / gamma^2 in Lemma 4 (ii):

    8 gamma^2 L^3 S sqrt(A), and gamma^2 (128 L^3 S sqrt(A) + 80 L (S A)^(3/2)) with hints.
    """
    rare = mdp.horizon**3 * mdp.num_states * math.sqrt(mdp.num_actions)
    return gamma**2 * (128 * rare + 80 * mdp.horizon * mdp.num_pairs**1.5 if hints else 8 * rare)


@torch.no_grad()
def lemma_4(
    mdp: LayeredMDP,
    q: Tensor,
    estimate: Tensor,
    chance: Tensor,
    t: int,
    gamma: float,
    hint: Tensor | None = None,
) -> tuple[Statement, Statement]:
    """Lemma 4: E[stab_t | past] at q_t = q `(S, A)` is (i) at most 2 eta_t sum sqrt(q), (ii) and

        at most 4 eta_t L^2 sum sqrt(q) (1 - pi) + 8 eta_t^2 L^3 S sqrt(A).

    With hints, (i) needs eta_t <= 1/4 and has 4 for 2; (ii) needs eta_t L <= 1/16, and has 16 for 4
    and the second term of `lower_order`.

    Args:
        estimate: lhat_t of every trajectory, `(M, S, A)`.
        chance: its probability, `(M,)`.
        hint: m_t, `(S, A)`.
    """
    eta, L, step = gamma / math.sqrt(t), mdp.horizon, FTRLStep(mdp, Tsallis() / InverseSqrt(gamma))
    loss = torch.where(mdp.actions, 1 / (2 * eta * q.sqrt()), 0.0)  # q is the minimum of F
    times, many = torch.full_like(chance, float(t)), q.expand_as(estimate)
    known = torch.zeros_like(q) if hint is None else hint
    left = (chance * stability_of(step, many, loss.expand_as(many), estimate - known, times)).sum()
    b, factor = (q.sqrt() * (1 - policy_of(mdp, q))).sum(), 2.0 if hint is None else 4.0
    right = factor**2 * eta * L**2 * b + lower_order(mdp, gamma, hint is not None) / t
    scale = (chance * inner(q, estimate.abs() + known)).sum() + q.sqrt().sum() / eta
    worst = factor * eta * q.sqrt().sum()
    first = statement("Lemma 4 (i)", left, worst, mdp.num_pairs, scale=scale)
    return first, statement("Lemma 4 (ii)", left, right, mdp.num_pairs, scale=scale)


def lemma_5(mdp: LayeredMDP, q: Tensor, u: Tensor, mapping: Tensor) -> Statement:
    """Lemma 5, for u of any mapping: sum sqrt(q) - sum sqrt(u) is at most

    sum_{a != pi(s)} sqrt(q) + sqrt(2 S L) sqrt(sum_{a != pi(s)} (q + u)).
    """
    left = q.sqrt().sum((-2, -1)) - u.sqrt().sum((-2, -1))
    away = (outside(q, mapping) + outside(u, mapping)).sqrt()
    right = outside(q.sqrt(), mapping) + math.sqrt(2 * mdp.num_states * mdp.horizon) * away
    return statement("Lemma 5", left, right, mdp.num_pairs, scale=q.sqrt().sum((-2, -1)))


def theorem_a(mdp: LayeredMDP, settings: ShiftSettings, regret: Tensor, T: int) -> Statement:
    """Theorem A: the mean of `regret` over seeds, against one fixed policy, is at most

    (4 gamma + 1 / gamma + 2 (b + 3c)) sqrt(L S A T) + b + 3 c L; 8 gamma with hints.
    """
    slope = 1 / settings.gamma + (8 if settings.hints else 4) * settings.gamma + 2 * settings.price
    root = math.sqrt(mdp.horizon * mdp.num_pairs * T)
    right = slope * root + settings.limit(mdp, torch.zeros(()))
    return statement("Theorem A", regret.mean(), right, mdp.num_pairs)


def theorem_b(
    mdp: LayeredMDP, settings: ShiftSettings, regret: Tensor, T: int, gaps: Tensor, C: float = 0.0
) -> Statement:
    """Theorem B, with gaps Delta `(S, A)`, 0 on one action of each state, and corruption C:

    Reg <= 2 U + V + 2 sqrt((3 C / 2 + U + V) U), with U and V of docs/adaptive.md. It is infinite
    if an optimal action is not unique.
    """
    L, S, gamma, log = mdp.horizon, mdp.num_states, settings.gamma, 1 + math.log(T)
    # The S least gaps are those of pi*. Another zero is a tie, and the bound is infinite.
    found = gaps[mdp.actions].sort().values[S:]
    G = 1 / gamma + (32 if settings.hints else 8) * gamma * L**2 + 2 * settings.price
    U = log * float(G**2 / 2 * (1 / found).sum() + S * L / (gamma**2 * found.min()))
    V = float(settings.limit(mdp, torch.zeros(()))) + log * lower_order(mdp, gamma, settings.hints)
    if settings.hints:  # Lemma 4 (i) while eta_t L > 1/16
        V += 128 * gamma**2 * L * math.sqrt(L * mdp.num_pairs)
    right = 2 * U + V + 2 * math.sqrt((1.5 * C + U + V) * U)
    return statement("Theorem B", regret.mean(), right, mdp.num_pairs)
