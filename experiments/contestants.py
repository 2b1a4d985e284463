"""The solvers in experiments/benchmark.py: torch_occ, and the same step in cvxpy and cvxpylayers.

Work that is needed once is not timed: the problem is stated, compiled and, where it is quick,
solved a first time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import util
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

import torch_occ as occ
from torch_occ.reference import (
    ACCURATE_CLARABEL,
    ACCURATE_SCS,
    CvxpyLayer,
    Settings,
    atoms,
    gather,
    largest,
    spread,
    state_in_cvxpy,
)

T = TypeVar("T")

#: With these tolerances and scaled inputs Moreau finds q to 1e-12; with its defaults, to 1e-5.
TIGHT_MOREAU = Settings(
    "tight Moreau",
    {"ipm_settings": dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-14)},
    solver="MOREAU",
    normalize=True,
)


@dataclass(frozen=True)
class Case:
    """A batch of steps with the paper's regularizer, at episode t of random losses."""

    shape: tuple[int, int, int]  # horizon, width, actions
    batch: int
    seed: int
    t: float
    clock: Callable[[], float] = time.perf_counter

    @cached_property
    def mdp(self) -> occ.LayeredMDP:
        return occ.LayeredMDP.random(*self.shape, seed=self.seed)

    @cached_property
    def regularizer(self) -> occ.Regularizer:
        return occ.jin_luo(self.mdp)

    @cached_property
    def losses(self) -> Tensor:
        """The direction of the gradient and the cumulative losses at episodes t and t + 1.

        `(1 + 2 * batch, S, A)`.
        """
        shape, generator = (
            (self.mdp.num_states, self.mdp.num_actions),
            torch.Generator().manual_seed(self.seed),
        )
        direction = torch.randn(1, *shape, dtype=torch.float64, generator=generator)
        mean = torch.rand(self.batch, *shape, dtype=torch.float64, generator=generator)
        new = torch.rand(self.batch, *shape, dtype=torch.float64, generator=generator)
        return torch.cat([direction, self.t * mean, self.t * mean + new])

    @property
    def direction(self) -> Tensor:
        return self.losses[0]

    @property
    def loss(self) -> Tensor:
        return self.losses[1 : 1 + self.batch]

    @property
    def next_loss(self) -> Tensor:
        return self.losses[1 + self.batch :]


@dataclass(frozen=True)
class Trial:
    """One timed run over the first `count` elements of a batch.

    A field is None if the contestant does not offer it.
    """

    count: int
    q: Tensor  # (count, S, A)
    gradient: Tensor | None  # of <direction, q> in the loss, (count, S, A)
    forward: float  # seconds for all of them
    backward: float | None
    warm: float | None  # the step of the next episode, started from q

    @property
    def total(self) -> float:
        return self.forward + (self.backward or 0.0)


class Contestant:
    """A solver. Subclasses write `prepare`, which returns the function that is timed."""

    label: ClassVar[str]
    package: ClassVar[str] = "torch_occ"
    #: A guess before the first measurement: seconds for one element at 84 pairs. Times grow like
    #: pairs ** growth.
    seconds: ClassVar[float] = 0.02
    growth: ClassVar[float] = 1.0
    accurate: ClassVar[bool] = False  # whether its gradients have many right digits
    whole: ClassVar[bool] = False  # whether batches are always run whole, whatever the budget

    def __init__(self) -> None:
        self.measured: tuple[int, float] = (84, self.seconds)

    @property
    def missing(self) -> str:
        """Why it cannot take part, or an empty string."""
        return "" if util.find_spec(self.package) else f"{self.package} is not installed"

    def predict(self, pairs: int) -> float:
        """Seconds for one element, from the largest problem measured so far."""
        base, seconds = self.measured
        return seconds * max(pairs / base, 1.0) ** self.growth

    def learn(self, pairs: int, trial: Trial) -> None:
        """Remember a measurement."""
        self.measured = (pairs, trial.total / trial.count)

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        """Get ready for a case; the function returned runs its first `count` elements."""
        raise NotImplementedError


class TorchOcc(Contestant):
    """This package."""

    label = "torch_occ"
    whole = True

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        step = occ.FTRLStep(case.mdp, case.regularizer)
        parameters = list(step.parameters())

        def run(count: int) -> Trial:
            chosen = 0 if count == 1 else slice(count)
            loss = case.loss[chosen].clone().requires_grad_()
            q, forward = timed(case, lambda: step(loss, case.t))
            found, backward = timed(
                case, lambda: torch.autograd.grad((case.direction * q).sum(), [loss, *parameters])
            )
            start, later = q.detach(), case.next_loss[chosen]
            _, warm = timed(case, lambda: step(later, case.t + 1, warm_start=start))
            return Trial(
                count,
                q.detach().reshape(count, *q.shape[-2:]),
                found[0].reshape(count, *q.shape[-2:]),
                forward,
                backward,
                warm,
            )

        return run


class Cvxpy(Contestant):
    """cvxpy with Clarabel at tight tolerances, one element at a time.

    It has no derivative and no warm start.
    """

    label = "cvxpy + Clarabel"
    package = "cvxpy"
    growth = 2.2

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        weights = atoms(case.regularizer, case.t)
        problem, variable, parameters = state_in_cvxpy(case.mdp, list(weights), exact_powers=True)
        scale = largest(weights)
        tolerances = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-14)
        for parameter, weight in zip(parameters[1:], weights.values(), strict=True):
            parameter.value = (weight.detach() / scale).numpy()

        parameters[0].value = (gather(case.mdp, case.loss[0]) / scale).numpy()
        problem.get_problem_data("CLARABEL")  # compiles it; from now on only numbers change

        def solve(loss: Tensor) -> Tensor:
            parameters[0].value = (gather(case.mdp, loss) / scale).numpy()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
                problem.solve(solver="CLARABEL", **tolerances)
            return spread(case.mdp, torch.as_tensor(variable.value))

        def run(count: int) -> Trial:
            q, forward = timed(
                case, lambda: torch.stack([solve(loss) for loss in case.loss[:count]])
            )
            return Trial(count, q, None, forward, None, None)

        return run


class Layers(Contestant):
    """cvxpylayers under some settings; no warm start."""

    settings: ClassVar[Settings]

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        layer = CvxpyLayer(case.mdp, case.regularizer, self.settings)
        parameters = list(case.regularizer.parameters())

        def run(count: int) -> Trial:
            loss = case.loss[:count].clone().requires_grad_()
            with warnings.catch_warnings():
                # NumPy warns about cvxpylayers, and diffcp about what the residuals show anyway.
                warnings.simplefilter("ignore")
                q, forward = timed(case, lambda: layer(loss, case.t))
                found, backward = timed(
                    case,
                    lambda: torch.autograd.grad((case.direction * q).sum(), [loss, *parameters]),
                )
            return Trial(count, q.detach(), found[0], forward, backward, None)

        return run


class LayersScs(Layers):
    """The accurate settings with SCS."""

    label = "cvxpylayers + diffcp (SCS)"
    package, settings, accurate = "diffcp", ACCURATE_SCS, True
    seconds, growth = 0.8, 3.0  # a dense matrix over all variables of the cone program is factored


class LayersClarabel(Layers):
    """The accurate settings with Clarabel."""

    label = "cvxpylayers + diffcp (Clarabel)"
    package, settings, accurate = "diffcp", ACCURATE_CLARABEL, True
    seconds, growth = 0.8, 3.0


class LayersMoreau(Layers):
    """Moreau. Its gradients have few right digits even with tight tolerances; see the residual."""

    label = "cvxpylayers + Moreau"
    package, settings = "moreau", TIGHT_MOREAU
    growth = 2.0


CONTESTANTS: dict[str, type[Contestant]] = {
    "torch_occ": TorchOcc,
    "cvxpy": Cvxpy,
    "scs": LayersScs,
    "clarabel": LayersClarabel,
    "moreau": LayersMoreau,
}


def timed(case: Case, function: Callable[[], T]) -> tuple[T, float]:
    """The result of a call, and its seconds."""
    start = case.clock()
    result = function()
    return result, case.clock() - start
