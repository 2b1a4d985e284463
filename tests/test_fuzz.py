"""Fuzzing: every answer is certified, and then certified again here with 60 digits; or else its status says what went wrong."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf
from torch import Tensor

import torch_occ as occ
from torch_occ import Status


@dataclass(frozen=True)
class Draw:
    """A problem small enough to print, from which everything else follows."""

    sizes: tuple[int, ...]
    num_actions: int
    concentration: float
    zeros: float  # share of transitions, and of losses, that are exactly zero
    masked: float  # share of pairs that do not exist
    loss: float
    t: float
    alpha: float
    beta: float
    gamma: float
    seed: int

    def model(self) -> occ.LayeredMDP:
        random = torch.Generator().manual_seed(self.seed)
        sizes, A = self.sizes, self.num_actions
        kernels = []
        for here, there in zip(sizes, (*sizes[1:], 1), strict=True):
            rows = occ.LayeredMDP.random(2, max(there, here * A), A, seed=self.seed, concentration=self.concentration).transitions[0]
            del rows
            logits = torch.rand(here, A, there, dtype=torch.float64, generator=random).log() / self.concentration
            keep = torch.rand(here, A, there, generator=random) >= self.zeros
            keep.scatter_(-1, torch.randint(there, (here, A, 1), generator=random), True)
            kernels.append(logits.masked_fill(~keep, -torch.inf).softmax(-1))
        actions = torch.rand(sum(sizes), A, generator=random) >= self.masked
        actions.scatter_(-1, torch.randint(A, (sum(sizes), 1), generator=random), True)
        initial = torch.rand(sizes[0], dtype=torch.float64, generator=random) + 0.01
        return occ.LayeredMDP(kernels, actions=actions, initial=initial / initial.sum()).prune()

    def losses(self, mdp: occ.LayeredMDP) -> Tensor:
        """Like sums of importance-weighted losses: some zero, some huge, a few negative."""
        random = torch.Generator().manual_seed(self.seed + 1)
        shape = (mdp.num_states, mdp.num_actions)
        size = self.loss ** torch.rand(shape, dtype=torch.float64, generator=random)
        sign = 1 - 2 * (torch.rand(shape, dtype=torch.float64, generator=random) < 0.1).double()
        return sign * size * (torch.rand(shape, generator=random) >= self.zeros)
