"""Leaps of many episodes in torch, for any regularizer; see torch_occ.forecasting.leaping."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.forecasting.course import WIDEST, Course
from torch_occ.game.estimators import CentredEstimator
from torch_occ.game.losses import Noise
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point, policy_of
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.hessians import Hessian
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Setting


@torch.no_grad()
def leap_in_torch(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    estimator: CentredEstimator,
    course: Course,
    particles: int,
    seed: int,
    accuracy: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leap with all particles.

    Returns:
        Their losses minus those of the best policy of every phase `(N, C)`, and their numbers of
        leaps and of uncertified steps, `(N,)` each.
    """
    step = FTRLStep(mdp, regularizer)
    setting = Setting(mdp, step.evaluator, False)
    generator = torch.Generator(device=mdp.device).manual_seed(seed)
    q = interior_point(mdp).expand(particles, -1, -1)
    cumulative_loss = torch.zeros_like(q)
    expected = torch.zeros(particles, len(course.stops), dtype=mdp.dtype, device=mdp.device)
    t, length, total, opening = (
        torch.full_like(expected[:, 0], value) for value in (1.0, 0.0, 0.0, 0.0)
    )
    stop, leaps, uncertified = (
        torch.zeros(particles, dtype=torch.long, device=mdp.device) for _ in range(3)
    )
    alive = torch.arange(particles, device=mdp.device)
    smallest = torch.finfo(mdp.dtype).tiny / torch.finfo(mdp.dtype).eps
    while True:
        solution = step.solve(cumulative_loss, t, warm_start=q, check=False)
        # The q of an entropy may fall to zero; psi has derivatives at the smallest number.
        q = torch.where(mdp.actions, solution.q.clamp(min=smallest), 0.0)
        uncertified[alive] += (~solution.converged).long()
        closing = (q * course.gaps[course.phase[stop]]).sum((-2, -1))
        total = torch.where(
            length > 0, total + 0.5 * (length + 1) * opening + 0.5 * (length - 1) * closing, total
        )
        arrived = t > course.stops[stop]
        expected[alive[arrived], stop[arrived]] = total[arrived]
        stop = stop + arrived.long()
        going = stop < len(course.stops)
        if not bool(going.all()):
            alive, q, cumulative_loss, t, total, stop = (
                x[going] for x in (alive, q, cumulative_loss, t, total, stop)
            )
            if not len(alive):
                return expected, leaps, uncertified
        phase = course.phase[stop]
        opening = (q * course.gaps[phase]).sum((-2, -1))
        hessian = setting.bind([t, *step.evaluator.own_parameters]).deriver(t.shape)(q).hessian
        length = (
            torch.minimum(longest_leap(mdp, hessian, q, accuracy), WIDEST * t).floor().clamp(min=1)
        )
        length = torch.minimum(length, course.stops[stop] - t + 1)
        visits, baseline = _visits(mdp, q, length, generator), estimator.baseline(q, t)
        charged = _charge(course.noise, course.means[phase], visits, generator)
        estimates = (charged - visits * baseline) / torch.where(mdp.actions, q, 1.0) + length[
            :, None, None
        ] * baseline
        cumulative_loss = cumulative_loss + torch.where(mdp.actions, estimates, 0.0)
        leaps[alive] += 1
        t = t + length


def _visits(mdp: LayeredMDP, q: Tensor, length: Tensor, generator: torch.Generator) -> Tensor:
    """How often `length` episodes `(N,)` with q visit every pair, `(N, S, A)`."""
    entering = _multinomial(length, mdp.initial.expand(len(q), -1), generator)  # (N, S_0)
    visits = []
    for k, policy in enumerate(mdp.split(policy_of(mdp, q), -2)):
        visits.append(_multinomial(entering, policy, generator))
        if k + 1 < mdp.horizon:
            kernel = mdp.transitions[k].expand(*visits[-1].shape, -1)
            entering = _multinomial(visits[-1], kernel, generator).sum((-3, -2))
    return torch.cat(visits, -2)


def _multinomial(count: Tensor, probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Multinomial counts `(*shape, K)` of `count` draws `(*shape,)`, by successive binomials."""
    left, drawn = count, []
    remaining = probabilities.flip(-1).cumsum(-1).flip(-1)
    for i in range(probabilities.shape[-1]):
        share = torch.where(
            remaining[..., i] > 0, probabilities[..., i] / remaining[..., i], 0.0
        ).clamp(0, 1)
        drawn.append(torch.binomial(left, share, generator=generator))
        left = left - drawn[-1]
    return torch.stack(drawn, -1)


def _charge(noise: Noise, mean: Tensor, visits: Tensor, generator: torch.Generator) -> Tensor:
    """The sum of the losses of all visits."""
    if noise == "bernoulli":
        return torch.binomial(visits, mean.expand_as(visits), generator=generator)
    if noise == "uniform":  # a sum of many uniform numbers is normal; of few, approximately
        normal = torch.randn(
            visits.shape, dtype=visits.dtype, device=visits.device, generator=generator
        )
        return visits * mean + torch.minimum(mean, 1 - mean) * (visits / 3).sqrt() * normal
    return visits * mean


def longest_leap(mdp: LayeredMDP, hessian: Hessian, q: Tensor, accuracy: float) -> Tensor:
    """The number of episodes `(*batch,)` during which q `(*batch, S, A)` may stay constant.

    At fixed q(s), a unit force on an action changes its q by R = (1/D_a) (sum_{b != a} 1/D_b) /
    (sum_b 1/D_b), where D is the curvature of psi (torch_occ.step.kkt). Each episode brings a force
    of about one. While a pair is not visited, q changes relatively by R/q per episode. Over many
    visits the forces average out, and their fluctuation R/q sqrt(length/q) remains. The larger of
    the two lengths is allowed.
    """
    exists = mdp.actions
    softness = torch.where(exists, 1 / torch.where(exists, hessian.curvature, 1.0), 0.0)
    others = softness @ mdp.other_actions
    alone = mdp.missing["rest"]
    decided = exists if alone is None else ~alone
    response = torch.where(decided, softness * others / softness.sum(-1, keepdim=True), 1.0)
    slack = accuracy * q / response
    return torch.where(decided, torch.maximum(slack, q * slack**2), torch.inf).amin((-2, -1))
