"""What to use: a recommended learner, and the recipe of tuning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from torch_occ._support.choices import later
from torch_occ.game.estimators import ReducedVariance
from torch_occ.game.learners import FTRL, Learner
from torch_occ.game.shifted import ShiftedFTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import ConditionalEntropy, LogBarrier, Tsallis
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.tuning.objective import ForecastObjective, Guard
from torch_occ.tuning.refine import Refined, refine
from torch_occ.tuning.space import ParameterSpace
from torch_occ.tuning.tune import Tuned, tune

# -- The recipe of tuning: gradients of the forecast, then a local search with values by trials ----


@dataclass(frozen=True)
class Recipe:
    """The numbers of steps, points and particles of `tune_and_refine`.

    The defaults are those that docs/tuning_results.md measures, for an objective over sixteen MDPs.
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
    if recipe.steps:
        sizes = {name: getattr(recipe, name) for name in ("steps", "starts", "rate")}
        files: dict[str, Any] = {"directory": directory, "save_to": save_to}
        tuned = tune(objective, regularizer, bounds=limits, seed=seed, **sizes, **files)
    else:
        tuned = untuned(regularizer, limits)
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


# -- What to take without tuning: one learner for each kind of world -------------------------------

Kind = Literal["any", "stochastic", "varying", "adversarial"]

#: gamma and beta of "varying", chosen on MDPs 80 to 82 (docs/tuning_results.md).
VARYING = (1.0, 0.5)

#: gamma and beta of "adversarial", chosen on training MDPs by experiments/both_worlds.py.
ADVERSARIAL = (0.2663, 1.0)

#: A rate so small that the baseline is 1/2 wherever q is not tiny.
EVERYWHERE = 0.001


def recommended(mdp: LayeredMDP, world: Kind = "any") -> Learner:
    """Return a learner with constants that were good on MDPs on which they were not chosen.

    - "any": nothing is known about the losses. `ShiftedFTRL`, with its defaults. Its
      guarantee is Theorems A and B of docs/adaptive.md: O(sqrt(L S A T)) regret against any
      adversary, and O(log T + sqrt(C log T)) where losses are stochastic, with corruption C.
    - "stochastic": losses are independent with the same means in every episode. Thompson sampling.
      Its regret may be linear in any other world.
    - "varying": means change from outside, as where losses are constrained or corrupted. FTRL with
      the 1/2-Tsallis entropy, eta_t = 1 / sqrt(t), a log-barrier of weight 0.5, and estimates with
      a baseline of 1/2.
    - "adversarial": losses react to the learner. FTRL with the conditional entropy,
      eta_t = 0.2663 / sqrt(t), a log-barrier of weight 1, and the same estimates.

    docs/tuning_results.md has the measurements. The baselines are for losses that are spread over
    [0, 1].

    Raises:
        ValueError: if the world is not one of these.
    """
    if world not in get_args(Kind):
        expected = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"world: expected one of {expected}, got {world!r}")
    if world == "stochastic":
        return later("rivals.thompson").Thompson(mdp)
    if world == "any":
        return ShiftedFTRL(mdp)
    entropy, (gamma, beta) = (
        (Tsallis(), VARYING) if world == "varying" else (ConditionalEntropy(), ADVERSARIAL)
    )
    estimator = ReducedVariance(InverseSqrt(EVERYWHERE))
    return FTRL(mdp, entropy / InverseSqrt(gamma) + LogBarrier(beta), estimator)
