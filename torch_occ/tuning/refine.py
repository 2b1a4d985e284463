"""A local search on noisy values: response surfaces, and the points that they suggest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_occ.game.learners import FTRL
from torch_occ.game.losses import BernoulliLosses, LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.leaps import leap
from torch_occ.tuning.objective import (
    Evaluation,
    ForecastObjective,
    Guard,
    Verdict,
    elements,
    final_regrets,
)
from torch_occ.tuning.space import ParameterSpace, load_numbers
from torch_occ.tuning.tune import Tuned

# -- Trials: the objective at one setting in every world, by leaping or by playing -----------------
#
# The cost of leaping grows with log T, but it is biased upwards by some percent where the learner
# is hardly regularized. Playing is unbiased, and its cost grows with T. Both average over the MDPs
# of the objective. Many MDPs with few runs on each are as precise as few MDPs with many runs, and
# say more about other MDPs.

#: A function of a regularizer with scalar parameters and a seed. The same seed gives the same
#: random numbers at every setting.
Trial = Callable[[Regularizer, int], Evaluation]


def trial_of(
    objective: ForecastObjective,
    *,
    particles: int = 64,
    accuracy: float = 0.7,
    runs: int | None = None,
) -> Trial:
    """The objective with regrets of leaping particles, or of real runs if their number is given."""

    def final(
        mdp: LayeredMDP, losses: Tensor | LossProcess, psi: Regularizer, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The final regret on one MDP, and whether it is certified."""
        own, T = objective.estimator, objective.episodes
        if runs is not None:
            process = BernoulliLosses(losses) if isinstance(losses, Tensor) else losses
            seeds = range(1 + seed * runs, 1 + (seed + 1) * runs)
            regrets, certified = final_regrets(FTRL(mdp, psi, own), process, T, seeds)
            return regrets.mean(), certified
        sizes: dict[str, Any] = {"particles": particles, "accuracy": accuracy}
        found = leap(mdp, psi, losses, T, estimator=own, seed=seed, **sizes)
        return found.regret[:, -1].mean(), ~found.uncertified.any()

    def trial(regularizer: Regularizer, seed: int) -> Evaluation:
        regrets, certified = [], []
        with torch.no_grad():
            for world in objective.worlds:
                found = [final(mdp, losses, regularizer, seed) for mdp, losses in elements(world)]
                regret, fine = zip(*found, strict=True)
                regrets.append(torch.stack(regret)[None])
                certified.append(torch.stack(fine)[None])
        return objective.combine(regrets, certified)

    return trial


# -- Response surfaces: quadratics with mixed terms, fitted to a noisy function around a point -----
#
# With x = (u - centre) / scale, a surface is
#
#     f(u) ~ c + g . x + x' H x,
#
# by least squares with a ridge on g and H. The ridge is chosen by leave-one-out errors, which a
# linear fit has in closed form: residual_i / (1 - leverage_i).

#: The ridges to choose from, in units of scaled monomials: from almost none to almost constant.
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


class Surface(NamedTuple):
    """A fitted quadratic."""

    centre: Tensor  # (p,)
    scale: float
    coefficients: Tensor  # (monomials,)
    error: float  # root mean square of the leave-one-out errors

    def __call__(self, u: Tensor) -> Tensor:
        """Evaluate the surface: `(..., p)` -> `(...,)`."""
        return monomials((u - self.centre) / self.scale) @ self.coefficients


def monomials(x: Tensor) -> Tensor:
    """1, x_i, and x_i x_j for i <= j: `(..., p)` -> `(..., 1 + p + p (p + 1) / 2)`."""
    p = x.shape[-1]
    i, j = torch.triu_indices(p, p)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j]], -1)


def fit_surface(u: Tensor, values: Tensor, centre: Tensor, scale: float) -> Surface:
    """Fit a surface to noisy values at points `(n, p)`; values that are not finite are ignored."""
    fine = values.isfinite()
    columns = monomials((u[fine] - centre) / scale)
    return min(
        (_ridge(columns, values[fine], ridge, centre, scale) for ridge in RIDGES),
        key=lambda surface: surface.error,
    )


def _ridge(columns: Tensor, values: Tensor, ridge: float, centre: Tensor, scale: float) -> Surface:
    penalty = ridge * torch.eye(columns.shape[-1], dtype=columns.dtype)
    penalty[0, 0] = 1e-12  # no ridge on the constant
    solver = torch.linalg.solve(columns.T @ columns + penalty, columns.T)  # (monomials, n)
    coefficients = solver @ values
    leverage = (columns * solver.T).sum(-1)
    left_out = (values - columns @ coefficients) / (1 - leverage).clamp(min=1e-9)
    return Surface(centre, scale, coefficients, float(left_out.square().mean().sqrt()))


# -- From the optimum of the forecast to the optimum of trials, with a trust region ----------------
#
# The mean-path forecast has exact gradients but fails where q fluctuates much, and the best
# parameters lie near that region. Trials, by leaping or playing, are correct there, but they are
# noisy and have no gradient. So each round tries points that fill a region around the best point so
# far, except those that the forecast excludes. It fits a response surface to the logarithm of the
# regret in the region, and tries its minimum too. The fit, not the lowest noisy value, decides
# which point is best and where the next region lies. At the end the best points are tried again
# with new random numbers, and a last fit to all trials chooses among them.
#
# Worlds whose losses react to the learner can be neither forecast nor leapt through. A `Guard`
# plays in them at the same points. Its excess has a surface of its own, and its penalty is added to
# the objective.

#: The factor by which a region shrinks if its best point is not at its border.
SHRINK = 0.6
#: The forecast is right within about 30 % almost everywhere, and points that are worse than the
#: best by more carry little information.
HOPELESS = 0.3
#: The largest number of candidates that are forecast per point that is tried.
SCREENED = 4
#: Points among which the minimum of a surface is searched.
CANDIDATES = 512
#: A quadratic cannot fit cliffs: points whose value, a logarithm, is worse than the best by more
#: are left out of a fit.
STEEP = 1.0


class Refined(NamedTuple):
    """The result of `refine`; a point that was tried twice occurs twice."""

    # The chosen point. Its value and regrets are means over its trials; path and values are those
    # of all points tried.
    tuned: Tuned
    values: Tensor  # (points,), the objective by trials
    fitted: Tensor  # (points,), the objective by the last surface
    points: Tensor  # (points, parameters)
    excess: Tensor  # (points,), the guard's excess; zeros without a guard
    chosen: int  # the index of the first trial of the chosen point
    seconds: float
    start: Tuned  # the result of `tune` from which it started


def refine(
    objective: ForecastObjective,
    regularizer: Regularizer,
    tuned: Tuned,
    *,
    judge: Literal["leap", "play"] | Trial = "leap",
    rounds: int = 3,
    points: int | None = None,
    radius: float = 0.8,
    hopeless: float = HOPELESS,
    finalists: int = 0,
    particles: int = 64,
    accuracy: float = 0.7,
    runs: int = 1,
    seed: int = 0,
    guard: Guard | None = None,
) -> Refined:
    """Continue from the result of `tune`, inside its bounds.

    Args:
        objective: the objective that was tuned.
        regularizer: the regularizer that was tuned; it is not changed.
        judge: "leap", "play", or any function of a regularizer and a seed. Playing is unbiased, and
            cheap for up to about 1e5 episodes.
        rounds: each tries `points` points and the minimum of the fit.
        points: 2 p for p numbers by default.
        radius: of the first region, in the unconstrained space; the region shrinks when its best
            point is not at its border.
        hopeless: a point whose forecast is worse than the best trial by more than this, in
            logarithms, is not tried. With infinity all points are tried and none is forecast; use
            it where a trial costs no more than a forecast.
        finalists: the number of best points that are tried again with new random numbers.
        particles: of each trial by leaping, on every MDP; a few are enough if there are many MDPs.
        accuracy: of leaping.
        runs: of each trial by playing, on every MDP.
        guard: worlds in which the result must not be worse than a reference. Its penalty is part
            of `values`, its regrets are part of `tuned.regrets`, and `excess` is its excess.

    Returns:
        The chosen point, and all points that were tried.

    Raises:
        ValueError: if an argument is wrong.
        RuntimeError: if no trial was finite and certified.
    """
    begun = time.monotonic()
    if not hopeless > 0:
        raise ValueError(f"hopeless: expected a positive number, got {hopeless}")
    if judge == "leap":
        judge = trial_of(objective, particles=particles, accuracy=accuracy)
    elif judge == "play":
        judge = trial_of(objective, runs=runs)
    elif not callable(judge):
        raise ValueError(
            "judge: expected 'leap', 'play' or a function of a regularizer and a seed, got "
            f"{judge!r}"
        )
    search = Search(objective, regularizer, tuned, judge, guard)
    sobol = torch.quasirandom.SobolEngine(len(tuned.names), scramble=True, seed=seed)
    kept = {name: x.clone() for name, x in regularizer.state_dict().items()}
    try:
        centre = search.space.coordinates_of(tuned.parameters)
        search.attempt(centre, seed)
        for _ in range(rounds):
            low, high = search.region(centre, radius)
            for u in search.promising(low, high, sobol, points or 2 * len(centre), hopeless):
                search.attempt(u, seed)
            search.fit(centre, radius)
            search.attempt(search.minimum(sobol), seed)
            search.fit(centre, radius)
            before, centre = centre, search.points[search.best(1)[0]]
            if float((centre - before).abs().max()) < 0.95 * radius:
                radius *= SHRINK
        search.fit(centre, radius)
        best = search.best(max(finalists, 1))
        for i in best[:finalists]:
            search.attempt(search.points[i], seed + 1)
        search.fit(centre, radius)
        chosen = min(best, key=lambda i: search.fitted()[i])
    finally:
        regularizer.load_state_dict(kept)
    return search.result(tuned, chosen, time.monotonic() - begun)


class Search:
    """All points tried so far, and the surfaces fitted to the points of a region."""

    def __init__(
        self,
        objective: ForecastObjective,
        regularizer: Regularizer,
        tuned: Tuned,
        trial: Trial,
        guard: Guard | None,
    ) -> None:
        self.space = ParameterSpace(regularizer, tuned.names, tuned.bounds)
        self.plain = copy(objective)
        self.plain.trust = 1.0  # in every forecast
        self.regularizer, self.trial, self.guard = regularizer, trial, guard
        self.points: list[Tensor] = []
        self.tried: list[float] = []  # without the guard's penalty
        self.judged: list[Evaluation] = []  # with the guard's penalty
        self.excess: list[float] = []

    def region(self, centre: Tensor, radius: float) -> tuple[Tensor, Tensor]:
        """The lower and upper ends of a region, inside the bounds."""
        low, high = self.space.low, self.space.high
        return (centre - radius).clamp(min=low), (centre + radius).clamp(max=high)

    def set_point(self, u: Tensor) -> None:
        """Set the regularizer's parameters to those of a point."""
        numbers = self.space.parameters_at(u).tolist()
        load_numbers(self.regularizer, dict(zip(self.space.names, numbers, strict=True)))

    def promising(
        self,
        low: Tensor,
        high: Tensor,
        sobol: torch.quasirandom.SobolEngine,
        count: int,
        hopeless: float,
    ) -> Iterator[Tensor]:
        """`count` points that fill a region, preferably without hopeless forecasts."""
        screened = 1 if math.isinf(hopeless) else SCREENED
        drawn = low + sobol.draw(screened * count, dtype=torch.float64) * (high - low)
        # With the guard's penalty: a point that does not pass is not the standard.
        given, lowest = 0, min(_trusted(found) for found in self.judged)
        for i, u in enumerate(drawn):
            if given < count and (
                len(drawn) - i <= count - given or self.forecast(u) < lowest + hopeless
            ):
                given += 1
                yield u

    def forecast(self, u: Tensor) -> float:
        """The objective at u by the mean path."""
        self.set_point(u)
        with torch.no_grad():
            return float(self.plain(self.regularizer).value)

    def attempt(self, u: Tensor, seed: int) -> None:
        """Try a point, also with the guard."""
        self.set_point(u)
        found = self.trial(self.regularizer, seed)
        self.points.append(u)
        self.tried.append(_trusted(found))
        verdict = Verdict(0.0, {})
        if self.guard is not None:
            verdict = self.guard(self.regularizer)
            excess = torch.tensor(verdict.excess, dtype=torch.float64)
            played = {name: torch.tensor([regret]) for name, regret in verdict.regrets.items()}
            found = Evaluation(
                found.value + self.guard.penalty(excess),
                found.regrets | played,
                found.certified & excess.isfinite(),  # a NaN excess removes the certificate
            )
        self.excess.append(verdict.excess)
        self.judged.append(found)

    def fit(self, centre: Tensor, radius: float) -> None:
        """Fit surfaces to the trials in a region, without those on a cliff.

        If there are too few for a smooth fit, the nearest others are added.
        """
        u, values = torch.stack(self.points), torch.tensor(self.tried, dtype=torch.float64)
        low = values < values.min() + STEEP
        distance = torch.where(low, (u - centre).abs().amax(-1), torch.inf)
        enough = min(2 * monomials(centre).numel(), len(u))
        self.used = low & (distance <= max(radius, float(distance.sort().values[enough - 1])))
        if not bool(self.used.any()):
            raise RuntimeError(
                f"none of {len(u)} trials was finite and certified; start elsewhere, or look at "
                "the judge"
            )
        excess = torch.tensor(self.excess, dtype=torch.float64)[self.used]
        self.surface = fit_surface(u[self.used], values[self.used], centre, radius)
        self.excess_surface = (
            fit_surface(u[self.used], excess, centre, radius) if self.guard is not None else None
        )

    def surfaces_at(self, u: Tensor) -> Tensor:
        """The objective by the surfaces at points `(n, p)`, with the guard's penalty."""
        values = self.surface(u)
        if self.guard is not None and self.excess_surface is not None:
            values = values + self.guard.penalty(self.excess_surface(u))
        return values

    def fitted(self) -> Tensor:
        """The surfaces at the points tried; infinite at points that were left out of the fit."""
        return torch.where(self.used, self.surfaces_at(torch.stack(self.points)), torch.inf)

    def best(self, count: int) -> list[int]:
        """The first trials of the `count` different points that are best by the surfaces."""
        found: list[int] = []
        for i in self.fitted().argsort().tolist():
            known = any(torch.equal(self.points[i], self.points[j]) for j in found)
            if len(found) < count and bool(self.used[i]) and not known:
                found.append(i)
        return found

    def minimum(self, sobol: torch.quasirandom.SobolEngine) -> Tensor:
        """The best of many points by the surfaces.

        Surfaces are used only between the good points that were tried.
        """
        fitted = self.fitted()
        good = torch.stack(self.points)[fitted < fitted.min() + HOPELESS]
        low, high = good.amin(0), good.amax(0)
        drawn = low + sobol.draw(CANDIDATES, dtype=torch.float64) * (high - low)
        return drawn[self.surfaces_at(drawn).argmin()]

    def result(self, tuned: Tuned, chosen: int, seconds: float) -> Refined:
        """The result, with one of the points as the chosen one."""
        values = torch.tensor([_trusted(found) for found in self.judged])
        parameters = self.space.parameters_at(torch.stack(self.points))
        own = [i for i, u in enumerate(self.points) if torch.equal(u, self.points[chosen])]
        regrets = {
            name: sum(float(self.judged[i].regrets[name]) for i in own) / len(own)
            for name in self.judged[chosen].regrets
        }
        result = replace(
            tuned,
            parameters=dict(zip(tuned.names, parameters[chosen].tolist(), strict=True)),
            value=float(values[own].mean()),
            regrets=regrets,
            at_bounds=self.space.at_bounds(self.points[chosen]),
            failures=~values.isfinite()[:, None],
            values=values[:, None],
            path=parameters[:, None],
            start=0,
            seconds=tuned.seconds + seconds,
        )
        fitted, excess = self.fitted(), torch.tensor(self.excess)
        return Refined(result, values, fitted, parameters, excess, own[0], seconds, tuned)


def _trusted(found: Evaluation) -> float:
    """The value; infinite if it is NaN or not certified."""
    value = float(found.value)
    return value if bool(found.certified.all()) and math.isfinite(value) else math.inf
