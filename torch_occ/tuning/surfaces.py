"""Response surfaces: quadratics with mixed terms, fitted to a noisy function around a point.

With x = (u - centre) / scale, a surface is

    f(u) ~ c + g . x + x' H x,

by least squares with a ridge on g and H. The ridge is chosen by leave-one-out errors, which a
linear fit has in closed form: residual_i / (1 - leverage_i).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: The ridges to choose from, in units of scaled monomials: from almost none to almost constant.
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)


class Surface(NamedTuple):
    """A fitted quadratic."""

    centre: Tensor  # (p,)
    scale: float
    coefficients: Tensor  # (monomials,)
    error: float  # root mean square of the leave-one-out errors

    def __call__(self, u: Tensor) -> Tensor:
        """Evaluate the surface: `(..., p)` -> `(...,)`."""
        return monomials((u - self.centre) / self.scale) @ self.coefficients


def monomials(x: Tensor) -> Tensor:
    """1, x_i, and x_i x_j for i <= j: `(..., p)` -> `(..., 1 + p + p (p + 1) / 2)`."""
    p = x.shape[-1]
    i, j = torch.triu_indices(p, p)
    return torch.cat([torch.ones_like(x[..., :1]), x, x[..., i] * x[..., j]], -1)


def fit_surface(u: Tensor, values: Tensor, centre: Tensor, scale: float) -> Surface:
    """Fit a surface to noisy values at points `(n, p)`; values that are not finite are ignored."""
    fine = values.isfinite()
    columns = monomials((u[fine] - centre) / scale)
    return min(
        (_ridge(columns, values[fine], ridge, centre, scale) for ridge in RIDGES),
        key=lambda surface: surface.error,
    )


def _ridge(columns: Tensor, values: Tensor, ridge: float, centre: Tensor, scale: float) -> Surface:
    penalty = ridge * torch.eye(columns.shape[-1], dtype=columns.dtype)
    penalty[0, 0] = 1e-12  # no ridge on the constant
    solver = torch.linalg.solve(columns.T @ columns + penalty, columns.T)  # (monomials, n)
    coefficients = solver @ values
    leverage = (columns * solver.T).sum(-1)
    left_out = (values - columns @ coefficients) / (1 - leverage).clamp(min=1e-9)
    return Surface(centre, scale, coefficients, float(left_out.square().mean().sqrt()))
