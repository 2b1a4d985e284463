"""Weights are data: rows have the numbers and derivatives that torch has, whoever reads them."""

from __future__ import annotations

import pytest
import torch

import torch_occ as occ
from torch_occ.step.arrays import WeightsOverTime

F64 = torch.float64
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
LOSS = 30 * torch.rand(7, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


class Sudden(occ.Schedule):
    """A schedule that looks at t, which is no power."""

    def forward(self, t):
        return torch.where(t < 10, 1.0, 0.1).to(t.dtype)


def test_a_schedule_of_somebody_else_is_asked_every_time():
    psi = occ.HybridTsallis(0.5) / Sudden() + occ.LogBarrier(1.0)
    engine, plain = (
        occ.FTRLStep(MDP, psi, backend="engine"),
        occ.FTRLStep(MDP, psi, backend="torch"),
    )
    for t in (2.0, 20.0, torch.tensor([2.0, 20.0], dtype=F64)):
        loss = LOSS.clone().requires_grad_()
        solution = engine.solve(loss, t)
        assert solution.backend == "engine"
        torch.testing.assert_close(solution.q, plain(loss, t), rtol=1e-11, atol=0)
        (found,), (expected,) = (
            torch.autograd.grad(step(loss, t)[..., 0, 1].sum(), loss) for step in (engine, plain)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    weights = WeightsOverTime(psi, MDP.actions.shape)
    assert not weights.are_powers
    assert weights.at(torch.arange(8, 12, dtype=F64))[:, 0].tolist() == pytest.approx(
        [-1, -1, -10, -10], rel=1e-6
    )


def test_numbers_beyond_the_floating_point_go_to_the_torch_path():
    """Python raises where torch says inf; who answers must not matter."""
    psi = occ.Tsallis() / occ.Polynomial(1.0, 200.0) + occ.LogBarrier(1.0)
    answers = [
        occ.FTRLStep(MDP, psi, backend=backend).solve(LOSS, 1e3, check=False)
        for backend in ("engine", "torch")
    ]
    assert all(int(answer.status) != 0 for answer in answers)
