"""Loss processes as phases: stretches of episodes with constant means.

Only losses that are fixed in advance can be forecast. An adversary that reacts to the learner, or a
random walk, has to be simulated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.game.corruption import Corrupted
from torch_occ.game.losses import (
    LossProcess,
    Noise,
    Stationary,
    StochasticallyConstrained,
    SwitchingLosses,
)
from torch_occ.mdp.layered import LayeredMDP

#: A forecast takes a fixed number of solves per phase. With more phases, simulation is better.
MOST_PHASES = 256


class Phase(NamedTuple):
    """The episodes after `start`, up to the start of the next phase."""

    start: int
    mean: Tensor  # (*batch, S, A)


def phases_of(
    mdp: LayeredMDP, losses: Tensor | LossProcess, episodes: int
) -> tuple[list[Phase], Noise]:
    """The phases of the first `episodes` episodes, and the kind of noise.

    A tensor of means `(*batch, S, A)` stands for Bernoulli losses.

    Raises:
        TypeError: if the means are not fixed in advance.
        ValueError: if there are too many phases.
    """
    if isinstance(losses, Tensor):
        return [Phase(0, losses)], "bernoulli"
    if isinstance(losses, Stationary):
        return [Phase(0, losses.mean)], losses.noise
    if isinstance(losses, SwitchingLosses):
        count = -(-episodes // losses.period)
        _check_count(losses, count)
        return [
            Phase(i * losses.period, losses.tables[i % len(losses.tables)]) for i in range(count)
        ], losses.noise
    if isinstance(losses, StochasticallyConstrained):
        starts = [0, *(end for end in losses._phase_ends(episodes).tolist() if end < episodes)]
        _check_count(losses, len(starts))
        return [Phase(start, _first_mean(mdp, losses, start)) for start in starts], losses.noise
    if isinstance(losses, Corrupted) and isinstance(losses.base, Stationary):
        return _corrupted(mdp, losses, episodes), losses.noise
    raise TypeError(
        f"losses: {type(losses).__name__} cannot be forecast, because its means are not fixed "
        "beforehand in few phases; simulate it, or give means, BernoulliLosses, UniformLosses, "
        "SwitchingLosses, StochasticallyConstrained, or Corrupted around a fixed mean"
    )


def _corrupted(mdp: LayeredMDP, losses: Corrupted, episodes: int) -> list[Phase]:
    """Full corruption while the budget lasts, one episode with the remainder, then none."""
    assert isinstance(losses.base, Stationary)
    clean, attacked = losses.base.mean, _first_mean(mdp, losses, 0)
    cost = 2 * sum(
        float(layer.abs().amax())
        for layer in mdp.split(torch.where(mdp.actions, attacked - clean, 0.0), -2)
    )
    if cost == 0:
        return [Phase(0, clean)]
    whole = math.floor(losses.budget / cost * (1 + 1e-12))
    left = (losses.budget - whole * cost) / cost
    found = [Phase(0, attacked)] if whole else []
    if left > 1e-9 and losses.strategy != "uniform":
        found.append(Phase(whole, clean + left * (attacked - clean)))
        whole += 1
    return [phase for phase in [*found, Phase(whole, clean)] if phase.start < episodes]


def _first_mean(mdp: LayeredMDP, losses: LossProcess, start: int) -> Tensor:
    """The mean of the episode after `start`, from the process itself."""
    means, _ = losses.means(mdp, losses.start(mdp, [0]), start + 1, 1, torch.empty(0))
    return means[0, 0]


def _check_count(losses: LossProcess, count: int) -> None:
    if count > MOST_PHASES:
        raise ValueError(
            f"losses: {type(losses).__name__} has {count} phases, more than {MOST_PHASES}; "
            "forecast fewer episodes, or simulate"
        )
