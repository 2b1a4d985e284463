"""The regret of a run, taken apart (`app:appendix_proof_ftrl`): penalty, stability, and the small rest.

Every statement of this part but the last is true along every single run, whatever the losses were: it takes the q_t and the loss estimates
as they came. `Recorder` keeps them, `decompose` solves for all tilde q_t at once and evaluates the terms, and the methods of
`Decomposition` are the lemmas. Differences of objective values are Bregman divergences here, so that no digits cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_occ.game.callbacks import Callback
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.arguments import keep
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory.bounds import lower_order
from torch_occ.theory.hessian import bregman, curvatures, hessian_of_step, hybrid, log_barrier
from torch_occ.theory.parameters import Parameters, episodes
from torch_occ.theory.recursion import curvature, inverse_hessian
from torch_occ.theory.stability import norm
from torch_occ.theory.statements import Statement, statement

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation


class Trajectory(NamedTuple):
    """What every episode of a run played and estimated."""

    q: Tensor  # (T, *batch, S, A), q_t
    estimate: Tensor  # (T, *batch, S, A), the loss estimates


class Recorder(Callback):
    """Keeps q_t and the loss estimates of a run of FTRL with `checkpoints=range(1, T + 1)`."""

    def __init__(self) -> None:
        self.q: list[Tensor] = []
        self.cumulative: list[Tensor] = []

    def on_checkpoint(self, run: Simulation) -> None:
        Parameters.of(run.learner)
        if run.t != len(self.q) + 1:
            raise ValueError(f"checkpoints: the recorder needs every episode, but episode {len(self.q) + 1} was skipped")
        self.q.append(run.q.clone())
        self.cumulative.append(run.learner.state["cumulative_loss"].clone())

    @property
    def trajectory(self) -> Trajectory:
        """All episodes so far, (T, seeds, S, A)."""
        total = torch.stack(self.cumulative)
        return Trajectory(torch.stack(self.q), torch.diff(total, dim=0, prepend=torch.zeros_like(total[:1])))


# -- one step -------------------------------------------------------------------------------------------------------------


def tilde(step: FTRLStep, q: Tensor, cumulative_loss: Tensor, t: Tensor | float) -> Tensor:
    """tilde q_t = argmin over Omega of G_t(q) = <q, hat L_t> + psi_t(q), `eq:tilde_q_def`; hat L_t includes the estimate of episode t.

    Read: G_t is printed as <q_t, hat L_t> + psi_t(q), whose minimizer would not depend on the losses at all.
    """
    with torch.no_grad():
        solution = step.solve(cumulative_loss, t, warm_start=q, check=False)
        # A warm start can lie too close to the boundary; from the middle, Newton's method is certain.
        return solution.q if bool(solution.converged.all()) else step.solve(cumulative_loss, t).q


def close_hessian(mdp: LayeredMDP, q: Tensor, p: Tensor, parameters: Parameters, t: Tensor) -> Statement:
    """`lem:close_hessian`: if q(s,a) / 2 <= p(s,a) everywhere, then 1/4 (Hessian of psi_t at p) <= (Hessian of psi_t at q).

    The largest eigenvalue of the first in the norm of the second, against 1, over the pairs that exist. q and p are in Omega; every state
    has at least two actions.
    """
    exists = mdp.actions.flatten()
    identity = torch.eye(len(exists), dtype=q.dtype, device=q.device)
    inflow = mdp.joint_transitions.flatten(-3, -2).mT.repeat_interleave(mdp.num_actions, -2)  # row (s, a) is the inflow of s
    # eq:quadratic_form: the Hessian is A' diag(weights) A. Squares are never formed, which leaves twice as many digits.
    A = torch.cat([identity.expand_as(inflow), inflow - identity], -2)[..., exists]
    at_q, at_p = (_weights(mdp, x, parameters, t).sqrt().unsqueeze(-1) for x in (q, p))
    length = (at_q * A).norm(dim=-2, keepdim=True)
    R = torch.linalg.qr(at_q * A / length).R
    ratio = torch.linalg.solve_triangular(R, at_p * A / (2 * length), upper=True, left=False)
    condition = torch.linalg.matrix_norm(torch.linalg.inv(R))
    largest = torch.linalg.matrix_norm(ratio, 2).square()
    return statement("lem:close_hessian", largest, 1.0, mdp.num_pairs, scale=condition)


def _weights(mdp: LayeredMDP, q: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """What psi_t weighs w(s,a)^2 and (h(s) - w(s,a))^2 with, `(*batch, 2 S A)`; zero on masked pairs."""
    (c, d), eta = curvatures(mdp, q, parameters.alpha), parameters.eta(t)[..., None, None]
    barrier = keep("pair", mdp, parameters.beta / keep("pair", mdp, q, 1.0).square(), 0.0)
    return torch.cat([(d / eta + barrier).flatten(-2), (c / eta).flatten(-2)], -1)


def smooth_update(mdp: LayeredMDP, q: Tensor, tilde_q: Tensor) -> tuple[Statement, Statement]:
    """`lem:smooth_update`, for beta >= 64 L: q_t(s,a) / 2 <= tilde q_t(s,a) <= 2 q_t(s,a).

    The largest q / tilde q and the largest tilde q / q over the pairs, against 2.
    """
    down, up = (torch.where(mdp.actions, x, 1.0).amax((-2, -1)) for x in (q / tilde_q, tilde_q / q))
    return statement("lem:smooth_update, below", down, 2.0, 1), statement("lem:smooth_update, above", up, 2.0, 1)


def step_length(mdp: LayeredMDP, q: Tensor, tilde_q: Tensor, parameters: Parameters, t: Tensor) -> tuple[Statement, Statement]:
    """`eq:earlier_argument`, for beta >= 64 L: beta sum (tilde q - q)^2 / q^2 <= |tilde q - q|^2 (norm of psi_t at q_t) <= 1.

    Read: the squares of the norms are missing in print. Together with beta >= 9 this gives `lem:smooth_update`, with 4/3 in place of 2.
    """
    change = keep("pair", mdp, tilde_q - q, 0.0)
    barrier = parameters.beta * (change / keep("pair", mdp, q, 1.0)).square().sum((-2, -1))
    whole = norm(hessian_of_step(mdp, q, parameters, t), change)
    label = "eq:earlier_argument"
    return statement(f"{label}, log-barrier", barrier, whole, mdp.num_pairs**2), statement(f"{label}, whole", whole, 1.0, mdp.num_pairs**2)


# -- a run ----------------------------------------------------------------------------------------------------------------


def proper_comparator(
    mdp: LayeredMDP, first: Tensor, best: Tensor, total_loss: Tensor, parameters: Parameters, count: int
) -> list[Statement]:
    """`lem:proper_comparator` for v = (1 - 1/T) q_opt + q_1 / T: the three statements about it.

    sum_t <v - q_opt, loss_t> <= 2 L,    phi_L(v) - phi_L(q_1) <= beta |S| |A| log T,    phi_H(v) - phi_H(q_opt) <= (1 + alpha) |S| |A| / T.

    `total_loss` is sum_t loss_t `(*batch, S, A)`, whose estimate is unbiased; the paper's 64 L is beta.
    """
    v = comparator_point(first, best, count)
    alpha, beta, pairs = parameters.alpha, parameters.beta, mdp.num_pairs
    shift = ((v - best) * total_loss).sum((-2, -1))
    barrier = log_barrier(mdp, v, beta) - log_barrier(mdp, first, beta)
    roots = hybrid(mdp, v, alpha) - hybrid(mdp, best, alpha)
    label, log = "lem:proper_comparator", torch.tensor(float(count), dtype=first.dtype).log()
    return [
        statement(f"{label}, loss", shift, 2.0 * mdp.horizon, pairs, scale=float(count * mdp.horizon)),
        statement(f"{label}, log-barrier", barrier, beta * pairs * log, pairs, scale=log_barrier(mdp, v, beta).abs()),
        statement(f"{label}, hybrid", roots, (1 + alpha) * pairs / count, pairs, scale=-hybrid(mdp, best, alpha)),
    ]


def comparator_point(first: Tensor, best: Tensor, count: int) -> Tensor:
    """v = (1 - 1/T) q_opt + q_1 / T."""
    return (1 - 1 / count) * best + first / count


@dataclass(frozen=True)
class Decomposition:
    """The terms of every episode of a run against a comparator u in the interior of Omega; all `(T, *batch)` but where said."""

    mdp: LayeredMDP
    parameters: Parameters
    regret: Tensor  # <q_t - u, estimate_t>
    stability: Tensor  # <q_t, estimate_t> + F_t(q_t) - G_t(tilde q_t)
    mixed_penalty: Tensor  # G_t(tilde q_t) - F_t(q_t) - <u, estimate_t>, from the values of F and G
    penalty: Tensor  # (1/eta_t - 1/eta_{t-1}) (phi_H(u) - phi_H(q_t))
    norm_step: Tensor  # |estimate_t|^2 in the norm of the inverse Hessian of psi_t at q_t
    norm_hybrid: Tensor  # the same of phi_H
    lost: Tensor  # G_t(q_{t+1}) - G_t(tilde q_t), and G_T(u) - G_T(tilde q_T) at the end: what lem:bound_penalty gives away
    start: Tensor  # (*batch,), phi_L(u) - phi_L(q_1)
    size: Tensor  # |F_t| + |G_t|, the scale of rounding in mixed_penalty
    tilde_q: Tensor  # (T, *batch, S, A)

    def simple_decomposition(self) -> Statement:
        """`eq:simple_decomposition`: <q_t - u, estimate_t> = stability + mixed penalty, in every episode."""
        found = self.stability + self.mixed_penalty
        return self._statement("eq:simple_decomposition", self.regret, found, self.size, relation="=")

    def short_estimate(self) -> Statement:
        """|estimate_t|^2 <= L / beta in the norm of the inverse Hessian of psi_t at q_t, in every episode: what `eq:convex_eq` needs.

        With beta = 64 L the right-hand side is 1/64, and G_t(q') >= G_t(q_t) - |estimate_t| + 1/8 >= G_t(q_t) at distance 1 from q_t.
        """
        right = torch.tensor(self.mdp.horizon / self.parameters.beta, dtype=self.norm_step.dtype)
        return self._statement("eq:convex_eq", self.norm_step, right, right * self.mdp.num_pairs)

    def bound_stability(self) -> Statement:
        """`lem:bound_stability`, in every episode: <q_t, estimate_t> + F_t(q_t) - G_t(tilde q_t) <= 8 |estimate_t|^2.

        The norm is that of the inverse Hessian of psi_t at q_t.
        """
        # tilde q is solved to a relative error of eps^(2/3), which makes a divergence of the order of its square.
        scale = self.norm_step * self.mdp.num_pairs + self.size * torch.finfo(self.size.dtype).eps ** (1 / 3)
        return self._statement("lem:bound_stability", self.stability, 8 * self.norm_step, scale)

    def bound_penalty(self) -> tuple[Statement, Statement]:
        """`lem:bound_penalty`: sum_t mixed penalty <= phi_L(u) - phi_L(q_1) + sum_t (1/eta_t - 1/eta_{t-1}) (phi_H(u) - phi_H(q_t)).

        Read: printed as an equality; its proof starts with an inequality. The second statement is the equality: the difference is
        sum_{t<T} ( G_t(q_{t+1}) - G_t(tilde q_t) ) + G_T(u) - G_T(tilde q_T), which is positive. Also, the fourth line of the proof has
        phi_H(q_1) for phi_H(q_1) / eta_1, which is the same for gamma = 1 only.
        """
        left, right = self.mixed_penalty.sum(0), self.start + self.penalty.sum(0)
        scale = self.size.sum(0)
        return (
            self._statement("lem:bound_penalty", left, right, scale),
            self._statement("lem:bound_penalty, exact", left + self.lost.sum(0), right, scale, relation="="),
        )

    def key_lemma(self) -> Statement:
        """`lem:key_lemma_ftrl` along this run, before expectations: sum_t <q_t - u, estimate_t> is at most

        phi_L(u) - phi_L(q_1) + sum_t (1/eta_t - 1/eta_{t-1}) (phi_H(u) - phi_H(q_t)) + 8 sum_t eta_t |estimate_t|^2 (norm of phi_H at q_t).
        """
        eta = self._eta()
        right = self.start + self.penalty.sum(0) + 8 * (eta * self.norm_hybrid).sum(0)
        return self._statement("lem:key_lemma_ftrl, one run", self.regret.sum(0), right, self.size.sum(0))

    def regret_bound(self, regret: Tensor, best: Tensor, q: Tensor) -> Statement:
        """`lem:key_lemma_ftrl`: Reg_T <= penalty + stability + `lower_order`, expectations as means over the seeds.

        `regret` is the pseudo-regret of each seed at T, q_opt = `best` its comparator, q as in the trajectory.
        """
        count, alpha = len(q), self.parameters.alpha
        t = self._episodes()
        penalty = (self.parameters.eta_step(t) * (hybrid(self.mdp, best, alpha) - hybrid(self.mdp, q, alpha))).sum(0)
        stability = 8 * (self._eta() * self.norm_hybrid).sum(0)
        rest = lower_order(self.mdp, self.parameters, torch.tensor(float(count), dtype=q.dtype))
        return self._statement("lem:key_lemma_ftrl", regret.mean(), penalty.mean() + stability.mean() + rest, rest)

    def _episodes(self) -> Tensor:
        return episodes(len(self.regret), self.regret).view(-1, *(1,) * (self.regret.dim() - 1))

    def _eta(self) -> Tensor:
        return self.parameters.eta(self._episodes())

    def _statement(self, label: str, left: Tensor, right: Tensor, scale: Tensor, relation: str = "<=") -> Statement:
        return statement(label, left, right, self.mdp.num_pairs, scale=scale, relation="=" if relation == "=" else "<=")


@torch.no_grad()
def decompose(mdp: LayeredMDP, parameters: Parameters, trajectory: Trajectory, u: Tensor) -> Decomposition:
    """Evaluate every term of the analysis along a run, against a comparator u `(*batch, S, A)`, positive on all pairs."""
    q, estimate = trajectory
    regularizer = parameters.regularizer(mdp)
    step = FTRLStep(mdp, regularizer)
    t = episodes(len(q), q).view(-1, *(1,) * (q.dim() - 3)).expand(q.shape[:-2])
    total = estimate.cumsum(0)
    tilde_q = tilde(step, q, total, t)

    def objective(point: Tensor, loss: Tensor) -> Tensor:
        return (point * loss).sum((-2, -1)) + regularizer(point, t, mdp)

    alpha, beta = parameters.alpha, parameters.beta
    F, G = objective(q, total - estimate), objective(tilde_q, total)
    next_q = torch.cat([q[1:], u.expand_as(q[0])[None]])
    step_inverse, hybrid_inverse = (
        inverse_hessian(mdp, curve) for curve in (curvature(mdp, q, alpha, eta=parameters.eta(t), beta=beta), curvature(mdp, q, alpha))
    )
    return Decomposition(
        mdp=mdp,
        parameters=parameters,
        regret=((q - u) * estimate).sum((-2, -1)),
        stability=bregman(mdp, q, tilde_q, parameters, t),
        mixed_penalty=G - F - (u * estimate).sum((-2, -1)),
        penalty=parameters.eta_step(t) * (hybrid(mdp, u, alpha) - hybrid(mdp, q, alpha)),
        norm_step=norm(step_inverse, estimate),
        norm_hybrid=norm(hybrid_inverse, estimate),
        lost=bregman(mdp, next_q, tilde_q, parameters, t),
        start=log_barrier(mdp, u, beta) - log_barrier(mdp, q[0], beta),
        size=F.abs() + G.abs() + (q * total).sum((-2, -1)),
        tilde_q=tilde_q,
    )
