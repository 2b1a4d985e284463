"""Elementary functions: the torch form and the kernels' form have one number and one derivative."""

import pytest
import torch

import torch_occ as occ
from torch_occ.engine import psi
from torch_occ.regularizers.terms import Log, Power, XLogX

FUNCTIONS = {"power": Power(0.3), "x log x": XLogX(), "log": Log()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_have_the_derivatives_of_the_torch_form(name):
    function = FUNCTIONS[name]
    x = torch.tensor([1e-6, 0.3, 1.0], dtype=torch.float64, requires_grad=True)
    exponent = function.p if isinstance(function, Power) else 0.0
    (slope,) = torch.autograd.grad(function.at(x, exponent).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    table = torch.zeros(9, 3, dtype=torch.float64).numpy()
    table[0] = x.detach().numpy()
    psi.accumulate.py_func(function.code, exponent, 1.0, table, 0)
    torch.testing.assert_close(torch.from_numpy(table[3]), slope.detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.from_numpy(table[6]), bend, rtol=1e-14, atol=0)
    assert psi.bend_at_one.py_func(function.code, exponent) == pytest.approx(float(bend[2]))


def test_the_built_in_regularizers_use_them():
    regularizers = (occ.Tsallis(), occ.Shannon(), occ.LogBarrier(1.0))
    terms = [term for regularizer in regularizers for term in regularizer.table()]
    assert [term.function.code for term in terms] == [psi.POWER, psi.X_LOG_X, psi.LOG]
