"""Leaps of many episodes in compiled kernels, for built-in regularizers and estimators."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.processes import for_each
from torch_occ.engine.lanes import allocator, width_of
from torch_occ.engine.layout import lanes_in, make_work
from torch_occ.engine.leaps import LEAPS, UNCERTIFIED, Particle, Way, leap_to_the_end
from torch_occ.engine.play import NOISE
from torch_occ.game.estimators import CentredEstimator, ImportanceWeighted, ReducedVariance
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.arrays import WeightsOverTime, model_of
from torch_occ.step.solution import Options
from torch_occ.step.ways import why_not_game as why_not_solve
from torch_occ.tuning.leaps import WIDEST, LeapCourse


def why_not(mdp: LayeredMDP, regularizer: Regularizer, estimator: CentredEstimator) -> str | None:
    """The reason why the kernels cannot leap with these, or None if they can."""
    if type(estimator) not in (ImportanceWeighted, ReducedVariance):
        return f"the engine does not know the estimator {type(estimator).__name__}"
    if regularizer.batched():
        return "the regularizer has batched parameters"
    return why_not_solve(mdp, regularizer)


def leap_compiled(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    estimator: CentredEstimator,
    course: LeapCourse,
    particles: int,
    seed: int,
    accuracy: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leap with all particles.

    Returns:
        Their losses minus those of the best policy of every phase `(N, C)`, and their numbers of
        leaps and of uncertified steps, `(N,)` each.
    """
    regularizer.validate()
    # For every built-in schedule, weights are products of powers of t, so linear interpolation of
    # logarithms is exact.
    weigh = WeightsOverTime(regularizer, mdp.actions.shape)
    log_t = torch.linspace(0, float(course.stops[-1].log()) + 0.1, 400, dtype=torch.float64)
    with torch.no_grad():
        weights = weigh.at(log_t.exp())
        exponents = weigh.terms.exponent
        # A threshold of 2 is above every q, so there is no baseline.
        threshold = (
            estimator.threshold(log_t.exp())
            if isinstance(estimator, ReducedVariance)
            else torch.full_like(log_t, 2.0)
        )
    log_weights = torch.where(weights == 0, 1.0, weights.abs()).log().contiguous().numpy()
    model = model_of(mdp)
    lanes = lanes_in(model, particles)
    width, new = lanes or 1, allocator(lanes)
    terms = weigh.terms._replace(exponent=new(*exponents.shape))
    terms.exponent.T[...] = exponents  # the lanes are the last axis
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
    shapes = ((4,), (2,), way.stops.shape, way.middle.shape, way.signs.shape, (mdp.num_states,))
    seeds = np.random.SeedSequence(seed).generate_state(particles, np.uint64).astype(np.uint64)
    groups = []
    for first in range(0, particles, width):
        members = np.arange(first, first + width)
        groups.append(
            Particle(
                # Lanes without a particle have finished.
                np.where(members < particles, 0, len(way.stops)),
                seeds[np.minimum(members, particles - 1)],
                *(new(*shape) for shape in shapes),
            )
        )

    def play(i: int) -> None:
        work = make_work(model, new)
        leap_to_the_end(model, terms, way, groups[i], new(0), work, width_of(lanes))

    for_each(play, len(groups))
    regret, counts = (
        torch.from_numpy(np.concatenate([x.reshape(-1, width).T for x in found])[:particles])
        for found in zip(*((group.regret, group.counts) for group in groups), strict=True)
    )
    return regret, counts[:, LEAPS].long(), counts[:, UNCERTIFIED].long()
