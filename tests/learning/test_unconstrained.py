"""Free parameters: the same step, gradients by the chain rule, and optimizers that stay inside."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.nn.utils import parametrize
from zoo import random_loss, tensor

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")


def small():
    return occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=0)


def make(beta=0.3):
    psi = occ.Tsallis() / occ.InverseSqrt(0.8) + occ.LogBarrier(beta)
    return occ.FTRLStep(small(), psi)


def test_the_step_is_the_same_and_gradients_follow_the_chain_rule():
    step, free = make(), occ.unconstrain(make())
    loss, cost = random_loss(small(), 3.0), random_loss(small(), seed=1)
    torch.testing.assert_close(free(loss, 3.0), step(loss, 3.0), atol=1e-14, rtol=1e-12)
    assert free.solve(loss, 3.0).backend == step.solve(loss, 3.0).backend
    for each in (step, free):
        (each(loss, 3.0) * cost).sum().backward()
    name = "regularizer.terms.1.parametrizations.beta.original"
    found = dict(free.named_parameters())[name].grad
    torch.testing.assert_close(found, 0.3 * step.regularizer.terms[1].beta.grad)
    assert gradcheck(lambda *_: (free(loss, 3.0) * cost).sum(), tuple(free.parameters()))


def test_adam_stays_in_the_domain():
    """Without it, the second step of Adam drives beta below zero."""
    step = occ.unconstrain(make())
    optimizer = torch.optim.Adam(step.parameters(), lr=0.5)
    mean = random_loss(small())
    for _ in range(40):
        optimizer.zero_grad()
        occ.expected_cost(step, 10 * mean, mean, 1).backward()
        optimizer.step()
    beta, power = step.regularizer.terms[1].beta, step.regularizer.terms[0].regularizer.power
    assert 0 < beta.item() < 0.01
    assert 0 < power.item() < 1


def test_parameters_with_one_value_per_state():
    mdp, loss = small(), random_loss(small(), 3.0)
    values = tensor([0.1, 0.2, 0.4])

    def per_state():
        psi = occ.Tsallis() / occ.InverseSqrt() + occ.LogBarrier(occ.PerState(mdp, values))
        return occ.FTRLStep(mdp, psi)

    step, free = per_state(), occ.unconstrain(per_state(), only=["beta"])
    torch.testing.assert_close(free(loss, 3.0), step(loss, 3.0), atol=1e-14, rtol=1e-12)
    for each in (step, free):
        each(loss, 3.0).square().sum().backward()
    found = free.regularizer.terms[1].parametrizations.beta.original.grad
    torch.testing.assert_close(found, values * step.regularizer.terms[1].beta.grad)


def test_values_can_be_read_and_set():
    step = occ.unconstrain(make())
    barrier = step.regularizer.terms[1]
    assert barrier.beta.item() == pytest.approx(0.3)
    barrier.beta = tensor(0.7)
    loss = random_loss(small())
    torch.testing.assert_close(step(loss, 3.0), make(beta=0.7)(loss, 3.0))


def test_only_some_and_twice():
    step = occ.unconstrain(make(), only=["beta"])
    trained = [name for name, p in step.named_parameters() if p.requires_grad]  # others are frozen
    assert [name.split(".")[-2:] for name in trained] == [["beta", "original"]]
    assert occ.unconstrain(step, only=["gamma"]) is step  # frozen so far
    assert all(p.requires_grad for name, p in step.named_parameters() if name[-8:] == "original")
    assert sum(p.requires_grad for p in step.parameters()) == 2
    occ.unconstrain(step)
    assert all(name.endswith("original") for name, _ in step.named_parameters())


def test_a_network_with_several_steps_a_copy_and_a_state():
    net = occ.unconstrain(nn.ModuleList([make(), make(0.5)]))
    loss = random_loss(small())
    other = copy.deepcopy(net)
    for mine, theirs in zip(net, other, strict=True):
        assert torch.equal(mine(loss, 1), theirs(loss, 1))
    other[0].regularizer.terms[1].beta = tensor(2.0)
    other.load_state_dict(net.state_dict())
    assert torch.equal(net[0](loss, 1), other[0](loss, 1))
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(net)


def test_a_parametrization_of_yours():
    class Square(nn.Module):
        def forward(self, x):
            return x**2

        def right_inverse(self, y):
            return y.sqrt()

    step, loss = make(), random_loss(small())
    expected = step(loss, 3.0)
    parametrize.register_parametrization(step.regularizer.terms[1], "beta", Square())
    torch.testing.assert_close(step(loss, 3.0), expected)
    original = step.regularizer.terms[1].parametrizations.beta.original
    step(loss, 3.0).square().sum().backward()
    assert original.grad is not None
    with torch.no_grad():
        original.mul_(2.0)  # beta is four times as large
    assert float((step(loss, 3.0) - expected).detach().abs().max()) > 1e-6


def test_a_parameter_at_the_edge_may_be_left_out():
    step = make(beta=0.0)
    occ.unconstrain(step, only=["power", "gamma"])
    assert step.regularizer.terms[1].beta.item() == 0.0
