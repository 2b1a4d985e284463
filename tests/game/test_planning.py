"""Optimistic planning: every bonus by hand, both backends, and what bounds promise."""

import math

import numpy as np
import pytest
import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.engine import play_planning as compiled
from torch_occ.engine.layout import make_work
from torch_occ.engine.play_old import CHOICE, Seen
from torch_occ.engine.play_old import average_seen as average
from torch_occ.rivals import planning
from torch_occ.rivals.planning import Averages, plan
from torch_occ.step.arrays import model_of

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
LOG = 5.3


def tables(mdp, most, seed=0):
    """Random visits `(1, S, A)` from 0 to `most`, sums of losses, and counts per layer."""
    generator = np.random.default_rng(seed)
    shape = (mdp.num_states, mdp.num_actions)
    visits = generator.integers(0, most + 1, shape) * mdp.actions.numpy()
    counts = [
        np.stack([generator.multinomial(n, np.full(after, 1 / after)) for n in part.ravel()])
        .reshape(*part.shape, after)
        .astype(float)
        for part, after in zip(
            np.split(visits, np.cumsum(mdp.layer_sizes)[:-1]),
            (*mdp.layer_sizes[1:], 1),
            strict=True,
        )
    ]
    losses = visits * generator.random(shape)
    return visits.astype(float), losses, counts


def averages_of(visits, losses, counts):
    once, start, shares = np.maximum(visits, 1), 0, []
    for part in counts:
        shares.append(torch.from_numpy(part / once[start : start + len(part), :, None])[None])
        start += len(part)
    visits, losses = torch.from_numpy(visits)[None], torch.from_numpy(losses / once)[None]
    return Averages(visits, losses, tuple(shares))


BONUSES = {
    "hoeffding": lambda mdp: lambda stage: planning.ucbvi_hoeffding(stage, LOG, mdp.horizon),
    "bernstein": lambda mdp: (
        lambda stage: planning.ucbvi_bernstein(
            stage, LOG, mdp.horizon, mdp.num_states, mdp.num_actions
        )
    ),
    "sharp": lambda mdp: lambda stage: planning.sharp_hoeffding(stage, LOG),
    "corrupted": lambda mdp: lambda stage: planning.sharp_hoeffding(stage, LOG, 40.0),
    "euler": lambda mdp: lambda stage: planning.euler(stage, LOG),
    "strong": lambda mdp: lambda stage: planning.strong_euler(stage, LOG),
}
CODES = {
    "hoeffding": compiled.UCBVI_HOEFFDING,
    "bernstein": compiled.UCBVI_BERNSTEIN,
    "sharp": compiled.SHARP_HOEFFDING,
    "corrupted": compiled.SHARP_HOEFFDING,
    "euler": compiled.EULER,
    "strong": compiled.STRONG_EULER,
}


def by_hand(name, mdp, left, n, loss, p, low, up, arrivals):
    """The bonus of one pair, from the formulas of the papers, with plain numbers."""
    L, S, A = mdp.horizon, mdp.num_states, mdp.num_actions
    if name == "hoeffding":
        return 7 * L * LOG / math.sqrt(n)
    if name in ("sharp", "corrupted"):
        changed = min(1, 40 / (2 * n)) if name == "corrupted" else 0
        return left * math.sqrt(LOG / (2 * n)) + changed
    if n < 2:
        return math.inf
    mean = sum(x * v for x, v in zip(p, low, strict=True))
    variance = sum(x * (v - mean) ** 2 for x, v in zip(p, low, strict=True))
    gap = math.sqrt(sum(x * (u - v) ** 2 for x, u, v in zip(p, up, low, strict=True)))
    b = math.sqrt(2 * loss * (1 - loss) * LOG / (n - 1)) + 7 * LOG / (3 * (n - 1))
    if name == "bernstein":
        b += math.sqrt(8 * LOG * variance / n) + 14 * L * LOG / (3 * n)
        if left > 1:
            spread = [
                min(100**2 * L**3 * S**2 * A * LOG**2 / m, L**2) if m else L**2 for m in arrivals
            ]
            b += math.sqrt(8 / n * sum(x * y for x, y in zip(p, spread, strict=True)))
        return b
    if len(p) > 1:
        b += math.sqrt(2 * variance * LOG / (n - 1)) + math.sqrt(2 * LOG / (n - 1)) * gap
        b += 7 * (left - 1) * LOG / (3 * (n - 1))
        if name == "strong":
            b += math.sqrt(2 * len(p) * LOG / (n - 1)) * gap
            b += 7 * len(p) * (left - 1) * LOG / (3 * (n - 1))
    return b


def plan_by_hand(name, mdp, visits, losses, counts):
    """Q_lower, Q_upper and the actions, pair by pair."""
    shape = (mdp.num_states, mdp.num_actions)
    lower, upper, chosen = np.full(shape, np.inf), np.full(shape, np.inf), {}
    low, up, arrivals = [0.0], [0.0], [0.0]
    for k in reversed(range(mdp.horizon)):
        here, left = mdp.layer_slices[k], mdp.horizon - k
        values = []
        for s in range(here.start, here.stop):
            for a in range(mdp.num_actions):
                if not mdp.actions[s, a]:
                    continue
                n = visits[s, a]
                if not n:
                    lower[s, a], upper[s, a] = 0, left
                    continue
                p, loss = counts[k][s - here.start, a] / n, losses[s, a] / n
                b = by_hand(name, mdp, left, n, loss, p, low, up, arrivals)
                lower[s, a] = max(0, loss + np.dot(p, low) - b)
                upper[s, a] = min(left, loss + np.dot(p, up) + b)
            chosen[s] = int(np.argmax(lower[s] <= lower[s].min() + 1e-9 * max(1, lower[s].min())))
            values.append((lower[s].min(), upper[s, chosen[s]], visits[s].sum()))
        low, up, arrivals = zip(*values, strict=True)
    return lower, upper, [chosen[s] for s in range(mdp.num_states)]


@pytest.mark.parametrize("problem", ["masked", "contexts", "layers", None])
@pytest.mark.parametrize("most", [3, 300, 100_000])
@pytest.mark.parametrize("name", BONUSES)
def test_both_backends_plan_as_by_hand(name, most, problem):
    mdp = MDP if problem is None else PROBLEMS[problem]().mdp
    if mdp.is_sparse:
        mdp = mdp.to_dense()
    visits, losses, counts = tables(mdp, most)
    lower, upper, chosen = plan_by_hand(name, mdp, visits, losses, counts)
    found = plan(mdp, averages_of(visits, losses, counts), BONUSES[name](mdp))
    np.testing.assert_allclose(found.lower[0], lower, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.upper[0], upper, rtol=1e-12, atol=1e-12)
    assert found.policy[0].argmax(-1).tolist() == chosen

    model, work = model_of(mdp), make_work(model_of(mdp))
    flat = np.concatenate([part.ravel() for part in counts])
    blank = np.zeros((2, visits.size))
    seen = Seen(visits.ravel(), losses.ravel(), *blank, flat, compiled.entries(model))
    average(seen, 0.0)
    planner = compiled.Planner(
        CODES[name],
        False,
        0.0,
        40.0 if name == "corrupted" else 0.0,
        float(mdp.num_states),
        float(mdp.num_actions),
        seen,
        np.full((2, visits.size), np.inf),
        np.zeros((3, mdp.num_states)),
        mdp.actions.numpy().ravel(),
    )
    compiled.plan(model, planner, planner, False, LOG, work)
    for row, expected in ((compiled.LOWER, lower), (compiled.UPPER, upper)):
        np.testing.assert_allclose(planner.bounds[row], expected.ravel(), rtol=1e-12, atol=1e-12)
    assert (work.states[CHOICE] % mdp.num_actions).tolist() == chosen


def test_without_a_bonus_it_is_the_optimal_policy_of_the_averages():
    visits, losses, counts = tables(MDP, 50, seed=3)
    averages = averages_of(visits + 1, losses + 0.5, [part + 1 / part.shape[-1] for part in counts])
    found = plan(MDP, averages, lambda stage: torch.zeros_like(stage.loss))
    believed = MDP.with_transitions([p[0] for p in averages.shares])
    expected = occ.optimal_policy(believed, averages.loss[0])
    torch.testing.assert_close(found.lower[0], expected.Q, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.value[0], expected.value, rtol=0, atol=1e-12)
    assert torch.equal(found.policy[0], expected.policy)


def test_lower_bounds_never_fall_if_asked():
    averages = averages_of(*tables(MDP, 50))
    least = random_loss(MDP, scale=3.0)[None]
    bonus = BONUSES["sharp"](MDP)
    found = plan(MDP, averages, bonus, least=least)
    assert bool((found.lower >= least).all())
    assert bool((found.lower >= plan(MDP, averages, bonus).lower).all())


@pytest.mark.parametrize("name", ["sharp", "euler", "strong"])
def test_a_pair_seen_for_ever_has_no_bonus(name):
    """The bounds meet at the optimal values of the true MDP."""
    mean = random_loss(MDP, seed=4)
    n = torch.full((1, MDP.num_states, MDP.num_actions), 1e14, dtype=torch.float64)
    averages = Averages(n, mean[None], tuple(p[None] for p in MDP.transitions))
    found, expected = plan(MDP, averages, BONUSES[name](MDP)), occ.optimal_policy(MDP, mean)
    torch.testing.assert_close(found.lower[0], expected.Q, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.upper[0], expected.Q, rtol=0, atol=1e-5)
