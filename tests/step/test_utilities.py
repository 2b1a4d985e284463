"""The step with a convex function of features of q, against cvxpy and finite differences."""

import cvxpy
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
    "distance": (
        lambda z: 5 * (z - GOAL).square().sum(-1),
        lambda z: 5 * cvxpy.sum_squares(z - GOAL.numpy()),
    ),
    "fairness": (lambda z: -z.log().sum(-1), lambda z: -cvxpy.sum(cvxpy.log(z))),
    "entropy": (lambda z: (z * z.log()).sum(-1), lambda z: -cvxpy.sum(cvxpy.entr(z))),
    "soft maximum": (
        lambda z: torch.logsumexp(20 * z, -1) / 2,
        lambda z: cvxpy.log_sum_exp(20 * z) / 2,
    ),
}
REGULARIZERS = {
    "Tsallis": (occ.Tsallis(), lambda q: -cvxpy.sum(cvxpy.sqrt(q))),
    "Shannon": (occ.Shannon(), lambda q: -cvxpy.sum(cvxpy.entr(q))),
    "LogBarrier": (occ.LogBarrier(0.1), lambda q: -0.1 * cvxpy.sum(cvxpy.log(q))),
}


@pytest.mark.parametrize("psi", REGULARIZERS)
@pytest.mark.parametrize("name", UTILITIES)
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # as far as Clarabel gets
def test_cvxpy_finds_the_same_q(name, psi):
    (F, F_cvxpy), (regularizer, psi_cvxpy) = UTILITIES[name], REGULARIZERS[psi]
    G, loss = table(3, seed=1), table(seed=2)
    solution = occ.UtilityStep(occ.FTRLStep(MDP, regularizer), G, F).solve(loss)
    assert int(solution.steps) <= 10

    q = cvxpy.Variable((MDP.num_states, MDP.num_actions), nonneg=True)
    z = cvxpy.hstack([cvxpy.sum(cvxpy.multiply(g.numpy(), q)) for g in G])
    flow = [cvxpy.sum(q[0]) == 1]
    for k, p in enumerate(MDP.transitions[:-1]):
        here, there = MDP.layer_slices[k], MDP.layer_slices[k + 1]
        into = sum(
            q[here.start + s, a] * p[s, a].numpy()
            for s in range(p.shape[0])
            for a in range(p.shape[1])
        )
        flow.append(cvxpy.sum(q[there], axis=1) == into)
    objective = cvxpy.sum(cvxpy.multiply(loss.numpy(), q)) + F_cvxpy(z) + psi_cvxpy(q)
    cvxpy.Problem(cvxpy.Minimize(objective), flow).solve(
        "CLARABEL", tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13
    )
    torch.testing.assert_close(solution.q, torch.as_tensor(q.value), atol=1e-6, rtol=0)


def test_prices_are_the_slope_of_the_utility_and_reproduce_q():
    step, G, loss = occ.FTRLStep(MDP, occ.ConditionalEntropy()), table(3, seed=1), table(2, seed=2)
    solution = occ.UtilityStep(step, G, UTILITIES["fairness"][0]).solve(loss)
    z = (G * solution.q.unsqueeze(-3)).sum((-2, -1))
    torch.testing.assert_close(solution.features, z)
    torch.testing.assert_close(solution.prices, -1 / z)
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


def test_what_is_refused():
    step, G = occ.FTRLStep(MDP, occ.Tsallis()), table(3, seed=1)
    with pytest.raises(ValueError, match=r"features: expected shape \(\*batch, m, S, A\)"):
        occ.UtilityStep(step, G[0], lambda z: z.sum(-1))
    with pytest.raises(ValueError, match="utility: expected shape"):
        occ.UtilityStep(step, G, lambda z: z.square())(table())
    with pytest.raises(ValueError, match="utility: not finite at the features"):
        occ.UtilityStep(step, G, lambda z: (-z).log().sum(-1))(table())
    with pytest.raises(occ.SolveError, match="NOT_CONVEX"):
        occ.UtilityStep(step, G, lambda z: -0.1 * z.square().sum(-1))(table())
    budgets = occ.Budgets(G[:1], torch.tensor([9.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="step: has budgets"):
        occ.UtilityStep(occ.FTRLStep(MDP, occ.Tsallis(), constraints=budgets), G, torch.sum)
