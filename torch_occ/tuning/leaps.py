"""Leaping: particles that play many episodes per step, from tensors to the kernel and back.

A particle is one run of the learner that plays `length` episodes with one q. It draws at once how
often these visit every pair (by multinomials along the layers, so that trajectories stay intact)
and the losses there, adds the estimates, and solves again:

    n ~ visits of `length` episodes with q,
    Lhat += (losses(n) - n b) / q + length b,
    t += length,

where b is the baseline of the estimator, zero for importance weights. Leaps of one episode are the
algorithm itself. The only error is that q is constant during a leap, and leaps are as long as that
allows (`longest_leap` of torch_occ.engine.leaps). Their number grows with log T.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.constants import log_spaced
from torch_occ._support.processes import for_each
from torch_occ.engine.lanes import allocator, pack, width_of
from torch_occ.engine.layout import Solver, lanes_in, make_work
from torch_occ.engine.leaps import LEAPS, UNCERTIFIED, LeapSettings, Particle, leap_to_the_end
from torch_occ.engine.play import NOISE
from torch_occ.game.estimators import CentredEstimator, ImportanceWeighted, ReducedVariance
from torch_occ.game.history import comparator
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point, optimal_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import LogBarrier
from torch_occ.step.arrays import WeightsOverTime, model_of
from torch_occ.step.solution import Options
from torch_occ.step.ways import why_not_game
from torch_occ.tuning.forecast import Phases


def run_leaps(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    estimator: CentredEstimator,
    phases: Phases,
    episodes: int,
    particles: int,
    seed: int,
    accuracy: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Leap with all particles; the fields of `torch_occ.tuning.Leaps`, or a ValueError."""
    reason = why_not_game(mdp, regularizer)
    if type(estimator) not in (ImportanceWeighted, ReducedVariance):
        reason = f"the engine does not know the estimator {type(estimator).__name__}"
    every, threshold = [regularizer], np.array([2.0, 0.0])  # above every q
    if isinstance(estimator, ReducedVariance):  # the weight of the barrier is -1 / eta_t
        every.append(LogBarrier() / estimator.learning_rate)
    if reason is None:
        weigh, *rate = (WeightsOverTime(psi, mdp.actions.shape) for psi in every)
        if not all(weights.are_powers for weights in (weigh, *rate)):
            reason = "the weights are not powers of t"
    if reason is not None:
        raise ValueError(f"leap: {reason}; use occ.forecast, or occ.simulate for fewer episodes")
    regularizer.validate()
    stops = torch.tensor(sorted({*log_spaced(episodes, 10), *phases.starts[1:]}), dtype=mdp.dtype)
    phase, means = phases.at(stops), phases.means.detach()
    gaps = optimal_policy(mdp, means, in_order=True).gaps
    for weights in rate:
        inverse, power = weights.powers()[:, 0]
        threshold = np.array([(4.0 / inverse) ** 2, -2.0 * power])
    model = model_of(mdp)
    lanes = lanes_in(model, particles)
    width, new = lanes or 1, allocator(lanes)
    terms = weigh.terms._replace(exponent=pack(weigh.terms.exponent[None], lanes)[0])
    settings = LeapSettings(
        weigh.powers(),
        threshold,
        means.flatten(-2).contiguous().numpy(),
        gaps.flatten(-2).contiguous().numpy(),
        NOISE[phases.noise],
        stops.numpy(),
        phase.numpy(),
        model.initial[None],
        float(accuracy),
    )
    middle = pack(interior_point(mdp).detach().flatten().numpy()[None], lanes)[0]
    limits = (Options().tolerance_in(torch.float64), Options().max_steps)
    shapes = ((4,), (2,), stops.shape, settings.means.shape[1:], (mdp.num_states,))
    seeds = np.random.SeedSequence(seed).generate_state(particles, np.uint64).astype(np.uint64)
    groups = []
    for first in range(0, particles, width):
        members = np.arange(first, first + width)
        groups.append(
            Particle(
                # Lanes without a particle have finished.
                np.where(members < particles, 0, len(stops)),
                seeds[np.minimum(members, particles - 1)],
                *(new(*shape) for shape in shapes),
            )
        )

    def play(i: int) -> None:
        solver, work = Solver(terms, new(weigh.size), *limits, middle), make_work(model, new)
        leap_to_the_end(model, solver, settings, groups[i], work, width_of(lanes))

    for_each(play, len(groups))
    regret, counts = (
        torch.from_numpy(np.concatenate([x.reshape(-1, width).T for x in found])[:particles])
        for found in zip(*((group.regret, group.counts) for group in groups), strict=True)
    )
    # The kernel compares with the best policy of every phase, the regret with the best of all.
    best = comparator(mdp, phases.totals(gaps, stops, phase))
    counts = counts.long()
    return stops.long(), regret - best, counts[:, LEAPS], counts[:, UNCERTIFIED]
