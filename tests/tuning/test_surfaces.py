"""Response surfaces: what they find, and how they choose."""

import pytest
import torch

from torch_occ.tuning.refine import RIDGES, _ridge, fit_surface, monomials


def points(n, p=3, seed=0):
    return (
        torch.quasirandom.SobolEngine(p, scramble=True, seed=seed).draw(n, dtype=torch.float64) * 4
        - 2
    )


def bowl(u):
    return 1.0 + (u - torch.tensor([0.5, -0.3, 0.2])).square().sum(-1) + 0.8 * u[..., 0] * u[..., 1]


def test_a_quadratic_is_found_through_noise():
    u = points(40)
    noise = 0.05 * torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = bowl(u) + noise
    values[3] = torch.inf  # a trial that failed
    surface = fit_surface(u, values, torch.zeros(3, dtype=torch.float64), 2.0)
    elsewhere = points(64, seed=1)
    assert float((surface(elsewhere) - bowl(elsewhere)).square().mean().sqrt()) < 0.05
    assert 0.03 < surface.error < 0.08


def test_the_error_is_that_of_points_left_out():
    u, centre = points(14), torch.zeros(3, dtype=torch.float64)
    values = bowl(u) + u[:, 0].sin()
    for ridge in RIDGES:
        errors = []
        for i in range(len(u)):
            others = torch.arange(len(u)) != i
            fitted = _ridge(monomials(u[others] / 2), values[others], ridge, centre, 2.0)
            errors.append(float(fitted(u[i]) - values[i]))
        assert _ridge(monomials(u / 2), values, ridge, centre, 2.0).error == pytest.approx(
            torch.tensor(errors).square().mean().sqrt()
        )
