import itertools
import math

import pytest
import torch
from theory_cases import F64, bandit, check, masked, one_hot, tightest

import torch_occ as occ
from experiments.statements import draw_mapping, draw_policy
from torch_occ import theory


def test_with_masks_several_start_states_and_states_of_one_action():
    """A state of one action is read as c = infinity; with c = 0 the second step would be false."""
    mdp, generator = masked(), torch.Generator().manual_seed(0)
    for _ in range(20):
        mapping, q = draw_mapping(mdp, generator), occ.occupancy(mdp, draw_policy(mdp, generator))
        mean = torch.rand(q.shape, dtype=F64, generator=generator)
        check(*theory.layer_recursion(mdp, q, mapping, 0.6))
        check(theory.stability_second_step(mdp, q, mapping, 0.6))
        check(*theory.bound_on_stability(mdp, q, mapping, 0.6, mean, mean))
    corridor = occ.LayeredMDP.random(3, 1, 1)
    q = occ.interior_point(corridor)
    found = theory.stability_second_step(corridor, q, torch.ones(3, 1, dtype=F64), 0.6)
    assert float(found.left) == float(found.right) == 0.0  # no choice, no regret
    # The reading c = 0 would put sum D^-1 / q on the left.
    assert float(4 * q.sqrt().sum()) > 0


# -- the expected norm -----------------------------------------------------------------------------


@pytest.mark.parametrize("mdp", [occ.LayeredMDP.random(3, 2, 2, seed=4), masked()])
def test_the_expected_norm_by_enumeration(mdp):
    """Every trajectory and every outcome of the coins, one by one."""
    generator, actions = torch.Generator().manual_seed(2), range(mdp.num_actions)
    policy = draw_policy(mdp, generator)
    q = occ.occupancy(mdp, policy)
    mean = torch.rand(q.shape, dtype=F64, generator=generator) * mdp.actions
    inverse = theory.inverse_hessian(mdp, theory.curvatures.curvature(mdp, q, 0.7))
    layers = [list(itertools.product(range(x.start, x.stop), actions)) for x in mdp.layer_slices]
    estimates, weights = [], []
    for pairs in itertools.product(*layers):
        chance = float(mdp.initial[pairs[0][0]]) * math.prod(float(policy[x]) for x in pairs)
        for (s, a), (after, _) in itertools.pairwise(pairs):
            chance *= float(mdp.joint_transitions[s, a, after])
        if chance == 0:
            continue
        for coins in itertools.product((0.0, 1.0), repeat=3):
            estimates.append(torch.zeros_like(q))
            weights.append(chance)
            for pair, coin in zip(pairs, coins, strict=True):
                estimates[-1][pair] = coin / q[pair]
                weights[-1] *= float(mean[pair]) if coin else 1 - float(mean[pair])
    norms = theory.norm(inverse, torch.stack(estimates))
    found = theory.expected_norm(mdp, q, inverse, mean, mean)
    expected = float(norms @ torch.tensor(weights, dtype=F64))
    assert float(found) == pytest.approx(expected, rel=1e-11)


# -- slips and tightness ---------------------------------------------------------------------------


def test_the_first_step_needs_its_square():
    """lem:stability_first_step as printed, E |estimate| <= L sum N / q, is false here."""
    mdp, alpha = bandit(2), 100.0
    q, loss = torch.full((1, 2), 0.5, dtype=F64), torch.ones(1, 2, dtype=F64)
    inverse = theory.inverse_hessian(mdp, theory.curvatures.curvature(mdp, q, alpha))
    # After the first action and after the second, each with probability 1/2.
    estimates = torch.diag_embed(loss / q).view(2, 1, 2)
    printed = float((0.5 * theory.norm(inverse, estimates).sqrt()).sum())
    right = theory.stability_first_step(mdp, q, alpha, loss, loss)
    check(right)
    assert printed == pytest.approx(0.2366, abs=1e-4)
    assert float(right.right) == pytest.approx(0.0560, abs=1e-4)
    assert printed > float(right.right)


def test_eq_r0_loses_a_factor_2_and_the_second_step_e_more():
    arms, rare = bandit(1000), torch.full((1, 1000), 1e-3, dtype=F64)
    first, _, _ = theory.layer_recursion(arms, rare, one_hot(arms, 0), 100.0)
    assert 0.49 < tightest(first) < 0.5
    second = theory.stability_second_step(arms, rare, one_hot(arms, 0), 100.0)
    assert tightest(second) == pytest.approx(tightest(first) / math.e)
