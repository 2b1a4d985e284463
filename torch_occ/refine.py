"""From the optimum of the forecast to that of the stochastic forecast: a trust region, with leaping as the judge.

The mean-path forecast has exact gradients but fails where q fluctuates much, and the best parameters lie at the edge of there. Leaping is
right there but has no usable gradient. So each round evaluates both at a few points around the best one so far, all with the same random
numbers; fits what the forecast lacks by a quadratic without mixed terms,

    log leap - log forecast = c + g . du + h . du^2,

adds it to the forecast, and minimizes the sum by gradients inside the region. What leaping finds best becomes the centre of the next round.

Worlds whose losses answer to the learner can be neither forecast nor leapt through. A `Guard` plays in them for real at the same points;
its excess is fitted by a quadratic of its own, and so is a constraint of the minimization.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.guard import Guard, Verdict
from torch_occ.leaping import leap
from torch_occ.losses import LossProcess
from torch_occ.mdp import LayeredMDP
from torch_occ.objectives import Evaluation, ForecastObjective, World
from torch_occ.regularizers import Regularizer
from torch_occ.tune import Tuned, Tuner, tune


class Refined(NamedTuple):
    """What refining leaves behind."""

    tuned: Tuned  # the best point by leaping; value and regrets are those of leaping, path and values those of all points tried
    values: Tensor  # (points,), the objective by leaping
    forecasts: Tensor  # (points,), by the mean path
    points: Tensor  # (points, parameters)
    excess: Tensor  # (points,), what the guard found; zeros without a guard
    seconds: float


def refine(
    objective: ForecastObjective,
    regularizer: Regularizer,
    tuned: Tuned,
    *,
    rounds: int = 3,
    radius: float = 0.8,
    particles: int = 64,
    accuracy: float = 0.7,
    steps: int = 30,
    seed: int = 0,
    guard: Guard | None = None,
) -> Refined:
    """Go on from what `tune` found.

    Args:
        objective: the one that was tuned.
        regularizer: the one that was tuned; it is left as it is.
        rounds: each takes 2 p + 2 evaluations by leaping for p parameters.
        radius: of the region in the unconstrained space; halved when a round brings nothing.
        particles: runs of each evaluation, the same random numbers in all.
        guard: worlds in which the result may not be worse than a reference. Its penalty is part of `values`, its regrets of
            `tuned.regrets`; `excess` says what it found.
    """
    begun = time.monotonic()
    tuner = Tuner(objective, regularizer, 0, 1, tuned.names, {}, 0.1, 0.0, 0, None)
    own = dict(regularizer.named_parameters())
    kept = {name: own[name].detach().clone() for name in tuned.names}
    points: list[Tensor] = []
    judged: list[Evaluation] = []
    leapt: list[float] = []
    forecasts: list[float] = []
    excess: list[float] = []

    def judge(u: Tensor) -> float:
        values = tuner.constrained(u)
        with torch.no_grad():
            for name, value in zip(tuned.names, values.tolist(), strict=True):
                own[name].fill_(value)
            forecasts.append(float(plain(regularizer).value))
        found = leap_evaluation(objective, regularizer, particles=particles, accuracy=accuracy, seed=seed)
        verdict = guard(regularizer) if guard is not None else Verdict(0.0, {})
        leapt.append(_trusted(found))
        excess.append(verdict.excess)
        judged.append(_guarded(found, verdict, guard))
        points.append(u)
        return _trusted(judged[-1])

    plain = ForecastObjective.believing(objective)
    try:
        centre = _inverse(tuner, tuned)
        best, best_value = centre, judge(centre)
        for _ in range(rounds):
            centre, first = best, len(points)
            offsets = radius * torch.cat([torch.eye(len(centre)), -torch.eye(len(centre))]).double()
            around = [(centre + offset).clamp(tuner.low, tuner.high) for offset in offsets]
            for u in around:
                judge(u)
            used = [next(i for i, u in enumerate(points) if torch.equal(u, centre)), *range(first, len(points))]
            lacks = torch.tensor([leapt[i] - forecasts[i] for i in used], dtype=torch.float64)
            beyond = torch.tensor([excess[i] for i in used], dtype=torch.float64)
            moves = torch.stack([points[i] for i in used]) - centre
            model = Corrected(plain, tuner, centre, _fit(moves, lacks), (guard, _fit(moves, beyond)) if guard is not None else None)
            with torch.no_grad():
                for name, value in zip(tuned.names, tuner.constrained(centre).tolist(), strict=True):
                    own[name].fill_(value)
            ends = [tuner.constrained((centre + sign * radius).clamp(tuner.low, tuner.high)).tolist() for sign in (-1, 1)]
            box = {name: (low, high) for name, low, high in zip(tuned.names, *ends, strict=True)}
            inner = tune(model, regularizer, steps=steps, starts=1, only=tuned.names, bounds=box, rate=radius / 4)
            judge(_inverse(tuner, inner))
            values = torch.tensor([_trusted(found) for found in judged])
            if float(values.min()) < best_value:
                best, best_value = points[int(values.argmin())], float(values.min())
            if int(values.argmin()) < first:
                radius /= 2
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)
    values = torch.tensor([_trusted(found) for found in judged])
    chosen = next(i for i, u in enumerate(points) if torch.equal(u, best))
    parameters = tuner.constrained(torch.stack(points))
    met = tuner.bounds_met(best)
    result = replace(
        tuned,
        parameters=dict(zip(tuned.names, parameters[chosen].tolist(), strict=True)),
        value=float(values[chosen]),
        regrets={name: float(regret) for name, regret in judged[chosen].regrets.items()},
        at_bounds=tuple(name for name, flag in zip(tuned.names, met.tolist(), strict=True) if flag),
        failures=~values.isfinite()[:, None],
        values=values[:, None],
        path=parameters[:, None],
        start=0,
        seconds=tuned.seconds + time.monotonic() - begun,
    )
    return Refined(result, values, torch.tensor(forecasts), parameters, torch.tensor(excess), time.monotonic() - begun)


Quadratic = tuple[Tensor, Tensor, Tensor]  # c, g and h of c + g . x + h . x^2


class Corrected:
    """An objective plus a quadratic in the unconstrained parameters, plus a guard's penalty if its excess is another quadratic."""

    def __init__(
        self, base: ForecastObjective, tuner: Tuner, centre: Tensor, correction: Quadratic, guarded: tuple[Guard, Quadratic] | None = None
    ) -> None:
        self.base, self.names, self.transforms = base, tuner.names, tuner.transforms
        self.centre, self.correction, self.guarded = centre, correction, guarded

    def __call__(self, regularizer: Regularizer) -> Evaluation:
        """The parameters have shape `(B, 1)`."""
        own = dict(regularizer.named_parameters())
        pairs = zip(self.names, self.transforms, strict=True)
        u = torch.cat([transform.inv(own[name]) for name, transform in pairs], -1)  # (B, parameters)
        offset = u - self.centre
        found = self.base(regularizer)
        value = found.value + _quadratic(self.correction, offset)
        if self.guarded is not None:
            guard, excess = self.guarded
            value = value + guard.penalty(_quadratic(excess, offset))
        return found._replace(value=value)


def leap_evaluation(objective: ForecastObjective, regularizer: Regularizer, *, particles: int, accuracy: float, seed: int) -> Evaluation:
    """The objective with leaping in place of the mean path, at one setting."""
    regrets, certified = [], []
    for world in objective.worlds:
        runs = [
            leap(mdp, regularizer, losses, objective.episodes, particles=particles, accuracy=accuracy, seed=seed)
            for mdp, losses in elements(world)
        ]
        regrets.append(torch.stack([run.regret[:, -1].mean() for run in runs])[None])
        certified.append(torch.stack([~run.uncertified.any() for run in runs])[None])
    return objective.combine(regrets, certified)


def elements(world: World) -> Iterator[tuple[LayeredMDP, Tensor | LossProcess]]:
    """The MDPs of a world, one by one."""
    mdp, losses = world.mdp, world.losses
    if not mdp.batch_shape:
        yield mdp, losses
        return
    assert isinstance(losses, Tensor), "a batch of MDPs goes with a tensor of means"
    (count,) = mdp.batch_shape
    initial, means = mdp.initial.expand(count, -1), losses.expand(count, -1, -1)
    for i in range(count):
        yield LayeredMDP([p.expand(count, *p.shape[-3:])[i] for p in mdp.transitions], actions=mdp.actions, initial=initial[i]), means[i]


def _trusted(found: Evaluation) -> float:
    """The value, infinite if it is not a number or not certified."""
    value = float(found.value)
    return value if bool(found.certified.all()) and math.isfinite(value) else math.inf


def _guarded(found: Evaluation, verdict: Verdict, guard: Guard | None) -> Evaluation:
    """An evaluation with what a guard adds to it; an excess that is not a number is no certificate."""
    if guard is None:
        return found
    excess = torch.tensor(verdict.excess, dtype=torch.float64)
    regrets = found.regrets | {name: torch.tensor([regret]) for name, regret in verdict.regrets.items()}
    return Evaluation(found.value + guard.penalty(excess), regrets, found.certified & excess.isfinite())


def _quadratic(coefficients: Quadratic, x: Tensor) -> Tensor:
    c, g, h = coefficients
    return c + (g * x + h * x**2).sum(-1)


def _fit(offsets: Tensor, lacks: Tensor) -> Quadratic:
    """The quadratic of least squares."""
    count = offsets.shape[-1]
    columns = torch.cat([torch.ones(len(offsets), 1, dtype=offsets.dtype), offsets, offsets**2], -1)
    fine = lacks.isfinite()
    solution = torch.linalg.lstsq(columns[fine], lacks[fine].unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    return solution[0], solution[1 : 1 + count], solution[1 + count :]


def _inverse(tuner: Tuner, tuned: Tuned) -> Tensor:
    pairs = zip(tuner.names, tuner.transforms, strict=True)
    return torch.stack([transform.inv(torch.tensor(tuned.parameters[name], dtype=torch.float64)) for name, transform in pairs])
