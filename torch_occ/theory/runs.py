"""A run as the paper analyses it: one update, the regret in its parts, and a certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_occ.game.callbacks import Callback
from torch_occ.game.history import comparator
from torch_occ.game.learners import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy
from torch_occ.regularizers.terms import keep
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory import curvatures
from torch_occ.theory.bounds import adversarial_bound, lower_order
from torch_occ.theory.curvatures import bregman, curvature, hybrid, inverse_hessian, log_barrier
from torch_occ.theory.statements import Parameters, Statement, episodes, equality, statement
from torch_occ.theory.terms import norm, norm_of_moments, penalty_bound, stability_bound, weighed

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


# -- One update of FTRL: tilde q_t, and how far it is from q_t (`app:appendix_proof_ftrl`) ---------
#
# q_t minimizes F_t(q) = ⟨q, hat L_{t-1}⟩ + psi_t(q) over Omega, and tilde q_t minimizes G_t(q) =
# ⟨q, hat L_t⟩ + psi_t(q). The log-barrier keeps the two close.


def tilde(step: FTRLStep, q: Tensor, cumulative_loss: Tensor, t: Tensor | float) -> Tensor:
    """tilde q_t = argmin over Omega of G_t(q) = ⟨q, hat L_t⟩ + psi_t(q), `eq:tilde_q_def`.

    hat L_t = `cumulative_loss` includes the estimate of episode t. The shape is that of q.
    """
    with torch.no_grad():
        solution = step.solve(cumulative_loss, t, warm_start=q, check=False)
        # A warm start can be too close to the boundary. From the middle Newton's method converges.
        return solution.q if bool(solution.converged.all()) else step.solve(cumulative_loss, t).q


def close_hessian(
    mdp: LayeredMDP, q: Tensor, p: Tensor, parameters: Parameters, t: Tensor
) -> Statement:
    """`lem:close_hessian`: if q/2 <= p, then (Hessian of psi_t at p) <= 4 (Hessian of psi_t at q).

    The left side is a quarter of the largest eigenvalue of the first matrix in the norm of the
    second, over the pairs that exist, and the right side is 1. q and p are in Omega, and every
    state has at least two actions.
    """
    exists = mdp.actions.flatten()
    identity = torch.eye(len(exists), dtype=q.dtype, device=q.device)
    into = mdp.joint_transitions.flatten(-3, -2).mT
    inflow = into.repeat_interleave(mdp.num_actions, -2)  # row (s, a) is the inflow of s
    # By eq:quadratic_form the Hessian is A' diag(weights) A. Without forming it, twice as many
    # digits are kept.
    A = torch.cat([identity.expand_as(inflow), inflow - identity], -2)[..., exists]
    alpha, eta, beta = parameters.alpha, parameters.eta(t), parameters.beta
    at_q, at_p = (
        torch.cat([d, c], -2).flatten(-2).sqrt().unsqueeze(-1)
        for c, d in (curvatures.curvatures(mdp, x, alpha, eta, beta) for x in (q, p))
    )
    length = (at_q * A).norm(dim=-2, keepdim=True)
    R = torch.linalg.qr(at_q * A / length).R
    ratio = torch.linalg.solve_triangular(R, at_p * A / (2 * length), upper=True, left=False)
    condition = torch.linalg.matrix_norm(torch.linalg.inv(R))
    largest = torch.linalg.matrix_norm(ratio, 2).square()
    return statement("lem:close_hessian", largest, 1.0, mdp.num_pairs, condition)


def smooth_update(mdp: LayeredMDP, q: Tensor, tilde_q: Tensor) -> tuple[Statement, Statement]:
    """`lem:smooth_update`, for beta >= 64 L: q_t(s,a) / 2 <= tilde q_t(s,a) <= 2 q_t(s,a).

    The left sides are the largest q / tilde q and the largest tilde q / q, the right sides are 2.
    """
    down, up = (torch.where(mdp.actions, x, 1.0).amax((-2, -1)) for x in (q / tilde_q, tilde_q / q))
    below = statement("lem:smooth_update, below", down, 2.0, 1)
    return below, statement("lem:smooth_update, above", up, 2.0, 1)


def step_length(
    mdp: LayeredMDP, q: Tensor, tilde_q: Tensor, parameters: Parameters, t: Tensor
) -> tuple[Statement, Statement]:
    """`eq:earlier_argument`, for beta >= 64 L:

        beta sum_{s,a} (tilde q - q)^2 / q^2 <= |tilde q - q|^2 <= 1,

    in the norm of the Hessian of psi_t at q_t. With beta >= 9 this gives `lem:smooth_update`, even
    with 4/3 in place of 2.
    """
    change = keep("pair", mdp, tilde_q - q, 0.0)
    barrier = parameters.beta * (change / keep("pair", mdp, q, 1.0)).square().sum((-2, -1))
    whole = norm(curvatures.hessian_of_step(mdp, q, parameters, t), change)
    label, terms = "eq:earlier_argument", mdp.num_pairs**2
    first = statement(f"{label}, log-barrier", barrier, whole, terms)
    return first, statement(f"{label}, whole", whole, 1.0, terms)


# -- The regret of a run as penalty, stability and a small rest (`app:appendix_proof_ftrl`) --------
#
# All statements are true for every single run. `Recorder` keeps q_t and the loss estimates,
# `decompose` solves for all tilde q_t at once, and the methods of `Decomposition` are the lemmas.
# Differences of objective values are Bregman divergences, so that no digits cancel.


class Trajectory(NamedTuple):
    """The q_t and the loss estimates of every episode of a run."""

    q: Tensor  # (T, *batch, S, A), q_t
    estimate: Tensor  # (T, *batch, S, A), the loss estimates


class Recorder(Callback):
    """Keeps q_t and the loss estimates of a run of `alg:main_alg`, at checkpoints 1, 2, ..., T."""

    def __init__(self) -> None:
        self.q: list[Tensor] = []
        self.cumulative: list[Tensor] = []

    def on_checkpoint(self, run: Simulation) -> None:
        Parameters.of(run.learner)
        if run.t != len(self.q) + 1:
            raise ValueError(
                "checkpoints: the recorder needs every episode, "
                f"but episode {len(self.q) + 1} was skipped"
            )
        self.q.append(run.q.clone())
        self.cumulative.append(run.learner.state["cumulative_loss"].clone())

    @property
    def trajectory(self) -> Trajectory:
        """All episodes so far, `(T, seeds, S, A)` each."""
        total = torch.stack(self.cumulative)
        estimates = torch.diff(total, dim=0, prepend=torch.zeros_like(total[:1]))
        return Trajectory(torch.stack(self.q), estimates)


def proper_comparator(
    mdp: LayeredMDP,
    first: Tensor,
    best: Tensor,
    total_loss: Tensor,
    parameters: Parameters,
    count: int,
) -> list[Statement]:
    """`lem:proper_comparator`: three statements about v = (1 - 1/T) q_opt + q_1 / T.

        sum_t <v - q_opt, loss_t> <= 2 L,
        phi_L(v) - phi_L(q_1) <= beta |S| |A| log T,
        phi_H(v) - phi_H(q_opt) <= (1 + alpha) |S| |A| / T.

    `total_loss` is sum_t loss_t `(*batch, S, A)`, the expectation of the sum of the estimates. The
    paper's 64 L is beta.
    """
    v = comparator_point(first, best, count)
    alpha, beta, pairs = parameters.alpha, parameters.beta, mdp.num_pairs
    shift = ((v - best) * total_loss).sum((-2, -1))
    barrier, roots = log_barrier(mdp, v, beta), hybrid(mdp, best, alpha)
    label, log = "lem:proper_comparator", torch.tensor(float(count), dtype=first.dtype).log()
    rise, fall = barrier - log_barrier(mdp, first, beta), hybrid(mdp, v, alpha) - roots
    limit, scale = (1 + alpha) * pairs / count, float(count * mdp.horizon)
    return [
        statement(f"{label}, loss", shift, 2.0 * mdp.horizon, pairs, scale),
        statement(f"{label}, log-barrier", rise, beta * pairs * log, pairs, barrier.abs()),
        statement(f"{label}, hybrid", fall, limit, pairs, -roots),
    ]


def comparator_point(first: Tensor, best: Tensor, count: int) -> Tensor:
    """v = (1 - 1/T) q_opt + q_1 / T."""
    return (1 - 1 / count) * best + first / count


@dataclass(frozen=True)
class Decomposition:
    """The terms of every episode of a run against a comparator u in the interior of Omega.

    All tensors are `(T, *batch)` unless a comment says otherwise.
    """

    mdp: LayeredMDP
    parameters: Parameters
    regret: Tensor  # ⟨q_t - u, estimate_t⟩
    stability: Tensor  # ⟨q_t, estimate_t⟩ + F_t(q_t) - G_t(tilde q_t)
    mixed_penalty: Tensor  # G_t(tilde q_t) - F_t(q_t) - ⟨u, estimate_t⟩, from values of F and G
    penalty: Tensor  # (1/eta_t - 1/eta_{t-1}) (phi_H(u) - phi_H(q_t))
    norm_step: Tensor  # |estimate_t|^2 in the norm of the inverse Hessian of psi_t at q_t
    norm_hybrid: Tensor  # the same of phi_H
    lost: Tensor  # G_t(q_{t+1}) - G_t(tilde q_t), at the end with u: the slack of lem:bound_penalty
    start: Tensor  # (*batch,), phi_L(u) - phi_L(q_1)
    size: Tensor  # |F_t| + |G_t|, the scale of rounding in mixed_penalty
    tilde_q: Tensor  # (T, *batch, S, A)

    def simple_decomposition(self) -> Statement:
        """`eq:simple_decomposition`: ⟨q_t - u, estimate_t⟩ = stability + mixed penalty."""
        found, terms = self.stability + self.mixed_penalty, self.mdp.num_pairs
        return equality("eq:simple_decomposition", self.regret, found, terms, self.size)

    def short_estimate(self) -> Statement:
        """|estimate_t|^2 <= L / beta in every episode, the ingredient of `eq:convex_eq`.

        The norm is that of the inverse Hessian of psi_t at q_t.
        """
        right, terms = self.mdp.horizon / self.parameters.beta, self.mdp.num_pairs
        return statement("eq:convex_eq", self.norm_step, right, terms, right * terms)

    def bound_stability(self) -> Statement:
        """`lem:bound_stability`: ⟨q_t, estimate_t⟩ + F_t(q_t) - G_t(tilde q_t) <= 8 |estimate_t|^2.

        In every episode, in the norm of the inverse Hessian of psi_t at q_t.
        """
        # tilde q has a relative error of eps^(2/3), and the divergence that of its square.
        terms, error = self.mdp.num_pairs, torch.finfo(self.size.dtype).eps ** (1 / 3)
        right, scale = 8 * self.norm_step, self.norm_step * terms + self.size * error
        return statement("lem:bound_stability", self.stability, right, terms, scale)

    def bound_penalty(self) -> tuple[Statement, Statement]:
        """`lem:bound_penalty`: sum_t mixed penalty is at most

            phi_L(u) - phi_L(q_1) + sum_t (1/eta_t - 1/eta_{t-1}) (phi_H(u) - phi_H(q_t)).

        The second statement is an equality: the difference of the two sides is
        sum_{t < T} ( G_t(q_{t+1}) - G_t(tilde q_t) ) + G_T(u) - G_T(tilde q_T) >= 0.
        """
        left, right = self.mixed_penalty.sum(0), self.start + self.penalty.sum(0)
        scale, terms, exact = self.size.sum(0), self.mdp.num_pairs, left + self.lost.sum(0)
        lemma = statement("lem:bound_penalty", left, right, terms, scale)
        return lemma, equality("lem:bound_penalty, exact", exact, right, terms, scale)

    def key_lemma(self) -> Statement:
        """`lem:key_lemma_ftrl` for one run, before expectations.

        sum_t ⟨q_t - u, estimate_t⟩ is at most

            phi_L(u) - phi_L(q_1) + sum_t (1/eta_t - 1/eta_{t-1}) (phi_H(u) - phi_H(q_t))
              + 8 sum_t eta_t |estimate_t|^2,

        in the norm of the inverse Hessian of phi_H at q_t.
        """
        t = episodes(len(self.regret), self.regret).view(-1, *(1,) * (self.regret.dim() - 1))
        stability = 8 * (self.parameters.eta(t) * self.norm_hybrid).sum(0)
        right = self.start + self.penalty.sum(0) + stability
        left, terms = self.regret.sum(0), self.mdp.num_pairs
        return statement("lem:key_lemma_ftrl, one run", left, right, terms, self.size.sum(0))


@torch.no_grad()
def decompose(
    mdp: LayeredMDP, parameters: Parameters, trajectory: Trajectory, u: Tensor
) -> Decomposition:
    """Evaluate every term of the analysis along a run.

    The comparator u `(*batch, S, A)` is positive on all pairs.
    """
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
    step_curve = curvature(mdp, q, alpha, eta=parameters.eta(t), beta=beta)
    return Decomposition(
        mdp=mdp,
        parameters=parameters,
        regret=((q - u) * estimate).sum((-2, -1)),
        stability=bregman(mdp, q, tilde_q, parameters, t),
        mixed_penalty=G - F - (u * estimate).sum((-2, -1)),
        penalty=parameters.eta_step(t) * (hybrid(mdp, u, alpha) - hybrid(mdp, q, alpha)),
        norm_step=norm(inverse_hessian(mdp, step_curve), estimate),
        norm_hybrid=norm(inverse_hessian(mdp, curvature(mdp, q, alpha)), estimate),
        lost=bregman(mdp, next_q, tilde_q, parameters, t),
        start=log_barrier(mdp, u, beta) - log_barrier(mdp, q[0], beta),
        size=F.abs() + G.abs() + (q * total).sum((-2, -1)),
        tilde_q=tilde_q,
    )


# -- The terms of `lem:key_lemma_ftrl` at the checkpoints of a run --------------------------------
#
# Numbers at one episode (`..._now`, smoothness, closed-form bounds) are exact. Sums over all
# episodes so far have exact weights 1/eta_t - 1/eta_{t-1} and 8 eta_t; what depends on q_t is taken
# to be linear in log t between two checkpoints, and constant before the first.

#: Curves that exist a second time, with the suffix `_shared`: against one policy for all seeds, the
#: best for their mean, in place of the best one of each seed. docs/theory.md has the difference.
_SHARED = ("regret", "penalty", "penalty_bound", "stability_bound", "bound_terms", "bound_lemmas")


class Records(NamedTuple):
    """What is kept of C checkpoints for N seeds, `(C, N)` unless a comment says otherwise."""

    episode: Tensor  # (C,)
    q: Tensor  # (C, N, S, A), q_t
    charged: Tensor  # (C, N, S, A), the sum of the means of the losses
    regret: Tensor
    # E |estimate|^2 with the losses since the checkpoint before, at the q of that checkpoint and at
    # q_t; and the bound of `lem:stability_first_step` at both.
    norm_before: Tensor
    norm: Tensor
    first_step_before: Tensor
    first_step: Tensor
    # The extremes of tilde q_t / q_t over pairs.
    smoothness_max: Tensor
    smoothness_min: Tensor


def _against(
    mdp: LayeredMDP, parameters: Parameters, records: Records, mappings: Tensor
) -> dict[str, Tensor]:
    """Everything that depends on the comparator, `(C, N)` each; the mappings are `(C, N, S, A)`."""
    alpha, best = parameters.alpha, occupancy(mdp, mappings)
    best_value, values = hybrid(mdp, best, alpha), hybrid(mdp, records.q, alpha)
    limits: list[Tensor] = []  # the bounds of both lemmas, (2, C, N) for each comparator
    for i, mapping in enumerate(mappings):
        if i and torch.equal(mapping, mappings[i - 1]):  # the comparator changes rarely
            limits.append(limits[-1])
        else:
            bound = penalty_bound(mdp, records.q, best[i], mapping, alpha)
            limits.append(torch.stack([bound, stability_bound(mdp, records.q, mapping, alpha)]))
    rates = parameters.eta_step, lambda t: 8 * parameters.eta(t)
    weights = [running_weights(records.episode, rate).to(values) for rate in rates]  # (C, C)
    penalty = best_value * weights[0].sum(-1, keepdim=True) - weights[0] @ values
    penalty_limit, stability_limit = (
        torch.stack([row @ limit[i] for row, limit in zip(weights[i], limits, strict=True)])
        for i in range(2)
    )
    last = torch.stack([limit[:, i] for i, limit in enumerate(limits)], 1)
    spent = (best * records.charged).sum((-2, -1))
    return {
        "regret": records.regret + comparator(mdp, records.charged) - spent,
        "penalty": penalty,
        "penalty_bound": penalty_limit,
        "stability_bound": stability_limit,
        "penalty_now": best_value - values,
        "penalty_now_bound": last[0],
        "stability_now_bound": last[1],
    }


def running_weights(checkpoints: Tensor, rate: Callable[[Tensor], Tensor]) -> Tensor:
    """W `(C, C)` with sum_{t <= T_i} rate(t) f(t) = sum_j W_ij f(T_j)."""
    ends = checkpoints.tolist()
    left, right = interval_weights([0, *ends], rate)
    shifted = torch.nn.functional.pad(left[1:], (0, 1)).expand(len(ends), -1)
    return right.expand(len(ends), -1).tril() + shifted.tril(-1)


def interval_weights(ends: list[int], rate: Callable[[Tensor], Tensor]) -> Tensor:
    """left and right, `(2, len(ends) - 1)`, of every interval from one of the `ends` to the next:

        sum_{start < t <= end} rate(t) f(t) = left f(start) + right f(end).

    f is linear in log t; it is constant if start is 0.
    """
    found = []
    for start, end in pairwise(ends):
        t = torch.arange(start + 1, end + 1, dtype=torch.float64)
        weights = rate(t)
        if not start:
            found.append((0.0, float(weights.sum())))
            continue
        logs = (t / start).log()
        right = float(weights @ (logs / logs[-1]))
        found.append((float(weights.sum()) - right, right))
    return torch.tensor(found, dtype=torch.float64).T


# -- A callback that evaluates them ----------------------------------------------------------------
#
# Between checkpoints the run adds up the means of the losses and their second moments
# E[loss_i loss_j].

#: Prefix of the certificate's entries in `Simulation.sums`, with which a saved run continues.
_KEPT = "theory/"


class Certificate(Callback):
    """Penalty, stability, their bounds and the smoothness of the update of `alg:main_alg`.

    `curves` has one number per seed and checkpoint under each name; docs/theory.md lists the names.

    A TensorBoard callback of the same run logs them, under `theory/*`.

    Raises:
        ValueError: before the first episode, if the learner does not play `alg:main_alg`, or if a
            saved run was begun without a certificate.
    """

    def __init__(self) -> None:
        self.rows: list[Records] = []  # one for each checkpoint, without the axis of C

    @property
    @torch.no_grad()
    def curves(self) -> dict[str, Tensor]:
        """Every curve by its name, `(N, C)`, and `episodes` `(C,)`, at the checkpoints so far."""
        if not self.rows:
            return {}
        mdp, parameters, records = self.mdp, self.parameters, self._records()
        t = records.episode.to(records.q)[:, None].expand_as(records.regret)
        rest, ends = lower_order(mdp, parameters, t), [0, *records.episode.tolist()]
        left, right = interval_weights(ends, lambda t: 8 * parameters.eta(t)).to(t).unsqueeze(-1)
        stability = (right * records.norm + left * records.norm_before).cumsum(0)
        first_step = (right * records.first_step + left * records.first_step_before).cumsum(0)
        own = optimal_policy(mdp, records.charged).policy
        shared = optimal_policy(mdp, records.charged.mean(1)).policy.unsqueeze(1).expand_as(own)
        found = _against(mdp, parameters, records, own)
        same = torch.equal(own, shared)
        other = {**found} if same else _against(mdp, parameters, records, shared)
        for each in (found, other):
            each["bound_terms"] = each["penalty"] + stability + rest
            each["bound_lemmas"] = each["penalty_bound"] + each["stability_bound"] + rest
        found["regret"] = records.regret
        found |= {f"{name}_shared": other[name] for name in _SHARED}
        found |= {
            "lower_order": rest,
            "stability": stability,
            "stability_first_step": first_step,
            "stability_now": records.norm,
            "stability_now_first_step": records.first_step,
            "bound_adversarial": adversarial_bound(mdp, parameters, t),
            "smoothness_max": records.smoothness_max,
            "smoothness_min": records.smoothness_min,
        }
        return {"episodes": records.episode} | {name: x.T for name, x in found.items()}

    def _records(self) -> Records:
        return Records(*map(torch.stack, zip(*self.rows, strict=True)))

    def on_start(self, run: Simulation) -> None:
        self.mdp, self.parameters = run.learner.mdp, Parameters.of(run.learner)
        names = [f"{_KEPT}{name}" for name in (*Records._fields, "total")]
        if run.t and not {*names} <= {*run.sums}:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the "
                "certificate, which needs every checkpoint; leave it out, or begin anew with "
                "another file"
            )
        run.ask_for_second_moments()
        run.monitors.append(self.monitor)
        if run.t:
            *kept, self.total = (run.sums[name] for name in names)
            self.rows = [Records(*parts) for parts in zip(*kept, strict=True)]
        else:  # `total` is that up to the last checkpoint
            self.rows, self.total = [], run.sums["second_moment"].clone()

    @torch.no_grad()
    def on_checkpoint(self, run: Simulation) -> None:
        assert isinstance(run.learner, FTRL)
        q, total, alpha = run.q.clone(), run.sums["second_moment"].clone(), self.parameters.alpha
        start, before = (self.rows[-1].episode, self.rows[-1].q) if self.rows else (0, q)
        moments, both = (total - self.total) / (run.t - start), torch.stack([before, q])
        curve = curvature(self.mdp, both, alpha)
        layers = curvatures.all_N(self.mdp, curve)
        inverse = curvatures.M_inverse(self.mdp, curve, layers)
        norms = norm_of_moments(self.mdp, both, inverse, moments)
        bounds = weighed(self.mdp, both, curvatures.N_diagonal(self.mdp, layers)).sum((-2, -1))
        ratio = tilde(run.learner.step, q, run.learner.state["cumulative_loss"], run.t) / q
        above, below = (torch.where(self.mdp.actions, sign * ratio, -torch.inf) for sign in (1, -1))
        extremes = above.amax((-2, -1)), -below.amax((-2, -1))
        kept = torch.tensor(run.t), q, run.sums["total_mean"].clone(), run.curves["regret"][-1]
        self.rows.append(Records._make((*kept, *norms, *(self.mdp.horizon * bounds), *extremes)))
        self.total = total

    def on_chunk(self, run: Simulation) -> None:
        if self.rows:
            kept = self._records()._asdict() | {"total": self.total}
            run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}

    def monitor(self, after: int) -> dict[int, dict[str, float]]:
        """Means over seeds, and extremes of the smoothness, by episode, after one of them."""
        if not self.rows or int(self.rows[-1].episode) <= after:
            return {}
        over_seeds = {"smoothness_max": torch.amax, "smoothness_min": torch.amin}
        curves = self.curves
        episodes = curves.pop("episodes").tolist()
        shown = {x: over_seeds.get(x, torch.mean)(curves[x], 0).tolist() for x in curves}
        points = {t: {f"theory/{x}": shown[x][i] for x in shown} for i, t in enumerate(episodes)}
        return {t: point for t, point in points.items() if t > after}
