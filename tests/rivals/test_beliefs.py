"""Counts, epochs, widths and upper occupancy bounds: by hand, and by linear programs."""

import math

import numpy as np
import pytest
import rival_oracles as oracles
import torch
from scipy.optimize import linprog
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.rivals import beliefs

R = occ.rivals
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


def random_counts(mdp, seed=0, most=6):
    """Visit counts of pairs that exist, one tensor per layer."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, most, P.shape, generator=generator).double() * mask.unsqueeze(-1)
        for P, mask in zip(mdp.blind().transitions, mdp.split(mdp.actions, 0), strict=True)
    ]


def test_transitions_are_counted_and_epochs_double():
    """Loops over seeds and layers: m_i stays until a visited pair reaches max(1, 2 m_i)."""
    mdp = PROBLEMS["layers"]().mdp
    table = [torch.zeros(2, *shape).double() for shape in beliefs.transition_shapes(mdp)]
    began = {0: [], 1: []}

    class Loop(R.CountingLearner):
        def propose_policy(self, t):
            return occ.uniform_policy(self.mdp)[None]

        def observe(self, t, q, feedback):
            before = {name: value.clone() for name, value in self.state.items()}
            new = self.record(t, feedback)
            for i in range(2):
                pairs = list(zip(feedback.states[i].tolist(), feedback.actions[i], strict=True))
                local = [
                    s - here.start for (s, _), here in zip(pairs, mdp.layer_slices, strict=True)
                ]
                for k, (s, after) in enumerate(zip(local, [*local[1:], 0], strict=True)):
                    table[k][i, s, pairs[k][1], after] += 1
                now, then = self.state["visits"][i], before["epoch_visits"][i]
                assert bool(new[i]) == any(now[s, a] >= max(1, 2 * then[s, a]) for s, a in pairs)
                if bool(new[i]):
                    began[i].append(t + 1)
                    assert torch.equal(self.state["epoch_visits"][i], now)
                    assert float(self.state["epoch_start"][i]) == t + 1
                    empirical = R.empirical_transitions(mdp, [m[i] for m in table])
                    assert all(map(torch.equal, (p[i] for p in self.transitions()), empirical))
                else:
                    for name in ("epoch_visits", "belief", "epochs", "epoch_start"):
                        assert torch.equal(self.state[name][i], before[name][i])
                assert float(self.state["epochs"][i]) == 1 + len(began[i])
            counted = beliefs.split_transitions(mdp, self.state["counts"])
            assert all(map(torch.equal, table, counted))
            visits = torch.cat([layer.sum(-1) for layer in table], -2)
            assert torch.equal(visits, self.state["visits"])

    assert occ.simulate(
        mdp, Loop(mdp), occ.BernoulliLosses(random_loss(mdp)), 200, range(2)
    ).finished
    limit = mdp.num_pairs * (1 + math.log2(200))
    assert all(5 < len(starts) <= limit for starts in began.values())


def test_empirical_transitions_by_hand():
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    m = (
        torch.tensor([[[3.0, 1.0], [0.0, 0.0]]], dtype=torch.float64),
        torch.tensor([[[4.0], [0.0]], [[1.0], [2.0]]], dtype=torch.float64),
    )
    first, last = R.empirical_transitions(mdp, m)
    expected = torch.tensor([[[3.5 / 5, 1.5 / 5], [0.5, 0.5]]], dtype=torch.float64)
    assert torch.equal(first, expected)
    assert torch.equal(last, torch.ones(2, 2, 1, dtype=torch.float64))
    plain, _ = R.empirical_transitions(mdp, m, pseudo_count=0.0)
    assert torch.equal(plain, torch.tensor([[[0.75, 0.25], [0.5, 0.5]]], dtype=torch.float64))
    masked = PROBLEMS["masked"]().mdp
    rows = R.empirical_transitions(masked, random_counts(masked))
    for row, mask in zip(rows, masked.split(masked.actions, 0), strict=True):
        assert not bool(row[~mask].any())


def width_by_hand(name, P, m, T, delta):
    """The formulas as they are printed, for one entry."""
    log = math.log(T * 21 / delta)
    if m == 0:
        return 1.0
    if name == "jin_huang_luo":
        return min(1.0, 2 * math.sqrt(P * log / m) + 14 * log / (3 * m))
    if name == "uob_reps":
        less = max(1, m - 1)
        return min(1.0, 2 * math.sqrt(P * log / less) + 14 * log / (3 * less))
    return min(1.0, math.sqrt(P / m) + 1 / m)


@pytest.mark.parametrize("name", beliefs.SOURCES)
def test_widths_are_printed_and_hold_the_true_transitions(name):
    """The union over everything fails in less than delta of the runs."""
    T, delta, seeds, kept = 3000, 0.2, 40, []
    outside = torch.zeros(seeds, dtype=torch.bool)
    true = beliefs.join_transitions(MDP.transitions)

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            kept[:] = [run.learner.state]
            error = (run.learner.state["belief"] - true).abs()
            outside.logical_or_((error > run.learner.state["widths"] + 1e-12).any(1))

    learner = R.UOBREPS(MDP, T, widths=R.Widths.of(name, MDP, T, delta))
    losses = occ.BernoulliLosses(torch.full((7, 3), 0.5, dtype=torch.float64))
    occ.simulate(MDP, learner, losses, T, range(seeds), callbacks=[Look()])
    assert int(outside.sum()) <= seeds * delta or name == "practical"
    tables = [beliefs.split_transitions(MDP, kept[0][x][0]) for x in ("belief", "widths")]
    visits, below = kept[0]["epoch_visits"][0], 0
    for k in range(2):
        for s, a, n in np.ndindex(MDP.layer_sizes[k], 3, 3):
            m, (P, B) = float(visits[MDP.layer_slices[k].start + s, a]), (x[k] for x in tables)
            expected = width_by_hand(name, float(P[s, a, n]), m, T, delta)
            assert float(B[s, a, n]) == pytest.approx(expected, rel=1e-13)
            below += expected < 1
    assert below
    assert not bool(tables[1][2].any())  # the terminal state follows surely


def by_linear_programming(mdp, policy, transitions, widths, target):
    """max of q(target) over q(s, a, s') >= 0 of the policy with transitions in the set.

    Flow: q(s, a) = pi(a | s) inflow(s); bounds: lo q(s, a) <= q(s, a, s') <= hi q(s, a).
    """
    shapes = [tuple(P.shape) for P in transitions]
    starts = np.concatenate([[0], np.cumsum([np.prod(shape) for shape in shapes])])
    number = [
        first + np.arange(np.prod(shape)).reshape(shape)
        for first, shape in zip(starts[:-1], shapes, strict=True)
    ]
    equal, right, unequal = [], [], []
    for k, shape in enumerate(shapes):
        for s, a in np.ndindex(*shape[:2]):
            pi = float(policy[mdp.layer_slices[k].start + s, a])
            row = np.zeros(starts[-1])
            row[number[k][s, a]] = 1.0
            if k:
                row[number[k - 1][:, :, s]] -= pi
            equal.append(row)
            right.append(pi * float(mdp.initial[s]) if k == 0 else 0.0)
            for n in range(shape[2]):
                P, B = float(transitions[k][s, a, n]), float(widths[k][s, a, n])
                for sign, bound in ((-1, max(0.0, P - B)), (1, min(1.0, P + B))):
                    row = np.zeros(starts[-1])
                    row[number[k][s, a]] = -sign * bound
                    row[number[k][s, a, n]] += sign
                    unequal.append(row)
    k = int(mdp.layer[target])
    goal = np.zeros(starts[-1])
    goal[number[k][target - mdp.layer_slices[k].start]] = -1.0
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    found = linprog(
        goal, np.array(unequal), np.zeros(len(unequal)), np.array(equal), right, options=options
    )
    assert found.success
    return -found.fun


@pytest.mark.parametrize("case", [*range(4), "masked", "contexts", "layers"])
def test_upper_occupancy_bounds_are_those_of_the_linear_program(case):
    """Those of the oracle, with which UOBREPS and UnknownFTRL play the same game."""
    mdp, seed = (MDP, case) if isinstance(case, int) else (PROBLEMS[case]().mdp.to_dense(), 3)
    m = random_counts(mdp, seed, most=(4, 30, 400, 10_000)[seed])
    P, visits = R.empirical_transitions(mdp, m), torch.cat([layer.sum(-1) for layer in m])
    B = oracles.widths_of(R.Widths.of("practical", mdp), mdp, P, visits)
    policy = random_loss(mdp, seed=seed) ** 3 * mdp.actions
    policy = policy / policy.sum(-1, keepdim=True)
    found = oracles.upper_occupancy(mdp, policy, P, B)
    expected = [by_linear_programming(mdp, policy, P, B, s) for s in range(mdp.num_states)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
