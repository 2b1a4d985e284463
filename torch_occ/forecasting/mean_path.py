"""A forecast of the regret of FTRL with bandit feedback, smooth and differentiable.

The loss estimate, (loss - b) / q on the visited pairs plus a baseline b
(torch_occ.game.estimators), is unbiased for every regularizer. So the cumulative estimate
fluctuates around the mean path Lbar_t = sum of means. Expanding q_t = q(t, Lhat_{t-1}) to second
order around it,

    E <q_t, mean_t> = <q(t, Lbar), mean_t>  -  1/2 <d/ds Pi(Lbar + s mean_t), C_{t-1}>,
                          drift                             noise

where Pi is the response of q to the loss (torch_occ.step.linearization) and C_t = sum of
Cov(loss_estimate) along the path, which contains the joint probabilities of visiting two pairs in
one episode. Everything is smooth on the scale of t, so about twenty values of t per tenfold of
episodes are enough (torch_occ.forecasting.quadrature). All of them are solved as one batch.

Summed by parts over t, the noise is 1/2 sum_t E |loss_estimate_t|^2 in the norm of Pi_t, the
stability term of the FTRL analysis, minus the fluctuations that are left at the end and those that
the growth of psi_t removes. `stability` gives that term too.

The expansion is in the relative fluctuations of q. It fails where the learner is so little
regularized that a single visit changes q many times over. `noise_share` shows this;
torch_occ.forecasting.leaping works there. With a baseline, a single visit may do so even where the
noise is small: a visit without loss lowers the estimate by b / q, and q ~ beta / (gap t) under a
log-barrier, so that for beta below about b it removes the whole lead of t gap. Only leaping and
playing show that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import readable
from torch_occ.forecasting.phases import Phase, phases_of
from torch_occ.forecasting.probes import probe_noise
from torch_occ.forecasting.quadrature import Quadrature
from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.losses import LossProcess, Noise, mean_square
from torch_occ.game.regret import comparator
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy, policy_of, reachability
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.linearization import Linearization

#: Panels of three solves per tenfold of episodes.
PER_DECADE = 3.0

#: Noise above this share of a forecast is no small correction; docs/meta_tuning.md measures it.
SMALL_NOISE = 1 / 3

#: Up to so many pairs the noise is computed from matrices; beyond, by so many probes.
EXACT_PAIRS, PROBES = 512, 8

#: The largest size of a matrix over pairs at all nodes.
MOST_BYTES = 4 * 10**9


class Forecast(NamedTuple):
    """Predicted pseudo-regret at C episodes; NaN if a step could not be certified."""

    episodes: Tensor  # (C,)
    drift: Tensor  # (*batch, C), the regret of the mean path
    noise: Tensor  # (*batch, C), the contribution of fluctuations of the loss estimates
    stability: Tensor  # (*batch, C), 1/2 sum_t E |loss_estimate_t|^2_{Pi_t}, for comparison
    certified: Tensor  # (*batch,), whether every step on the path was certified
    noise_error: Tensor  # (*batch, C), the standard error of the noise; zero without probes

    @property
    def regret(self) -> Tensor:
        """The predicted regret, drift + noise, `(*batch, C)`."""
        return self.drift + self.noise

    @property
    def final(self) -> Tensor:
        """The regret after the last episode, `(*batch,)`, differentiable; `float` does not warn."""
        return readable(self.regret[..., -1])

    @property
    def noise_share(self) -> Tensor:
        """|noise| / (|drift| + |noise|) at the end, `(*batch,)`."""
        drift, noise = self.drift[..., -1].abs(), self.noise[..., -1].abs()
        return noise / (drift + noise)

    @property
    def reliable(self) -> Tensor:
        """Whether the expansion is reliable, `(*batch,)`: certified, with little noise.

        Elsewhere use `leap`.
        """
        return self.certified & (self.noise_share <= SMALL_NOISE)


def forecast(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    per_decade: float = PER_DECADE,
    probes: int | None = None,
    seed: int = 0,
) -> Forecast:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` for up to 1e12 episodes.

    All batch shapes broadcast. The result is differentiable in the regularizer's parameters and in
    the means.

    Args:
        mdp: may have a batch shape.
        regularizer: psi_t; its parameters may have a batch shape.
        losses: means `(*batch, S, A)` of Bernoulli losses, differentiable; or a loss process whose
            means are fixed in advance.
        episodes: T.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other
            `CentredEstimator`.
        per_decade: panels of three solves per tenfold of episodes.
        probes: the number of random vectors by which the noise is computed without matrices, at
            the cost of some hundred steps (torch_occ.forecasting.probes); 0 computes it exactly
            from matrices over all pairs. By default 0 up to 512 pairs, and 8 beyond.
        seed: of the probes.

    Returns:
        The curves of drift, noise and stability.

    Raises:
        ValueError: if `episodes` or `probes` is out of range, the losses have too many phases, or
            matrices are demanded that would need more than 4 GB.
        TypeError: if the losses or the estimator cannot be forecast.
    """
    if not 1 <= episodes <= 10**12:
        raise ValueError(f"episodes: expected a number from 1 to 1e12, got {episodes}")
    if probes is not None and (probes < 0 or probes == 1):
        raise ValueError(
            f"probes: expected at least 2, because their spread is the error, or 0, got {probes}"
        )
    estimate = centred(estimator)
    phases, noise = phases_of(mdp, losses, int(episodes))
    step = FTRLStep(mdp, regularizer)
    grid = Quadrature.over(
        [phase.start for phase in phases], int(episodes), per_decade, mdp.transitions[0]
    )
    given = step.evaluator.batch_shape(step.evaluator.own_parameters)
    batch = torch.broadcast_shapes(phases[0].mean.shape[:-2], mdp.batch_shape, given)
    # (P, *batch, S, A)
    mean = torch.stack([phase.mean.expand(*batch, *phase.mean.shape[-2:]) for phase in phases])
    t = grid.t.reshape(-1, *(1,) * len(batch)).expand(-1, *batch)  # (K, *batch)
    now = mean[grid.phase]  # (K, *batch, S, A)
    solution = step.solve(totals(phases, mean, grid.t - 1, grid.phase), t, check=False)
    certified = solution.converged.all(0)
    q = floored(mdp, solution.q)
    gaps = optimal_policy(mdp, mean).gaps  # (P, *batch, S, A)
    # Gaps instead of losses: the loss that every policy pays drops out, without cancellation.
    ends = grid.ends.to(mdp.dtype)
    best = comparator(
        mdp, totals(phases, gaps, ends, torch.bucketize(ends, _starts(phases, ends)) - 1)
    )
    drift = grid.sums((q * gaps[grid.phase]).sum((-2, -1))) - best

    linear = Linearization(step, q, t)
    baseline = torch.where(mdp.actions, estimate.baseline(q, t), 0.0)
    if probes is None:
        probes = 0 if mdp.num_states * mdp.num_actions <= EXACT_PAIRS else PROBES
    if probes:
        found = probe_noise(mdp, linear, grid, now, noise, baseline, probes, seed)
        each = torch.stack([grid.sums(-0.5 * bend) for bend in found.bend])  # (R, C, *batch)
        fluctuation, square = each.mean(0), found.square
        error = each.detach().std(0) / probes**0.5
    else:
        bend, square = _exact_noise(mdp, linear, grid, now, noise, baseline)
        fluctuation = grid.sums(-0.5 * bend)
        error = torch.zeros_like(fluctuation)
    curves = (drift, fluctuation, grid.sums(0.5 * square))
    drift, fluctuation, stability = (
        torch.where(certified, curve, torch.nan).movedim(0, -1) for curve in curves
    )
    return Forecast(grid.ends, drift, fluctuation, stability, certified, error.movedim(0, -1))


def _exact_noise(
    mdp: LayeredMDP,
    linear: Linearization,
    grid: Quadrature,
    mean: Tensor,
    noise: Noise,
    baseline: Tensor,
) -> tuple[Tensor, Tensor]:
    """D3psi[Pi m](Pi C Pi) and E |loss_estimate|^2_Pi at every node, `(K, *batch)`, by matrices."""
    q = linear.q
    nodes, pairs = q.shape[:-2].numel(), q.shape[-2:].numel()
    size = nodes * pairs**2 * q.element_size()
    if size > MOST_BYTES:
        raise ValueError(
            f"probes: without probes the noise needs matrices of {size / 1e9:.1f} GB, for "
            f"{pairs:,} pairs at {nodes:,} nodes; give a number of probes, or use occ.leap"
        )
    Pi = linear.dense()  # (K, *batch, S * A, S * A)
    visited = second_moment(mdp, q, mean, noise, baseline)
    flat, b = mean.flatten(-2), baseline.flatten(-2)
    C = grid.sums_before(visited - outer(flat - b))
    u = (Pi @ flat.unsqueeze(-1)).squeeze(-1).unflatten(-1, q.shape[-2:])
    bend = linear.bend(u, Pi @ C @ Pi)
    square = (Pi * visited).sum((-2, -1)) + (b.unsqueeze(-2) @ Pi @ (2 * flat - b).unsqueeze(-1))[
        ..., 0, 0
    ]
    return bend, square


def second_moment(
    mdp: LayeredMDP, q: Tensor, mean: Tensor, noise: Noise, baseline: Tensor
) -> Tensor:
    """E[x x'] of one episode, `(*batch, S * A, S * A)`, with x = (loss - b) / q where visited.

    x is the loss estimate minus b. With m = mean - b, the entry of pairs i before j is
    m_i m_j P(i and j are visited) / (q_i q_j) = m_i m_j P(s_j is visited | i) / q(s_j). The
    diagonal is E[(loss_i - b_i)^2] / q_i. Two pairs of one layer are never both visited.
    """
    exists = mdp.actions
    policy = policy_of(mdp, q)
    ahead = mdp.joint_transitions @ reachability(mdp, policy).unsqueeze(-3)  # (*batch, S, A, S)
    later = (ahead / q.sum(-1)[..., None, None, :]).flatten(-3, -2)  # (*batch, S * A, S)
    later = later.repeat_interleave(mdp.num_actions, -1)  # (*batch, S * A, S * A)
    flat, b = (torch.where(exists, x, 0.0).flatten(-2) for x in (mean, baseline))
    joint = outer(flat - b) * later
    own = (mean_square(flat, noise) - 2 * b * flat + b**2) / torch.where(exists, q, 1.0).flatten(-2)
    return joint + joint.mT + torch.diag_embed(own)


def floored(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """q, raised where 1/q^3 would overflow; the formulas are continuous near q = 0."""
    return torch.where(mdp.actions, q.clamp(min=torch.finfo(q.dtype).tiny ** 0.3), 0.0)


def outer(x: Tensor) -> Tensor:
    """x x', `(..., n)` -> `(..., n, n)`."""
    return x.unsqueeze(-1) * x.unsqueeze(-2)


def totals(phases: list[Phase], values: Tensor, episodes: Tensor, phase: Tensor) -> Tensor:
    """Sums of the values over the first `episodes` `(K,)`: `(P, ...)` -> `(K, ...)`.

    `phase` is the phase in which each of these episodes lies.
    """
    starts = _starts(phases, episodes)
    lengths = torch.diff(starts).reshape(-1, *(1,) * (values.dim() - 1))
    finished = torch.cat([torch.zeros_like(values[:1]), (lengths * values[:-1]).cumsum(0)])
    return (
        finished[phase]
        + (episodes - starts[phase]).reshape(-1, *(1,) * (values.dim() - 1)) * values[phase]
    )


def _starts(phases: list[Phase], like: Tensor) -> Tensor:
    return torch.tensor([phase.start for phase in phases], dtype=like.dtype, device=like.device)
