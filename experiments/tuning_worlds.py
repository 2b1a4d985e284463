"""The problems of the experiments about tuning.

A family of random MDPs, the environments of each, and a cache of simulations.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import torch_occ as occ

Setting = tuple[float, float, float]  # alpha, beta, gamma
STOCHASTIC, CORRUPTED, SWITCHING, GREEDY = (
    "stochastic",
    "corrupted",
    "switching",
    "greedy adversary",
)
ENVIRONMENTS = (STOCHASTIC, CORRUPTED, SWITCHING, GREEDY)


class Family(NamedTuple):
    """Random MDPs of one size, numbered, and how long they are played."""

    episodes: int
    horizon: int = 3
    width: int = 3
    actions: int = 3

    @property
    def paper(self) -> Setting:
        """The paper's constants."""
        return self.actions**-0.5, 64.0 * self.horizon, 1.0

    @property
    def sizes(self) -> str:
        """For names of files."""
        return f"{self.horizon}x{self.width}x{self.actions}"

    def problem(self, number: int) -> tuple[occ.LayeredMDP, Tensor]:
        """A random MDP with uniformly random mean losses."""
        mdp = occ.LayeredMDP.random(self.horizon, self.width, self.actions, seed=number)
        generator = torch.Generator().manual_seed(number)
        return mdp, torch.rand(
            mdp.num_states, mdp.num_actions, dtype=torch.float64, generator=generator
        )

    def stochastic(self, numbers: range) -> occ.World:
        """The stochastic worlds of some MDPs, which can be forecast as one batch."""
        mdps, means = zip(*map(self.problem, numbers), strict=True)
        return occ.World(STOCHASTIC, occ.stack(mdps), torch.stack(means))

    def environment(self, number: int, name: str) -> occ.LossProcess:
        """Losses for one MDP.

        The greedy adversary reacts to the learner. It cannot be forecast, so the tuner has to play.
        """
        if name == GREEDY:
            return occ.GreedyAdversary()
        _, mean = self.problem(number)
        if name == STOCHASTIC:
            return occ.BernoulliLosses(mean)
        if name == CORRUPTED:
            return occ.Corrupted(
                occ.BernoulliLosses(mean), math.sqrt(self.episodes) * 4, "targeted", target=mean
            )
        _, other = self.problem(number + 10_000)
        return occ.SwitchingLosses(
            torch.stack([mean, other]), max(self.episodes // 4, 1), noise="bernoulli"
        )

    def kept(self, cache: Path, number: int, setting: Setting, environment: str, runs: int) -> Path:
        """The file in which a simulation is kept."""
        numbers, place = "_".join(f"{x:.6g}" for x in setting), environment.replace(" ", "-")
        game = f"{self.sizes}_mdp{number}_{place}"
        return cache / f"{game}_{numbers}_T{self.episodes}_n{runs}.npz"

    def simulated(
        self, cache: Path, number: int, setting: Setting, environment: str, runs: int
    ) -> occ.History:
        """A simulation, from the cache if it is there."""
        path = self.kept(cache, number, setting, environment, runs)
        if not path.exists():
            mdp, _ = self.problem(number)
            learner = occ.FTRL(mdp, occ.jin_luo(mdp, *setting))
            occ.simulate(
                mdp,
                learner,
                self.environment(number, environment),
                self.episodes,
                range(1, runs + 1),
            ).save(path)
        return occ.History.load(path)
