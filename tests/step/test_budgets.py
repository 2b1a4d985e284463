"""Budgets: the same q as cvxpy, exact derivatives, certificates of infeasibility."""

import pytest
import torch
from torch.func import functional_call, jacrev, vmap
from zoo import PROBLEMS, REGULARIZERS, random_loss, random_problem, tensor

import torch_occ as occ
from torch_occ.engine.newton import SMALLEST
from torch_occ.reference import solve_cvxpy

pytestmark = pytest.mark.usefixtures("both_backends")


def budgets_for(step, loss, t, shares, seed=0):
    """Budgets on random costs, as shares of what the step spends without budgets."""
    mdp = step.mdp
    costs = random_loss(mdp, seed=seed + 50, batch=(len(shares),))
    with torch.no_grad():
        spent = (costs * step(loss, t)).sum((-2, -1))
    least = torch.stack([occ.game.comparator(mdp, row) for row in costs])
    # Between the least possible cost (share 0) and that without budgets (share 1).
    return occ.Budgets(costs, least + tensor(shares) * (spent - least))


def case(shape=(3, 3, 3), shares=(0.6, 0.9, 1.3), seed=0, t=100.0, beta=1.0):
    mdp, mean = random_problem(seed, shape)
    psi = occ.HybridTsallis(0.5) / occ.InverseSqrt(1.0) + occ.LogBarrier(beta)
    step = occ.FTRLStep(mdp, psi)
    return step, t * mean, t, budgets_for(step, t * mean, t, shares, seed)


@pytest.mark.parametrize("shape", [(2, 2, 4), (3, 3, 3), (4, 5, 3)])
@pytest.mark.parametrize("shares", [(0.5,), (0.6, 0.9, 1.3), (0.9, 0.8, 0.95, 0.7, 2.0)])
def test_q_is_that_of_cvxpy(shape, shares):
    step, loss, t, budgets = case(shape, shares)
    with torch.no_grad():
        found = step.solve(loss, t, constraints=budgets)
    q, value = solve_cvxpy(step.mdp, step.regularizer, loss, t, constraints=budgets)
    torch.testing.assert_close(found.q, q, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.value, value, rtol=1e-5, atol=1e-4)
    assert float(found.slack.min()) > -1e-14
    assert float(found.multipliers.min()) >= 0
    assert float(found.duality_gap) < 1e-11


@pytest.mark.parametrize("problem", [name for name in PROBLEMS if "sparse" not in name])
@pytest.mark.parametrize("name", ["shannon", "conditional_entropy", "tsallis", "jin_luo"])
def test_every_problem_is_solved_and_certified(name, problem):
    mdp, loss, t = PROBLEMS[problem]()
    step = occ.FTRLStep(mdp, REGULARIZERS[name](mdp))
    budgets = budgets_for(step, loss, t, (0.7,))
    with torch.no_grad():
        found, free = step.solve(loss, t, constraints=budgets), step.solve(loss, t)
    assert bool(found.converged)
    assert float(found.slack) > -1e-13
    # One budget that costs more than allowed holds with equality.
    spent = (budgets.costs * free.q).sum()
    if float(spent) > float(budgets.limits) + 1e-9:
        assert abs(float(found.slack)) < 1e-13
        assert float(found.multipliers) > 0


@pytest.mark.parametrize("psi", [occ.Shannon(), occ.ConditionalEntropy()])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_entropies_meet_several_budgets_at_large_losses(psi, count):
    """q underflows there, and the multipliers still need the curvature of psi."""
    for seed in range(8):
        mdp, mean = random_problem(seed)
        costs = random_loss(mdp, seed=seed + 50, batch=(count,))
        policy = random_loss(mdp, seed=seed + 70).pow(3)
        q = occ.occupancy(mdp, policy / policy.sum(-1, keepdim=True))
        budgets = occ.Budgets(costs, (costs * q).sum((-2, -1)) + 0.01)
        for scale in (1e3, 1e4):
            step = occ.FTRLStep(mdp, psi, backend="engine")
            found = step.solve(scale * mean, constraints=budgets)
            assert float(found.slack.min()) > -1e-15 * scale  # of the rounding errors of the loss
            assert not bool((found.q == SMALLEST).any())  # what underflows is not raised


def test_the_certificate_knows_how_little_room_the_budgets_leave():
    """Feasible by 1e-9, q is known to 1e-6 only: rounding errors of a sum of 1 are 1e-16."""
    mdp, mean = random_problem(0)
    costs = random_loss(mdp, seed=50, batch=(2,))
    prices = tensor([0.3, 0.7])
    plan = occ.optimal_policy(mdp, (costs * prices[:, None, None]).sum(0))
    least = (costs * occ.occupancy(mdp, plan.policy)).sum((-2, -1))
    step, errors = occ.FTRLStep(mdp, occ.Shannon()), []
    for room in (0.1, 1e-9):
        found = step.solve(10 * mean, constraints=occ.Budgets(costs, least + room), check=False)
        errors.append(float(found.dual_residual))
        assert bool(found.converged) == (errors[-1] <= 4e-11)
    assert errors[0] < 1e-12
    assert 1e-8 < errors[1] < 1e-2
    with pytest.raises(occ.SolveError, match="accept a larger tolerance"):
        step(10 * mean, constraints=occ.Budgets(costs, least + 1e-9))
    loose = occ.FTRLStep(mdp, occ.Shannon(), tolerance=1e-3)
    assert loose.solve(10 * mean, constraints=occ.Budgets(costs, least + 1e-9)).all_converged


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_losses_at_the_end_of_the_numbers_fail_alone(backend):
    mdp, mean = random_problem(0)
    step = occ.FTRLStep(mdp, occ.Shannon(), backend=backend)
    losses = torch.stack([mean, 1e306 * mean])
    found = step.solve(losses, constraints=occ.Budgets(mean[None], tensor([9.0])), check=False)
    assert found.status.tolist() == [occ.Status.CONVERGED, occ.Status.NOT_FINITE]


def test_without_a_binding_budget_nothing_changes():
    step, loss, t, budgets = case(shares=(1.5, 2.0))
    found, free = step.solve(loss, t, constraints=budgets), step.solve(loss, t)
    assert torch.equal(found.q, free.q)
    assert not bool(found.multipliers.any())


def test_multipliers_are_prices():
    """The step without budgets gives the same q if the loss contains the multipliers as prices."""
    step, loss, t, budgets = case()
    found = step.solve(loss, t, constraints=budgets)
    priced = loss + (budgets.costs * found.multipliers[:, None, None]).sum(0)
    torch.testing.assert_close(step(priced, t), found.q, rtol=1e-12, atol=0)


def test_a_batch_is_solved_element_by_element():
    """With the answer of torch on sparse layers, in both backends."""
    step, loss, t, budgets = case()
    losses = loss * tensor([0.1, 1.0, 3.0])[:, None, None]
    limits = budgets.limits * tensor([1.0, 1.1, 0.99])[:, None]
    budgets_of_all = occ.Budgets(budgets.costs, limits)
    both = step.solve(losses, t, constraints=budgets_of_all)
    other = occ.FTRLStep(step.mdp.to_sparse(), step.regularizer, backend="torch")
    expected = other.solve(losses, t, constraints=budgets_of_all)
    for name in ("q", "multipliers", "value"):
        mine, theirs = getattr(both, name), getattr(expected, name)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    for i in range(3):
        alone = step.solve(losses[i], t, constraints=occ.Budgets(budgets.costs, limits[i]))
        torch.testing.assert_close(both.q[i], alone.q, rtol=1e-12, atol=0)
        torch.testing.assert_close(both.multipliers[i], alone.multipliers, rtol=1e-9, atol=1e-9)


def test_starting_from_the_solution_takes_few_steps():
    step, loss, t, budgets = case()
    cold = step.solve(loss, t, constraints=budgets)
    warm = step.solve(loss, t, constraints=budgets, warm_start=cold.q, multipliers=cold.multipliers)
    assert int(warm.steps) <= 4 < int(cold.steps)
    torch.testing.assert_close(warm.q, cold.q, rtol=1e-12, atol=0)


# -- derivatives -----------------------------------------------------------------------------------


def solved(step, loss, costs, limits, t=100.0):
    found = step.solve(loss, t, constraints=occ.Budgets(costs, limits))
    return found.q, found.multipliers


def test_derivatives_are_those_of_finite_differences():
    step, loss, _, budgets = case((2, 2, 3), shares=(0.6, 1.4))
    inputs = [loss, budgets.costs, budgets.limits, *(p.detach() for p in step.parameters())]
    names = [name for name, _ in step.named_parameters()]

    def q(loss, costs, limits, *parameters):
        own = dict(zip(names, parameters, strict=True))
        return functional_call(
            step, own, (loss, 100.0), {"constraints": occ.Budgets(costs, limits)}
        )

    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(q, leaves, eps=1e-6, atol=1e-6, rtol=1e-5)
    assert torch.autograd.gradcheck(
        lambda *x: solved(step, *x)[1], leaves[:3], eps=1e-6, atol=1e-6, rtol=1e-5
    )


@pytest.mark.slow
def test_second_derivatives_are_those_of_finite_differences():
    step, loss, _, budgets = case((2, 2, 2), shares=(0.7,))
    inputs = [x.clone().requires_grad_() for x in (loss, budgets.costs, budgets.limits)]
    assert torch.autograd.gradgradcheck(
        lambda *x: solved(step, *x)[0], inputs, eps=1e-6, atol=1e-5, rtol=1e-4
    )


def test_transforms_of_torch_func():
    step, loss, t, budgets = case((2, 2, 2), shares=(0.7, 1.2))
    losses = torch.stack([loss, 1.1 * loss])
    each = torch.stack([solved(step, x, budgets.costs, budgets.limits)[0] for x in losses])
    found = vmap(lambda x: solved(step, x, budgets.costs, budgets.limits)[0])(losses)
    torch.testing.assert_close(found, each, rtol=1e-12, atol=0)
    jacobian = jacrev(lambda h: solved(step, loss, budgets.costs, h)[0])(budgets.limits)
    # The expected cost of an active budget moves with its limit.
    moved = (budgets.costs[0, ..., None] * jacobian).sum((0, 1))
    torch.testing.assert_close(moved, tensor([1.0, 0.0]), rtol=0, atol=1e-10)
    names = dict(step.named_parameters())
    again = functional_call(step, names, (loss, t), {"constraints": budgets})
    torch.testing.assert_close(again, each[0], rtol=1e-12, atol=0)


def test_probabilities_are_differentiated():
    step, loss, t, budgets = case((2, 2, 2), shares=(0.7,))
    P = [p.clone().requires_grad_() for p in step.mdp.transitions]

    def spent(*P):
        mdp = step.mdp.with_transitions([p / p.sum(-1, keepdim=True) for p in P])
        return step.solve(loss, t, mdp=mdp, constraints=budgets).q

    assert torch.autograd.gradcheck(spent, P, eps=1e-6, atol=1e-6, rtol=1e-5)


# -- what cannot be had ----------------------------------------------------------------------------


def test_infeasible_budgets_come_with_a_proof():
    step, loss, t, budgets = case(shares=(0.5, 0.5))
    # Costs 0 and 1 add up to 1 in every pair, so together they cost L = 3.
    costs = torch.stack([budgets.costs[0], 1 - budgets.costs[0]])
    limits = (costs * occ.interior_point(step.mdp)).sum((-2, -1)) - 0.01
    with pytest.raises(occ.InfeasibleError, match="no policy meets the budgets") as caught:
        step.solve(loss, t, constraints=occ.Budgets(costs, limits))
    y = caught.value.certificate
    assert bool((y >= 0).all())
    least = occ.game.comparator(step.mdp, (costs * y[:, None, None]).sum(0))
    assert float(least) > float((y * limits).sum())
    found = step.solve(loss, t, constraints=occ.Budgets(costs, limits), check=False)
    assert int(found.status) == occ.Status.INFEASIBLE
    # One element of a batch may be feasible.
    both = torch.stack([limits + 0.1, limits])
    found = step.solve(loss, t, constraints=occ.Budgets(costs, both), check=False)
    assert found.status.tolist() == [occ.Status.CONVERGED, occ.Status.INFEASIBLE]


def test_the_budgets_of_a_step_move_with_it():
    step, loss, t, budgets = case()
    own = occ.FTRLStep(step.mdp, step.regularizer, constraints=budgets)
    assert torch.equal(own(loss, t), step(loss, t, constraints=budgets))
    single = own.to(torch.float32)
    assert single.constraints.costs.dtype == torch.float32
    q = single(loss.float(), t).detach()
    assert float(((budgets.costs.float() * q).sum((-2, -1)) - budgets.limits.float()).max()) < 1e-5


def test_a_warm_start_that_underflowed_is_accepted_with_entropies():
    mdp = occ.LayeredMDP.random(3, 3, 3, seed=0)
    loss = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    budgets = occ.Budgets(loss[None], torch.tensor([1.3], dtype=torch.float64))
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy(), constraints=budgets)
    empty = occ.occupancy(mdp, occ.optimal_policy(mdp, loss).policy)  # has zeros
    torch.testing.assert_close(step(loss, warm_start=empty), step(loss))
