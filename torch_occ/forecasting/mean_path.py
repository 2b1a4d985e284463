"""The regret of FTRL with bandit feedback, forecast without playing: cheap, smooth, and differentiable in everything.

The loss estimate, (loss - b) / q on the visited pairs plus a baseline b (torch_occ.game.estimators), is unbiased whatever the regularizer is,
so the cumulative estimate fluctuates around the mean path Lbar_t = sum of means. Expanding q_t = q(t, Lhat_{t-1}) to second order
around it,

    E <q_t, mean_t> = <q(t, Lbar), mean_t>  -  1/2 <d/ds Pi(Lbar + s mean_t), C_{t-1}>,
                          drift                             noise

with Pi the response of q to the loss (torch_occ.step.linearization) and C_t = sum of Cov(loss_estimate) along the path, which holds the
joint probabilities of visiting two pairs in one episode. Everything is smooth on the scale of t itself, so some twenty values of t for
every tenfold of episodes are enough (torch_occ.forecasting.quadrature), and all of them are solved as one batch.

Summed by parts over t, the noise is 1/2 sum_t E |loss_estimate_t|^2 in the norm of Pi_t, the stability term of the FTRL analysis, less
what is left of the fluctuations at the end and what the growth of psi_t takes out of them. `stability` gives that term too.

The expansion is one in the fluctuations of q relative to itself. Where the learner is so little regularized that a single visit changes q
many times over, it fails; `noise_share` tells, and torch_occ.forecasting.leaping is for there. With a baseline a single visit may do so even where
the noise is small: without a loss there it lowers the estimate by b / q, and q ~ beta / (gap t) under a log-barrier, so that below
beta ~ b it takes away the whole lead of t gap. Only leaping and playing see that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import readable
from torch_occ.forecasting.phases import Phase, phases_of
from torch_occ.forecasting.quadrature import Quadrature
from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.losses import LossProcess, Noise, mean_square
from torch_occ.game.regret import comparator
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy, policy_of, reachability
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.linearization import Linearization

#: Panels of three solves for every tenfold of episodes.
PER_DECADE = 3.0

#: Noise that makes up more than this of a forecast is no small correction any more; measured in docs/meta_tuning.md.
SMALL_NOISE = 1 / 3


class Forecast(NamedTuple):
    """Predicted pseudo-regret at C episodes. Where a step could not be certified all curves are NaN."""

    episodes: Tensor  # (C,)
    drift: Tensor  # (*batch, C), the regret of the mean path
    noise: Tensor  # (*batch, C), what the fluctuations of the loss estimates add
    stability: Tensor  # (*batch, C), 1/2 sum_t E |loss_estimate_t|^2_{Pi_t}, for comparison
    certified: Tensor  # (*batch,), whether every step on the path was

    @property
    def regret(self) -> Tensor:
        """`(*batch, C)`."""
        return self.drift + self.noise

    @property
    def final(self) -> Tensor:
        """The regret after the last episode, `(*batch,)`, differentiable; `float(path.final)` is the number."""
        return readable(self.regret[..., -1])

    @property
    def noise_share(self) -> Tensor:
        """|noise| / (|drift| + |noise|) at the end, `(*batch,)`: how far from a small correction the noise is."""
        drift, noise = self.drift[..., -1].abs(), self.noise[..., -1].abs()
        return noise / (drift + noise)

    @property
    def reliable(self) -> Tensor:
        """Where the expansion may be believed, `(*batch,)`: certified, and with little noise. Elsewhere use `leap`."""
        return self.certified & (self.noise_share <= SMALL_NOISE)


def forecast(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    per_decade: float = PER_DECADE,
) -> Forecast:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` over any number of episodes up to 1e12.

    Args:
        mdp: may have a batch shape.
        regularizer: psi_t; its parameters may have a batch shape.
        losses: means `(*batch, S, A)` of Bernoulli losses, differentiable; or a loss process whose means are fixed beforehand.
        episodes: T.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other `CentredEstimator`.
        per_decade: panels of three solves for every tenfold of episodes.

    All batch shapes broadcast. The result is differentiable in the regularizer's parameters and in the means.
    """
    if not 1 <= episodes <= 10**12:
        raise ValueError(f"episodes: expected a number from 1 to 1e12, got {episodes}")
    estimate = centred(estimator)
    phases, noise = phases_of(mdp, losses, int(episodes))
    step = FTRLStep(mdp, regularizer)
    grid = Quadrature.over(
        [phase.start for phase in phases], int(episodes), per_decade, mdp.transitions[0]
    )
    given = step.evaluator.batch_shape(step.evaluator.own_parameters)
    batch = torch.broadcast_shapes(phases[0].mean.shape[:-2], mdp.batch_shape, given)
    mean = torch.stack(
        [phase.mean.expand(*batch, *phase.mean.shape[-2:]) for phase in phases]
    )  # (P, *batch, S, A)
    t = grid.t.reshape(-1, *(1,) * len(batch)).expand(-1, *batch)  # (K, *batch)
    now = mean[grid.phase]  # (K, *batch, S, A)
    solution = step.solve(totals(phases, mean, grid.t - 1, grid.phase), t, check=False)
    certified = solution.converged.all(0)
    q = floored(mdp, solution.q)
    gaps = optimal_policy(mdp, mean).gaps  # (P, *batch, S, A)
    # With gaps in place of losses both sums lose what every policy pays, and nothing large has to cancel.
    ends = grid.ends.to(mdp.dtype)
    best = comparator(
        mdp, totals(phases, gaps, ends, torch.bucketize(ends, _starts(phases, ends)) - 1)
    )
    drift = grid.sums((q * gaps[grid.phase]).sum((-2, -1))) - best

    linear = Linearization(step, q, t)
    Pi = linear.dense()  # (K, *batch, S * A, S * A)
    baseline = torch.where(mdp.actions, estimate.baseline(q, t), 0.0)
    visited = second_moment(mdp, q, now, noise, baseline)
    flat, b = now.flatten(-2), baseline.flatten(-2)
    C = grid.sums_before(visited - outer(flat - b))
    u = (Pi @ flat.unsqueeze(-1)).squeeze(-1).unflatten(-1, q.shape[-2:])
    bend = linear.bend(u, Pi @ C @ Pi)
    square = (Pi * visited).sum((-2, -1)) + (b.unsqueeze(-2) @ Pi @ (2 * flat - b).unsqueeze(-1))[
        ..., 0, 0
    ]  # E |loss_estimate|^2_Pi
    curves = (drift, grid.sums(-0.5 * bend), grid.sums(0.5 * square))
    drift, fluctuation, stability = (
        torch.where(certified, curve, torch.nan).movedim(0, -1) for curve in curves
    )
    return Forecast(grid.ends, drift, fluctuation, stability, certified)


def second_moment(
    mdp: LayeredMDP, q: Tensor, mean: Tensor, noise: Noise, baseline: Tensor
) -> Tensor:
    """E[x x'] of one episode, `(*batch, S * A, S * A)`, with x = (loss - b) / q on the visited pairs: what a loss estimate has beyond b.

    With m = mean - b, for pairs i before j it is m_i m_j P(i and j are visited) / (q_i q_j) = m_i m_j P(s_j is passed | i) / q(s_j); on
    the diagonal, E[(loss_i - b_i)^2] / q_i; two pairs of one layer are never visited together.
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
    """q, not so small on any pair that 1/q^3 overflows: the formulas are far from q = 0, and continuous."""
    return torch.where(mdp.actions, q.clamp(min=torch.finfo(q.dtype).tiny ** 0.3), 0.0)


def outer(x: Tensor) -> Tensor:
    """x x', `(..., n)` -> `(..., n, n)`."""
    return x.unsqueeze(-1) * x.unsqueeze(-2)


def totals(phases: list[Phase], values: Tensor, episodes: Tensor, phase: Tensor) -> Tensor:
    """The sum of the first so many `(K,)` episodes' values, each of which lies in the given phase: `(P, ...)` -> `(K, ...)`."""
    starts = _starts(phases, episodes)
    lengths = torch.diff(starts).reshape(-1, *(1,) * (values.dim() - 1))
    finished = torch.cat([torch.zeros_like(values[:1]), (lengths * values[:-1]).cumsum(0)])
    return (
        finished[phase]
        + (episodes - starts[phase]).reshape(-1, *(1,) * (values.dim() - 1)) * values[phase]
    )


def _starts(phases: list[Phase], like: Tensor) -> Tensor:
    return torch.tensor([phase.start for phase in phases], dtype=like.dtype, device=like.device)
