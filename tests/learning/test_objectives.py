"""The expected cost, and the likelihood of demonstrations."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from zoo import PROBLEMS, REGULARIZERS, random_loss, tensor, trajectories

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")


def small(seed=0, horizon=3):
    return occ.LayeredMDP.random(horizon=horizon, width=2, num_actions=2, seed=seed)


def test_expected_cost_is_the_scalar_product_and_ignores_masked_pairs():
    mdp, loss, t = PROBLEMS["masked"]()
    step = occ.FTRLStep(mdp, occ.Tsallis())
    cost = random_loss(mdp).masked_fill(~mdp.actions, torch.inf)
    found = occ.expected_cost(step, loss, cost, t)
    torch.testing.assert_close(found, (step(loss, t) * cost)[mdp.actions].sum())


def test_expected_cost_derivatives():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.2), tolerance=1e-13)
    loss, cost = random_loss(mdp, 2.0).requires_grad_(), random_loss(mdp, seed=1).requires_grad_()
    inputs = (loss, cost, *step.parameters())
    assert gradcheck(lambda x, y, *_: occ.expected_cost(step, x, y, 2.0), inputs, fast_mode=True)
    assert gradgradcheck(
        lambda x, y, *_: occ.expected_cost(step, x, y, 2.0), inputs, fast_mode=True
    )


@pytest.mark.parametrize(
    ("name", "sparse"), [*((name, False) for name in REGULARIZERS), ("jin_luo", True)]
)
def test_likelihood_of_all_trajectories_sums_to_one(name, sparse):
    mdp, loss, t = PROBLEMS["masked"]()
    mdp = mdp.to_sparse() if sparse else mdp
    step = occ.FTRLStep(mdp, REGULARIZERS[name](mdp))
    states, actions, expected = trajectories(mdp.to_dense(), step(loss, t).detach())
    found = occ.negative_log_likelihood(
        step, loss, states[:, None], actions[:, None], t, transitions=True
    )
    torch.testing.assert_close(found.neg().exp(), expected, atol=1e-12, rtol=1e-9)
    mean = occ.negative_log_likelihood(step, loss, states, actions, t, transitions=True)
    torch.testing.assert_close(mean, found.mean())


@pytest.mark.parametrize("name", REGULARIZERS)
def test_likelihood_derivatives(name):
    mdp = small(horizon=2)
    step = occ.FTRLStep(mdp, REGULARIZERS[name](mdp), tolerance=1e-13)
    states, actions = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 1], [1, 1]])
    inputs = (random_loss(mdp, 2.0).requires_grad_(), *step.parameters())

    def value(loss, *_):
        return occ.negative_log_likelihood(step, loss, states, actions, 2.0)

    assert gradcheck(value, inputs, fast_mode=True)
    assert gradgradcheck(value, inputs, fast_mode=True)


def test_with_one_state_it_is_the_cross_entropy():
    mdp = occ.LayeredMDP([torch.ones(1, 3, 1, dtype=torch.float64)])
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy() / occ.Constant(2.0))
    loss, label = random_loss(mdp, batch=(5,)), torch.tensor([0, 1, 2, 1, 0])
    zeros = torch.zeros(5, 1, 1, dtype=torch.int64)
    found = occ.negative_log_likelihood(step, loss, zeros, label[:, None, None])
    expected = torch.nn.functional.cross_entropy(-2 * loss[:, 0], label, reduction="none")
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("psi", [occ.ConditionalEntropy(), occ.Shannon()])
def test_likelihood_does_not_underflow_with_entropies(psi):
    mdp = small()
    step = occ.FTRLStep(mdp, psi)
    loss = torch.zeros_like(random_loss(mdp))
    loss[0, 1] = 2000.0  # the policy takes action 1 with probability e^-2000, which underflows
    loss.requires_grad_()
    states, actions = torch.tensor([[0, 1, 3]]), torch.tensor([[1, 0, 0]])
    found = occ.negative_log_likelihood(step, loss, states, actions)
    assert 2000 < found < 2005
    (gradient,) = torch.autograd.grad(found, loss)
    torch.testing.assert_close(gradient[0], tensor([-1.0, 1.0]))


def test_derivatives_in_the_probabilities():
    mdp = small(horizon=2)
    step = occ.FTRLStep(mdp, occ.Tsallis(), tolerance=1e-13)
    scores = (random_loss(mdp)[:1, :, None] * tensor([1.0, -2.0])).requires_grad_()
    states, actions = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[0, 1], [1, 1]])

    def value(scores):
        other = mdp.with_transitions([scores.softmax(-1), mdp.transitions[1]])
        return occ.negative_log_likelihood(
            step, random_loss(mdp), states, actions, mdp=other, transitions=True
        )

    assert gradcheck(value, scores)


def test_transforms():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy())
    losses = random_loss(mdp, batch=(3,))
    states, actions = torch.tensor([[0, 1, 3]]), torch.tensor([[1, 0, 0]])

    def value(loss):
        return occ.negative_log_likelihood(step, loss, states, actions)

    torch.testing.assert_close(torch.func.vmap(value)(losses), value(losses))
    of_actions = torch.func.vmap(partial(occ.negative_log_likelihood, step, losses[0], states))
    torch.testing.assert_close(of_actions(actions[None])[0], value(losses[0]))
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(value))(losses),
        torch.autograd.functional.jacobian(value, losses).sum(0),
    )


def test_trajectories_may_end_early():
    mdp, loss, t = PROBLEMS["masked"]()
    step = occ.FTRLStep(mdp, occ.Shannon())
    q = step(loss, t)
    logs = (q / q.sum(-1, keepdim=True)).log()
    expected = -(logs[..., 0, 0] + logs[..., 2, 0] + logs[..., 1, 0]) / 2
    lists = ([[0, 2], [1]], [[0, 0], torch.tensor([0])])
    padded = (torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0, 0], [0, -1]]))
    for given in (lists, padded):
        found = occ.negative_log_likelihood(step, loss, *given, t)
        torch.testing.assert_close(found, expected)
    initial, moves = mdp.initial, mdp.transitions[0]
    chances = initial[0].log() + moves[0, 0, 0].log() + initial[1].log()
    found = occ.negative_log_likelihood(step, loss, *lists, t, transitions=True)
    torch.testing.assert_close(found, expected - chances / 2)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_pass_of_the_engine_equals_torch(sparse):
    """Both losses and their gradients, in a batch, for trajectories that are no exact flow."""
    mdp = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=0)
    mdp = mdp.to_sparse() if sparse else mdp
    states, actions = torch.tensor([[0, 1, 4], [0, 2, -1]]), torch.tensor([[0, 1, 2], [2, 2, -1]])
    for psi in (occ.ConditionalEntropy(), occ.Shannon()):
        found = []
        for backend in ("engine", "torch"):
            step, loss = occ.FTRLStep(mdp, psi, backend=backend), random_loss(mdp, 3.0, batch=(11,))
            target = occ.occupancy(mdp, occ.optimal_policy(mdp, loss[:1] - loss).policy)
            loss.requires_grad_()
            for value in (
                occ.fenchel_young_loss(step, loss, target),
                occ.fenchel_young_loss(step, loss, step(random_loss(mdp)).detach()),
                occ.negative_log_likelihood(step, loss, states, actions),
            ):
                found += [value, *torch.autograd.grad(value.sum(), loss)]
        for one, other in zip(found[:6], found[6:], strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
