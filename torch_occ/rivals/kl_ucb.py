"""KL-UCB for known transitions: optimism by relative entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ._support.constants import KL_STEPS, KL_TOLERANCE
from torch_occ.game.learners import EmpiricalLearner


class KLUCB(EmpiricalLearner):
    """Plays the optimal policy for the smallest losses that the observations allow.

    The index of a pair with N observations of average m is

        min { x : N kl(m, x) <= log t },   kl(m, x) = m log(m / x) + (1-m) log((1-m) / (1-x)),

    and 0 without observations. For L = 1 this is KL-UCB (Garivier and Cappe, 2011, with c = 0),
    which attains the limit of regret (`occ.limits.lower_bound`). Where optimal policies leave out
    states, optimism explores more than is needed (Dann, Marinov, Mohri and Zimmert, 2021);
    docs/rivals.md has measurements. The confidence holds for all losses in [0, 1] with constant
    means.
    """

    def index(self, t: int) -> Tensor:
        visits = self.state["visits"]
        seen = visits.clamp(min=1)
        return kl_lower(self.state["losses"] / seen, math.log(max(t, 2)) / seen) * (visits > 0)


def kl_lower(mean: Tensor, width: Tensor) -> Tensor:
    """The smallest x with kl(mean, x) <= width, for means in [0, 1] and widths > 0.

    kl is convex in log x and falls up to x = mean. So Newton's method in log x, started below the
    solution, approaches it from below. The start is the larger of two bounds: Pinsker's inequality,
    x >= mean - sqrt(width / 2), and -log(1-x) >= 0.
    """
    p = mean.clamp(min=torch.finfo(mean.dtype).tiny)
    zeros = torch.where(p < 1, (1 - p) * torch.log1p(-p), 0.0)  # (1-p) log(1-p)
    pinsker = p - (width / 2).sqrt()
    x = torch.maximum(torch.where(pinsker > 0, pinsker, 0.0).log(), p.log() - (width - zeros) / p)
    for _ in range(KL_STEPS):
        other = x.exp()
        information = p * (p.log() - x) + zeros - (1 - p) * torch.log1p(-other.clamp(max=1.0))
        information = torch.where(p < 1, information, p.log() - x)
        step = (information - width) * (1 - other) / (p - other)
        step = torch.where((p < 1) & (other < p), step, information - width)
        step = torch.where((p < 1) & (other >= p), 0.0, step)
        x = x + step
        if float(step.abs().max()) <= KL_TOLERANCE:
            break
    return torch.where(mean > 0, x.exp().minimum(p), 0.0)
