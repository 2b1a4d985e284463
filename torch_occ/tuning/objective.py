"""The objective of a tuning: forecast regret in several worlds, relative to a reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.losses import LossProcess
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.forecast import SMALL_NOISE, Forecast, forecast

# In environment e, x_e is the mean over its MDPs of log((regret + floor) / (reference regret +
# floor)). The objective is a soft maximum over environments,
#
#     value = 1/robustness log mean_e exp(robustness x_e).
#
# It is the mean of the x_e for robustness -> 0 and the largest of them for robustness -> infinity.

#: The weight of the squared excess of noise over `trust`.
DISTRUST = 30.0


class World(NamedTuple):
    """An environment: MDPs with their losses. Worlds with the same name are averaged."""

    name: str
    mdp: LayeredMDP  # one, or a batch of one layout (`stack`)
    losses: Tensor | LossProcess  # means `(*batch, S, A)`, or a process that can be forecast


class Evaluation(NamedTuple):
    """The objective at B settings of the parameters."""

    value: Tensor  # (B,)
    regrets: dict[str, Tensor]  # by environment: the mean over its MDPs, (B,)
    certified: Tensor  # (B,), whether every forecast was certified


class ForecastObjective:
    """Forecast regret after `episodes` episodes, over all worlds.

    Args:
        reference: a regularizer whose regrets are the divisors, for example `jin_luo(mdp)` with
            the paper's constants; by default the divisor is the floor. Its loss estimates are
            importance-weighted, also if `estimator` is given.
        estimator: the loss estimator of all regularizers; importance-weighted by default, or
            `ReducedVariance`. With a baseline, keep a log-barrier's beta above 1/2: below, rare
            visits may make the regret much larger than the mean path predicts.
        robustness: how much the worst environment counts.
        trust: the largest share of noise at which a forecast is trusted. Beyond it, the objective
            rises steeply, because a tuner would otherwise exploit errors of the forecast. 1 trusts
            every forecast.
        floor: added to every regret before the logarithm. A negative regret counts as zero, and
            differences far below the floor have no effect.

    Raises:
        ValueError: if there are no worlds, a number is not positive, or the forecast of the
            reference has no certificate.
    """

    def __init__(
        self,
        worlds: Sequence[World],
        episodes: int,
        *,
        reference: Regularizer | None = None,
        estimator: Estimator | None = None,
        robustness: float = 4.0,
        trust: float = SMALL_NOISE,
        floor: float = 1.0,
    ) -> None:
        check_that(bool(worlds), "worlds", "at least one", "none")
        kinds = {type(world).__name__ for world in worlds} - {World.__name__}
        check_that(not kinds, "worlds", "a list of worlds", ", ".join(sorted(kinds)), TypeError)
        fine, found = robustness > 0 and floor > 0, f"{robustness} and {floor}"
        check_that(fine, "robustness, floor", "positive numbers", found)
        self.worlds, self.episodes, self.robustness = tuple(worlds), episodes, robustness
        self.trust, self.floor = trust, floor
        self.estimator = centred(estimator)
        self.scales = [torch.zeros((), dtype=torch.float64) for _ in worlds]
        if reference is not None:
            with torch.no_grad():
                self.scales = [path.final for path in self._forecasts(reference, None)]
            for world, scale in zip(worlds, self.scales, strict=True):
                if not bool(scale.isfinite().all()):
                    found = f"its forecast regret in {world.name!r} is {scale.tolist()}"
                    raise ValueError(f"reference: {found}; it has no certificate")

    def _forecasts(self, psi: Regularizer, estimator: Estimator | None) -> list[Forecast]:
        return [
            forecast(world.mdp, psi, world.losses, self.episodes, estimator=estimator)
            for world in self.worlds
        ]

    def __call__(self, regularizer: Regularizer) -> Evaluation:
        """Evaluate the objective; parameters `(B, 1)` broadcast with the MDPs of a world."""
        paths = self._forecasts(regularizer, self.estimator)
        regrets: dict[str, list[Tensor]] = {}
        ratios: dict[str, list[Tensor]] = {}
        for world, scale, path in zip(self.worlds, self.scales, paths, strict=True):
            final = _batched(path.final)
            regrets.setdefault(world.name, []).append(final)
            ratios.setdefault(world.name, []).append(self._log(final) - self._log(scale))
        # (environments, B)
        x = torch.stack([torch.cat(parts, -1).mean(-1) for parts in ratios.values()])
        r = self.robustness
        value = (r * x).logsumexp(0) / r - math.log(len(x)) / r
        excess = [(_batched(path.noise_share) - self.trust).clamp(min=0) for path in paths]
        beyond = torch.stack([each.square().amax(-1) for each in excess]).amax(0)
        means = {name: torch.cat(parts, -1).mean(-1) for name, parts in regrets.items()}
        fine = torch.stack([_batched(path.certified).all(-1) for path in paths]).all(0)
        return Evaluation(value + DISTRUST * beyond, means, fine)

    def _log(self, regret: Tensor) -> Tensor:
        return (regret.clamp(min=0) + self.floor).log()


def _batched(x: Tensor) -> Tensor:
    """Give x the shape `(B, M)`, also for one setting or one MDP."""
    return x.reshape(1, -1) if x.dim() < 2 else x


def stack(mdps: Sequence[LayeredMDP]) -> LayeredMDP:
    """Stack MDPs of the same layout into a batch; raise a ValueError if layouts differ."""
    first = mdps[0]
    for i, other in enumerate(mdps):
        if other.layer_sizes != first.layer_sizes or not torch.equal(other.actions, first.actions):
            raise ValueError(f"mdps: number {i} is {other}, which has another layout than {first}")
    transitions = [
        torch.stack(layers) for layers in zip(*(mdp.transitions for mdp in mdps), strict=True)
    ]
    return LayeredMDP(
        transitions, actions=first.actions, initial=torch.stack([mdp.initial for mdp in mdps])
    )
