"""Counterexamples to lines of the paper's proofs that are false as printed.

docs/theory.md lists all of them under "Errata". The ones about a whole statement stand beside the
tests of that statement.
"""

import math

import pytest
import torch
from theory_cases import F64, bandit, fan, one_hot

import torch_occ as occ
from torch_occ import theory

MDP = occ.LayeredMDP.random(3, 2, 3, seed=1)
T = 6


def number(x):
    return torch.tensor(float(x), dtype=F64)


class Run:
    """A run of T + 1 episodes, and every line of the proof of lem:bound_penalty for its first T."""

    def __init__(self, gamma, beta):
        generator, recorder = torch.Generator().manual_seed(3), theory.Recorder()
        mean = torch.rand(MDP.num_states, MDP.num_actions, dtype=F64, generator=generator)
        self.parameters = theory.Parameters(0.6, beta, gamma)
        learner = occ.FTRL(MDP, self.parameters.regularizer(MDP))
        every = range(1, T + 2)
        losses = occ.BernoulliLosses(mean)
        occ.simulate(MDP, learner, losses, T + 1, [5], checkpoints=every, callbacks=[recorder])
        q, estimate = recorder.trajectory
        self.q, self.estimate = q[:, 0], estimate[:, 0]
        self.total = self.estimate.cumsum(0)
        self.psi = self.parameters.regularizer(MDP)

    def regularizer(self, t, q):
        return float(self.psi(q, number(t), MDP).detach())

    def F(self, t, q):
        loss = self.total[t - 2] if t > 1 else torch.zeros_like(q)
        return float((q * loss).sum()) + self.regularizer(t, q)

    def G(self, t, q):
        return float((q * self.total[t - 1]).sum()) + self.regularizer(t, q)

    def hybrid(self, q):
        return float(theory.hybrid(MDP, q, self.parameters.alpha))

    def barrier(self, q):
        return float(theory.log_barrier(MDP, q, self.parameters.beta))

    def rate_step(self, t):
        return float(self.parameters.eta_step(number(t)))

    def line_2(self, u, last):
        """sum_t G_t(q_{t+1}) - F_t(q_t) - <u, estimate_t>, with `last` for q_{T+1}."""
        points = [*self.q[1:T], last]
        values = (self.G(t, points[t - 1]) - self.F(t, self.q[t - 1]) for t in range(1, T + 1))
        return sum(values) - float((u * self.total[T - 1]).sum())

    def line_3(self, u):
        found = -self.F(1, self.q[0])
        found += sum(
            self.G(t - 1, self.q[t - 1]) - self.F(t, self.q[t - 1]) for t in range(2, T + 1)
        )
        return found + self.G(T, u) - float((u * self.total[T - 1]).sum())

    def line_5(self, u, first_weight):
        """The fifth line, in which phi_H(q_1) has the weight `first_weight`."""
        later = sum(self.rate_step(t) * self.hybrid(self.q[t - 1]) for t in range(2, T + 1))
        eta = float(self.parameters.eta(number(T)))
        start = -first_weight * self.hybrid(self.q[0]) - self.barrier(self.q[0])
        return start - later + self.hybrid(u) / eta + self.barrier(u)


def test_bound_penalty_goes_from_its_second_to_its_third_line_with_u_for_the_next_q():
    """Lines 2 and 3 are printed as equal. They are if u stands for q_{T+1} in line 2."""
    run = Run(1.0, beta=0.01)
    u = occ.interior_point(MDP)
    assert run.line_2(u, last=u) == pytest.approx(run.line_3(u), abs=1e-9)
    assert abs(run.line_2(u, last=run.q[T]) - run.line_3(u)) > 1e-3
    # With <= the step is not right either: G_T is least at tilde q_T, not at q_{T+1}.
    step = occ.FTRLStep(MDP, run.psi)
    tilde = theory.tilde(step, run.q[T - 1], run.total[T - 1], float(T))
    assert run.line_2(tilde, last=run.q[T]) > run.line_3(tilde) + 1e-6


@pytest.mark.parametrize("gamma", [0.25, 1.0, 4.0])
def test_bound_penalty_has_the_first_rate_in_its_fourth_line(gamma):
    """The fourth line has phi_H(q_1) for phi_H(q_1) / eta_1, which is right for gamma = 1 only."""
    run = Run(gamma, beta=64.0 * MDP.horizon)
    u = occ.interior_point(MDP)
    assert run.line_5(u, first_weight=1 / gamma) == pytest.approx(run.line_3(u), abs=1e-9)
    gap = abs(run.line_5(u, first_weight=1.0) - run.line_3(u))
    assert gap == pytest.approx(abs(1 / gamma - 1) * -run.hybrid(run.q[0]), abs=1e-9)
    assert (gap > 1) == (gamma != 1)


def test_proper_comparator_has_an_equality_that_is_an_inequality():
    """sum ( sqrt(q_opt(s,a)) + alpha sqrt(q_opt(s) - q_opt(s,a)) ) is less than (1+alpha)|S||A|.

    The proof of the third statement of lem:proper_comparator replaces one by the other with "=".
    """
    mdp, alpha = bandit(2), 0.5
    best = one_hot(mdp, 0)
    assert -float(theory.hybrid(mdp, best, alpha)) == pytest.approx(1 + alpha)
    assert (1 + alpha) * mdp.num_pairs == pytest.approx(2 * (1 + alpha))


def test_what_is_called_order_one_is_not():
    """The end of the proof of lem:key_lemma_ftrl has (1+alpha)|S||A| / (gamma sqrt(T)) = O(1)."""

    def rest(actions, episodes):
        mdp = bandit(actions)
        parameters = theory.Parameters.paper(mdp)
        found = float(theory.lower_order(mdp, parameters, number(episodes)))
        return found - 2 - 64 * actions * math.log(episodes), parameters

    # For a fixed T it grows with the number of pairs ...
    small, large = rest(10, 100)[0], rest(1000, 100)[0]
    assert small == pytest.approx((1 + 10**-0.5) * 10 / 10)
    assert large > 75 * small
    # ... and at T = 1 it is not O(L|S||A| log T) either, for log T = 0.
    assert rest(1000, 1)[0] > 1000
    # From T = 2 on it is, with the constant (1 + alpha) / (gamma sqrt(2) log 2).
    for actions in (2, 10, 1000):
        for episodes in (2, 3, 100, 10**6):
            found, parameters = rest(actions, episodes)
            constant = (1 + parameters.alpha) / (parameters.gamma * math.sqrt(2) * math.log(2))
            assert found <= constant * actions * math.log(episodes) * (1 + 1e-9)


def test_the_stochastic_bound_needs_a_minimal_gap_of_at_most_one():
    """The proof of col:stochastic_bound ends with V <= L|S||A| log T / Delta_min <= U.

    Condition eq:self_bounding_constraint allows any gap function if C is large enough: without
    losses, Delta = 10 and C = 10 T satisfy it for all q_1, ..., q_T. Then V > U.
    """
    mdp, episodes = bandit(2), number(1000)
    best, gap = one_hot(mdp, 0), torch.tensor([[0.0, 10.0]], dtype=F64)
    for share in (0.0, 0.3, 1.0):
        played = 1000 * torch.tensor([[1 - share, share]], dtype=F64)
        condition = theory.self_bounding_condition(number(0), played, gap, best, 10.0 * 1000)
        assert bool(condition.holds)
    V = mdp.horizon * mdp.num_pairs * math.log(1000)
    assert V / float(theory.minimal_gap(mdp, gap, best)) < V
    U = math.log(1000) * (2 + 1 * (1 + 2)) / 10  # L |S| |A| and L^2 (L^3 + |A|), over the gap
    assert 3 * U < V
    # The explicit bound adds V by itself, so it needs no such condition.
    parameters = theory.Parameters.paper(mdp)
    found = float(theory.stochastic_bound(mdp, parameters, gap, best, episodes, 1e4))
    assert found > float(theory.lower_order(mdp, parameters, episodes)) > V


def test_a_factor_z_is_missing_under_the_second_root():
    """The second chain of col:stochastic_bound begins with an equality that needs z = 1."""
    D, kappa, t, gap, q = 2.0, 3.0, 5.0, 0.4, 0.7
    left = kappa * D * math.sqrt(q / t)
    for z in (0.5, 1.0, 4.0):
        printed = math.sqrt(q * gap / z * kappa**2 * D**2 / (t * gap))
        right = math.sqrt(q * gap / z * z * kappa**2 * D**2 / (t * gap))
        assert right == pytest.approx(left)
        assert (printed == pytest.approx(left)) == (z == 1.0)


def test_second_derivatives_within_a_layer_are_not_zero():
    """The proof of lem:hessian_derivaties says that an entry is non-zero only one layer apart."""
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    H = theory.hessian(mdp, occ.interior_point(mdp), 0.7).reshape(3, 2, 3, 2)
    assert mdp.layer.tolist() == [0, 1, 1]
    assert float(H[0, 0, 0, 1]) > 0.1  # (s_0, a) and (s_0, a'), by eq:derivative_2


def test_sqrt_diff_needs_the_transition_to_the_next_state():
    """The proof of lem:sqrt_diff has P(s'|s',a), which is zero, for P(s|s',a')."""
    mdp = fan(2, 3)
    policy, mapping = torch.full((5, 2), 0.5, dtype=F64), one_hot(mdp, 0)
    # At s' = s_0, where q_1 = q_2 = 1, and for the first state s that action 1 leads to:
    s, P = 2, mdp.joint_transitions
    left = float((policy[0] * P[0, :, s]).sum() - P[0, 0, s])
    other = [a for a in range(2) if mapping[0, a] == 0]
    printed = sum(float(policy[0, a] * P[0, a, 0]) for a in other)
    right = sum(float(policy[0, a] * P[0, a, s]) for a in other)
    assert printed == 0 < left <= right + 1e-15
