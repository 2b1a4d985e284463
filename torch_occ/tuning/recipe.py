"""The recipe of tuning: gradients of the forecast, then a local search with values by leaping.

docs/meta_tuning.md shows its results and its cost, and compares it with searches by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.guard import Guard
from torch_occ.tuning.objectives import ForecastObjective
from torch_occ.tuning.refinement import Refined, refine
from torch_occ.tuning.space import ParameterSpace
from torch_occ.tuning.tuner import Tuned, tune


@dataclass(frozen=True)
class Recipe:
    """The numbers of steps, points and particles of `tune_and_refine`.

    The defaults are those that docs/meta_tuning.md measures, for an objective over sixteen MDPs.
    """

    steps: int = 12
    """of the optimizer; 0 leaves the gradients out, and nothing is forecast"""
    starts: int = 1
    """of the optimizer"""
    rate: float = 0.7
    """learning rate of the optimizer"""
    rounds: int = 4
    """of the refinement"""
    points: int = 12
    """of each round; 0 for twice as many as there are parameters"""
    radius: float = 3.5
    """of the first region, in logarithms; wide, because gradients stop where forecasts fail"""
    particles: int = 8
    """of each point by leaping, on every MDP"""
    hopeless: float = math.inf
    """points whose forecast is worse than the best trial by more are not tried"""


def tune_and_refine(
    objective: ForecastObjective,
    regularizer: Regularizer,
    recipe: Recipe | None = None,
    *,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    guard: Guard | None = None,
    seed: int = 0,
    directory: str | Path | None = None,
    save_to: str | Path | None = None,
) -> Refined:
    """Minimize an objective over a regularizer's parameters.

    First come gradients of the forecast, then trials around the best point. With
    `Recipe(steps=0)` there are only trials: this is the way where forecasts are slow or not
    reliable.

    Args:
        objective: forecast regret over some worlds. Sixteen MDPs are enough for a result that
            holds on other MDPs.
        regularizer: its scalar parameters are the first start; it is not changed.
        recipe: how many steps, points and particles.
        bounds: of each parameter by name; 1e-4 to 1e4 by default.
        guard: worlds in which the result must not be worse than a reference.
        seed: of the starts and of the trials.
        directory: a directory for TensorBoard's `meta/*`.
        save_to: a file in which the part by gradients is saved, so that it can continue after an
            interruption.

    Returns:
        The result of `refine`; `result.tuned.load_into(regularizer)` sets the parameters.

    Raises:
        ValueError: if a bound names no parameter, or the first start is outside its bounds.
        RuntimeError: if no point was finite and certified.
    """
    recipe = Recipe() if recipe is None else recipe
    limits = dict(bounds or {})
    tuned = (
        tune(
            objective,
            regularizer,
            steps=recipe.steps,
            starts=recipe.starts,
            rate=recipe.rate,
            bounds=limits,
            seed=seed,
            directory=directory,
            save_to=save_to,
        )
        if recipe.steps
        else untuned(regularizer, limits)
    )
    return refine(
        objective,
        regularizer,
        tuned,
        rounds=recipe.rounds,
        points=recipe.points or None,
        radius=recipe.radius,
        hopeless=recipe.hopeless,
        particles=recipe.particles,
        seed=seed,
        guard=guard,
    )


def untuned(regularizer: Regularizer, bounds: dict[str, tuple[float, float]]) -> Tuned:
    """The regularizer's own parameters in the form of a result, without any evaluation."""
    space = ParameterSpace(regularizer, None, bounds)
    parameters, nothing = space.parameters_at(space.centre), torch.empty(0, 1, dtype=torch.float64)
    return Tuned(
        parameters=dict(zip(space.names, parameters.tolist(), strict=True)),
        value=math.nan,
        regrets={},
        start=0,
        at_bounds=space.at_bounds(space.centre),
        failures=nothing.bool(),
        values=nothing,
        path=parameters.new_empty(0, 1, len(space.names)),
        names=space.names,
        seconds=0.0,
        finished=True,
        bounds=space.bounds,
    )
