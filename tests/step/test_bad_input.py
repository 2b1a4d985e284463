"""Bad input: errors name the argument and what was expected, and failed calls change nothing."""

import copy

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap
from zoo import masked

import torch_occ as occ

pytestmark = pytest.mark.usefixtures("both_backends")

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def step():
    mdp = masked().mdp
    return occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.5))


def replaced(x: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    x = x.clone()
    x[index] = value
    return x


LOSS, ONES = masked().loss, torch.ones(4, 2, dtype=torch.float64)
#: More are in the record, to the word. Name: (what is called, words that the message must have).
BAD_CALLS = {
    "nan_loss": (
        lambda step: step(replaced(LOSS, (2, 1), NAN), 3),
        ["cumulative_loss", "layer 1, state 0, action 1", "nan", "finite"],
    ),
    "infinite_loss": (
        lambda step: step(replaced(torch.stack([LOSS] * 3), (1, 0, 1), -INF), 3),
        ["cumulative_loss", "element (1,)", "-inf"],
    ),
    "t_infinite": (lambda step: step(LOSS, INF), ["t:", "at least 1", "inf"]),
    "t_missing": (
        lambda step: step(LOSS),
        ["t:", "schedule InverseSqrt", "step(cumulative_loss, t)"],
    ),
    "t_missing_in_learning": (
        lambda step: occ.fenchel_young_loss(step, LOSS, step.interior),
        ["t:", "schedule InverseSqrt"],
    ),
    "t_beyond_all_numbers": (
        lambda step: step(LOSS, 10**400),
        ["t:", "at least 1 and below", "larger integer"],
    ),
    "sparse_loss": (
        lambda step: step(LOSS.to_sparse(), 3),
        ["cumulative_loss", "sparse", "to_dense()"],
    ),
    "budgets_as_a_tensor": (
        lambda step: step(LOSS, 3, constraints=LOSS),
        ["constraints", "Budgets(costs, limits)", "Tensor"],
    ),
    "regularizer_as_a_function": (
        lambda step: occ.FTRLStep(step.mdp, lambda q: q.sum()),
        ["regularizer", "got function", "SeparableRegularizer"],
    ),
    "regularizer_as_a_class": (
        lambda step: occ.FTRLStep(step.mdp, occ.Shannon),
        ["regularizer", "the class Shannon", "make one"],
    ),
    "arguments_in_the_wrong_order": (
        lambda step: occ.FTRLStep(occ.Shannon(), step.mdp),
        ["mdp:", "got Shannon", "FTRLStep(mdp, regularizer)"],
    ),
    "warm_start_zero": (
        lambda step: step(LOSS, 3, warm_start=replaced(ONES, (0, 1), 0.0)),
        ["warm_start", "state 0, action 1", "positive"],
    ),
    "warm_start_negative": (
        lambda step: step(LOSS, 3, warm_start=-ONES),
        ["warm_start", "-1.0", "positive"],
    ),
    "model_with_nan": (
        lambda step: step(
            LOSS, 3, mdp=step.mdp.with_transitions([NAN * p for p in step.mdp.transitions])
        ),
        ["mdp"],
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named_and_changes_nothing(name, step):
    call, words = BAD_CALLS[name]
    parameters = copy.deepcopy(step.state_dict())
    q = step(LOSS, 3.0).detach()
    with pytest.raises((ValueError, TypeError)) as caught:
        call(step)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert torch.equal(step(LOSS, 3.0), q)
    for name, parameter in step.state_dict().items():
        assert torch.equal(parameter, parameters[name])
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
