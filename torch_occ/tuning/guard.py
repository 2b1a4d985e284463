"""A guard compares a regularizer with a reference, by playing.

It is for worlds whose losses react to the learner, which cannot be forecast. The regularizer must
not be worse than the reference in any of them. Let R be the mean regret of the runs, R_ref that of
the reference with the same seeds, and d = (R - R_ref) / |R_ref|. Then

    excess = max_e ( mean_{MDPs of e} d  +  caution * its standard error ),

and a regularizer passes if its excess is at most `-margin`. Worlds with the same name are averaged;
for a bound on every MDP, give each world its own name. The excess has no gradient, so `refine` fits
a quadratic to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.game.contracts import uncertified_is_handled
from torch_occ.game.driver import simulate
from torch_occ.game.estimators import Estimator
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.game.losses import LossProcess
from torch_occ.regularizers.base import Regularizer
from torch_occ.tuning.objectives import World

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
        self.margin, self.caution = margin, caution
        self.estimator = estimator
        # (seeds,) each
        self.references = [
            self._play(world, FTRL(world.mdp, reference, reference_estimator)) for world in worlds
        ]
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
            found = self._play(world, FTRL(world.mdp, regularizer, self.estimator))
            regrets.setdefault(world.name, []).append(float(found.mean()))
            ratios.setdefault(world.name, []).append((found - before) / abs(scale))
        worst = torch.stack(
            [self._excess(torch.stack(parts)) for parts in ratios.values()]
        ).max()  # NaN if any entry is NaN
        return Verdict(
            float(worst), {name: sum(parts) / len(parts) for name, parts in regrets.items()}
        )

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

    def _play(self, world: World, learner: FTRL) -> Tensor:
        """The regret of every seed; NaN if any step had no certificate."""
        assert isinstance(world.losses, LossProcess)
        with torch.no_grad(), uncertified_is_handled():
            history = simulate(
                world.mdp,
                learner,
                world.losses,
                self.episodes,
                self.seeds,
                checkpoints=[self.episodes],
            )
        return (
            history.regret[:, -1]
            if not bool(history.uncertified.any())
            else torch.full_like(history.regret[:, -1], torch.nan)
        )
