import pytest
import torch

import torch_occ as occ

F64 = torch.float64
T = torch.tensor([1.0, 2.0, 100.0, 1e8], dtype=F64)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (occ.Constant(0.25), 0.25 * T**0),
        (occ.InverseSqrt(), T**-0.5),
        (occ.InverseSqrt(1.5), 1.5 / T**0.5),
        (occ.Polynomial(), T**-0.5),
        (occ.Polynomial(2.0, 0.25), 2 / T**0.25),
        (occ.Polynomial(gamma=3.0, exponent=0.0), 3 * T**0),
    ],
)
def test_values(schedule, expected):
    found = schedule(T.reshape(2, 2))
    torch.testing.assert_close(found, expected.reshape(2, 2), rtol=1e-15, atol=0)
    torch.testing.assert_close(schedule(T[2]), expected[2], rtol=1e-15, atol=0)


@pytest.mark.parametrize("build", [occ.Constant, occ.InverseSqrt, occ.Polynomial])
@pytest.mark.parametrize("t", [T[2], T[1:3]], ids=["one t", "a t for each"])
def test_a_batched_rate_gives_a_batch(build, t):
    rates = torch.tensor([0.5, 2.0], dtype=F64)
    one_by_one = torch.stack([build(float(rate))(t.expand(2)[i]) for i, rate in enumerate(rates)])
    torch.testing.assert_close(build(rates)(t), one_by_one, rtol=1e-15, atol=0)


def test_a_new_schedule_is_a_forward():
    class Halving(occ.Schedule):
        def forward(self, t):
            return 0.5**t

    q = torch.tensor([[0.25, 0.75]], dtype=F64)
    psi = occ.Shannon() / Halving()
    torch.testing.assert_close(psi(q, 3.0), 8 * occ.Shannon()(q), rtol=1e-15, atol=0)
