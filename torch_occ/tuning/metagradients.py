"""Gradients of the regret through the run itself, in the logarithms of the parameters.

A learner with bandit feedback depends on its parameters in two ways: through q_t, and through the
actions that it samples. The **pathwise** estimator, sum_t ⟨dq_t, gaps⟩, keeps the sampled actions
fixed and differentiates everything else, so it is biased. The **unbiased** estimator adds the
score,

    sum_t ( <q_t, gaps> - baseline_t ) sum_{tau < t} d log pi_tau(a_tau | s_tau),

where the baseline is the mean of the other seeds. Both propagate one tangent per parameter along
the run (torch_occ.tuning.tangents), in memory that does not grow with T. `finite_differences` with
common random numbers is the reference.

The first two fail in long runs. A visit multiplies the tangent of Lhat by 1 + Pi loss/q^2, so the
standard error explodes with T; it is reported with the estimate. docs/meta_tuning.md shows up to
which T each is usable. Beyond, use torch_occ.forecasting.mean_path.
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
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.losses import Stationary
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep
from torch_occ.tuning.tangents import Stretch, play_in_torch


class Estimate(NamedTuple):
    """A gradient of the expected regret at C episodes, from N seeds."""

    # (N, C, parameters), one estimate per seed; those of the unbiased estimator share baselines
    samples: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over seeds, `(C, parameters)`."""
        return self.samples.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """The standard error of the mean, `(C, parameters)`."""
        return self.samples.std(0) / len(self.samples) ** 0.5

    @property
    def heaviest(self) -> Tensor:
        """The largest share of one seed in the variance, `(C, parameters)`.

        Where it is not small, the standard error is unreliable.
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
    backend: str  # the one that played: "torch" or "engine"


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
    """Play importance-weighted FTRL with the tangents of q and Lhat.

    The run is that of `simulate`, from the same random numbers.

    Args:
        checkpoints: episodes at which there is an estimate; by default 20 per decade, and the last.
        backend: "engine" is compiled, for built-in regularizers; "torch" plays everything; "auto"
            uses the engine where it can.

    Returns:
        Both estimates, for every seed and checkpoint.

    Raises:
        ValueError: if there are fewer than two seeds, a checkpoint is out of range, or the
            regularizer has no scalar parameters.
    """
    seeds = [int(seed) for seed in seeds]
    if len(seeds) < 2:
        raise ValueError(f"seeds: a leave-one-out baseline needs at least two, got {len(seeds)}")
    wanted = sorted(set(log_spaced(episodes) if checkpoints is None else checkpoints))
    if not wanted or wanted[0] < 1 or wanted[-1] > episodes:
        raise ValueError(f"checkpoints: expected episodes from 1 to {episodes}, got {wanted}")
    losses.start(mdp, seeds)  # checks that they fit the MDP
    step = FTRLStep(mdp, regularizer, backend="torch" if backend == "torch" else "auto")
    if not step.evaluator.names or any(
        parameter.dim() for parameter in step.evaluator.own_parameters
    ):
        raise ValueError(
            "regularizer: expected scalar parameters, at least one; use tune with a forecast for "
            "one value per layer, state or pair"
        )
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
    """The function that plays, and its name; an error if the engine is required but cannot."""

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
    """The gradient in the logarithms of the parameters, by central differences of simulated regret.

    Both runs have the same random numbers. If a step of a seed could not be certified, its samples
    are NaN from there on. The backend is that of `simulate`.

    Returns:
        One estimate per seed and checkpoint.

    Raises:
        ValueError: if `step` is not positive.
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
