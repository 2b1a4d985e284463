"""Counts, widths, bonuses and upper occupancy bounds: by hand, and by linear programs."""

import math

import numpy as np
import pytest
import torch
from beliefs import random_belief, random_counts, random_policy, visits_of
from scipy.optimize import linprog
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import occupancy, policy_of
from torch_occ.rivals import beliefs

R, T = occ.rivals, 10**5
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
LAYOUTS = ("masked", "contexts", "layers")


class Uniform(R.CountingLearner):
    """A user's learner."""

    def propose_policy(self, t):
        return occ.uniform_policy(self.mdp)[None]


# -- counts and epochs -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_flat_tables_and_layers_are_inverse(name):
    mdp = PROBLEMS[name]().mdp
    table = random_counts(mdp, (3, 2))
    flat = beliefs.join_transitions(table)
    assert flat.shape == (3, 2, beliefs.num_transitions(mdp))
    assert all(map(torch.equal, beliefs.split_transitions(mdp, flat), table))
    assert [layer.shape[-3:] for layer in table] == [p.shape[-3:] for p in mdp.transitions]


def test_transitions_are_counted_and_epochs_double():
    """Loops over seeds and layers: m_i stays until a visited pair reaches max(1, 2 m_i)."""
    mdp = PROBLEMS["layers"]().mdp
    table = [torch.zeros(2, *shape).double() for shape in beliefs.transition_shapes(mdp)]
    began = {0: [], 1: []}

    class Loop(Uniform):
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
            assert all(map(torch.equal, table, self.counted()))
            assert torch.equal(visits_of(mdp, table), self.state["visits"])

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


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_empirical_transitions_are_transitions(kappa):
    mdp = PROBLEMS["masked"]().mdp
    rows = R.empirical_transitions(mdp, random_counts(mdp, (7,)), pseudo_count=kappa)
    checked = occ.LayeredMDP(rows, actions=mdp.actions, initial=mdp.initial)  # validates them
    if kappa:
        assert bool(checked.reachable.all())
    for row, mask in zip(rows, mdp.split(mdp.actions, 0), strict=True):
        assert not bool(row[:, ~mask].any())


# -- widths and bonuses ----------------------------------------------------------------------------


def width_by_hand(name, P, m, n, delta):
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


@pytest.mark.parametrize("name", beliefs.SOURCES)
@pytest.mark.parametrize("delta", [0.1, 1e-15])
def test_widths_are_the_printed_formulas(name, delta):
    visits = torch.tensor([0.0, 1.0, 2.0, 50.0, 4e3, 1e5, 1e6], dtype=torch.float64)
    visits = visits[:, None].expand(7, 3)
    P = random_belief(MDP, "practical")[1]
    B = R.Widths.of(name, MDP, T, delta)(MDP, P, visits)
    below = 0
    for k in range(2):
        for s in range(MDP.layer_sizes[k]):
            for n in range(3):
                m = float(visits[MDP.layer_slices[k].start + s, 1])
                expected = width_by_hand(name, float(P[k][s, 1, n]), m, 3, delta)
                assert float(B[k][s, 1, n]) == pytest.approx(expected, rel=1e-13)
                below += expected < 1
    assert below or name != "practical"
    assert not bool(B[2].any())  # the terminal state follows surely


def test_widths_hold_the_true_transitions():
    """Counts of simulated episodes; the union over everything fails in less than delta of runs."""
    delta, failed, kept = 0.2, {"uob_reps": 0, "bernstein": 0}, []

    class Keep(occ.Callback):
        def on_checkpoint(self, run):
            kept.append((run.learner.transitions(), run.learner.state["epoch_visits"]))

    losses = occ.BernoulliLosses(torch.full((7, 3), 0.5, dtype=torch.float64))
    occ.simulate(MDP, Uniform(MDP, 0.0), losses, 300, range(100), callbacks=[Keep()])
    for name in failed:
        widths, outside = R.Widths.of(name, MDP, 300, delta), torch.zeros(100, dtype=torch.bool)
        for P, visits in kept:
            for mine, width, true in zip(P, widths(MDP, P, visits), MDP.transitions, strict=True):
                outside |= ((mine - true).abs() > width + 1e-12).flatten(1).any(1)
        failed[name] = int(outside.sum())
    assert all(count <= 100 * delta for count in failed.values()), failed


def test_bonuses_by_hand():
    mdp = PROBLEMS["masked"]().mdp
    B = random_belief(mdp, "practical", 4, most=60)[2]
    L = mdp.horizon
    printed, practical = R.Bonus()(mdp, B), R.Bonus.practical()(mdp, B)
    for state in range(mdp.num_states):
        k = int(mdp.layer[state])
        for a in range(mdp.num_actions):
            total = float(B[k][state - mdp.layer_slices[k].start, a].sum())
            exists = bool(mdp.actions[state, a])
            assert float(printed[state, a]) == pytest.approx(exists * L * min(1.0, total))
            expected = exists * 0.5 * (L - 1 - k) * min(1.0, 0.5 * total)
            assert float(practical[state, a]) == pytest.approx(expected)
    assert bool(practical.any())


# -- upper occupancy bounds ------------------------------------------------------------------------


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


@pytest.mark.parametrize("case", [*range(16), *LAYOUTS])
def test_the_bounds_are_those_of_the_linear_program(case):
    mdp, seed = (MDP, case) if isinstance(case, int) else (PROBLEMS[case]().mdp, 3)
    _, P, B = random_belief(
        mdp, [*beliefs.SOURCES][seed % 4], seed, most=(4, 30, 400, 10_000)[seed // 4 % 4]
    )
    policy = random_policy(mdp, seed)
    found = R.upper_occupancy(mdp, policy, P, B)
    expected = [by_linear_programming(mdp, policy, P, B, s) for s in range(mdp.num_states)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_width_the_bound_is_the_occupancy(name):
    mdp = PROBLEMS[name]().mdp
    policy = random_policy(mdp, 1, (5,))
    u = R.upper_occupancy(mdp, policy, mdp.transitions, [0 * P for P in mdp.transitions])
    torch.testing.assert_close(u, occupancy(mdp, policy).sum(-1), rtol=1e-13, atol=0)


def test_the_bound_is_above_the_occupancy_of_every_member():
    """Belief and truth are drawn; the widths are just large enough to hold the truth."""
    _, P, _ = random_belief(MDP, "practical", 7, batch=(40,))
    B = [(mine - true).abs() for mine, true in zip(P, MDP.transitions, strict=True)]
    for seed in range(5):
        policy = random_policy(MDP, seed, (40,))
        u = R.upper_occupancy(MDP, policy, P, B)
        assert bool((u >= occupancy(MDP, policy).sum(-1) * (1 - 1e-14)).all())
        assert bool((u <= 1 + 1e-14).all())


def test_an_element_of_a_batch_has_its_own_bound():
    _, P, B = random_belief(MDP, "practical", 2, batch=(4,))
    policy = random_policy(MDP, 2, (3, 4))
    whole = R.upper_occupancy(MDP, policy, P, B)
    assert whole.shape == (3, 4, MDP.num_states)
    for i, j in np.ndindex(3, 4):
        one = R.upper_occupancy(MDP, policy[i, j], [p[j] for p in P], [b[j] for b in B])
        assert torch.equal(one, whole[i, j])


# -- numbers about a belief ------------------------------------------------------------------------


def test_monitored_numbers_by_hand():
    mdp = PROBLEMS["masked"]().mdp
    losses, kept = occ.BernoulliLosses(random_loss(mdp)), Kept()
    learner = R.UnknownFTRL.practical(mdp)
    history = occ.simulate(mdp, learner, losses, 30, range(3), callbacks=[kept])
    learner, q = kept.learner, history.last_q
    found = learner.monitor(mdp, q)
    errors, played, held = [], 0.0, torch.ones(3, dtype=torch.bool)
    for k in range(mdp.horizon - 1):
        here = mdp.layer_slices[k]
        error = (learner.transitions()[k] - mdp.transitions[k]).abs()
        held &= (error <= learner.confidence()[k]).flatten(1).all(1)
        errors.append(error.sum(-1)[:, mdp.actions[here]].flatten())
        played += float((q[:, here] * error.sum(-1)).sum()) / 3 / (mdp.horizon - 1)
    u = R.upper_occupancy(mdp, policy_of(mdp, q), learner.transitions(), learner.confidence())
    expected = {
        "epochs": float(learner.state["epochs"].mean()),
        "l1_error": float(torch.cat(errors).mean()),
        "l1_error_played": played,
        "coverage": float(held.double().mean()),
        "bonus": float(learner.state["bonus"][:, mdp.actions].mean()),
        "upper_bound": float(u.mean()),
        "occupancy": mdp.horizon / mdp.num_states,
    }
    assert found == pytest.approx(expected)


def test_learners_without_a_belief_have_no_numbers():
    mdp = PROBLEMS["layers"]().mdp
    assert occ.FixedPolicy(mdp).monitor(mdp, occ.interior_point(mdp)[None]) == {}
    plug_in = R.UnknownFTRL(mdp, occ.jin_luo(mdp))
    plug_in.start(2)
    q = occ.interior_point(mdp).expand(2, -1, -1)
    assert set(plug_in.monitor(mdp, q)) == {"epochs", "l1_error", "l1_error_played"}
    assert set(plug_in.monitor(mdp.to_sparse(), q)) > {"epochs"}
    bandit = occ.LayeredMDP([torch.ones(1, 3, 1, dtype=torch.float64)])
    one_layer = R.UnknownFTRL(bandit, occ.jin_luo(bandit))
    one_layer.start(1)
    assert one_layer.monitor(bandit, occ.interior_point(bandit)[None]) == {"epochs": 1.0}


def test_tensorboard_shows_the_belief(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    mdp = PROBLEMS["layers"]().mdp
    losses, board = occ.BernoulliLosses(random_loss(mdp)), occ.TensorBoard(tmp_path)
    occ.simulate(mdp, R.UnknownFTRL.practical(mdp), losses, 200, range(2), callbacks=[board])
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("belief/")}
    names = ("epochs", "l1_error", "l1_error_played", "coverage", "bonus", "upper_bound")
    assert tags == {f"belief/{name}" for name in (*names, "occupancy")}
    points = [event.value for event in events.Scalars("belief/l1_error_played")]
    assert points[-1] < points[0]
