"""The regret of FTRL by leaping: many episodes at once, as long as the policy would hardly have changed in between.

A particle is one run of the learner. Instead of solving for q in every episode it plays `length` episodes with one q, draws at once how
often they visit every pair (multinomial down the layers, so that a trajectory stays one) and what they are charged there, adds the
estimates, and solves again:

    n ~ visits of `length` episodes with q,        Lhat += (losses(n) - n b) / q + length b,        t += length,

with b the baseline of the estimator, nothing for importance weights.

Leaps of one episode are the algorithm itself. The only error is that q stands still during a leap, and leaps are as long as that allows
(`patience`). Everything changes on the scale of t, and so the number of leaps grows with log T, however little the learner is
regularized: where a single visit changes everything, visits are rare.

`leap` draws exact counts, and is the forecast for where torch_occ.forecast is out of its depth; `predict` chooses between the two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.estimators import CentredEstimator, Estimator, ImportanceWeighted, ReducedVariance, centred
from torch_occ.forecast import forecast, totals
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
    estimator: Estimator | None = None,
    particles: int = PARTICLES,
    seed: int = 0,
) -> Prediction:
    """The regret at T: by `forecast` where its own noise says that it may be believed, by `leap` elsewhere; no simulation decides.

    With a baseline it is always `leap`: a rare visit without loss may overturn all that was learnt, of which covariances say nothing.
    """
    if type(centred(estimator)) is ImportanceWeighted:
        with torch.no_grad():
            path = forecast(mdp, regularizer, losses, episodes)
        if bool(path.reliable):
            return Prediction(path.final, torch.zeros_like(path.final), "mean path")
    found = leap(mdp, regularizer, losses, episodes, estimator=estimator, particles=particles, seed=seed)
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
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` over any number of episodes up to 1e12.

    Args:
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed beforehand.
        estimator: importance-weighted by default; or `ReducedVariance`, or any other `CentredEstimator`.
        particles: independent runs.
        seed: the same seed gives the same numbers on the same backend.
        accuracy: how much q may change in a leap, relatively; smaller is slower and closer to the algorithm.
        backend: "engine" is compiled and knows what is built in, "torch" knows all; "auto" takes the engine where it can.
    """
    if not 1 <= episodes <= 10**12:
        raise ValueError(f"episodes: expected a number from 1 to 1e12, got {episodes}")
    if particles < 1:
        raise ValueError(f"particles: expected at least 1, got {particles}")
    if not accuracy > 0:
        raise ValueError(f"accuracy: expected a positive number, got {accuracy}")
    estimate, course = centred(estimator), Course.of(mdp, losses, int(episodes))
    play = _leap_compiled if engine_takes(backend, lambda: _why_not_compiled(mdp, regularizer, estimate)) else _leap_in_torch
    expected, leaps, uncertified = play(mdp, regularizer, estimate, course, particles, seed, accuracy)
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
        gaps = optimal_policy(mdp, means, in_order=True).gaps
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
    mdp: LayeredMDP, regularizer: Regularizer, estimator: CentredEstimator, course: Course, particles: int, seed: int, accuracy: float
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
        visits, baseline = _visits(mdp, q, length, generator), estimator.baseline(q, t)
        charged = _charge(course.noise, course.means[phase], visits, generator)
        estimates = (charged - visits * baseline) / torch.where(mdp.actions, q, 1.0) + length[:, None, None] * baseline
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


def _why_not_compiled(mdp: LayeredMDP, regularizer: Regularizer, estimator: CentredEstimator) -> str | None:
    from torch_occ.engine.arrays import why_not

    if type(estimator) not in (ImportanceWeighted, ReducedVariance):
        return f"the engine does not know the estimator {type(estimator).__name__}"
    if any(parameter.dim() for parameter in regularizer.parameters()):
        return "the regularizer has batched parameters"
    return why_not(mdp, regularizer)


def _leap_compiled(
    mdp: LayeredMDP, regularizer: Regularizer, estimator: CentredEstimator, course: Course, particles: int, seed: int, accuracy: float
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
        # No q reaches a threshold of 2.
        threshold = estimator.threshold(log_t.exp()) if isinstance(estimator, ReducedVariance) else torch.full_like(log_t, 2.0)
    log_weights = torch.where(weights == 0, 1.0, weights.abs()).log().contiguous().numpy()
    model = model_of(mdp)
    way = Way(
        log_t.numpy(),
        log_weights,
        weights[0].sign().numpy(),
        threshold.log().numpy(),
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
