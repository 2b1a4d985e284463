import pytest
import torch
from torch.autograd.functional import hessian as autograd_hessian
from zoo import PROBLEMS, REGULARIZERS, random_point

import torch_occ as occ
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


@pytest.mark.parametrize("name", REGULARIZERS)
def test_a_batch_is_its_elements(name):
    mdp, q = point("masked", 3)
    psi, t = REGULARIZERS[name](mdp), torch.tensor([1.0, 5.0, 100.0], dtype=F64)
    found = derive(mdp, psi, q, t)
    for i in range(3):
        alone = derive(mdp, psi, q[i], t[i])
        close([found.gradient[i]], [alone.gradient], 1e-15)
        close([found.hessian.to_full().matrix[i]], [alone.hessian.to_full().matrix], 1e-15)


# -- parameters from outside -----------------------------------------------------------------------


def test_the_evaluator_takes_other_parameters():
    mdp, q = point("masked")
    psi = occ.HybridTsallis(0.5) / occ.InverseSqrt(2.0) + occ.LogBarrier(3.0)
    twin = occ.HybridTsallis(1.0) / occ.InverseSqrt(4.0) + occ.LogBarrier(6.0)
    evaluator, t = Evaluator(psi), torch.tensor(9.0, dtype=F64)
    doubled = [2 * x.detach() for x in evaluator.parameters(t)]
    expected = on_pairs(mdp, derive(mdp, twin, q, t))
    found = derivatives(mdp, psi, evaluator.bind(doubled, t), q)
    close(on_pairs(mdp, found), expected, 1e-15)
    evaluator.validate(doubled)
    with pytest.raises(ValueError, match=r"HybridTsallis: alpha|InverseSqrt: gamma"):
        evaluator.validate([-x for x in doubled])
    assert [x.item() for x in psi.parameters()] == [0.5, 2.0, 3.0]
