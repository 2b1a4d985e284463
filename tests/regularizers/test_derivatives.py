import pytest
import torch
from torch.autograd.functional import hessian as autograd_hessian
from zoo import PROBLEMS, REGULARIZERS, random_point

from torch_occ.regularizers.derivatives import Evaluator, derivatives

F64 = torch.float64
SMALL = ["contexts", "masked", "no_choice", "layers"]


def point(problem, *batch):
    mdp = PROBLEMS[problem]().mdp
    return mdp, random_point(mdp, *batch, seed=5)


def derive(mdp, psi, q, t=1.0):
    evaluator, t = Evaluator(psi), torch.as_tensor(t, dtype=F64)
    return derivatives(mdp, psi, evaluator.bind(evaluator.parameters(t), t), q)


def dense(mdp, psi, q, t=1.0):
    """Gradient `(N,)` and Hessian `(N, N)` of `forward` on existing pairs, by plain autograd."""
    own = mdp.actions

    def value(x):
        return psi(torch.zeros_like(q).masked_scatter(own, x), t, mdp)

    at = q[own].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(at), at)
    return gradient, autograd_hessian(value, at.detach())


def on_pairs(mdp, found):
    own = mdp.actions.flatten()
    hessian = found.hessian.to_full().matrix[..., own, :][..., own]
    return found.gradient.flatten(-2)[..., own], hessian


def close(found, expected, tolerance=1e-12):
    """Every entry to rounding, relative to the largest of its kind."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max()))


@pytest.mark.parametrize("problem", SMALL)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_they_are_those_of_forward(name, problem):
    mdp, q = point(problem)
    psi = REGULARIZERS[name](mdp)
    found = derive(mdp, psi, q, 7.0)
    close(on_pairs(mdp, found), dense(mdp, psi, q, 7.0))
    assert not bool(found.gradient[~mdp.actions].any())
    assert not bool(found.hessian.to_full().matrix[~mdp.actions.flatten()].any())
    assert not found.gradient.requires_grad
