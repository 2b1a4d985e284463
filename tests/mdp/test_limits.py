"""The Graves-Lai constant: closed forms, an independent twin, corners and bad input."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, linprog
from zoo import random_loss

import torch_occ as occ
from experiments.distance_to_limit import few_successors
from torch_occ.limits import excursions_of

BANDIT = occ.LayeredMDP.random(1, 1, 4)


def kl(p, q):
    return sum(x * math.log(x / y) for x, y in ((p, q), (1 - p, 1 - q)) if x > 0)


def row(*means):
    return torch.tensor([means], dtype=torch.float64)


def closed_form(mdp, mean, visited=None):
    """sum gap / kl(mean, mean - gap) over the pairs of visited states."""
    gaps, total = occ.optimal_policy(mdp, mean).gaps, 0.0
    for s, a in mdp.actions.nonzero().tolist():
        gap, m = float(gaps[s, a]), float(mean[s, a])
        if 1e-9 < gap < m and (visited is None or visited[s]):
            total += gap / kl(m, m - gap)
    return total


# -- the constant ----------------------------------------------------------------------------------


def test_one_state_is_the_bound_of_lai_and_robbins():
    found = occ.limits.lower_bound(BANDIT, row(0.3, 0.5, 0.45, 0.9))
    terms = {1: 0.2 / kl(0.5, 0.3), 2: 0.15 / kl(0.45, 0.3), 3: 0.6 / kl(0.9, 0.3)}
    assert found.value == found.upper == pytest.approx(sum(terms.values()), rel=1e-14)
    assert (found.exact, found.rounds, found.method) == (True, 0, "closed form")
    visits = [0.0, 1 / kl(0.5, 0.3), 1 / kl(0.45, 0.3), 1 / kl(0.9, 0.3)]
    torch.testing.assert_close(found.allocation, row(*visits))


@pytest.mark.parametrize("shape", [(3, 3, 3), (12, 20, 6)])
def test_the_closed_form_where_optimal_policies_visit_every_state(shape):
    mdp = occ.LayeredMDP.random(*shape, seed=1)
    mean = 0.1 + 0.8 * random_loss(mdp)
    found = occ.limits.lower_bound(mdp, mean)
    # kl of this file loses digits where gaps are small.
    assert found.value == pytest.approx(closed_form(mdp, mean), rel=1e-9)
    assert found.method == "closed form"


def information(n, policy_q, mean, cost, support):
    """The least information about tables for which a policy is as good as the optimal one, and one.

    Independent of the package: all pairs at once. n: observations; cost: that of the
    optimal policy; support: pairs that the optimal policy plays.
    """
    free = np.flatnonzero((policy_q > 0) & ~support)
    best = float(policy_q @ mean) - cost  # how much must be gained
    if best < 1e-12 or policy_q[free] @ mean[free] <= best:
        return math.inf, None
    m, weight, n = mean[free], policy_q[free], n[free]

    def lowered(price):
        """Where n kl'(m, x) = price * weight: a root of a quadratic."""
        c = math.exp(price) * weight / n
        return 2 * m / (1 + c + np.sqrt((1 + c) ** 2 - 4 * c * m))

    x = lowered(brentq(lambda price: weight @ (m - lowered(price)) - best, -60, 60, xtol=1e-13))
    table = np.zeros(len(mean))
    table[free] = m * np.log(m / x) + (1 - m) * np.log((1 - m) / (1 - x))
    return n @ table[free], table


def twin(mdp, mean, rounds=25):
    """The constant from all deterministic policies of the whole MDP."""
    S, A = mean.shape
    m, plan = mean.flatten().numpy(), occ.optimal_policy(mdp, mean)
    support = (occ.occupancy(mdp, plan.policy) > 0).flatten().numpy()
    cost = float(occ.occupancy(mdp, plan.policy).flatten().numpy() @ m)
    choices = torch.tensor(list(itertools.product(range(A), repeat=S)))
    every = occ.occupancy(mdp, torch.nn.functional.one_hot(choices, A).to(mean.dtype))
    every = np.unique(every.flatten(1).numpy().round(14), axis=0)
    # n = sum over policies of eta * q, so the program is over eta and the cost is eta * regret.
    regrets = np.maximum(every @ m - cost, 0.0)
    n, cuts, value = np.full(S * A, 1.0), [], 0.0
    for _ in range(rounds):
        found = [information(np.maximum(n, 1e-6), q, m, cost, support) for q in every]
        least = min(value for value, _ in found)
        if cuts and least > 1 - 1e-6:
            return value
        scale = 0.99 if cuts else math.inf
        cuts += [table for x, table in found if x < max(1.0, least / scale) and table is not None]
        solved = linprog(regrets, A_ub=-np.array(cuts) @ every.T, b_ub=-np.ones(len(cuts)))
        value, n = solved.fun, solved.x @ every
    raise AssertionError(f"the twin did not converge: least information {least}")


@pytest.mark.parametrize(
    "world", [(3, 2, 2, 1, 0), (3, 2, 2, 1, 5), (3, 3, 2, 1, 4), (3, 3, 2, 2, 3)]
)
def test_an_independent_program_over_all_policies_agrees(world):
    mdp, mean = few_successors(*world)
    assert len(excursions_of(mdp, mean).onward) > 0
    assert occ.limits.lower_bound(mdp, mean).value == pytest.approx(twin(mdp, mean), rel=2e-4)


@pytest.mark.parametrize("successors", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_bounds_meet_and_the_allocation_satisfies_every_constraint(successors, seed):
    mdp, mean = few_successors(3, 3, 3, successors, seed)
    found = occ.limits.lower_bound(mdp, mean)
    assert found.exact
    assert found.value <= found.upper <= (1 + 1e-5) * found.value
    gaps = occ.optimal_policy(mdp, mean).gaps
    assert float((gaps * found.allocation).sum()) == pytest.approx(found.upper, rel=1e-12)
    q = occ.occupancy(mdp, occ.optimal_policy(mdp, mean).policy)
    assert bool((found.allocation[q > 0] == 0).all())
    hidden = q.sum(-1) == 0
    flow = found.allocation.sum(-1) - torch.einsum(
        "sa,sat->t", found.allocation, mdp.joint_transitions
    )
    # Free visits also lead to visited states, so only hidden ones have a balance.
    assert float(flow[hidden].abs().max() if bool(hidden.any()) else 0.0) < 1e-9 * found.upper
    # More states must be explored than those that the optimal policy visits.
    assert found.value >= (1 - 1e-5) * closed_form(mdp, mean, ~hidden)


def test_a_short_search_still_brackets_the_constant():
    mdp, mean = few_successors(5, 5, 4, 1, 0)
    short, whole = (
        occ.limits.lower_bound(mdp, mean, budget=30, max_rounds=4),
        occ.limits.lower_bound(mdp, mean),
    )
    assert whole.exact
    assert not short.exact
    assert 0 < short.value < whole.value < short.upper
    assert "cut short" in str(short)
    assert str(whole).startswith(f"C = {whole.value:.6g} (cutting planes, ")


# -- corners ---------------------------------------------------------------------------------------


def test_a_gap_larger_than_the_mean_costs_nothing():
    """Its loss cannot be lower by the gap: action 1 leads to a state that is bad for certain."""
    layers = [torch.eye(2, dtype=torch.float64)[None], torch.ones(2, 2, 1, dtype=torch.float64)]
    mdp = occ.LayeredMDP(layers, actions=torch.tensor([[True, True], [True, False], [True, False]]))
    mean = torch.tensor([[0.5, 0.1], [0.2, 0.0], [0.9, 0.0]], dtype=torch.float64)
    # Confusing tables lower (0, 1) and the hidden state (2, 0) together by the gap 0.3.
    found = occ.limits.lower_bound(mdp, mean)
    assert found.exact
    assert found.value > 0
    # With a sure loss of 1 that no table lowers enough, nothing has to be explored.
    sure = mean.clone()
    sure[1, 0], sure[0, 0], sure[2, 0] = 0.0, 0.0, 0.0
    sure[0, 1] = 0.4
    assert occ.limits.lower_bound(mdp, sure).value == 0.0


def test_tied_actions_are_all_free():
    assert occ.limits.lower_bound(BANDIT, row(0.4, 0.4, 0.6, 0.4)).value == pytest.approx(
        0.2 / kl(0.6, 0.4)
    )
    assert occ.limits.lower_bound(BANDIT, row(0.4, 0.4, 0.4, 0.4)).value == 0.0
    # Two optimal actions lead to both states of a layer, so no state is hidden.
    layers = [torch.eye(2, dtype=torch.float64)[None], torch.ones(2, 2, 1, dtype=torch.float64)]
    mdp = occ.LayeredMDP(layers)
    mean = torch.tensor([[0.5, 0.4], [0.2, 0.5], [0.3, 0.7]], dtype=torch.float64)
    found = occ.limits.lower_bound(mdp, mean)
    assert found.value == pytest.approx(0.3 / kl(0.5, 0.2) + 0.4 / kl(0.7, 0.3), rel=1e-12)
    # An action that is worse by a hair hides its state, and costs what such a gap costs.
    mean[0, 1] += 1e-4
    apart = occ.limits.lower_bound(mdp, mean)
    assert apart.exact
    assert apart.value > 1000


def test_unreachable_states_and_masked_actions_play_no_part():
    mdp, mean = few_successors(3, 3, 3, 1, 1)
    value = occ.limits.lower_bound(mdp, mean).value
    pruned = mdp.prune()
    rest = mean[mdp.reachable]
    assert occ.limits.lower_bound(pruned, rest).value == pytest.approx(value, rel=1e-6)
    nonsense = torch.where(mdp.reachable[:, None], mean, torch.nan)
    assert occ.limits.lower_bound(mdp, nonsense).value == pytest.approx(value, rel=1e-12)
    # A fourth action that no state has.
    wide = occ.LayeredMDP(
        [torch.cat([p, p[:, :1]], 1) for p in mdp.transitions],
        actions=torch.tensor([True, True, True, False]).expand(mdp.num_states, 4),
    )
    masked = torch.cat([mean, torch.full((mdp.num_states, 1), torch.nan)], 1)
    found = occ.limits.lower_bound(wide, masked)
    assert found.value == pytest.approx(value, rel=1e-5)
    assert bool((found.allocation[:, 3] == 0).all())
    assert occ.limits.lower_bound(mdp.to_sparse(), mean).value == pytest.approx(value, rel=1e-6)
