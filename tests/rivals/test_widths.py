"""Widths and bonuses, by hand."""

import math

import pytest
import torch
from beliefs import random_belief
from zoo import PROBLEMS

import torch_occ as occ

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
T = 10**5


def by_hand(name, P, m, n, delta):
    """The formulas as they are printed, for one entry."""
    log = math.log(T * 21 / delta)
    if m == 0:
        return 1.0
    if name == "jin_huang_luo":
        return min(1.0, 2 * math.sqrt(P * log / m) + 14 * log / (3 * m))
    if name == "uob_reps":
        less = max(1, m - 1)
        return min(1.0, 2 * math.sqrt(P * log / less) + 14 * log / (3 * less))
    if name == "practical":
        return min(1.0, math.sqrt(P / m) + 1 / m)
    log = math.log(2 * 21 * n * T / delta)
    if m == 1:
        return 1.0
    return min(1.0, math.sqrt(2 * P * (1 - P) * log / m) + 7 * log / (3 * (m - 1)))


@pytest.mark.parametrize("name", ["jin_huang_luo", "uob_reps", "bernstein", "practical"])
@pytest.mark.parametrize("delta", [0.1, 1e-15])
def test_widths_are_the_printed_formulas(name, delta):
    visits = torch.tensor([0.0, 1.0, 2.0, 50.0, 4e3, 1e5, 1e6], dtype=torch.float64)
    visits = visits[:, None].expand(7, 3)
    P = random_belief(MDP, "practical")[1]
    B = occ.rivals.Widths.of(name, MDP, T, delta)(MDP, P, visits)
    below = 0
    for k in range(2):
        for s in range(MDP.layer_sizes[k]):
            for n in range(3):
                row = MDP.layer_slices[k].start + s
                expected = by_hand(name, float(P[k][s, 1, n]), float(visits[row, 1]), 3, delta)
                assert float(B[k][s, 1, n]) == pytest.approx(expected, rel=1e-13)
                below += expected < 1
    assert below or name != "practical"
    assert not bool(B[2].any())  # the terminal state follows surely


def test_the_printed_iota():
    """ln(T^4 S A) = 49 at T = 1e5, S A = 21, delta = T^-3."""
    widths = occ.rivals.Widths.of("jin_huang_luo", MDP, T, T**-3.0)
    assert widths.iota == pytest.approx((4 * math.log(T) + math.log(21),) * 3, rel=1e-14)
    assert widths.iota[0] == pytest.approx(49.1, abs=0.01)
    assert occ.rivals.Widths.of("practical", MDP).iota == (1.0, 1.0, 1.0)


def test_widths_hold_the_true_transitions():
    """Counts of simulated episodes; the union over everything fails in less than delta of runs."""
    delta, failed = 0.2, {"uob_reps": 0, "bernstein": 0}
    kept = []

    class Keep(occ.Callback):
        def on_checkpoint(self, run):
            kept.append((run.learner.transitions(), run.learner.state["epoch_visits"]))

    class Uniform(occ.rivals.CountingLearner):
        def propose_policy(self, t):
            return occ.uniform_policy(self.mdp)[None]

    losses = occ.BernoulliLosses(torch.full((7, 3), 0.5, dtype=torch.float64))
    occ.simulate(MDP, Uniform(MDP, 0.0), losses, 300, range(100), callbacks=[Keep()])
    for name in failed:
        widths = occ.rivals.Widths.of(name, MDP, 300, delta)
        outside = torch.zeros(100, dtype=torch.bool)
        for P, visits in kept:
            B = widths(MDP, P, visits)
            for mine, width, true in zip(P, B, MDP.transitions, strict=True):
                outside |= ((mine - true).abs() > width + 1e-12).flatten(1).any(1)
        failed[name] = int(outside.sum())
    assert all(count <= 100 * delta for count in failed.values()), failed


def test_bonuses_by_hand():
    mdp = PROBLEMS["masked"]().mdp
    B = random_belief(mdp, "practical", 4, most=60)[2]
    L = mdp.horizon
    printed, practical = occ.rivals.Bonus()(mdp, B), occ.rivals.Bonus.practical()(mdp, B)
    for state in range(mdp.num_states):
        k = int(mdp.layer[state])
        for a in range(mdp.num_actions):
            total = float(B[k][state - mdp.layer_slices[k].start, a].sum())
            exists = bool(mdp.actions[state, a])
            assert float(printed[state, a]) == pytest.approx(exists * L * min(1.0, total))
            expected = exists * 0.5 * (L - 1 - k) * min(1.0, 0.5 * total)
            assert float(practical[state, a]) == pytest.approx(expected)
    assert bool(practical.any())


def test_bad_input():
    with pytest.raises(ValueError, match="the widths of uob_reps need the number of episodes"):
        occ.rivals.Widths.of("uob_reps", MDP, delta=0.1)
    with pytest.raises(ValueError, match=r"delta: the widths of bernstein need .* got None"):
        occ.rivals.Widths.of("bernstein", MDP, 100)
    with pytest.raises(ValueError, match="delta"):
        occ.rivals.Widths.of("bernstein", MDP, 100, 1.5)
    with pytest.raises(ValueError, match="widths: expected one of jin_huang_luo"):
        occ.rivals.Widths.of("unknown", MDP)
    _, P, B = random_belief(MDP, "practical")
    with pytest.raises(ValueError, match=r"visits: expected shape \(\*batch, 7, 3\)"):
        occ.rivals.Widths.of("practical", MDP)(MDP, P, torch.zeros(3, 7))
    shorter = occ.LayeredMDP.random(2, 3, 3, seed=0)
    with pytest.raises(ValueError, match="were made for 2 layers, the MDP has 3"):
        occ.rivals.Widths.of("practical", shorter)(MDP, P, torch.zeros(7, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="scale: expected a number of at least 0"):
        occ.rivals.Bonus(scale=-1.0)
    with pytest.raises(ValueError, match="widths: expected one tensor per layer"):
        occ.rivals.Bonus()(MDP, B[:1])
