"""The course of a leaping particle: phases of constant means, and episodes where leaps end."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.spacing import log_spaced
from torch_occ.forecasting.mean_path import totals
from torch_occ.forecasting.phases import phases_of
from torch_occ.game.losses import LossProcess, Noise
from torch_occ.game.regret import comparator
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy

#: The longest leap relative to t.
WIDEST = 0.25


class Course(NamedTuple):
    """Losses, stops and comparators, which are known before the first leap."""

    stops: Tensor  # (C,), episodes that no leap crosses: checkpoints and ends of phases
    phase: Tensor  # (C,), the phase before each stop
    means: Tensor  # (P, S, A)
    gaps: Tensor  # (P, S, A)
    best: Tensor  # (C,), loss of the best fixed policy minus that of the best of every phase
    noise: Noise

    @classmethod
    def of(
        cls, mdp: LayeredMDP, losses: Tensor | LossProcess, episodes: int, per_decade: int = 10
    ) -> Course:
        phases, noise = phases_of(mdp, losses, episodes)
        if mdp.batch_shape or phases[0].mean.dim() != 2:
            raise ValueError(
                "leaping takes one MDP and one table of means (S, A) at a time; forecast takes "
                "batches"
            )
        every = {*log_spaced(episodes, per_decade), *(phase.start for phase in phases[1:])}
        stops = torch.tensor(sorted(every), dtype=mdp.dtype, device=mdp.device)
        starts = torch.tensor([phase.start for phase in phases], dtype=mdp.dtype, device=mdp.device)
        phase = torch.bucketize(stops, starts) - 1
        means = torch.stack([phase.mean for phase in phases]).detach()
        gaps = optimal_policy(mdp, means, in_order=True).gaps
        return cls(
            stops, phase, means, gaps, comparator(mdp, totals(phases, gaps, stops, phase)), noise
        )
