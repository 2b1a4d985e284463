"""The recipe of tuning: gradients of the forecast first, then a local search judged by leaping.

docs/meta_tuning.md has what it finds and what it costs, beside searches by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.guard import Guard
from torch_occ.tuning.objectives import ForecastObjective
from torch_occ.tuning.refinement import Refined, refine
from torch_occ.tuning.tuner import tune


@dataclass(frozen=True)
class Recipe:
    """How much of everything. The defaults are what docs/meta_tuning.md measures, for an objective
    over sixteen MDPs.
    """

    steps: int = 12
    """of the optimizer"""
    starts: int = 1
    """of the optimizer"""
    rate: float = 0.7
    """its learning rate"""
    rounds: int = 4
    """of the refinement"""
    points: int = 12
    """of each round; 0 for twice as many as there are parameters"""
    radius: float = 3.5
    """of the first region, in logarithms; wide, since gradients stop where the forecast is no longer reliable"""
    particles: int = 8
    """of each point by leaping, on every MDP"""
    hopeless: float = math.inf
    """a point whose forecast is worse than the best trial by more is not tried; infinity tries all points"""


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
    """Minimize an objective over a regularizer's parameters: by gradients of the forecast, then by
    trials around the best point.

    Args:
        objective: forecast regret over some worlds; sixteen MDPs are enough for a result that holds
            on others.
        regularizer: its parameters, scalars, are the first start; it is left as it is.
        recipe: how many steps, points and particles.
        bounds: of each parameter by name; 1e-4 to 1e4 by default.
        guard: worlds in which the result may not be worse than a reference.
        seed: of the starts and of the trials.
        directory: where TensorBoard's `meta/*` go.
        save_to: a file in which the part by gradients is kept, so that it can continue after an
            interruption.

    Returns:
        What `refine` returns; `result.tuned.load_into(regularizer)` sets the parameters.

    Raises:
        ValueError: if a bound names no parameter or does not hold the first start.
        RuntimeError: if no point was finite and certified.
    """
    recipe = Recipe() if recipe is None else recipe
    tuned = tune(
        objective,
        regularizer,
        steps=recipe.steps,
        starts=recipe.starts,
        rate=recipe.rate,
        bounds=dict(bounds or {}),
        seed=seed,
        directory=directory,
        save_to=save_to,
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
