"""The run with tangents carried along, compiled: torch_occ.tangents for regularizers that are tables of elementary terms.

An episode costs one factorization and a solve for each parameter more than in torch_occ.engine.episodes. How weights and exponents
depend on the parameters is worked out in torch, once a chunk of episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torch_occ.engine.arrays import exponents_of, kinds_of, model_of, terms_of, weights_of, why_not
from torch_occ.engine.compiling import patiently
from torch_occ.engine.entropic import minimize
from torch_occ.engine.episodes import NOISE, draw, index_drawn, state_drawn
from torch_occ.engine.layout import (
    COMPLEMENT,
    DQ,
    FORCE,
    PAIR,
    REST,
    SLOPE,
    STATE,
    TRIAL,
    Floats,
    Model,
    Terms,
    Work,
    kernel,
    make_work,
)
from torch_occ.engine.newton import CONVERGED, accumulate, derive, floor_pairs
from torch_occ.engine.transitions import factorize, solve
from torch_occ.ftrl import FTRLStep
from torch_occ.losses import LossProcess, Stationary
from torch_occ.occupancy import interior_point, optimal_policy
from torch_occ.regularizers import Regularizer
from torch_occ.streams import CHUNK, Purpose, uniforms
from torch_occ.tangents import Stretch
from torch_occ.threads import for_each

# Columns of a record; those of the slopes and then of the scores begin at TANGENTS.
COST, FAILED, TANGENTS = 0, 1, 2


class Pushes(NamedTuple):
    """How P parameters push the terms, by their logarithms."""

    weights: Floats  # (n, P, K)
    exponents: Floats  # (P, K)


class World(NamedTuple):
    """What is played against, and when a step counts as solved."""

    mean: Floats  # (S * A,)
    gaps: Floats  # (S * A,)
    noise: int
    tolerance: float
    max_steps: int


class Carried(NamedTuple):
    """What one seed carries along, updated in place; pairs are flat."""

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
    world: World,
    numbers: Floats,  # (n, L, 3)
    carried: Carried,
    record: Floats,  # (n, 2 + 2 * P), out
    middle: Floats,  # (S * A,), an interior point for cold starts
    still: Floats,  # (S,), zeros
    work: Work,
) -> None:
    """n episodes."""
    pairs, q, tangent = work.pairs, carried.q, carried.tangent
    num_tangents, num_pairs = tangent.shape
    limits = (world.tolerance, world.max_steps)
    for t in range(len(weights)):
        for attempt in range(2):  # from the last q; from the middle if that fails
            for i in range(num_pairs):
                pairs[PAIR, i] = q[i] if attempt == 0 else middle[i]
            status = minimize(model, terms, weights[t], carried.cumulative_loss, *limits, still[:0], work)[0]
            if status == CONVERGED:
                break
        carried.failures[0] += status != CONVERGED
        floor_pairs(model, work)
        derive(model, terms, weights[t], work)  # at the solution itself, so that tangents are exact to rounding
        factorize(model, work)
        push_gradient(model, terms, weights[t], pushes, t, tangent, work)
        for p in range(num_tangents):
            for i in range(num_pairs):
                pairs[FORCE, i] = -(carried.tangent_loss[p, i] + tangent[p, i]) if model.exists[PAIR, i] else 0.0
            solve(model, still, work)  # a source, though it is zero: to rounding, by whatever method
            slope = 0.0
            for i in range(num_pairs):
                tangent[p, i] = pairs[DQ, i]
                slope += pairs[DQ, i] * world.gaps[i]
            record[t, TANGENTS + p] = slope
            record[t, TANGENTS + num_tangents + p] = carried.score[p]
        cost = 0.0
        for i in range(num_pairs):
            q[i] = pairs[PAIR, i]
            cost += q[i] * world.gaps[i]
        record[t, COST] = cost
        record[t, FAILED] = carried.failures[0]
        walk_with_tangents(model, world, numbers, t, carried)


@kernel
def push_gradient(model: Model, terms: Terms, weights: Floats, pushes: Pushes, t: int, out: Floats, work: Work) -> None:
    """d grad psi / d log parameter for every parameter, (P, S * A). Needs the arguments at q; spoils their slopes and bends, DQ, TRIAL."""
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


@kernel
def term_gradient(model: Model, terms: Terms, term: int, bent: bool, out: int, work: Work) -> None:
    """The gradient in q of one term of weight 1 into a row of the pairs, or its derivative in the exponent.

    The slope of x^p is s = p x^(p-1), and its derivative in p is (1/p + log x) s.
    """
    pairs, states, exists, num_actions = work.pairs, work.states, model.exists, model.num_actions
    argument, p = terms.argument[term], terms.exponent[term]
    rows, row = (states, 0) if argument == STATE else (pairs, argument)
    for i in range(rows.shape[1]):
        rows[row + SLOPE, i] = 0.0
    accumulate(terms.function[term], p, 1.0, rows, row)
    if bent:
        for i in range(rows.shape[1]):
            rows[row + SLOPE, i] *= 1.0 / p + np.log(rows[row, i])
    for s in range(states.shape[1]):
        first, left, right = s * num_actions, 0.0, 0.0
        for i in range(first, first + num_actions):
            if argument == REST:
                pairs[out, i] = left
                left += pairs[REST + SLOPE, i] if exists[REST, i] else 0.0
            elif argument == COMPLEMENT:
                pairs[out, i] = -pairs[COMPLEMENT + SLOPE, i] if exists[COMPLEMENT, i] else 0.0
            else:
                pairs[out, i] = states[SLOPE, s] if argument == STATE else pairs[PAIR + SLOPE, i]
        if argument == REST:
            for i in range(first + num_actions - 1, first - 1, -1):
                pairs[out, i] += right
                right += pairs[REST + SLOPE, i] if exists[REST, i] else 0.0
        for i in range(first, first + num_actions):
            pairs[out, i] = pairs[out, i] if exists[PAIR, i] else 0.0


@kernel
def walk_with_tangents(model: Model, world: World, numbers: Floats, t: int, carried: Carried) -> None:
    """One trajectory, as `torch_occ.engine.episodes.walk`: the estimates of the visited pairs, their tangents and the score."""
    num_actions, q, tangent, layers = model.num_actions, carried.q, carried.tangent, len(model.start) - 1
    s = index_drawn(model.initial, 0, len(model.initial), 1.0, numbers[t, layers - 1, 2])
    for k in range(layers):
        first, total = s * num_actions, 0.0
        for i in range(first, first + num_actions):
            total += q[i]
        chosen = first + index_drawn(q, first, num_actions, total, numbers[t, k, 0])
        estimate = draw(world.noise, world.mean[chosen], numbers[t, k, 1]) / q[chosen]
        carried.cumulative_loss[chosen] += estimate
        for p in range(len(tangent)):
            arriving, relative = 0.0, tangent[p, chosen] / q[chosen]
            for i in range(first, first + num_actions):
                arriving += tangent[p, i]
            carried.score[p] += relative - arriving / total
            carried.tangent_loss[p, chosen] -= estimate * relative
        if k + 1 < layers:
            s = state_drawn(model, chosen, k, numbers[t, k, 2])


# -- from torch and back --------------------------------------------------------------------------------------------------


def why_not_carry(step: FTRLStep, losses: LossProcess) -> str | None:
    """The reason why the engine cannot carry these tangents, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    return why_not(step.mdp, step.regularizer)


def play_compiled(step: FTRLStep, losses: Stationary, episodes: int, seeds: Sequence[int]) -> Iterator[Stretch]:
    """Play as `simulate` does, from the same random numbers, a chunk of episodes a stretch; the seeds side by side in threads."""
    mdp, model, table = step.mdp, model_of(step.mdp), _Table(step.regularizer)
    N, P, num_pairs = len(seeds), len(step.evaluator.names), mdp.num_states * mdp.num_actions
    logs = [parameter.detach().log() for parameter in step.evaluator.own_parameters]
    kinds = kinds_of(terms_of(step.regularizer, torch.ones((), dtype=torch.float64)))
    mean, gaps, middle = (x.detach().flatten().numpy() for x in (losses.mean, optimal_policy(mdp, losses.mean).gaps, interior_point(mdp)))
    world = World(mean, gaps, NOISE[losses.noise], step.options.tolerance_in(torch.float64), step.options.max_steps)
    shapes = ((num_pairs,), (P, num_pairs), (P, num_pairs), (P,), (1,))
    carried = Carried(np.tile(middle, (N, 1)), *(np.zeros((N, *shape)) for shape in shapes))

    def play_chunk(chunk: int, n: int) -> Tensor:
        t = chunk * CHUNK + torch.arange(1, n + 1, dtype=torch.float64)
        weights, exponents, pushes = table.differentiate(step.evaluator.names, logs, t)
        terms, record = Terms(*kinds, exponents), np.empty((N, n, 2 + 2 * P))

        def play_seed(i: int) -> None:
            numbers = uniforms([seeds[i]], Purpose.EPISODES, [chunk], (mdp.horizon, 3))[0].numpy()
            own, scratch = Carried(*(x[i] for x in carried)), (np.zeros(mdp.num_states), make_work(model))
            play_with_tangents(model, terms, weights, pushes, world, numbers, own, record[i], middle, *scratch)

        with patiently:
            for_each(play_seed, N)
        return torch.from_numpy(record)

    for chunk in range(-(-episodes // CHUNK)):
        record = play_chunk(chunk, min(CHUNK, episodes - chunk * CHUNK))
        slope, score = record[..., TANGENTS:].split(P, -1)
        yield Stretch(record[..., COST], slope, score, record[..., FAILED] == 0)


class _Table(nn.Module):
    """t `(n,)` -> weights `(n, K)` and exponents `(K,)`, as a module: `functional_call` can exchange its parameters."""

    def __init__(self, regularizer: Regularizer) -> None:
        super().__init__()
        self.regularizer = regularizer

    def forward(self, t: Tensor) -> tuple[Tensor, Tensor]:
        terms = terms_of(self.regularizer, t)
        return weights_of(terms).expand(len(t), -1), exponents_of(terms)

    def differentiate(self, names: Sequence[str], logs: Sequence[Tensor], t: Tensor) -> tuple[Floats, Floats, Pushes]:
        """Weights and exponents, and how they move with the logarithm of each parameter."""

        def table(*logs: Tensor) -> tuple[Tensor, Tensor]:
            named = {f"regularizer.{name}": log.exp() for name, log in zip(names, logs, strict=True)}
            return torch.func.functional_call(self, named, (t,), tie_weights=False)

        moves = torch.func.jacfwd(table, tuple(range(len(logs))))(*logs)
        pushes = (torch.stack([x.detach() for x in move], -2).contiguous().numpy() for move in moves)
        weights, exponents = (x.detach().contiguous().numpy() for x in self(t))
        return weights, exponents, Pushes(*pushes)
