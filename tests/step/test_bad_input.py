"""Bad input: failed calls change nothing. The messages are in the record, to the word."""

import copy

import pytest
import torch
from torch.func import functional_call, jacrev, vmap
from zoo import masked

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")

LOSS = masked().loss


@pytest.fixture
def step():
    mdp = masked().mdp
    return occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.5))


def test_failed_calls_change_nothing(step):
    parameters, q = copy.deepcopy(step.state_dict()), step(LOSS, 3.0).detach()
    nowhere = step.mdp.with_transitions([torch.nan * p for p in step.mdp.transitions])
    for loss, given in ((torch.nan * LOSS, {"t": 3}), (LOSS, {}), (LOSS, {"t": 3, "mdp": nowhere})):
        with pytest.raises((ValueError, TypeError)):
            step(loss, **given)
    assert torch.equal(step(LOSS, 3.0), q)
    assert all(torch.equal(p, parameters[name]) for name, p in step.state_dict().items())
    assert all(p.grad is None for p in step.parameters())


@pytest.mark.parametrize("name", ["alpha", "gamma", "beta"])
def test_a_parameter_that_an_optimizer_made_negative_is_named(name, step):
    (parameter,) = (p for path, p in step.named_parameters() if path.endswith(name))
    step(LOSS, 3.0)[0, 0].backward()
    parameter.grad = torch.full_like(parameter, 100.0)
    torch.optim.SGD([parameter], lr=1.0).step()
    value = float(parameter.detach())

    def solve(loss):
        return step(loss, 3.0)

    for call in (solve, vmap(solve), jacrev(solve), lambda x: functional_call(step, {}, (x, 3.0))):
        with pytest.raises(ValueError, match=f"{name} must .*{value}"):
            call(torch.stack([LOSS, LOSS]))
    assert float(parameter.detach()) == value


def test_what_is_said_about_masked_pairs_is_ignored(step):
    """Loss and warm start may hold anything there."""
    mask, q = step.mdp.actions, step(LOSS, 3.0)
    assert torch.equal(step(torch.where(mask, LOSS, torch.nan), 3.0), q)
    for anything in (0.7, torch.nan):
        torch.testing.assert_close(
            step(LOSS, 3.0, warm_start=torch.where(mask, q, anything)), q, rtol=1e-12, atol=0
        )
