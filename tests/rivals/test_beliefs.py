"""Counts, epochs, widths and upper occupancy bounds: by hand, and by linear programs."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from zoo import PROBLEMS, Kept, random_loss

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
    """Loops over seeds: m_i stays until a visited pair reaches max(1, 2 m_i)."""
    mdp = PROBLEMS["layers"]().mdp

    class Loop(R.CountingLearner):
        def propose_policy(self, t):
            return occ.uniform_policy(self.mdp)[None]

        def observe(self, t, q, feedback):
            before, new = dict(self.state), self.record(t, feedback)
            counts = beliefs.split_transitions(mdp, self.state["counts"])
            assert torch.equal(torch.cat([m.sum(-1) for m in counts], -2), self.state["visits"])
            empirical = R.empirical_transitions(mdp, counts)
            for i in range(2):
                pairs = list(zip(feedback.states[i], feedback.actions[i], strict=True))
                now, then = self.state["visits"][i], before["epoch_visits"][i]
                assert bool(new[i]) == any(now[s, a] >= max(1, 2 * then[s, a]) for s, a in pairs)
                for s, a in pairs:
                    assert now[s, a] == before["visits"][i, s, a] + 1
                expected = {name: before[name][i] for name in ("epochs", "belief", "epoch_start")}
                if bool(new[i]):
                    expected = {"epochs": expected["epochs"] + 1, "epoch_visits": now}
                    expected["belief"] = beliefs.join_transitions([p[i] for p in empirical])
                    expected["epoch_start"] = torch.tensor(t + 1.0, dtype=now.dtype)
                for name, x in expected.items():
                    assert torch.equal(self.state[name][i], x), name

    losses = occ.BernoulliLosses(random_loss(mdp))
    assert occ.simulate(mdp, Loop(mdp), losses, 200, range(2)).finished


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


@pytest.mark.parametrize("episodes", [2, 10, 60, 400])
@pytest.mark.parametrize("problem", ["dense", "masked", "contexts", "layers"])
def test_upper_occupancy_bounds_are_those_of_the_linear_program(problem, episodes):
    """Losses of 1 add 1 / u(s, a) to the visited pairs, so two runs show u of the last episode."""
    mdp = MDP if problem == "dense" else PROBLEMS[problem]().mdp
    losses, ends = occ.TableLosses(torch.ones(episodes, *mdp.actions.shape).double()), []
    learner = R.UnknownFTRL(mdp, occ.Tsallis(), widths=R.Widths.of("practical", mdp))
    for length in (episodes - 1, episodes):
        kept = Kept()
        history = occ.simulate(mdp, learner, losses, length, callbacks=[kept])
        ends.append({name: x[0] for name, x in kept.learner.state.items()})
    last, now = ends
    policy = occ.policy_of(mdp, history.last_q[0])
    P, B = (beliefs.split_transitions(mdp, last[x]) for x in ("belief", "widths"))
    visited = (now["visits"] - last["visits"]).nonzero().tolist()
    assert len(visited) == mdp.horizon
    for s, a in visited:
        u = 1 / float(now["cumulative_loss"][s, a] - last["cumulative_loss"][s, a])
        expected = float(policy[s, a]) * by_linear_programming(mdp, policy, P, B, s)
        assert u == pytest.approx(expected, rel=1e-7)
