import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from theory_cases import F64, bandit, cases, check, one_hot, tightest

import torch_occ as occ
from torch_occ import theory


def number(x: float) -> torch.Tensor:
    return torch.tensor(float(x), dtype=F64)


MDP = occ.LayeredMDP.random(3, 3, 4, seed=0)  # L = 3, |S| = 7, |A| = 4
L, S, A = 3, 7, 4


# -- constants -------------------------------------------------------------------------------------


def test_the_coefficients_by_hand():
    alpha, gamma = 0.3, 2.0
    X, Y, Z = theory.main_general(MDP, theory.Parameters(alpha, 64.0 * L, gamma))
    assert pytest.approx((1 + alpha) / gamma + gamma * L**2 * (math.sqrt(L) + 1 / (alpha * L))) == X
    assert pytest.approx(math.sqrt(L * S) * (1 + alpha * A) / gamma) == Y
    assert pytest.approx(math.sqrt(L * S * A) * ((1 + alpha * math.sqrt(A)) / gamma + gamma)) == Z
    B, D = theory.main(MDP)
    assert pytest.approx(L**2.5 + L * 2) == B
    assert pytest.approx(math.sqrt(L * S * A)) == D


@settings(max_examples=30)
@given(cases())
def test_the_summands(case):
    t = torch.tensor([7.0, 900.0], dtype=F64)
    best = occ.occupancy(case.mdp, case.other)
    J = theory.bounds.summands(case.q, best, case.mapping, t)
    check(theory.cauchy_schwarz(case.mdp, J))
    left_out = case.mapping == 0
    for i in range(2):
        q = case.q[i][left_out[i]]
        assert float(J.J1[i]) == pytest.approx(float(t[i]) ** -0.5)
        assert float(J.J2[i]) == pytest.approx(float((q / t[i]).sqrt().sum()))
        assert float(J.J3[i]) == pytest.approx(
            math.sqrt(float((q + best[i][left_out[i]]).sum() / t[i]))
        )


# -- corollaries -----------------------------------------------------------------------------------


def test_the_explicit_adversarial_bound_is_the_sum_of_its_lemmas():
    """Sum over t of the worst cases of both lemmas, with the weights of lem:key_lemma_ftrl."""
    parameters, T = theory.Parameters(0.4, 64.0 * L, 1.7), 1000
    t = torch.arange(1, T + 1, dtype=F64)
    C1, C2, _, _ = theory.bounds.proof_constants(MDP, parameters)
    penalty = (parameters.eta_step(t).sum() * parameters.gamma) * (C1 * math.sqrt(L * S * A) + C2)
    stability = 8 * parameters.eta(t).sum() * theory.terms.worst_case_stability(MDP)
    rest = 2 * L + 64 * L * S * A * math.log(T) + (1 + 0.4) * S * A / (1.7 * math.sqrt(T))
    found = float(theory.adversarial_bound(MDP, parameters, number(T)))
    assert float(theory.lower_order(MDP, parameters, number(T))) == pytest.approx(rest)
    # Only sum eta_t <= 2 gamma sqrt T was given away.
    assert float(penalty + stability) + rest <= found
    assert found == pytest.approx(float(penalty + stability) + rest, rel=0.02)


def gaps_and_policy():
    mean = torch.tensor([[0.2, 0.5, 0.9]], dtype=F64)
    mdp = bandit(3)
    return mdp, theory.gaps(mdp, mean), occ.optimal_policy(mdp, mean).policy


def test_the_stochastic_bound_by_hand():
    mdp, gap, best = gaps_and_policy()
    T = number(1000)
    assert float(theory.minimal_gap(mdp, gap, best)) == pytest.approx(0.3)
    parameters = theory.Parameters(0.5, 64.0, 1.0)
    X, Y, _ = theory.explicit(mdp, parameters)
    assert pytest.approx(1.5 + 64 * math.e * (1 + 2)) == X
    assert pytest.approx(2 * (1 + 1.5)) == Y
    V = float(theory.lower_order(mdp, parameters, T))
    u = (1 + math.log(1000)) / 2 * (X**2 * (1 / 0.3 + 1 / 0.7) + Y**2 / 0.3)
    for C in (0.0, 50.0):
        # The best z of the proof, by search.
        several = [1 + 10 ** (k / 500) for k in range(-1500, 1500)]
        best_z = min((1.5 * C + z * z * u + z * V) / (z - 1) for z in several)
        found = float(theory.stochastic_bound(mdp, parameters, gap, best, T, C))
        assert found == pytest.approx(best_z, rel=1e-5)


# -- slips -----------------------------------------------------------------------------------------


def test_the_harmonic_sum():
    """Printed: sum 1/t <= 2 log T; the bound has 1 + log T."""
    for T in (1, 2, 3, 10, 1000):
        total = sum(1 / t for t in range(1, T + 1))
        assert (total <= 2 * math.log(T)) == (T > 2)
        assert total <= 1 + math.log(T)


def test_the_square_of_b_needs_a_factor_of_two():
    """The proof of col:stochastic_bound has L^2 (L^3 + A) for B^2: too small, by at most 2."""
    for horizon in (1, 3, 10):
        for actions in (2, 5, 100, 1000):
            B2 = (horizon**2.5 + horizon * actions**0.5) ** 2
            printed = horizon**2 * (horizon**3 + actions)
            assert printed < B2 <= 2 * printed * (1 + 1e-15)


def test_the_gap_as_printed_is_negative_at_the_optimal_action():
    """Q(s,a) - min over a' != a of Q(s,a')."""
    mdp, gap, best = gaps_and_policy()
    Q = occ.optimal_policy(mdp, torch.tensor([[0.2, 0.5, 0.9]], dtype=F64)).Q[0]
    printed = [float(Q[a] - min(Q[b] for b in range(3) if b != a)) for a in range(3)]
    assert printed == pytest.approx([-0.3, 0.3, 0.7])
    assert gap[0].tolist() == pytest.approx([0.0, 0.3, 0.7])
    assert theory.terms.outside(gap, best) == pytest.approx(1.0)


# -- conditions ------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(cases())
def test_stochastic_losses_satisfy_the_condition_with_equality(case):
    mean = torch.rand(case.q.shape, dtype=F64, generator=case.generator)
    check(theory.performance_difference(case.mdp, case.q, mean))
    plan = occ.optimal_policy(case.mdp, mean)
    regret = ((case.q - occ.occupancy(case.mdp, plan.policy)) * mean).sum((-2, -1))
    found = theory.self_bounding_condition(regret, case.q, plan.gaps, plan.policy, 0.0)
    check(found)
    torch.testing.assert_close(found.left, found.right, rtol=1e-9, atol=1e-12)


def test_the_implicit_bound_on_the_optimum_is_tight_when_corruption_just_suffices():
    """Two arms, gap 0.4: 0.2 up and 0.2 down in every episode make both arms optimal."""
    mdp, T = bandit(2), 10
    clean = torch.tensor([[0.3, 0.7]], dtype=F64).expand(T, 1, 2)
    losses = torch.tensor([[0.5, 0.5]], dtype=F64).expand(T, 1, 2)
    C = theory.corruption(mdp, losses, clean)
    assert float(C) == pytest.approx(2 * T * 0.2)
    gap, best = theory.gaps(mdp, clean[0]), occ.optimal_policy(mdp, clean[0]).policy
    found = theory.opt_implicit_bound(mdp, one_hot(mdp, 1), gap, best, T, C)
    check(found)
    assert tightest(found) == pytest.approx(1.0)
    assert not bool(theory.opt_implicit_bound(mdp, one_hot(mdp, 1), gap, best, T, C - 0.1).holds)


# -- tuning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1, 2), (3, 3, 3), (5, 2, 50), (20, 3, 2)])
def test_the_tuning_is_the_minimum(size):
    mdp = occ.LayeredMDP.random(*size)
    found, f = theory.tune_stochastic(mdp), theory.bounds.tuning_objective
    assert found.value == pytest.approx(f(mdp, found.alpha, found.gamma))
    near = [1 - 1e-4, 1.0, 1 + 1e-4]
    nearby = [f(mdp, found.alpha * x, found.gamma * y) for x in near for y in near]
    assert min(nearby) >= found.value * (1 - 1e-12)
    grid = [
        f(mdp, 10 ** (i / 40), 10 ** (j / 40)) for i in range(-160, 80) for j in range(-120, 80)
    ]
    assert found.value <= min(grid) <= found.value * 1.01
    # Better than the parameters of thm:main, and worse against an adversary.
    assert found.value < f(mdp, mdp.num_actions**-0.5, 1.0)
    tuned = theory.main_general(mdp, theory.Parameters(found.alpha, 1.0, found.gamma))
    assert tuned.Z > theory.main_general(mdp, theory.Parameters.paper(mdp)).Z or mdp.horizon == 1


def test_the_tuning_has_the_printed_order():
    """The exact minimum is 2 to 4.6 times the printed order, over five orders of magnitude."""
    ratios = []
    for L, A in itertools.product((1, 3, 30, 300), (2, 30, 1000)):
        S = 1 + 3 * (L - 1)
        mdp = SimpleNamespace(horizon=L, num_states=S, num_actions=A, num_pairs=S * A)
        order = math.sqrt(A) * L + L**1.5 + A + A**0.75 * math.sqrt(L)
        printed = S * math.sqrt(A) * L**1.5 * order
        ratios.append(theory.tune_stochastic(mdp).value / printed)
    assert min(ratios) > 2
    assert max(ratios) < 4.6


# -- parameters ------------------------------------------------------------------------------------


def test_parameters_of_a_learner():
    mdp = occ.LayeredMDP.random(2, 2, 2)
    mine = theory.Parameters.of(occ.FTRL(mdp, occ.jin_luo(mdp, 0.3, 2.0, 0.5)))
    assert mine == theory.Parameters(0.3, 2.0, 0.5)
    assert theory.Parameters.of(occ.FTRL(mdp, occ.jin_luo(mdp))) == theory.Parameters.paper(mdp)
