"""The objective of a tuning: regret in several worlds, relative to a reference, and a guard."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ.game.checks import uncertified_is_handled
from torch_occ.game.estimators import Estimator, centred
from torch_occ.game.learners import FTRL
from torch_occ.game.losses import LossProcess
from torch_occ.game.simulate import simulate
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.forecast import PER_DECADE, SMALL_NOISE, Forecast, forecast
from torch_occ.tuning.leaps import leap

# -- The objective: forecast regret in several environments, relative to a reference ---------------
#
# In environment e, x_e is the mean over its MDPs of log((regret + floor) / (reference regret +
# floor)). The objective is a soft maximum over environments,
#
#     value = 1/robustness log mean_e exp(robustness x_e).
#
# It is the mean of the x_e for robustness -> 0 and the largest of them for robustness -> infinity.
# So a regularizer that is tuned for one world cannot fail badly in another.

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
        shrinkage: the weight of a penalty on differences within a parameter that has one value per
            layer, state or pair: the variance of its logarithms. It says that states are expected
            to be alike, and keeps many parameters from fitting a few tables of losses.
        probes: of the forecasts, for MDPs of more than some hundred pairs; see `forecast`.
        particles: if given, the regrets of the reference are found by leaping with so many
            particles, and nothing is forecast before the objective is called.

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
        per_decade: float = PER_DECADE,
        shrinkage: float = 0.0,
        probes: int | None = None,
        particles: int = 0,
    ) -> None:
        if not worlds:
            raise ValueError("worlds: expected at least one")
        if not (robustness > 0 and floor > 0):
            raise ValueError(
                f"robustness, floor: expected positive numbers, got {robustness} and {floor}"
            )
        self.worlds, self.episodes, self.robustness = tuple(worlds), episodes, robustness
        if not shrinkage >= 0:
            raise ValueError(f"shrinkage: expected a non-negative number, got {shrinkage}")
        self.per_decade, self.probes, self.shrinkage = per_decade, probes, shrinkage
        self.trust, self.floor, self.estimator = trust, floor, centred(estimator)
        self.scales = [torch.zeros((), dtype=torch.float64) for _ in worlds]
        if reference is not None:
            with torch.no_grad():
                self.scales = [
                    _leaped(world, reference, episodes, particles)
                    if particles
                    else self._forecast(world, reference, None).final
                    for world in worlds
                ]
            for world, scale in zip(worlds, self.scales, strict=True):
                if not bool(scale.isfinite().all()):
                    raise ValueError(
                        f"reference: its forecast regret in {world.name!r} is {scale.tolist()}; it "
                        "has no certificate"
                    )

    def _forecast(
        self, world: World, regularizer: Regularizer, estimator: Estimator | None
    ) -> Forecast:
        options: dict[str, Any] = {"per_decade": self.per_decade, "probes": self.probes}
        arguments = (world.mdp, regularizer, world.losses, self.episodes)
        return forecast(*arguments, estimator=estimator, **options)

    def __call__(self, regularizer: Regularizer) -> Evaluation:
        """Evaluate the objective; parameters `(B, 1)` broadcast with the MDPs of a world."""
        paths = [self._forecast(world, regularizer, self.estimator) for world in self.worlds]
        found = self.combine([path.final for path in paths], [path.certified for path in paths])
        excess = [(_batched(path.noise_share) - self.trust).clamp(min=0) for path in paths]
        beyond = torch.stack([each.square().amax(-1) for each in excess]).amax(0)
        value = found.value + DISTRUST * beyond
        if self.shrinkage:
            value = value + self.shrinkage * _differences(regularizer)
        return found._replace(value=value)

    def combine(self, regrets: Sequence[Tensor], certified: Sequence[Tensor]) -> Evaluation:
        """The objective from the regret in every world, `(B, M)` or a number."""
        plain: dict[str, list[Tensor]] = {}
        ratios: dict[str, list[Tensor]] = {}
        for world, scale, regret in zip(self.worlds, self.scales, regrets, strict=True):
            final = _batched(regret)
            plain.setdefault(world.name, []).append(final)
            ratios.setdefault(world.name, []).append(self._log(final) - self._log(scale))
        # (environments, B)
        x = torch.stack([torch.cat(parts, -1).mean(-1) for parts in ratios.values()])
        r = self.robustness
        value = (r * x).logsumexp(0) / r - math.log(len(x)) / r
        means = {name: torch.cat(parts, -1).mean(-1) for name, parts in plain.items()}
        fine = torch.stack([_batched(each).all(-1) for each in certified]).all(0)
        return Evaluation(value, means, fine)

    def _log(self, regret: Tensor) -> Tensor:
        return (regret.clamp(min=0) + self.floor).log()


def _differences(regularizer: Regularizer) -> Tensor:
    """The variance of the logarithms within every parameter that has a place, summed, `(B,)`."""
    own, total = dict(regularizer.named_parameters()), torch.zeros(1, dtype=torch.float64)
    for name, place in regularizer.places().items():
        entries = tuple(range(-len(place.shape), 0))
        total = total + _batched(own[name].log().var(entries, unbiased=False)).mean(-1)
    return total


def _leaped(world: World, reference: Regularizer, episodes: int, particles: int) -> Tensor:
    """The mean regret of importance-weighted FTRL by leaping, `(M,)`."""
    return torch.stack(
        [
            leap(mdp, reference, losses, episodes, particles=particles).final
            for mdp, losses in elements(world)
        ]
    )


def elements(world: World) -> Iterator[tuple[LayeredMDP, Tensor | LossProcess]]:
    """The MDPs of a world with their losses, one by one."""
    mdp, losses = world.mdp, world.losses
    if not mdp.batch_shape:
        # Many tables of means for one MDP are a batch, too.
        tables = list(losses) if isinstance(losses, Tensor) and losses.dim() == 3 else [losses]
        yield from ((mdp, table) for table in tables)
        return
    assert isinstance(losses, Tensor), "a batch of MDPs goes with a tensor of means"
    (count,) = mdp.batch_shape
    initial, means = mdp.initial.expand(count, -1), losses.expand(count, -1, -1)
    for i in range(count):
        transitions = [p.expand(count, *p.shape[-3:])[i] for p in mdp.transitions]
        yield LayeredMDP(transitions, actions=mdp.actions, initial=initial[i]), means[i]


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


# -- A guard compares a regularizer with a reference, by playing -----------------------------------
#
# It is for worlds whose losses react to the learner, which cannot be forecast. The regularizer must
# not be worse than the reference in any of them. Let R be the mean regret of the runs, R_ref that
# of the reference with the same seeds, and d = (R - R_ref) / |R_ref|. Then
#
#     excess = max_e ( mean_{MDPs of e} d  +  caution * its standard error ),
#
# and a regularizer passes if its excess is at most `-margin`. Worlds with the same name are
# averaged; for a bound on every MDP, give each world its own name. The excess has no gradient, so
# `refine` fits a quadratic to it.

#: The weight of an excess in the objective of `refine`: 1 % of excess counts more than 30 % of
#: regret elsewhere.
PENALTY = 30.0


class Verdict(NamedTuple):
    """The result of a guard for one regularizer."""

    # The excess in the worst world, with standard errors; NaN if a step had no certificate.
    excess: float
    regrets: dict[str, float]  # by environment: the mean over its MDPs and seeds


class Guard:
    """Runs in worlds that cannot be forecast, compared with a reference.

    Args:
        worlds: each with one MDP and a loss process, for example `GreedyAdversary()`. Worlds with
            the same name are averaged.
        reference: the regularizer to compare with, for example `jin_luo(mdp)` with the paper's
            constants.
        estimator: the loss estimator of all regularizers that are checked; importance-weighted by
            default. Nothing is forecast here, so any estimator can be used; use the objective's.
        reference_estimator: the loss estimator of the reference; importance-weighted by default,
            as in the paper.
        seeds: the seeds of the runs, the same for every regularizer.
        margin: how much better than the reference to be, relative to its regret, because other
            MDPs differ; a negative margin allows to be worse.
        caution: the number of standard errors of the difference that are added, because there are
            few runs; it needs two seeds.

    Raises:
        ValueError: if an argument is wrong, or the regret of the reference is zero or not finite.
    """

    def __init__(
        self,
        worlds: Sequence[World],
        episodes: int,
        reference: Regularizer,
        *,
        estimator: Estimator | None = None,
        reference_estimator: Estimator | None = None,
        seeds: Sequence[int] = range(1, 9),
        margin: float = 0.0,
        caution: float = 0.0,
    ) -> None:
        if not worlds:
            raise ValueError("worlds: expected at least one")
        if not caution >= 0 or (caution > 0 and len(seeds) < 2):
            raise ValueError(
                "caution: expected a non-negative number, and two seeds for a standard error, got "
                f"{caution} and {len(seeds)}"
            )
        for world in worlds:
            if not isinstance(world.losses, LossProcess) or world.mdp.batch_shape:
                raise ValueError(
                    f"worlds: {world.name!r} is played, so it takes one MDP and a loss process, "
                    "not means or a batch"
                )
        self.worlds, self.episodes, self.seeds = tuple(worlds), episodes, tuple(seeds)
        self.margin, self.caution, self.estimator = margin, caution, estimator
        # (seeds,) each
        self.references = [self._play(world, reference, reference_estimator) for world in worlds]
        self.scales = [float(regrets.mean()) for regrets in self.references]
        for world, scale in zip(worlds, self.scales, strict=True):
            if not 0 < abs(scale) < torch.inf:
                raise ValueError(
                    f"reference: its regret in {world.name!r} is {scale}; nothing can be compared "
                    "with that"
                )

    def __call__(self, regularizer: Regularizer) -> Verdict:
        """Play with a regularizer, whose parameters are scalars, and return its excess."""
        regrets: dict[str, list[float]] = {}
        ratios: dict[str, list[Tensor]] = {}
        for world, before, scale in zip(self.worlds, self.references, self.scales, strict=True):
            found = self._play(world, regularizer, self.estimator)
            regrets.setdefault(world.name, []).append(float(found.mean()))
            ratios.setdefault(world.name, []).append((found - before) / abs(scale))
        excess = torch.stack([self._excess(torch.stack(parts)) for parts in ratios.values()])
        means = {name: sum(parts) / len(parts) for name, parts in regrets.items()}
        return Verdict(float(excess.max()), means)  # NaN if any entry is NaN

    def penalty(self, excess: Tensor) -> Tensor:
        """The penalty for an excess: zero if the guard passes."""
        return PENALTY * (excess + self.margin).clamp(min=0)

    def _excess(self, ratios: Tensor) -> Tensor:
        """The excess of the worlds with one name, from ratios `(worlds, seeds)`."""
        if not self.caution:
            return ratios.mean()
        worlds, seeds = ratios.shape
        error = (ratios.var(1) / seeds).sum().sqrt() / worlds
        return ratios.mean() + self.caution * error

    def _play(self, world: World, regularizer: Regularizer, estimator: Estimator | None) -> Tensor:
        """The regret of every seed; NaN if any step had no certificate."""
        assert isinstance(world.losses, LossProcess)
        learner = FTRL(world.mdp, regularizer, estimator)
        regrets, certified = final_regrets(learner, world.losses, self.episodes, self.seeds)
        return torch.where(certified, regrets, torch.nan)


@torch.no_grad()
def final_regrets(
    learner: FTRL, losses: LossProcess, episodes: int, seeds: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The final regret of every seed, and whether all steps were certified."""
    with uncertified_is_handled():
        history = simulate(learner.mdp, learner, losses, episodes, seeds, checkpoints=[episodes])
    return history.regret[:, -1], ~history.uncertified.any()
