"""Playing settings in both worlds, and ratios of their regrets; for experiments/both_worlds.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import torch_occ as occ
from experiments.tuning_worlds import Family
from torch_occ._support.fingerprints import fingerprint


class Contestant(NamedTuple):
    """A regularizer with its parameters, and the estimator of the losses."""

    regularizer: occ.Regularizer
    estimator: occ.Estimator


def entropy(beta: float, gamma: float) -> occ.Regularizer:
    """The regularizer that is tuned."""
    return occ.ConditionalEntropy() / occ.InverseSqrt(gamma) + occ.LogBarrier(beta)


def regrets(
    family: Family, cache: Path, player: Contestant, number: int, place: str, seeds: range
) -> np.ndarray:
    """The final regret of every seed, from the cache if it is there."""
    kind = fingerprint(psi=player.regularizer, estimator=player.estimator)[:16]
    game = f"{family.sizes}_mdp{number}_{place.replace(' ', '-')}_{kind}"
    path = cache / f"{game}_T{family.episodes}_seeds{seeds[0]}-{seeds[-1]}.npz"
    if not path.exists():
        mdp, _ = family.problem(number)
        learner = occ.FTRL(mdp, player.regularizer, player.estimator)
        losses = family.environment(number, place)
        history = occ.simulate(
            mdp, learner, losses, family.episodes, seeds, checkpoints=[family.episodes]
        )
        if bool(history.uncertified.any()):
            count = int(history.uncertified.sum())
            raise RuntimeError(f"MDP {number}, {place}: {count} steps without certificate")
        history.save(path)
    return occ.History.load(path).regret[:, -1].numpy()


class Ratio(NamedTuple):
    """The ratio of two mean regrets, with its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, above: np.ndarray, below: np.ndarray) -> Ratio:
        """The ratio of the means over seeds."""
        value = float(above.mean() / below.mean())
        relative = np.hypot(
            standard_error(above) / above.mean(), standard_error(below) / below.mean()
        )
        return cls(value, abs(value) * float(relative))

    @classmethod
    def mean(cls, ratios: Sequence[Ratio]) -> Ratio:
        """The mean of the ratios of several MDPs."""
        values, errors = np.array(ratios).T
        return cls(float(values.mean()), float(np.linalg.norm(errors)) / len(errors))

    def __str__(self) -> str:
        return (
            f"{self.value:.2f} ± {1.96 * self.error:.2f}"
            if self.value < 3
            else f"{self.value:.1f} ± {1.96 * self.error:.1f}"
        )


def standard_error(x: np.ndarray) -> float:
    """The standard error of a mean."""
    return float(x.std(ddof=1)) / len(x) ** 0.5
