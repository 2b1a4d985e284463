"""The episode loop with forward-mode derivatives: tangents of q and of the cumulative loss.

This is the compiled twin of torch_occ.tuning.tangents, which has the formulas. The loop is that of
torch_occ.kernels.play.episodes, for one seed or one per lane. Tangents add one factorization to an
episode, and one solve per parameter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ.kernels.constants import CONVERGED
from torch_occ.kernels.lanes.arrays import in_lanes, lane
from torch_occ.kernels.lanes.vectors import where
from torch_occ.kernels.layout import (
    DQ,
    FORCE,
    PAIR,
    TRIAL,
    Floats,
    Ints,
    Model,
    Terms,
    Work,
    kernel,
    routine,
)
from torch_occ.kernels.play.episodes import draw, index_drawn, state_drawn
from torch_occ.kernels.solver.entropic import follow_or_restart
from torch_occ.kernels.solver.newton import floor_pairs
from torch_occ.kernels.solver.parameters import term_gradient
from torch_occ.kernels.solver.psi import derive
from torch_occ.kernels.solver.transitions import factorize, solve

# Columns of a record. The P slopes begin at column TANGENTS, and the P scores follow them.
COST, FAILED, TANGENTS = 0, 1, 2


class Pushes(NamedTuple):
    """Derivatives of the weights and exponents of the terms by the logarithms of P parameters."""

    weights: Floats  # (n, P, K)
    exponents: Floats  # (P, K)


class Opponent(NamedTuple):
    """The losses that are played against, and the limits of a solve."""

    mean: Floats  # (S * A,)
    gaps: Floats  # (S * A,)
    noise: int
    tolerance: float
    max_steps: int


class Carried(NamedTuple):
    """The state of one seed, or of one per lane, updated in place; pairs are flat."""

    q: Floats  # (S * A,)
    cumulative_loss: Floats  # (S * A,)
    tangent_loss: Floats  # (P, S * A), of the cumulative loss
    tangent: Floats  # (P, S * A), of q
    score: Floats  # (P,)
    failures: Floats  # (1,), steps without certificate


@kernel
def play_with_tangents(
    model: Model,
    terms: Terms,
    weights: Floats,  # (n, K)
    pushes: Pushes,
    opponent: Opponent,
    numbers: Floats,  # (N, n, L, 3) for N seeds, at most as many as lanes
    carried: Carried,
    record: Floats,  # (n, 2 + 2 * P), out
    middle: Floats,  # (S * A,), an interior point for cold starts
    own: Floats,  # (K,), scratch: the weights of an episode
    still: Floats,  # (S,), zeros
    nowhere: Floats,  # (0,)
    work: Work,
    width: Any,  # see `in_lanes`
) -> None:
    """Play n episodes, with one seed per lane, and write one row of the record per episode.

    In lanes, exponents, carried, record, own, still, nowhere and work have a last axis of lanes.
    There may be fewer seeds than lanes.
    """
    terms, carried, work = in_lanes(terms, width), in_lanes(carried, width), in_lanes(work, width)
    record, own = in_lanes(record, width), in_lanes(own, width)
    still, nowhere = in_lanes(still, width), in_lanes(nowhere, width)
    pairs, q, tangent = work.pairs, carried.q, carried.tangent
    num_tangents, num_pairs = tangent.shape
    loss, tolerance, most = carried.cumulative_loss, opponent.tolerance, opponent.max_steps
    for t in range(len(weights)):
        for i in range(num_pairs):
            pairs[PAIR, i] = q[i]
        for k in range(len(own)):
            own[k] = weights[t, k]
        work.stale[0], work.stale[2] = np.inf, 0.0  # the factors belong to the last tangents
        found = follow_or_restart(model, terms, own, loss, tolerance, most, nowhere, middle, work)
        status = found[0]
        carried.failures[0] += where(status != CONVERGED, 1.0, 0.0)
        floor_pairs(model, work)
        # The Hessian is taken at the solution itself, so that tangents are exact up to rounding.
        derive(model, terms, own, np.inf, work)
        everywhere = status == status
        factorize(model, everywhere, work)
        push_gradient(model, terms, own, pushes, t, tangent, work)
        for p in range(num_tangents):
            for i in range(num_pairs):
                pairs[FORCE, i] = (
                    -(carried.tangent_loss[p, i] + tangent[p, i]) if model.exists[PAIR, i] else 0.0
                )
            # With a source that is not empty, even if zero, iterative solvers solve to rounding.
            solve(model, still, work)
            slope = 0.0
            for i in range(num_pairs):
                tangent[p, i] = pairs[DQ, i]
                slope += pairs[DQ, i] * opponent.gaps[i]
            record[t, TANGENTS + p] = slope
            record[t, TANGENTS + num_tangents + p] = carried.score[p]
        cost = 0.0
        for i in range(num_pairs):
            q[i] = pairs[PAIR, i]
            cost += q[i] * opponent.gaps[i]
        record[t, COST] = cost
        record[t, FAILED] = carried.failures[0]
        walk_with_tangents(model, opponent, numbers, t, carried, work.places)


@routine
def push_gradient(
    model: Model, terms: Terms, weights: Floats, pushes: Pushes, t: int, out: Floats, work: Work
) -> None:
    """Write d grad psi / d log parameter for every parameter into `out`, (P, S * A).

    The scratch memory must hold the arguments of psi at q. Overwrites their slopes and bends, DQ
    and TRIAL.
    """
    pairs = work.pairs
    num_tangents, num_pairs = out.shape
    for p in range(num_tangents):
        for i in range(num_pairs):
            out[p, i] = 0.0
    for term in range(len(weights)):
        bends = False
        for p in range(num_tangents):
            bends = bends or pushes.exponents[p, term] != 0.0
        term_gradient(model, terms, term, False, TRIAL, work)
        if bends:
            term_gradient(model, terms, term, True, DQ, work)
        for p in range(num_tangents):
            if pushes.weights[t, p, term] != 0.0:
                for i in range(num_pairs):
                    out[p, i] += pushes.weights[t, p, term] * pairs[TRIAL, i]
            if pushes.exponents[p, term] != 0.0:
                for i in range(num_pairs):
                    out[p, i] += weights[term] * pushes.exponents[p, term] * pairs[DQ, i]


@routine
def walk_with_tangents(
    model: Model,
    opponent: Opponent,
    numbers: Floats,  # (N, n, L, 3)
    t: int,
    carried: Carried,
    places: Ints,  # (lanes,), scratch: the state of every lane
) -> None:
    """Play one trajectory per lane, as in `torch_occ.kernels.play.episodes.walk`.

    Adds the estimates of the visited pairs to the cumulative loss, their tangents to
    `tangent_loss`, and the derivatives of the log-probabilities of the chosen actions to `score`.
    """
    num_actions, layers = model.num_actions, len(model.start) - 1
    for n in range(len(numbers)):
        uniform = numbers[n, t, layers - 1, 2]
        places[n] = index_drawn(model.initial, 0, len(model.initial), uniform)
    for k in range(layers):
        for n in range(len(numbers)):
            q, tangent, score = lane(carried.q, n), lane(carried.tangent, n), lane(carried.score, n)
            loss, tangent_loss = lane(carried.cumulative_loss, n), lane(carried.tangent_loss, n)
            uniforms = numbers[n, t, k]
            first, total = places[n] * num_actions, 0.0
            for i in range(first, first + num_actions):
                total += q[i]
            chosen = first + index_drawn(q, first, num_actions, uniforms[0])
            estimate = draw(opponent.noise, opponent.mean[chosen], uniforms[1]) / q[chosen]
            loss[chosen] += estimate
            for p in range(len(tangent)):
                arriving, relative = 0.0, tangent[p, chosen] / q[chosen]
                for i in range(first, first + num_actions):
                    arriving += tangent[p, i]
                score[p] += relative - arriving / total
                tangent_loss[p, chosen] -= estimate * relative
            if k + 1 < layers:
                places[n] = state_drawn(model, chosen, k, uniforms[2])
