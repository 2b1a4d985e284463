"""The Fenchel-Young loss: its value, all its derivatives, its targets and its errors."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from zoo import PROBLEMS, REGULARIZERS, expect, random_loss, tensor

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")


def vertex(mdp, seed=7):
    """The occupancy measure of a deterministic policy: it has zeros."""
    return occ.occupancy(mdp, occ.optimal_policy(mdp, random_loss(mdp, seed=seed)).policy)


def interior(mdp, seed=5):
    """The occupancy measure of a random policy."""
    return occ.occupancy(
        mdp, random_loss(mdp, seed=seed).where(mdp.actions, -torch.inf).softmax(-1)
    )


def small(seed=0):
    return occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=seed)


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_with_one_state_and_shannon_it_is_the_logistic_loss(rate):
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1, dtype=torch.float64)])
    step = occ.FTRLStep(mdp, occ.Shannon() / occ.Constant(rate))
    loss = random_loss(mdp, 5.0, batch=(4,)).requires_grad_()
    label = torch.arange(4)
    target = torch.nn.functional.one_hot(label, 4).double().unsqueeze(-2)
    mine = occ.fenchel_young_loss(step, loss, target)
    theirs = torch.nn.functional.cross_entropy(-rate * loss[:, 0], label, reduction="none") / rate
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    gradients = [torch.autograd.grad(x.sum(), loss)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("problem", ["masked", "layers", "contexts", "no_choice"])
@pytest.mark.parametrize("name", REGULARIZERS)
def test_gradient_is_target_minus_q_and_the_value_is_zero_at_the_target(name, problem):
    mdp, loss, t = PROBLEMS[problem]()
    step = occ.FTRLStep(mdp, REGULARIZERS[name](mdp))
    loss = loss.clone().requires_grad_()
    q = step(loss, t).detach()
    for target in (vertex(mdp), interior(mdp)):
        (found,) = torch.autograd.grad(occ.fenchel_young_loss(step, loss, target, t), loss)
        assert torch.equal(found, target - q)
    assert occ.fenchel_young_loss(step, loss, interior(mdp), t) > -1e-9
    scale = 1 + abs(step.regularizer(q, t, mdp).item())
    assert abs(occ.fenchel_young_loss(step, loss, q, t).item()) < 1e-9 * scale


@pytest.mark.parametrize("name", REGULARIZERS)
def test_derivatives_equal_finite_differences(name):
    mdp = small()
    step = occ.FTRLStep(mdp, REGULARIZERS[name](mdp), tolerance=1e-13)
    # gradgradcheck mistakes the order of its outputs if the value does not depend on an input.
    constant = name in ("tsallis_power", "shannon", "log_barrier")
    t = tensor(2.5).requires_grad_(not constant)

    def value(loss, *_):
        return occ.fenchel_young_loss(step, loss, interior(mdp), t)

    inputs = (random_loss(mdp, 3.0).requires_grad_(), t, *step.parameters())
    assert gradcheck(value, inputs, fast_mode=True)
    assert gradgradcheck(value, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["tsallis", "shannon", "conditional_entropy", "log_barrier"])
def test_derivatives_at_a_vertex_equal_finite_differences(name):
    mdp, loss, t = PROBLEMS["masked"]()
    step = occ.FTRLStep(mdp, REGULARIZERS[name](mdp), tolerance=1e-13)
    t = tensor(t).requires_grad_(name in ("tsallis", "conditional_entropy"))
    inputs = (loss.clone().requires_grad_(), t)

    def value(loss, t, *_):
        return occ.fenchel_young_loss(step, loss, vertex(mdp), t)

    assert gradcheck(value, (*inputs, *step.parameters()), fast_mode=True)
    assert gradgradcheck(value, inputs, fast_mode=True)


def test_derivatives_in_the_probabilities():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.3), tolerance=1e-13)
    loss, scores = random_loss(mdp, 3.0), random_loss(mdp)[:1, :, None] * tensor([1.0, -2.0])
    scores.requires_grad_()

    def value(scores):
        other = mdp.with_transitions([scores.softmax(-1), mdp.transitions[1]])
        target = interior(other).detach()
        fixed = occ.fenchel_young_loss(step, loss, target, 3.0, mdp=other)
        # Undo the move of the target, which a user would hold fixed.
        return fixed - (target * loss).sum() - step.regularizer(target, 3.0, mdp)

    assert gradcheck(value, scores)
    assert gradgradcheck(value, scores)


def test_infinite_constants_are_left_out_element_by_element():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.LogBarrier(0.5))
    loss = random_loss(mdp, 3.0).requires_grad_()
    both = torch.stack([vertex(mdp), interior(mdp)])
    found = occ.fenchel_young_loss(step, loss, both)
    q = step(loss).detach()
    assert (found[0] - ((vertex(mdp) - q) * loss).sum() + step.regularizer(q)).abs() < 1e-12
    assert torch.equal(found[1], occ.fenchel_young_loss(step, loss, interior(mdp)))
    grads = torch.autograd.grad(found.sum(), (loss, *step.parameters()))
    torch.testing.assert_close(grads[0], (both - q).sum(0), atol=1e-15, rtol=0)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("psi", [occ.ConditionalEntropy(), occ.jin_luo(small(), beta=0.3)])
@pytest.mark.parametrize(("batch", "more"), [((3, 1), (2,)), ((), (3,)), ((0,), ()), ((), (0,))])
def test_batches_of_losses_targets_starts_episodes_and_trajectories(psi, batch, more):
    mdp, path = small(), torch.tensor([[0, 1]])
    step, loss = occ.FTRLStep(mdp, psi), random_loss(mdp, 3.0, batch=batch).requires_grad_()
    one, t, whole = interior(mdp), tensor(2.0), loss.expand(*batch[:1], *more, *loss.shape[-2:])
    found, expected = (
        (
            occ.fenchel_young_loss(step, x, one.expand(*shape, -1, -1), 2.0),
            occ.fenchel_young_loss(step, x, one, t.expand(shape), warm_start=one),
            occ.fenchel_young_loss(step, x, one, t, warm_start=one.expand(*shape, -1, -1)),
            occ.negative_log_likelihood(step, x, *2 * [path.expand(*shape, -1, -1)], 2.0),
        )
        for x, shape in ((loss, more), (whole, ()))
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(*(torch.autograd.grad(z.sum(), loss)[0] for z in (x, y)))


def test_transforms():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.3))
    losses, targets = random_loss(mdp, 3.0, batch=(3,)), interior(mdp).expand(3, -1, -1)

    def value(loss, target):
        return occ.fenchel_young_loss(step, loss, target, 2.0)

    expected = value(losses, targets)
    torch.testing.assert_close(torch.func.vmap(value)(losses, targets), expected)
    gradients = torch.func.vmap(torch.func.grad(value))(losses, targets)
    torch.testing.assert_close(gradients, targets - step(losses, 2.0))
    _, pushed = torch.func.jvp(lambda x: value(x, targets), (losses,), (losses,))
    torch.testing.assert_close(pushed, (gradients * losses).sum((-2, -1)))
    hessian = torch.func.hessian(value)(losses[0], targets[0])
    reverse = torch.func.jacrev(torch.func.jacrev(value))(losses[0], targets[0])
    torch.testing.assert_close(hessian, reverse)


def test_empirical_visits_need_not_be_a_flow():
    """Mean visits of two trajectories: the gradient is visits - q, and layers have mass one."""
    mdp = small()
    step, loss = occ.FTRLStep(mdp, occ.ConditionalEntropy()), random_loss(mdp).requires_grad_()
    visits = torch.zeros_like(loss)
    visits[0, 0], visits[0, 1], visits[1, 0] = 0.5, 0.5, 1.0
    value = occ.fenchel_young_loss(step, loss, visits, empirical=True)
    (gradient,) = torch.autograd.grad(value, loss)
    assert torch.equal(gradient, visits - step(loss).detach())


def test_a_target_is_checked_again_after_a_change():
    """Also if its memory is that of an array; losses may be arrays, too."""
    step, loss = occ.FTRLStep(small(), occ.Shannon()), random_loss(small()).float().numpy()
    array = step.interior.numpy().copy()
    occ.fenchel_young_loss(step, loss, torch.from_numpy(array))
    array[0, 0] += 0.5
    with expect("target: layer 0, state 0 has the mass 1.5, but 1 arrives"):
        occ.fenchel_young_loss(step, loss, torch.from_numpy(array))


@pytest.mark.parametrize("psi", [occ.ConditionalEntropy(), occ.Shannon()])
def test_second_derivatives_where_q_underflows(psi):
    loss = (random_loss(small()) + tensor([[0, 3000], [0, 0], [0, 0]])).requires_grad_()
    step = occ.FTRLStep(small(), psi)
    value, cost = occ.fenchel_young_loss(step, loss, step.interior), random_loss(small(), seed=1)
    (slope,) = torch.autograd.grad(value, loss, create_graph=True)
    found, expected = ((x * cost).sum() for x in (slope, -step(loss)))
    assert step(loss)[0, 1] == 0
    torch.testing.assert_close(*(torch.autograd.grad(x, loss)[0] for x in (found, expected)))


@pytest.mark.parametrize("empirical", [False, True])
def test_nan_anywhere_in_a_target_is_named(empirical):
    mdp, loss, _ = PROBLEMS["masked"]()
    step = occ.FTRLStep(mdp, occ.Shannon() + occ.ConditionalEntropy())
    for i in range(loss.numel()):
        target = step.interior.clone()
        target.view(-1)[i] = torch.nan
        with pytest.raises(ValueError, match="is nan; expected an occupancy of at least 0"):
            occ.fenchel_young_loss(step, loss, target, empirical=empirical)
