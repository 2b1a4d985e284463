"""Response surfaces: what they find, and how they choose."""

import pytest
import torch

from torch_occ.surfaces import RIDGES, _ridge, fit_surface, monomials


def points(n, p=3, seed=0):
    return torch.quasirandom.SobolEngine(p, scramble=True, seed=seed).draw(n, dtype=torch.float64) * 4 - 2


def bowl(u):
    return 1.0 + (u - torch.tensor([0.5, -0.3, 0.2])).square().sum(-1) + 0.8 * u[..., 0] * u[..., 1]


def test_monomials():
    assert monomials(torch.tensor([2.0, 3.0])).tolist() == [1, 2, 3, 4, 6, 9]


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
            fitted = _ridge(monomials(u[others] / 2), values[others], ridge, centre, 2.0, False)
            errors.append(float(fitted(u[i]) - values[i]))
        assert _ridge(monomials(u / 2), values, ridge, centre, 2.0, False).error == pytest.approx(
            torch.tensor(errors).square().mean().sqrt()
        )


def test_a_base_takes_part_where_it_has_the_shape_of_the_values():
    u, centre = points(16), torch.zeros(3, dtype=torch.float64)
    wiggles = (4 * u).sin().sum(-1)
    surface = fit_surface(u, bowl(u) + wiggles, centre, 2.0, base=wiggles)
    assert surface.based
    assert float((surface(u) - bowl(u)).abs().max()) < 0.05
    assert not fit_surface(u, bowl(u), centre, 2.0, base=wiggles).based
    assert not fit_surface(u, bowl(u) + wiggles, centre, 2.0, base=wiggles * torch.inf).based  # a forecast without certificate
