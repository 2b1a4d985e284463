"""Gradients of the regret through the run itself, in the logarithms of the regularizer's
parameters, and what they are worth.

A learner with bandit feedback depends on its parameters in two ways: its q_t moves, and so do the
actions that it samples. Holding the sampled actions fixed and differentiating everything else is
the **pathwise** estimator, sum_t <dq_t, gaps>: biased. The **unbiased** one adds the score,

    sum_t ( <q_t, gaps> - baseline_t ) sum_{tau < t} d log pi_tau(a_tau | s_tau),

with the mean of the other seeds as the baseline. Both carry a handful of tangents along the run
(torch_occ.tuning.tangents), in memory that does not grow with T. `finite_differences` with common
random numbers is the reference.

The first two fail in long runs: a visit multiplies the tangent of Lhat by 1 + Pi loss/q^2, so that
the standard error explodes with T, which is reported and not hidden. docs/meta_tuning.md shows
where each one stops being usable, and torch_occ.forecasting.mean_path is what to use beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.backends import Backend, engine_takes, later
from torch_occ._support.spacing import log_spaced
from torch_occ.game.contracts import uncertified_is_handled
from torch_occ.game.driver import simulate
from torch_occ.game.learners import FTRL
from torch_occ.game.losses import Stationary
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep
from torch_occ.tuning.tangents import Stretch, play_in_torch


class Estimate(NamedTuple):
    """A gradient of the expected regret at C episodes, from N seeds."""

    # (N, C, parameters), one estimate a seed; those of the unbiased estimator share baselines
    samples: Tensor

    @property
    def mean(self) -> Tensor:
        """`(C, parameters)`."""
        return self.samples.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, `(C, parameters)`."""
        return self.samples.std(0) / len(self.samples) ** 0.5

    @property
    def heaviest(self) -> Tensor:
        """The share of one seed in the variance, `(C, parameters)`: where it is not small, the
        standard error is not to be believed.
        """
        squares = (self.samples - self.mean).square()
        return squares.amax(0) / squares.sum(0)


class Gradients(NamedTuple):
    """Two estimates from one run, in the logarithms of the parameters `names`."""

    names: tuple[str, ...]
    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C)
    pathwise: Estimate
    unbiased: Estimate
    certified: (
        Tensor  # (N,), whether every step was; others have NaN as their samples from there on
    )
    backend: str  # which one played, "torch" or "engine"


@torch.no_grad()
def run_gradients(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Stationary,
    episodes: int,
    seeds: Sequence[int],
    *,
    checkpoints: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> Gradients:
    """Play importance-weighted FTRL as `simulate` does, from the same random numbers, with the
    tangents of q and Lhat carried along.

    Args:
        checkpoints: episodes at which there is an estimate; 20 a decade by default, and the last.
        backend: "engine" is compiled, for built-in regularizers; "torch" does everything; "auto"
            takes the engine where it can.
    """
    seeds = [int(seed) for seed in seeds]
    if len(seeds) < 2:
        raise ValueError(f"seeds: a leave-one-out baseline needs at least two, got {len(seeds)}")
    wanted = sorted(set(log_spaced(episodes) if checkpoints is None else checkpoints))
    if not wanted or wanted[0] < 1 or wanted[-1] > episodes:
        raise ValueError(f"checkpoints: expected episodes from 1 to {episodes}, got {wanted}")
    losses.start(mdp, seeds)  # checks that they fit
    step = FTRLStep(mdp, regularizer, backend="torch" if backend == "torch" else "auto")
    if not step.evaluator.names or any(
        parameter.dim() for parameter in step.evaluator.own_parameters
    ):
        raise ValueError("regularizer: expected scalar parameters, at least one")
    step.evaluator.validate(step.evaluator.own_parameters)
    name, play = _choose(backend, step, losses)
    curves: dict[str, list[Tensor]] = {"regret": [], "pathwise": [], "unbiased": []}
    begun, regret, pathwise, scored = (
        0,
        *(torch.zeros((), dtype=mdp.dtype, device=mdp.device) for _ in range(3)),
    )
    for cost, slope, score, certified in play(step, losses, wanted[-1], seeds):
        baseline = (cost.sum(0) - cost) / (len(seeds) - 1)
        regret = regret + cost.cumsum(1)
        pathwise = pathwise + slope.cumsum(1)
        scored = scored + ((cost - baseline)[..., None] * score).cumsum(1)
        for t in (t for t in wanted if begun < t <= begun + cost.shape[1]):
            now, valid = t - begun - 1, certified[:, t - begun - 1, None]
            for curve, value in zip(
                curves.values(), (regret[..., None], pathwise, pathwise + scored), strict=True
            ):
                curve.append(torch.where(valid, value[:, now], torch.nan))
        begun += cost.shape[1]
        regret, pathwise, scored = regret[:, -1:], pathwise[:, -1:], scored[:, -1:]
    samples = {key: torch.stack(parts, 1) for key, parts in curves.items()}
    estimates = (Estimate(samples["pathwise"]), Estimate(samples["unbiased"]))
    return Gradients(
        step.evaluator.names,
        torch.tensor(wanted),
        samples["regret"].squeeze(-1),
        *estimates,
        certified[:, -1],
        name,
    )


Play = Callable[[FTRLStep, Stationary, int, Sequence[int]], Iterator[Stretch]]


def _choose(backend: Backend, step: FTRLStep, losses: Stationary) -> tuple[str, Play]:
    """Who plays; an error that says why if the engine was asked for and cannot."""

    def why_not() -> str | None:
        return later("tuning.compiled_tangents").why_not_carry(step, losses)

    if not engine_takes(backend, why_not):
        return "torch", play_in_torch
    return "engine", later("tuning.compiled_tangents").play_compiled


def finite_differences(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Stationary,
    episodes: int,
    seeds: Sequence[int],
    *,
    step: float = 0.05,
    checkpoints: Sequence[int] | None = None,
    backend: Backend = "auto",
) -> Estimate:
    """The gradient in the logarithms of the parameters by central differences of simulated regret,
    with common random numbers.

    A seed with a step that could not be certified has NaN as its sample from there on. The backend
    is that of `simulate`.
    """
    if not step > 0:
        raise ValueError(f"step: expected a positive number, got {step}")

    def regret() -> Tensor:
        with uncertified_is_handled():
            played = simulate(
                mdp,
                FTRL(mdp, regularizer),
                losses,
                episodes,
                seeds,
                checkpoints=checkpoints,
                backend=backend,
            )
        return torch.where(played.uncertified == 0, played.regret, torch.nan)

    columns = []
    for parameter in regularizer.parameters():
        kept, sides = parameter.detach().clone(), []
        try:
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.copy_(kept * torch.tensor(sign * step, dtype=kept.dtype).exp())
                sides.append(regret())
        finally:
            with torch.no_grad():
                parameter.copy_(kept)
        columns.append((sides[0] - sides[1]) / (2 * step))
    return Estimate(torch.stack(columns, -1))
