"""Upper occupancy bounds against a linear program over q(s, a, s')."""

import numpy as np
import pytest
import torch
from beliefs import random_belief, random_counts, random_policy
from scipy.optimize import linprog
from zoo import PROBLEMS

import torch_occ as occ
from torch_occ.mdp.occupancy import occupancy
from torch_occ.rivals import beliefs as occupancy_bounds

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


def by_linear_programming(mdp, policy, transitions, widths, target):
    """max of q(target) over q(s, a, s') >= 0 of the policy with transitions in the set.

    Flow: q(s, a) = pi(a | s) inflow(s); bounds: lo q(s, a) <= q(s, a, s') <= hi q(s, a).
    """
    shapes = [tuple(P.shape) for P in transitions]
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    number = lambda k, s, a, n: starts[k] + np.ravel_multi_index((s, a, n), shapes[k])  # noqa: E731
    equal, right, unequal = [], [], []
    for k, shape in enumerate(shapes):
        for s in range(shape[0]):
            for a in range(shape[1]):
                pi = float(policy[mdp.layer_slices[k].start + s, a])
                row = np.zeros(starts[-1])
                row[[number(k, s, a, n) for n in range(shape[2])]] = 1.0
                if k:
                    before = shapes[k - 1]
                    came = [
                        number(k - 1, i, j, s) for i in range(before[0]) for j in range(before[1])
                    ]
                    row[came] -= pi
                equal.append(row)
                right.append(pi * float(mdp.initial[s]) if k == 0 else 0.0)
                for n in range(shape[2]):
                    P, B = float(transitions[k][s, a, n]), float(widths[k][s, a, n])
                    for sign, bound in ((-1, max(0.0, P - B)), (1, min(1.0, P + B))):
                        row = np.zeros(starts[-1])
                        row[[number(k, s, a, i) for i in range(shape[2])]] = -sign * bound
                        row[number(k, s, a, n)] += sign
                        unequal.append(row)
    k = int(mdp.layer[target])
    s = target - mdp.layer_slices[k].start
    goal = np.zeros(starts[-1])
    goal[[number(k, s, a, n) for a in range(shapes[k][1]) for n in range(shapes[k][2])]] = -1.0
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(
        goal, np.array(unequal), np.zeros(len(unequal)), np.array(equal), right, options=options
    )
    assert found.success
    return -found.fun


@pytest.mark.parametrize("seed", range(50))
def test_the_bounds_are_those_of_the_linear_program(seed):
    name = ("practical", "jin_huang_luo", "uob_reps", "bernstein")[seed % 4]
    _, P, B = random_belief(MDP, name, seed, most=(4, 30, 400, 10_000)[seed // 4 % 4])
    policy = random_policy(MDP, seed)
    found = occ.rivals.upper_occupancy(MDP, policy, P, B)
    expected = [by_linear_programming(MDP, policy, P, B, s) for s in range(MDP.num_states)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["masked", "contexts", "layers"])
def test_the_bounds_on_other_layouts(name):
    mdp = PROBLEMS[name]().mdp
    _, P, B = random_belief(mdp, "practical", 3)
    policy = random_policy(mdp, 3)
    found = occ.rivals.upper_occupancy(mdp, policy, P, B)
    expected = [by_linear_programming(mdp, policy, P, B, s) for s in range(mdp.num_states)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["masked", "contexts", "layers"])
def test_without_width_the_bound_is_the_occupancy(name):
    mdp = PROBLEMS[name]().mdp
    policy = random_policy(mdp, 1, (5,))
    u = occ.rivals.upper_occupancy(mdp, policy, mdp.transitions, [0 * P for P in mdp.transitions])
    torch.testing.assert_close(u, occupancy(mdp, policy).sum(-1), rtol=1e-13, atol=0)


def test_the_bound_is_above_the_occupancy_of_every_member():
    """Belief and truth are drawn; the widths are just large enough to hold the truth."""
    _, P, _ = random_belief(MDP, "practical", 7, batch=(40,))
    B = [(mine - true).abs() for mine, true in zip(P, MDP.transitions, strict=True)]
    for seed in range(5):
        policy = random_policy(MDP, seed, (40,))
        u = occ.rivals.upper_occupancy(MDP, policy, P, B)
        assert bool((u >= occupancy(MDP, policy).sum(-1) * (1 - 1e-14)).all())
        assert bool((u <= 1 + 1e-14).all())


def test_batches_and_parts_change_nothing(monkeypatch):
    _, P, B = random_belief(MDP, "practical", 2, batch=(4,))
    policy = random_policy(MDP, 2, (3, 4))
    whole = occ.rivals.upper_occupancy(MDP, policy, P, B)
    assert whole.shape == (3, 4, MDP.num_states)
    for i in range(3):
        for j in range(4):
            one = occ.rivals.upper_occupancy(
                MDP, policy[i, j], [p[j] for p in P], [b[j] for b in B]
            )
            torch.testing.assert_close(one, whole[i, j], rtol=1e-14, atol=0)
    monkeypatch.setattr(occupancy_bounds, "_MOST", 1)
    torch.testing.assert_close(
        occ.rivals.upper_occupancy(MDP, policy, P, B), whole, rtol=1e-14, atol=0
    )


def test_bad_input():
    _, P, B = random_belief(MDP, "practical", 0)
    policy = random_policy(MDP, 0)
    with pytest.raises(ValueError, match=r"widths\[1\]: expected shape"):
        occ.rivals.upper_occupancy(MDP, policy, P, (B[0], B[1][..., :2], B[2]))
    with pytest.raises(ValueError, match=r"policy: expected shape \(\*batch, 7, 3\), got \(3, 7\)"):
        occ.rivals.upper_occupancy(MDP, policy.T, P, B)
    with pytest.raises(ValueError, match="transitions: expected one tensor per layer, 3, got 2"):
        occ.rivals.upper_occupancy(MDP, policy, P[:2], B)
    assert len(random_counts(MDP)) == 3
