import pytest
import torch
from hypothesis import given, settings
from theory_cases import F64, bandit, cases, check, fan, masked, one_hot, tightest

import torch_occ as occ
from experiments.statements import draw_mapping, draw_policy
from torch_occ import theory


@settings(max_examples=30)
@given(cases(smallest_horizon=2))
def test_the_induction_lemma(case):
    """The condition implies the conclusion; the largest such f has equality in both."""
    g = case.q * torch.rand(case.q.shape, dtype=F64, generator=case.generator)
    most = theory.induction_equality(case.mdp, case.policy, g)
    for share in (1.0, 0.4):
        condition, conclusion = theory.induction(case.mdp, case.policy, share * most, g)
        check(condition, conclusion)
    condition, conclusion = theory.induction(case.mdp, case.policy, most, g)
    torch.testing.assert_close(conclusion.left, conclusion.right, rtol=1e-12, atol=1e-300)
    # An f that breaks the condition at one state of the second layer breaks the conclusion there.
    wrong = most.clone()
    wrong[:, 1] = 1.01 * wrong[:, 1] + 1e-3
    condition, conclusion = theory.induction(case.mdp, case.policy, wrong, g)
    assert not bool(condition.holds[:, 1].any() | conclusion.holds[:, 1].any())


def test_with_masks_several_start_states_and_states_of_one_action():
    mdp, generator = masked(), torch.Generator().manual_seed(0)
    for _ in range(20):
        policy = draw_policy(mdp, generator)
        mapping, other = draw_mapping(mdp, generator), draw_mapping(mdp, generator)
        q = occ.occupancy(mdp, policy)
        check(*theory.state_reach_probability(mdp, policy))
        check(*theory.sqrt_diff(mdp, policy, mapping), *theory.sqrt_diff_2(mdp, mapping, other))
        check(
            theory.penalty_decomposition(mdp, q, other, 0.6),
            theory.penalty_term_1(mdp, policy, other, mapping, 0.6),
        )
        check(theory.bound_on_penalty(mdp, q, other, mapping, 0.6))


# -- reachability ----------------------------------------------------------------------------------


def test_reachability_as_it_is_defined():
    """eq:reachability, case by case."""
    mdp = occ.LayeredMDP.random(4, 2, 2, seed=5)
    policy = draw_policy(mdp, torch.Generator().manual_seed(0))
    P, k = mdp.joint_transitions, mdp.layer.tolist()

    def p(s2, s, a):
        if k[s2] <= k[s]:
            return 0.0
        if k[s2] == k[s] + 1:
            return float(P[s, a, s2])
        middle = [m for m in range(7) if k[m] == k[s2] - 1]
        return sum(
            p(m, s, a) * sum(float(policy[m, b] * P[m, b, s2]) for b in range(2)) for m in middle
        )

    found = theory.reach(mdp, policy)
    for s in range(7):
        for a in range(2):
            assert found[s, a].tolist() == pytest.approx(
                [p(s2, s, a) for s2 in range(7)], rel=1e-13
            )


def test_the_second_sum_of_the_reachability_lemma_is_over_the_states_reached():
    """lem:state_reach_probabilty prints sum over s of p(s'|s,a) <= L.

    A wide layer leads into a single last state, which has 6 > 3.
    """
    wide = torch.full((1, 2, 5), 0.2, dtype=F64)
    mdp = occ.LayeredMDP([wide, torch.ones(5, 2, 1, dtype=F64), torch.ones(1, 2, 1, dtype=F64)])
    reached = theory.reach(mdp, occ.uniform_policy(mdp))
    assert float(reached[:, 0, -1].sum()) == pytest.approx(6.0)
    layer, every = theory.state_reach_probability(mdp, occ.uniform_policy(mdp))
    check(layer, every)
    assert tightest(layer) == pytest.approx(1.0)  # every layer ahead is reached for certain
    # L - 1 layers come after the first: how far from tight the lemma always is
    assert float(every.left) == pytest.approx(2.0)
    assert float(every.right) == 3.0


# -- how tight -------------------------------------------------------------------------------------


def test_where_the_lemmas_are_nearly_tight():
    """lem:sqrt_diff on a fan, and lem:key_lemma_bound_penalty with many rare actions."""
    mdp = fan(horizon=20, width=60)
    policy = one_hot(mdp, 0)
    policy[0] = torch.tensor([1 - 1e-6, 1e-6], dtype=F64)
    key, first = theory.sqrt_diff(mdp, policy, one_hot(mdp, 0))
    assert float(key.ratio[2]) == pytest.approx(1.0)  # in the states that only pi_1 reaches
    assert 0.95 < tightest(first) < 1
    mdp = bandit(1000)
    policy, mapping = torch.full((1, 1000), 1e-12, dtype=F64), one_hot(mdp, 0)
    policy[0, 0] = 1 - policy[0, 1:].sum()
    q = occ.occupancy(mdp, policy)
    assert 0.93 < tightest(theory.bound_on_penalty(mdp, q, mapping, mapping, 1e-9)) < 1
