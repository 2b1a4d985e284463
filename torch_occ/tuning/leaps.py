"""Leaping: the regret of particles that play many episodes per step.

A particle is one run of the learner that plays `length` episodes with one q. It draws at once how
often these visit every pair (by multinomials along the layers, so that trajectories stay intact)
and the losses there, adds the estimates, and solves again:

    n ~ visits of `length` episodes with q,
    Lhat += (losses(n) - n b) / q + length b,
    t += length,

where b is the baseline of the estimator, zero for importance weights. Leaps of one episode are the
algorithm itself. The only error is that q is constant during a leap, and leaps are as long as that
allows (`longest_leaps`). Their number grows with log T.
"""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.constants import log_spaced
from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.history import comparator
from torch_occ.game.losses import LossProcess, Noise
from torch_occ.mdp.checks import check_that, whole
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point, optimal_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.terms import keep
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import Linearization
from torch_occ.tuning.forecast import floored, phases_of

#: The relative change of q that is allowed in a leap; docs/tuning.md has measurements.
ACCURACY = 0.5

#: The default number of particles.
PARTICLES = 128

#: The longest leap relative to t.
WIDEST = 0.25

#: The sum of this many uniform losses is drawn as a normal number.
MANY = 50


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


@torch.no_grad()
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
) -> Leaps:
    """Predict the regret of `FTRL(mdp, regularizer, estimator)` for up to 1e12 episodes.

    Args:
        mdp: in double precision, because episodes are counted in its number type.
        regularizer: psi_t, without a batch.
        losses: means `(S, A)` of Bernoulli losses, or a loss process whose means are fixed in
            advance.
        estimator: importance-weighted by default; or any other `CentredEstimator`.
        particles: the number of independent runs.
        seed: the same seed gives the same numbers.
        accuracy: the relative change of q that is allowed in a leap. Smaller is slower and closer
            to the algorithm.

    Returns:
        The regret of every particle.

    Raises:
        ValueError: if an argument is wrong.
        TypeError: if the losses or the estimator cannot be forecast.
    """
    particles = whole("particles", particles)
    fine = isinstance(seed, Integral) and -(2**63) <= seed < 2**64
    check_that(fine, "seed", "an integer below 2**64", repr(seed))
    check_that(accuracy > 0, "accuracy", "a positive number", accuracy)
    fine, advice = mdp.dtype == torch.float64, "; use mdp.to(torch.float64)"
    check_that(fine, "mdp", "double precision", f"{mdp.dtype}{advice}")
    for batch in regularizer.batched():
        raise ValueError(
            f"regularizer: a parameter has the batch shape {tuple(batch)}, and leap takes one "
            "regularizer at a time; forecast takes a batch"
        )
    estimate, phases = centred(estimator), phases_of(mdp, losses, episodes)
    if mdp.batch_shape or phases.means.dim() != 3:
        raise ValueError(
            "leaping takes one MDP and one table of means (S, A) at a time; forecast takes batches"
        )
    phases = phases._replace(means=phases.means.to(mdp.dtype))
    step, draw = FTRLStep(mdp, regularizer), Draw(mdp, seed)
    stops = sorted({*log_spaced(int(episodes), 10), *phases.starts[1:]})
    ends = torch.tensor(stops, dtype=mdp.dtype, device=mdp.device)  # leaps end there, (C,)
    phase = phases.at(ends)
    gaps = optimal_policy(mdp, phases.means, in_order=True).gaps  # (P, S, A)
    none = ends.new_zeros(particles)
    t, total, length, opening = none + 1, none, none, none  # total: the regret so far
    stop, leaps, uncertified = none.long(), none.long(), none.long()
    regret, q = none.new_zeros(particles, len(ends)), interior_point(mdp).expand(particles, -1, -1)
    loss = torch.zeros_like(q)
    while True:
        solution = step.solve(loss, t, warm_start=q, check=False)
        q, at = floored(mdp, solution.q), stop.clamp(max=len(ends) - 1)
        playing = stop < len(ends)
        uncertified += playing & ~solution.converged
        # The regret per episode is taken to change linearly over a leap.
        closing = (q * gaps[phase[at]]).sum((-2, -1))
        total = total + 0.5 * ((length + 1) * opening + (length - 1) * closing) * (length > 0)
        reached = playing & (t > ends[at])
        regret[reached, at[reached]] = total[reached]
        stop = stop + reached
        playing, at = stop < len(ends), stop.clamp(max=len(ends) - 1)
        if not bool(playing.any()):
            break
        opening = (q * gaps[phase[at]]).sum((-2, -1))
        longest = torch.minimum(longest_leaps(Linearization(step, q, t), accuracy), WIDEST * t)
        length = torch.minimum(longest.floor().clamp(min=1), ends[at] - t + 1) * playing
        visits = draw.visits(length, q)
        baseline = keep("pair", mdp, estimate.baseline_like(q, t), 0.0)
        charged = draw.charges(visits, phases.means[phase[at]], phases.noise)
        charged = (charged - visits * baseline) / keep("pair", mdp, q, 1.0)
        loss = loss + charged + length[:, None, None] * baseline
        t, leaps = t + length, leaps + playing
    # Here a run is compared with the best policy of every phase, in the regret with that of all.
    best = comparator(mdp, phases.totals(gaps, ends, phase))
    return Leaps(ends.long(), regret - best, leaps, uncertified)


def longest_leaps(linear: Linearization, accuracy: float) -> Tensor:
    """The number of episodes during which q may stay constant, `(N,)`.

    At fixed q(s), a unit force on an action changes its q by R = (1/D_a) (sum_{b != a} 1/D_b) /
    (sum_b 1/D_b), where D is the curvature of psi. An episode has a force of about one. While a
    pair is not visited, q changes relatively by R/q per episode. Over many visits the forces
    average out, and their fluctuation R/q sqrt(length/q) remains. The larger of the two lengths is
    allowed.
    """
    mdp, q = linear.mdp, linear.q
    softness = linear.setting.deriver(q.shape[:-2])(q).hessian.curvature.reciprocal()
    softness = keep("pair", mdp, softness, 0.0)
    others = keep("rest", mdp, softness * (softness @ mdp.other_actions), 0.0)
    slack = accuracy * q * softness.sum(-1, keepdim=True) / others  # infinite for a single action
    return torch.maximum(slack, q * slack * slack).nan_to_num(torch.inf).amin((-2, -1))


class Draw:
    """Random numbers of visits and losses, from one generator."""

    def __init__(self, mdp: LayeredMDP, seed: int) -> None:
        self.mdp, self.generator = mdp, torch.Generator(mdp.device).manual_seed(int(seed))
        #: The next states of every pair of each layer, and their probabilities.
        self.successors = [
            layer.rows(torch.arange(layer.sizes[0] * mdp.num_actions, device=mdp.device))
            for layer in mdp.layers[:-1]
        ]

    def binomial(self, count: Tensor, p: Tensor) -> Tensor:
        """How many of `count` independent events happen, each with probability p."""
        return torch.binomial(count, p.expand_as(count), generator=self.generator)

    def split(self, count: Tensor, shares: Tensor) -> list[Tensor]:
        """Divide numbers `(N, n)` by multinomial draws with shares `(n or N, n, K)`."""
        left = shares.flip(-1).cumsum(-1).flip(-1)  # from each share on; exact for the last one
        found = []
        for p in (shares / left).nan_to_num(0.0).unbind(-1):
            found.append(self.binomial(count, p))
            count = count - found[-1]
        return found

    def visits(self, length: Tensor, q: Tensor) -> Tensor:
        """How often episodes `(N,)` with q `(N, S, A)` visit every pair, `(N, S, A)`."""
        arrived = torch.stack(self.split(length, self.mdp.initial), -1)  # (N, S_k)
        found: list[Tensor] = []
        for k, own in enumerate(self.mdp.split(q, -2)):
            found.append(torch.stack(self.split(arrived, own), -1))
            if k < len(self.successors):
                following, shares = self.successors[k]
                arrived = arrived.new_zeros(len(length), self.mdp.layer_sizes[k + 1])
                for j, part in enumerate(self.split(found[k].flatten(1), shares)):
                    arrived.index_add_(1, following[:, j], part)
        return torch.cat(found, 1)

    def charges(self, visits: Tensor, mean: Tensor, noise: Noise) -> Tensor:
        """The sums of the losses of these visits."""
        if noise == "bernoulli":
            return self.binomial(visits, mean)
        if noise == "none":
            return visits * mean
        off, radius = torch.zeros_like(visits), torch.minimum(mean, 1 - mean)
        for i in range(int(visits.clamp(max=MANY).max())):
            one = torch.empty_like(visits).uniform_(-1.0, 1.0, generator=self.generator)
            off += torch.where(i < visits, one, 0.0)
        normal = torch.empty_like(visits).normal_(generator=self.generator) * (visits / 3).sqrt()
        return visits * mean + radius * torch.where(visits < MANY, off, normal)
