"""Random transitions: rows drawn from a symmetric Dirichlet distribution."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from torch_occ._support.private import standard_gamma


def random_transitions(
    horizon: int,
    width: int,
    num_actions: int,
    seed: int,
    concentration: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Transitions `(S_k, A, S_{k+1})` of each layer: one start state, then `width` states each.

    Raises:
        ValueError: if a size is less than one, or the concentration is not positive.
    """
    sizes = {"horizon": horizon, "width": width, "num_actions": num_actions}
    for name, number in sizes.items():
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")
    if not concentration > 0:
        raise ValueError(f"concentration: expected a positive number, got {concentration}")
    generator = torch.Generator().manual_seed(seed)
    layers = [1, *[width] * (horizon - 1), 1]
    shapes = [(here, num_actions, there) for here, there in pairwise(layers)]
    return [_dirichlet(shape, concentration, generator).to(dtype) for shape in shapes]


def _dirichlet(shape: tuple[int, ...], concentration: float, generator: torch.Generator) -> Tensor:
    """Symmetric Dirichlet rows from an explicit generator.

    They are computed in log space, so that small concentrations do not underflow:
    Gamma(c) = Gamma(c + 1) * U^(1/c), where the first factor stays away from zero.
    """
    shape_plus_one = torch.full(shape, concentration + 1.0, dtype=torch.float64)
    log_gamma = standard_gamma(shape_plus_one, generator).log()
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator).clamp(min=2.0**-60)
    return (log_gamma + uniform.log() / concentration).softmax(-1)
