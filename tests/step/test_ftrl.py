"""FTRLStep as a module: failed solves, moves, tuned parameters, equal results on all paths."""

import copy
import pickle

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacrev, vmap
from zoo import PROBLEMS, REGULARIZERS, Problem, layers, masked, random_loss, tensor

import torch_occ as occ
from torch_occ import SolveError, Status

pytestmark = pytest.mark.usefixtures("both_backends")

LOSS = masked().loss


def close(found: Tensor, expected: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(
        found.detach(),
        expected.detach(),
        rtol=rtol,
        atol=rtol * float(expected.detach().abs().max()),
    )


@pytest.fixture
def step():
    mdp = masked().mdp
    return occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.5))


# -- failed solves ---------------------------------------------------------------------------------


def test_the_error_names_the_elements_and_what_to_do(step):
    steep = occ.FTRLStep(step.mdp, occ.Tsallis(0.99))  # q falls like loss^-100
    losses = LOSS * tensor([1.0, 1e9, 2.0, 1e10])[:, None, None]
    with pytest.raises(SolveError) as caught:
        steep(losses)
    message = str(caught.value)
    assert all(
        word in message
        for word in [
            "batch element (1,)",
            "batch element (3,)",
            "UNDERFLOW",
            Status.UNDERFLOW.advice,
            "check=False",
        ]
    )
    assert "(0,)" not in message
    assert "(2,)" not in message
    assert caught.value.solution.status.tolist() == [0, Status.UNDERFLOW, 0, Status.UNDERFLOW]
    close(caught.value.solution.q[0], steep(LOSS))
    with pytest.raises(SolveError, match=r"MAX_STEPS after 1 Newton steps.*raise max_steps"):
        occ.FTRLStep(step.mdp, occ.Shannon(), max_steps=1)(LOSS)
    with pytest.raises(SolveError, match="and 3 more"):
        steep(LOSS.expand(8, 4, 2) * 1e9)
    with pytest.raises(SolveError, match=r"batch element \(1,\)"):
        vmap(steep)(losses)


def test_a_failed_element_has_nan_derivatives_and_its_neighbours_right_ones(step):
    """One underflows, the parameter belongs to each element: reverse, forward, second order."""
    steep = occ.FTRLStep(
        step.mdp, occ.Tsallis(tensor([0.99] * 3)) / occ.Constant(tensor([0.5, 0.6, 0.7]))
    )
    solos = [
        occ.FTRLStep(step.mdp, occ.Tsallis(tensor(0.99)) / occ.Constant(tensor(rate)))
        for rate in (0.5, 0.6, 0.7)
    ]
    losses = (LOSS * tensor([1.0, 1e9, 2.0])[:, None, None]).requires_grad_()
    weight = random_loss(step.mdp, seed=3)

    def derivatives(module: occ.FTRLStep, loss: Tensor) -> list[Tensor]:
        solution = module.solve(loss, check=False)
        if solution.backend == "engine":  # torch refuses what follows; the engine has a copy
            solution.certificate.zero_()
        scalar = (weight * solution.q).sum() + solution.value.square().sum()
        first = torch.autograd.grad(scalar, [loss, *module.parameters()], create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), loss)[0]
        with forward_ad.dual_level():
            moved = module.solve(
                forward_ad.make_dual(loss.detach(), weight.expand_as(loss)), check=False
            )
            tangents = [forward_ad.unpack_dual(x).tangent for x in (moved.q, moved.value)]
        return [*first, second, *tangents]

    for i, (solo, batch) in enumerate(
        zip(solos, zip(*derivatives(steep, losses), strict=True), strict=True)
    ):
        assert len(batch) == 6  # with the power, too
        if i == 1:
            assert all(x.isnan().all() for x in batch)
        else:
            for found, expected in zip(
                batch, derivatives(solo, losses[i].detach().requires_grad_()), strict=True
            ):
                close(found, expected, 1e-11)


# -- modules that move -----------------------------------------------------------------------------


def test_to_moves_the_model_with_the_parameters(step):
    assert step.to(torch.float32) is step
    assert {step.mdp.dtype, *(p.dtype for p in step.parameters())} == {torch.float32}
    assert step(LOSS.float(), 3).dtype == torch.float32
    assert step.double()(LOSS, 3).dtype == torch.float64
    loss = LOSS.float().requires_grad_()
    step.float()(loss, 3.0)[0, 0].backward()
    assert loss.grad.dtype == torch.float32
    assert loss.grad.isfinite().all()


@pytest.mark.parametrize("use", ["solve", "transform", "built inside"])
def test_copies_pickles_and_state_dicts_are_the_same_step(use, step):
    """Also after a transform was the first to touch the model."""
    mdp = masked().mdp
    other = occ.FTRLStep(mdp, occ.jin_luo(mdp, alpha=0.9, beta=7.0, gamma=2.0))
    if use == "transform":
        hessian(lambda q: other.regularizer(q, 3.0, mdp))(occ.interior_point(mdp))
        grad(lambda q: other.regularizer(q, 3.0, mdp))(occ.interior_point(mdp))
    if use == "built inside":
        mdp = masked().mdp
        grad(lambda loss: occ.FTRLStep(mdp, other.regularizer)(loss, 3.0)[0, 0])(LOSS)
        other = occ.FTRLStep(mdp, other.regularizer)
    q = other(LOSS, 3.0)
    for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(copied(LOSS, 3.0), q)
        with torch.no_grad():
            copied.regularizer.terms[1].beta.mul_(2.0)
        assert not torch.allclose(copied(LOSS, 3.0), q)
        with pytest.raises(AttributeError, match="cannot be changed"):
            copied.regularizer.terms[:1].append(occ.Shannon())
    assert torch.equal(other(LOSS, 3.0), q)
    step.load_state_dict(other.state_dict())
    assert torch.equal(step(LOSS, 3.0), q)


def test_two_regularizers_may_share_a_parameter(step):
    """beta = alpha as one tensor: the gradient is the sum of both."""
    loss, apart = LOSS.clone(), occ.jin_luo(step.mdp, alpha=0.7, beta=0.7)
    tied = occ.jin_luo(step.mdp, alpha=0.7, beta=0.7)
    hybrid, barrier = (
        next(m for m in tied.modules() if isinstance(m, kind))
        for kind in (occ.HybridTsallis, occ.LogBarrier)
    )
    barrier.beta = hybrid.alpha
    before = [id(p) for p in tied.parameters()]
    one, two = occ.FTRLStep(step.mdp, tied)(loss, 3.0), occ.FTRLStep(step.mdp, apart)(loss, 3.0)
    close(one, two)
    one[0, 0].backward()
    two[0, 0].backward()
    by_name = {name.rsplit(".")[-1]: p.grad for name, p in apart.named_parameters()}
    close(hybrid.alpha.grad, by_name["alpha"] + by_name["beta"])
    assert [id(p) for p in tied.parameters()] == before  # or optimizers would lose them


# -- edges and paths -------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_one_sided_derivatives_at_the_edge_of_the_domain(alpha, beta):
    """alpha = 0 and beta = 0 are legal, and where a tuner may stop."""
    mdp, loss, t = layers()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, alpha=alpha, beta=beta))
    slopes = jacrev(lambda theta: functional_call(step, theta, (loss, t)))(
        {name: p.detach() for name, p in step.named_parameters()}
    )
    for name, parameter in step.named_parameters():
        small = 1e-6
        moved = [
            functional_call(step, {name: parameter.detach() + k * small}, (loss, t))
            for k in range(3)
        ]
        close(slopes[name], (4 * moved[1] - moved[2] - 3 * moved[0]) / (2 * small), 1e-5)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_single_precision(problem):
    mdp, loss, t = PROBLEMS[problem]()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.3))
    q = step(loss, t)
    single = step.to(torch.float32).solve(loss.float(), t)
    assert single.q.dtype == single.value.dtype == torch.float32
    # Rounding the loss to single precision alone changes it by 1e-7 of its size.
    close(single.q.double()[mdp.actions], q[mdp.actions], 2e-4)


@pytest.mark.parametrize("problem", [*PROBLEMS, "large"])
@pytest.mark.parametrize("regularizer", ["jin_luo", "custom_statewise"])
def test_layered_path_equals_dense_path(problem, regularizer, monkeypatch):
    """More than 64 states are factorized layer by layer; solutions and gradients are the same."""
    big = occ.LayeredMDP.random(horizon=8, width=10, num_actions=3, concentration=0.2)
    mdp, loss, t = (
        Problem(big, random_loss(big, 20.0), 40.0) if problem == "large" else PROBLEMS[problem]()
    )
    assert problem != "large" or mdp.num_states > 64

    def everything() -> tuple[Tensor, ...]:
        step = occ.FTRLStep(mdp, REGULARIZERS[regularizer](mdp))
        inputs = [
            loss.clone().requires_grad_(),
            *(p.clone().requires_grad_() for p in mdp.transitions),
            mdp.initial.clone().requires_grad_(),
        ]
        solution = step.solve(inputs[0], t, mdp=mdp.with_transitions(inputs[1:-1], inputs[-1]))
        direction = random_loss(mdp, seed=5) / torch.where(mdp.actions, solution.q.detach(), 1.0)
        scalar = (direction * solution.q).sum() + solution.value.sum()
        return (
            solution.q,
            solution.value,
            *torch.autograd.grad(scalar, [*inputs, *step.parameters()]),
        )

    monkeypatch.setattr("torch_occ.mdp.occupancy.DENSE_STATES", 10**6)
    dense = everything()
    monkeypatch.setattr("torch_occ.mdp.occupancy.DENSE_STATES", 0)
    for a, b in zip(everything(), dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11 * float(b.detach().abs().max()))
