"""The step with a convex function of features of q: conditions of optimality, derivatives."""

import pytest
import torch

import torch_occ as occ

MDP = occ.LayeredMDP.random(horizon=3, width=4, num_actions=3, seed=3)


def table(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (*shape, MDP.num_states, MDP.num_actions)
    return torch.rand(size, dtype=torch.float64, generator=generator)


GOAL = torch.tensor([0.3, 0.9, 0.5], dtype=torch.float64)
UTILITIES = {
    "distance": lambda z: 5 * (z - GOAL).square().sum(-1),
    "fairness": lambda z: -z.log().sum(-1),
    "entropy": lambda z: (z * z.log()).sum(-1),
    "soft maximum": lambda z: torch.logsumexp(20 * z, -1) / 2,
}


@pytest.mark.parametrize(
    "psi", [occ.Tsallis(), occ.Shannon(), occ.LogBarrier(0.1), occ.ConditionalEntropy()]
)
@pytest.mark.parametrize("name", UTILITIES)
def test_prices_are_the_slope_of_the_utility_and_reproduce_q(name, psi):
    """These are the conditions of optimality; the step alone is compared with cvxpy elsewhere."""
    step, G, loss = occ.FTRLStep(MDP, psi), table(3, seed=1), table(2, seed=2)
    solution = occ.UtilityStep(step, G, UTILITIES[name]).solve(loss)
    assert int(solution.steps.max()) <= 10
    z = (G * solution.q.unsqueeze(-3)).sum((-2, -1)).detach().requires_grad_()
    torch.testing.assert_close(solution.features, z, rtol=1e-10, atol=0)
    (slope,) = torch.autograd.grad(UTILITIES[name](z).sum(), z)
    torch.testing.assert_close(solution.prices, slope, rtol=1e-9, atol=1e-9)
    alone = step(loss + (solution.prices[..., None, None] * G).sum(-3))
    torch.testing.assert_close(solution.q, alone, rtol=1e-9, atol=0)


class Distance(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, z):
        return (self.weight * (z - GOAL).square()).sum(-1)


def test_first_and_second_derivatives():
    step = occ.FTRLStep(MDP, occ.Tsallis() / occ.InverseSqrt(1.0))
    weight = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64, requires_grad=True)
    G, loss = table(3, seed=1).requires_grad_(), table(seed=2).requires_grad_()
    probe = table(seed=4)

    def cost(weight, G, loss):
        plan = occ.UtilityStep(step, G, lambda z: (weight * (z - GOAL).square()).sum(-1))
        return (probe * plan(loss, 2.0)).sum()

    assert torch.autograd.gradcheck(cost, (weight, G, loss), fast_mode=True, rtol=1e-4)
    assert torch.autograd.gradgradcheck(cost, (weight, G, loss), fast_mode=True, rtol=1e-3)


def test_a_module_is_trained():
    plan = occ.UtilityStep(occ.FTRLStep(MDP, occ.Shannon()), table(3), Distance(torch.ones(3)))
    plan.double()(table(seed=2)).square().sum().backward()
    assert plan.utility.weight.grad.abs().min() > 0


@pytest.mark.parametrize("psi", [occ.Tsallis(), occ.ConditionalEntropy(), occ.Shannon()])
@pytest.mark.parametrize(
    "F",
    [
        lambda z: 5e3 * (z - GOAL).square().sum(-1),
        lambda z: 1e-3 * torch.logsumexp(1e3 * z, -1),
        lambda z: 0.1 * torch.logsumexp(1e3 * z, -1),
    ],
)
def test_steep_utilities_are_certified(psi, F):
    plan = occ.UtilityStep(occ.FTRLStep(MDP, psi), table(3, seed=1), F)
    solution = plan.solve(table(4, seed=2))
    assert bool((solution.status == occ.Status.CONVERGED).all())
    assert float(solution.dual_residual.max()) < 1e-9


def test_what_is_refused():  # tests/record has more
    step, G = occ.FTRLStep(MDP, occ.Tsallis()), table(3, seed=1)
    with pytest.raises(ValueError, match="utility: not finite at the features"):
        occ.UtilityStep(step, G, lambda z: (-z).log().sum(-1))(table())
    with pytest.raises(occ.SolveError, match="NOT_CONVEX"):
        occ.UtilityStep(step, G, lambda z: -0.1 * z.square().sum(-1))(table())
