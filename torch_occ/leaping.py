"""The regret of FTRL by leaping: many episodes at once, as long as the policy would hardly have changed in between.

A particle is one run of the learner. Instead of solving for q in every episode it plays `length` episodes with one q, draws at once how
often they visit every pair (multinomial down the layers, so that a trajectory stays one) and what they are charged there, adds the
estimates, and solves again:

    n ~ visits of `length` episodes with q,        Lhat += losses(n) / q,        t += length.

Leaps of one episode are the algorithm itself. The only error is that q stands still during a leap, and leaps are as long as that allows
(`patience`). Everything changes on the scale of t, and so the number of leaps grows with log T, however little the learner is
regularized: where a single visit changes everything, visits are rare.

`leap` draws exact counts, and is the forecast for where torch_occ.forecast is out of its depth; `predict` chooses between the two.
`leap_smoothly` draws reparametrized numbers on a fixed grid of times, so that the regret is differentiable in the regularizer's parameters.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.forecast import forecast, second_moment, totals
from torch_occ.ftrl import FTRLStep
from torch_occ.hessians import Hessian
from torch_occ.implicit import Setting
from torch_occ.losses import LossProcess, Noise
from torch_occ.mdp import LayeredMDP
from torch_occ.newton import Options
from torch_occ.occupancy import interior_point, optimal_policy, policy_of
from torch_occ.phases import phases_of
from torch_occ.regret import comparator
from torch_occ.regularizers import Regularizer
from torch_occ.validation import Backend, engine_takes

#: The relative change of q that is tolerated in a leap, and the longest leap relative to t. Measured in docs/meta_tuning.md.
ACCURACY, WIDEST = 0.5, 0.25

#: Particles of a forecast.
PARTICLES = 128


class Leaps(NamedTuple):
    """The pseudo-regret of N particles at C episodes."""

    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C)
    leaps: Tensor  # (N,), how many it took
    uncertified: Tensor  # (N,), steps among them without certificate

    @property
    def mean(self) -> Tensor:
        """Over the particles, `(C,)`; NaN if a step was not certified."""
        return torch.where(self.uncertified.any(), torch.nan, self.regret.mean(0))

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, `(C,)`."""
        return self.regret.std(0) / len(self.regret) ** 0.5

    @property
    def final(self) -> Tensor:
        """The mean after the last episode."""
        return self.mean[-1]


class Prediction(NamedTuple):
    """A forecast of the regret at T by the method that suits it."""

    regret: Tensor  # ()
    standard_error: Tensor  # (), zero for the mean path
    method: Literal["mean path", "leaping"]


def predict(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    particles: int = PARTICLES,
    seed: int = 0,
) -> Prediction:
    """The regret at T: by `forecast` where its own noise says that it may be believed, by `leap` elsewhere; no simulation decides."""
    with torch.no_grad():
        path = forecast(mdp, regularizer, losses, episodes)
    if bool(path.reliable):
        return Prediction(path.final, torch.zeros_like(path.final), "mean path")
    found = leap(mdp, regularizer, losses, episodes, particles=particles, seed=seed)
    return Prediction(found.final, found.standard_error[-1], "leaping")


def leap(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Tensor | LossProcess,
    episodes: int,
    *,
    particles: int = PARTICLES,
    seed: int = 0,
    accuracy: float = ACCURACY,
    backend: Backend = "auto",
) -> Leaps:
    """Predict the regret of `FTRL(mdp, regularizer)`, importance-weighted, over any number of episodes up to 1e12.

    Args:
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed beforehand.
        particles: independent runs.
        seed: the same seed gives the same numbers on the same backend.
        accuracy: how much q may change in a leap, relatively; smaller is slower and closer to the algorithm.
        backend: "engine" is compiled and knows built-in regularizers, "torch" knows all; "auto" takes the engine where it can.
    """
    if not 1 <= episodes <= 10**12:
        raise ValueError(f"episodes: expected a number from 1 to 1e12, got {episodes}")
    if particles < 1:
        raise ValueError(f"particles: expected at least 1, got {particles}")
    if not accuracy > 0:
        raise ValueError(f"accuracy: expected a positive number, got {accuracy}")
    course = Course.of(mdp, losses, int(episodes))
    play = _leap_compiled if engine_takes(backend, lambda: _why_not_compiled(mdp, regularizer)) else _leap_in_torch
    expected, leaps, uncertified = play(mdp, regularizer, course, particles, seed, accuracy)
    return Leaps(course.stops.long(), expected - course.best, leaps, uncertified)


class Course(NamedTuple):
    """What is known before the first leap."""

    stops: Tensor  # (C,), episodes beyond which no leap goes: checkpoints and ends of phases
    phase: Tensor  # (C,), the phase that ends, or goes on, at each
    means: Tensor  # (P, S, A)
    gaps: Tensor  # (P, S, A)
    best: Tensor  # (C,), what the best fixed policy pays beyond the best policy of every phase
    noise: Noise

    @classmethod
    def of(cls, mdp: LayeredMDP, losses: Tensor | LossProcess, episodes: int, per_decade: int = 10) -> Course:
        phases, noise = phases_of(mdp, losses, episodes)
        if mdp.batch_shape or phases[0].mean.dim() != 2:
            raise ValueError("leaping takes one MDP and one table of means (S, A) at a time; forecast takes batches")
        exponents = np.arange(0, np.log10(max(episodes, 1)), 1 / per_decade)
        every = {*np.round(10**exponents).astype(int).tolist(), *(phase.start for phase in phases[1:]), episodes}
        stops = torch.tensor(sorted(every), dtype=mdp.dtype, device=mdp.device)
        starts = torch.tensor([phase.start for phase in phases], dtype=mdp.dtype, device=mdp.device)
        phase = torch.bucketize(stops, starts) - 1
        means = torch.stack([phase.mean for phase in phases]).detach()
        gaps = optimal_policy(mdp, means).gaps
        return cls(stops, phase, means, gaps, comparator(mdp, totals(phases, gaps, stops, phase)), noise)


def patience(mdp: LayeredMDP, hessian: Hessian, q: Tensor, accuracy: float) -> Tensor:
    """For how many episodes q `(*batch, S, A)` may stay as it is, `(*batch,)`.

    At fixed q(s), a force of one on an action moves its q by R = (1/D_a) (sum_{b != a} 1/D_b) / (sum_b 1/D_b), with D the curvature of psi
    (torch_occ.kkt). Each episode brings a force of about one. While a pair is not visited, q changes relatively by R/q an episode; over
    many visits the forces average out, and what remains is their fluctuation, R/q sqrt(length/q). The larger of the two lengths is
    allowed.
    """
    exists = mdp.actions
    softness = torch.where(exists, 1 / torch.where(exists, hessian.curvature, 1.0), 0.0)
    others = softness @ mdp.other_actions
    alone = mdp.missing["rest"]
    decided = exists if alone is None else ~alone
    response = torch.where(decided, softness * others / softness.sum(-1, keepdim=True), 1.0)
    slack = accuracy * q / response
    return torch.where(decided, torch.maximum(slack, q * slack**2), torch.inf).amin((-2, -1))


# -- any regularizer, in torch --------------------------------------------------------------------------------------------


@torch.no_grad()
def _leap_in_torch(
    mdp: LayeredMDP, regularizer: Regularizer, course: Course, particles: int, seed: int, accuracy: float
) -> tuple[Tensor, Tensor, Tensor]:
    step = FTRLStep(mdp, regularizer)
    setting = Setting(mdp, step.evaluator, False)
    generator = torch.Generator(device=mdp.device).manual_seed(seed)
    q = interior_point(mdp).expand(particles, -1, -1)
    cumulative_loss = torch.zeros_like(q)
    expected = torch.zeros(particles, len(course.stops), dtype=mdp.dtype, device=mdp.device)
    t, length, total, opening = (torch.full_like(expected[:, 0], value) for value in (1.0, 0.0, 0.0, 0.0))
    stop, leaps, uncertified = (torch.zeros(particles, dtype=torch.long, device=mdp.device) for _ in range(3))
    alive = torch.arange(particles, device=mdp.device)
    while True:
        solution = step.solve(cumulative_loss, t, warm_start=q, check=False)
        if not bool(solution.converged.all()):
            again = step.solve(cumulative_loss, t, check=False)
            solution = solution.merge(again, again.converged & ~solution.converged)
        q = solution.q
        uncertified[alive] += (~solution.converged).long()
        closing = (q * course.gaps[course.phase[stop]]).sum((-2, -1))
        total = torch.where(length > 0, total + 0.5 * (length + 1) * opening + 0.5 * (length - 1) * closing, total)
        arrived = t > course.stops[stop]
        expected[alive[arrived], stop[arrived]] = total[arrived]
        stop = stop + arrived.long()
        going = stop < len(course.stops)
        if not bool(going.all()):
            alive, q, cumulative_loss, t, total, stop = (x[going] for x in (alive, q, cumulative_loss, t, total, stop))
            if not len(alive):
                return expected, leaps, uncertified
        phase = course.phase[stop]
        opening = (q * course.gaps[phase]).sum((-2, -1))
        hessian = setting.bind([t, *step.evaluator.own_parameters]).deriver(t.shape)(q).hessian
        length = torch.minimum(patience(mdp, hessian, q, accuracy), WIDEST * t).floor().clamp(min=1)
        length = torch.minimum(length, course.stops[stop] - t + 1)
        charged = _charge(course.noise, course.means[phase], _visits(mdp, q, length, generator), generator)
        cumulative_loss = cumulative_loss + torch.where(mdp.actions, charged / torch.where(mdp.actions, q, 1.0), 0.0)
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
    """Counts `(*shape, K)` of so many draws `(*shape,)`, one binomial after the other."""
    left, drawn = count, []
    remaining = probabilities.flip(-1).cumsum(-1).flip(-1)
    for i in range(probabilities.shape[-1]):
        share = torch.where(remaining[..., i] > 0, probabilities[..., i] / remaining[..., i], 0.0).clamp(0, 1)
        drawn.append(torch.binomial(left, share, generator=generator))
        left = left - drawn[-1]
    return torch.stack(drawn, -1)


def _charge(noise: Noise, mean: Tensor, visits: Tensor, generator: torch.Generator) -> Tensor:
    """The sum of the losses of so many visits."""
    if noise == "bernoulli":
        return torch.binomial(visits, mean.expand_as(visits), generator=generator)
    if noise == "uniform":  # the sum of many uniform numbers is normal; of few, nearly
        normal = torch.randn(visits.shape, dtype=visits.dtype, device=visits.device, generator=generator)
        return visits * mean + torch.minimum(mean, 1 - mean) * (visits / 3).sqrt() * normal
    return visits * mean


# -- built-in regularizers, compiled --------------------------------------------------------------------------------------


def _why_not_compiled(mdp: LayeredMDP, regularizer: Regularizer) -> str | None:
    from torch_occ.engine.arrays import why_not

    if any(parameter.dim() for parameter in regularizer.parameters()):
        return "the regularizer has batched parameters"
    return why_not(mdp, regularizer)


def _leap_compiled(
    mdp: LayeredMDP, regularizer: Regularizer, course: Course, particles: int, seed: int, accuracy: float
) -> tuple[Tensor, Tensor, Tensor]:
    from torch_occ.engine.arrays import exponents_of, kinds_of, model_of, terms_of, weights_of
    from torch_occ.engine.compiling import patiently
    from torch_occ.engine.episodes import NOISE
    from torch_occ.engine.layout import Terms, make_work
    from torch_occ.engine.leaps import Way
    from torch_occ.engine.leaps import leap as leap_alone
    from torch_occ.threads import for_each

    regularizer.validate()
    # Weights are products of powers of t for every built-in schedule, so that straight lines between logarithms are exact.
    log_t = torch.linspace(0, float(course.stops[-1].log()) + 0.1, 400, dtype=torch.float64)
    with torch.no_grad():
        found = terms_of(regularizer, log_t.exp())
        weights = weights_of(found).expand(len(log_t), -1)
        terms = Terms(*kinds_of(found), exponents_of(found).numpy())
    log_weights = torch.where(weights == 0, 1.0, weights.abs()).log().contiguous().numpy()
    model = model_of(mdp)
    way = Way(
        log_t.numpy(),
        log_weights,
        weights[0].sign().numpy(),
        course.means.flatten(-2).contiguous().numpy(),
        course.gaps.flatten(-2).contiguous().numpy(),
        NOISE[course.noise],
        course.stops.numpy(),
        course.phase.numpy(),
        model.initial[None],
        interior_point(mdp).detach().flatten().numpy(),
        float(accuracy),
        WIDEST,
        Options().tolerance_in(torch.float64),
        Options().max_steps,
    )
    regret = torch.zeros(particles, len(course.stops), dtype=torch.float64)
    counts = torch.zeros(particles, 2, dtype=torch.long)
    seeds = np.random.SeedSequence(seed).generate_state(particles).astype(np.int64)

    def play(i: int) -> None:
        scratch = (np.zeros(len(way.middle)), np.zeros(len(way.signs)), np.zeros(mdp.num_states), np.zeros(0), make_work(model))
        leap_alone(model, terms, way, seeds[i], regret[i].numpy(), counts[i].numpy(), *scratch)

    with patiently:
        for_each(play, particles)
    return regret, counts[:, 0], counts[:, 1]


# -- differentiable -------------------------------------------------------------------------------------------------------


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
    """The regret by leaps whose random numbers are reparametrized, so that it has gradients in the regularizer's parameters.

    Leaps end at log-spaced times, the same for all particles. With "gaussian" draws the estimates of a leap are normal with their exact
    covariance, joint visits included; where a leap expects less than a visit to a pair, that is a bad likeness. "gamma" draws what a pair
    is charged from the gamma distribution with the mean and the variance of a Poisson number: never negative, and as skewed as rare visits
    are, but independent between pairs; its gradient is right in expectation, not for a single seed. Regularizers may have parameters of a
    batch shape `(B,)`; then the regret is `(N, B, C)`.
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
        solution = step.solve(cumulative_loss, torch.full(shape[:-2], t, dtype=mdp.dtype), warm_start=warm, check=False)
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
            cumulative_loss = cumulative_loss + _smooth_estimates(mdp, q, course.means[phase], course.noise, length, draws, generator)
            t += length
    leaps = torch.full(shape[:-2], len(course.stops))
    return Leaps(course.stops.long(), torch.stack(curve, -1), leaps, uncertified)


def _smooth_estimates(
    mdp: LayeredMDP, q: Tensor, mean: Tensor, noise: Noise, length: float, draws: str, generator: torch.Generator
) -> Tensor:
    """The loss estimates of `length` episodes with q, reparametrized."""
    if draws == "gaussian":
        flat = mean.flatten()
        moment = second_moment(mdp, q, mean.expand_as(q), noise) - flat.unsqueeze(-1) * flat
        scale = moment.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
        correlation = moment / scale.unsqueeze(-1) / scale.unsqueeze(-2)
        root = torch.linalg.cholesky(correlation + 1e-9 * torch.eye(len(flat), dtype=q.dtype, device=q.device))
        normal = torch.randn(*q.shape[:1], *(1,) * (q.dim() - 3), len(flat), dtype=q.dtype, device=q.device, generator=generator)
        fluctuation = scale * (root @ normal.expand(*q.shape[:-2], -1).unsqueeze(-1)).squeeze(-1)
        return length * mean + length**0.5 * fluctuation.unflatten(-1, mean.shape)
    exists = mdp.actions & (mean > 0)
    expected = torch.where(exists, length * q * mean, 1.0)
    return torch.where(exists, torch._standard_gamma(expected, generator=generator) / torch.where(exists, q, 1.0), 0.0)
