"""Leaping: the regret of particles that play many episodes per step."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.choices import Backend, engine_takes, later
from torch_occ._support.constants import log_spaced
from torch_occ.game.estimators import CentredEstimator, Estimator, ImportanceWeighted, centred
from torch_occ.game.history import comparator
from torch_occ.game.losses import LossProcess, Noise
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point, optimal_policy, policy_of
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.derivatives import Hessian
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Setting
from torch_occ.tuning.forecast import forecast, phases_of

#: The longest leap relative to t.
WIDEST = 0.25


class LeapCourse(NamedTuple):
    """Losses, stops and comparators, which are known before the first leap, and the options."""

    stops: Tensor  # (C,), episodes that no leap crosses: checkpoints and ends of phases
    phase: Tensor  # (C,), the phase before each stop
    means: Tensor  # (P, S, A)
    gaps: Tensor  # (P, S, A)
    best: Tensor  # (C,), loss of the best fixed policy minus that of the best of every phase
    noise: Noise
    particles: int
    seed: int
    accuracy: float

    @classmethod
    def of(
        cls, mdp: LayeredMDP, losses: Tensor | LossProcess, episodes: int, *options: Any
    ) -> LeapCourse:
        phases = phases_of(mdp, losses, episodes)
        if mdp.batch_shape or phases.means.dim() != 3:
            raise ValueError(
                "leaping takes one MDP and one table of means (S, A) at a time; forecast takes "
                "batches"
            )
        every = sorted({*log_spaced(episodes, 10), *phases.starts[1:]})
        stops = torch.tensor(every, dtype=mdp.dtype, device=mdp.device)
        phase, means = phases.at(stops), phases.means.detach()
        gaps = optimal_policy(mdp, means, in_order=True).gaps
        best = comparator(mdp, phases.totals(gaps, stops, phase))
        return cls(stops, phase, means, gaps, best, phases.noise, *options)


# -- Leaps of many episodes in torch, for any regularizer ------------------------------------------


@torch.no_grad()
def leap_in_torch(
    mdp: LayeredMDP, regularizer: Regularizer, estimator: CentredEstimator, course: LeapCourse
) -> tuple[Tensor, Tensor, Tensor]:
    """Leap with all particles; for the result see `torch_occ.tuning.compiled_leaps`."""
    step, particles = FTRLStep(mdp, regularizer), course.particles
    setting = Setting(mdp, step.evaluator, False)
    generator = torch.Generator(device=mdp.device).manual_seed(course.seed)
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
        hessian = setting.bind([t, *step.evaluator.parameters(t)]).deriver(t.shape)(q).hessian
        longest = torch.minimum(longest_leap(mdp, hessian, q, course.accuracy), WIDEST * t)
        length = torch.minimum(longest.floor().clamp(min=1), course.stops[stop] - t + 1)
        visits, baseline = _visits(mdp, q, length, generator), estimator.baseline(q, t)
        charged = _sum_of_losses(course.noise, course.means[phase], visits, generator)
        visited = (charged - visits * baseline) / torch.where(mdp.actions, q, 1.0)
        estimates = visited + length[:, None, None] * baseline
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
        share = probabilities[..., i] / remaining[..., i]
        share = torch.where(remaining[..., i] > 0, share, 0.0).clamp(0, 1)
        drawn.append(torch.binomial(left, share, generator=generator))
        left = left - drawn[-1]
    return torch.stack(drawn, -1)


def _sum_of_losses(noise: Noise, mean: Tensor, visits: Tensor, random: torch.Generator) -> Tensor:
    """The sum of the losses of all visits."""
    if noise == "bernoulli":
        return torch.binomial(visits, mean.expand_as(visits), generator=random)
    if noise == "uniform":  # a sum of many uniform numbers is normal; of few, approximately
        normal = torch.empty_like(visits).normal_(generator=random)
        return visits * mean + torch.minimum(mean, 1 - mean) * (visits / 3).sqrt() * normal
    return visits * mean


def longest_leap(mdp: LayeredMDP, hessian: Hessian, q: Tensor, accuracy: float) -> Tensor:
    """The number of episodes `(*batch,)` during which q `(*batch, S, A)` may stay constant.

    At fixed q(s), a unit force on an action changes its q by R = (1/D_a) (sum_{b != a} 1/D_b) /
    (sum_b 1/D_b), where D is the curvature of psi (torch_occ.step.system). An episode has a force
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


# -- The regret of FTRL by leaping: many episodes at once, while the policy would hardly change ----
#
# A particle is one run of the learner that plays `length` episodes with one q. It draws at once how
# often these visit every pair (by multinomials along the layers, so that trajectories stay intact)
# and the losses there, adds the estimates, and solves again:
#
#     n ~ visits of `length` episodes with q,
#     Lhat += (losses(n) - n b) / q + length b,
#     t += length,
#
# where b is the baseline of the estimator, zero for importance weights.
#
# Leaps of one episode are the algorithm itself. The only error is that q is constant during a leap,
# and leaps are as long as that allows (`longest_leap`). Everything changes on the scale of t, so
# the number of leaps grows with log T. This also holds where the learner is hardly regularized:
# there a single visit changes much, but visits are rare.

#: The relative change of q that is allowed in a leap; docs/tuning_results.md has measurements.
ACCURACY = 0.5

#: The default number of particles.
PARTICLES = 128


class Leaps(NamedTuple):
    """The pseudo-regret of N particles at C episodes."""

    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C)
    leaps: Tensor  # (N,), the number of leaps
    uncertified: Tensor  # (N,), the number of steps without certificate

    @property
    def mean(self) -> Tensor:
        """The mean over the particles, `(C,)`; NaN if a step was not certified."""
        return torch.where(self.uncertified.any(), torch.nan, self.regret.mean(0))

    @property
    def standard_error(self) -> Tensor:
        """The standard error of the mean, `(C,)`."""
        return self.regret.std(0) / len(self.regret) ** 0.5

    @property
    def final(self) -> Tensor:
        """The mean after the last episode."""
        return self.mean[-1]


class Prediction(NamedTuple):
    """A forecast of the regret at T, by the method that was chosen."""

    regret: Tensor  # ()
    standard_error: Tensor  # (), zero for the mean path
    method: Literal["mean path", "leaping"]


def predict(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    particles: int = PARTICLES,
    seed: int = 0,
) -> Prediction:
    """Forecast the regret at T by `forecast` where it is reliable, and by `leap` elsewhere.

    The noise of the forecast decides; nothing is simulated. With a baseline the method is always
    `leap`: a rare visit without loss may change the estimates completely, and covariances do not
    show this.

    Returns:
        The regret, its standard error, and the method.
    """
    if type(centred(estimator)) is ImportanceWeighted:
        with torch.no_grad():
            path = forecast(mdp, regularizer, losses, episodes)
        if bool(path.reliable):
            return Prediction(path.final, torch.zeros_like(path.final), "mean path")
    found = leap(
        mdp, regularizer, losses, episodes, estimator=estimator, particles=particles, seed=seed
    )
    return Prediction(found.final, found.standard_error[-1], "leaping")


def leap(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    estimator: Estimator | None = None,
    particles: int = PARTICLES,
    seed: int = 0,
    accuracy: float = ACCURACY,
    backend: Backend = "auto",
) -> Leaps:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` for up to 1e12 episodes.

    Args:
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed in
            advance.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other
            `CentredEstimator`.
        particles: the number of independent runs.
        seed: the same seed gives the same numbers on the same backend.
        accuracy: the relative change of q that is allowed in a leap. Smaller is slower and closer
            to the algorithm.
        backend: "engine" is compiled and takes built-in regularizers and estimators; "torch" takes
            all; "auto" uses the engine where it can.

    Returns:
        The regret of every particle.

    Raises:
        ValueError: if an argument is wrong, or the engine is required but cannot be used.
        TypeError: if the losses or the estimator cannot be forecast.
    """
    if not 1 <= episodes <= 10**12:
        raise ValueError(f"episodes: expected a number from 1 to 1e12, got {episodes}")
    if particles < 1:
        raise ValueError(f"particles: expected at least 1, got {particles}")
    if not accuracy > 0:
        raise ValueError(f"accuracy: expected a positive number, got {accuracy}")
    for _, batch in regularizer.batched():
        raise ValueError(
            f"regularizer: a parameter has the batch shape {tuple(batch)}, and leap takes one "
            "regularizer at a time; forecast takes a batch"
        )
    estimate = centred(estimator)
    course = LeapCourse.of(mdp, losses, int(episodes), particles, seed, accuracy)

    def why_not() -> str | None:
        return later("tuning.compiled_leaps").why_no_leap(mdp, regularizer, estimate)

    usable = engine_takes(backend, why_not)
    play = later("tuning.compiled_leaps").leap_compiled if usable else leap_in_torch
    expected, leaps, uncertified = play(mdp, regularizer, estimate, course)
    return Leaps(course.stops.long(), expected - course.best, leaps, uncertified)
