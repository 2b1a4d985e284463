"""What surrounds a step in a network: each works as usual, or is refused with the reason."""

import threading

import pytest
import torch
from torch import nn
from torch.autograd.functional import jacobian
from torch.utils.checkpoint import checkpoint
from zoo import Centred, random_loss, tensor

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")

# Without schedules, so that a step is a function of the loss alone.
MAKERS = {
    "jin_luo": lambda: occ.HybridTsallis(0.5) / occ.Constant(0.8) + occ.LogBarrier(0.3),
    "entropy": lambda: occ.ConditionalEntropy() / occ.Constant(1.3),
    "own": lambda: Centred(0.7) / occ.Constant(0.8) + occ.LogBarrier(0.1),
}
each_regularizer = pytest.mark.parametrize("name", MAKERS)


def make(name="jin_luo", **options):
    mdp = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=0)
    return occ.FTRLStep(mdp, MAKERS[name](), **options)


def losses(step, count=3):
    return random_loss(step.mdp, 2.0, batch=(count,)).requires_grad_()


def cost(step):
    return random_loss(step.mdp, seed=4)


def gradients(step, q, *inputs, **options):
    return torch.autograd.grad((q * cost(step)).sum(), inputs, **options)


def network(step, dtype=torch.float32):
    torch_shape = step.mdp.num_states, step.mdp.num_actions
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, torch_shape[0] * torch_shape[1]), nn.Unflatten(-1, torch_shape)
    )
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.rand(p.shape, generator=generator))
    return nn.Sequential(net.to(dtype), step)


def features(count=5):
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(1))


def test_a_float32_network_needs_no_casts():
    step = make()
    net, exact = network(step), network(step, torch.float64)
    q, expected = net(features()), exact(features().double())
    assert q.dtype == torch.float64
    torch.testing.assert_close(q, expected, atol=1e-6, rtol=0)
    for f, x in ((net, q), (exact, expected)):
        (x * cost(step)).sum().backward()
        assert f[0][0].weight.grad.dtype == f[0][0].weight.dtype
    torch.testing.assert_close(
        net[0][0].weight.grad.double(), exact[0][0].weight.grad, atol=1e-6, rtol=1e-4
    )
    target = step(losses(step)[0]).detach().float()
    assert occ.fenchel_young_loss(step, losses(step).detach().float(), target).dtype == q.dtype


def test_a_network_may_change_its_number_type():
    """The step works in that of its MDP, whatever the losses have."""
    mdp = occ.LayeredMDP.from_graph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")], "a", "d")
    net = nn.ModuleDict({"line": nn.Linear(2, 4), "step": occ.FTRLStep(mdp, occ.Shannon())})
    paths, x = mdp.occupancy_of(mdp.shortest_path(torch.rand(3, 4))), torch.rand(3, 2)
    for moved in (net, net.float(), net.double()):
        losses = mdp.losses(moved["line"](x.to(moved["line"].weight.dtype)))
        assert moved["step"](losses).dtype == moved["step"].mdp.dtype
        occ.fenchel_young_loss(moved["step"], losses, paths).sum().backward()
        assert moved["line"].weight.grad.dtype == moved["line"].weight.dtype
        net.zero_grad()


@each_regularizer
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(name, use_reentrant):
    step = make(name)
    x, scale = losses(step), tensor(1.5).requires_grad_()
    expected = gradients(step, step(x * scale, 3.0), x, scale, *step.parameters())
    q = checkpoint(lambda x: step(x * scale, 3.0), x, use_reentrant=use_reentrant)
    step.zero_grad()
    (q * cost(step)).sum().backward()
    found = [x.grad, scale.grad, *(p.grad for p in step.parameters())]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_in_batches_are_refused():
    step = make()
    x = losses(step)[0].detach().requires_grad_()
    q = step(x)
    every = torch.eye(q.numel(), dtype=q.dtype).reshape(-1, *q.shape)
    calls = [
        lambda: torch.autograd.grad(q, x, every, is_grads_batched=True),
        lambda: jacobian(step, x, vectorize=True),
        lambda: jacobian(step, x, vectorize=True, strategy="forward-mode"),
        lambda: jacobian(
            lambda x: occ.fenchel_young_loss(step, x[None], q.detach()), x, vectorize=True
        ),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"is_grads_batched=True .* use torch\.func\.jacrev"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_does_not_reach_into_the_step(dtype):
    step = make().to(dtype)
    net, entropy = network(step), occ.FTRLStep(step.mdp, occ.ConditionalEntropy())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = net[0](features())
        q, value = step(prediction), occ.fenchel_young_loss(entropy, prediction, step.interior)
    assert prediction.dtype == torch.bfloat16
    assert q.dtype == dtype
    assert torch.equal(q, step(prediction))  # as outside of autocast
    assert torch.equal(value, occ.fenchel_young_loss(entropy, prediction, step.interior))
    (q * cost(step)).sum().backward()
    assert net[0][0].weight.grad.dtype == torch.float32


@each_regularizer
def test_inference_mode(name):
    step = make(name)
    x = losses(step).detach()
    with torch.inference_mode():
        q = step(1.0 * x, tensor(2.0), warm_start=step(x))
        assert not q.requires_grad
    torch.testing.assert_close(q, step(x, 2.0))


def right_or_refused(compute, expected):
    """Whether derivatives after a change in place are right, or torch refuses to compute them."""
    try:
        found = compute()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return all(map(torch.equal, found, expected))


@each_regularizer
def test_a_loss_that_changes_in_place_never_gives_a_wrong_gradient(name):
    step = make(name)
    x = losses(step)
    expected = gradients(step, step(1.0 * x), x)
    y = 1.0 * x
    q = step(y)
    y.mul_(3.0)
    assert right_or_refused(lambda: gradients(step, q, x), expected)


@each_regularizer
def test_parameters_that_change_in_place_never_give_a_wrong_gradient(name):
    step = make(name)
    expected = gradients(step, step(losses(step)), *step.parameters())
    q = step(losses(step))
    with torch.no_grad():
        for p in step.parameters():
            p.mul_(1.1)
    assert right_or_refused(lambda: gradients(step, q, *step.parameters()), expected)


@each_regularizer
def test_several_threads(name):
    """Forward, backward and twice backward, through one step."""
    step = make(name)
    inputs = (losses(step), *step.parameters())

    def derivatives():
        first = gradients(step, step(inputs[0], 3.0), *inputs, create_graph=True)
        return [*first, *torch.autograd.grad(first[0].square().sum(), inputs)]

    expected, wrong = derivatives(), []

    def work():
        try:
            for _ in range(4):
                for mine, theirs in zip(derivatives(), expected, strict=True):
                    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-9)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
