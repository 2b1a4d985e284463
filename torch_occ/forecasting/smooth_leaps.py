"""Leaps with reparametrized random numbers, on a fixed grid of times: differentiable regret."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torch_occ._support.private import standard_gamma
from torch_occ.forecasting.course import Course
from torch_occ.forecasting.leaping import Leaps
from torch_occ.forecasting.mean_path import outer, second_moment
from torch_occ.game.losses import LossProcess, Noise
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep


def leap_smoothly(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    particles: int = 16,
    seed: int = 0,
    per_decade: int = 20,
    draws: Literal["gamma", "gaussian"] = "gamma",
) -> Leaps:
    """The regret by leaps, differentiable in the regularizer's parameters.

    Estimates are importance-weighted. Leaps end at log-spaced times, the same for all particles.

    With "gaussian" draws, the estimates of a leap are normal with their exact covariance, including
    joint visits. This is a poor approximation for a pair with less than one expected visit.
    "gamma" draws the losses of a pair from the gamma distribution with the mean and the variance of
    a Poisson number. They are never negative, and as skewed as rare visits are, but independent
    between pairs; the gradient is right in expectation, not for a single seed.

    Parameters of the regularizer may have a batch shape `(B,)`; then the regret is `(N, B, C)`.

    Returns:
        The regret of every particle.
    """
    course = Course.of(mdp, losses, int(episodes), per_decade)
    step = FTRLStep(mdp, regularizer)
    batch = step.evaluator.batch_shape(step.evaluator.own_parameters)
    shape = (particles, *batch, mdp.num_states, mdp.num_actions)
    generator = torch.Generator(device=mdp.device).manual_seed(seed)
    cumulative_loss = torch.zeros(shape, dtype=mdp.dtype, device=mdp.device)
    total = cumulative_loss[..., 0, 0]
    uncertified = torch.zeros(shape[:-2], dtype=torch.long, device=mdp.device)
    curve: list[Tensor] = []
    warm: Tensor | None = None
    t, length, opening = 1.0, 0.0, total
    for i in range(len(course.stops) + 1):
        solution = step.solve(
            cumulative_loss,
            torch.full(shape[:-2], t, dtype=mdp.dtype),
            warm_start=warm,
            check=False,
        )
        uncertified = uncertified + (~solution.converged).long()
        q, warm = solution.q, solution.q.detach()
        if i:
            closing = (q * course.gaps[course.phase[i - 1]]).sum((-2, -1))
            total = total + 0.5 * (length + 1) * opening + 0.5 * (length - 1) * closing
            curve.append(total - course.best[i - 1])
        if i < len(course.stops):
            phase = course.phase[i]
            opening = (q * course.gaps[phase]).sum((-2, -1))
            length = float(course.stops[i]) - t + 1
            cumulative_loss = cumulative_loss + _smooth_estimates(
                mdp, q, course.means[phase], course.noise, length, draws, generator
            )
            t += length
    leaps = torch.full(shape[:-2], len(course.stops))
    return Leaps(course.stops.long(), torch.stack(curve, -1), leaps, uncertified)


def _smooth_estimates(
    mdp: LayeredMDP,
    q: Tensor,
    mean: Tensor,
    noise: Noise,
    length: float,
    draws: str,
    generator: torch.Generator,
) -> Tensor:
    """Reparametrized loss estimates of `length` episodes with q."""
    if draws == "gaussian":
        flat = mean.flatten()
        moment = second_moment(mdp, q, mean.expand_as(q), noise, torch.zeros_like(q)) - outer(flat)
        scale = moment.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
        correlation = moment / scale.unsqueeze(-1) / scale.unsqueeze(-2)
        root = torch.linalg.cholesky(
            correlation + 1e-9 * torch.eye(len(flat), dtype=q.dtype, device=q.device)
        )
        normal = torch.randn(
            *q.shape[:1],
            *(1,) * (q.dim() - 3),
            len(flat),
            dtype=q.dtype,
            device=q.device,
            generator=generator,
        )
        fluctuation = scale * (root @ normal.expand(*q.shape[:-2], -1).unsqueeze(-1)).squeeze(-1)
        return length * mean + length**0.5 * fluctuation.unflatten(-1, mean.shape)
    exists = mdp.actions & (mean > 0)
    expected = torch.where(exists, length * q * mean, 1.0)
    return torch.where(
        exists, standard_gamma(expected, generator) / torch.where(exists, q, 1.0), 0.0
    )
