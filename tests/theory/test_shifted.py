"""The lemmas and theorems about `ShiftedFTRL`: no run violates them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from zoo import random_problem, trajectories

import torch_occ as occ
from torch_occ.theory import shifted

F64 = torch.float64


def worlds(mdp, mean, T):
    """Losses that are random, change once, are best responses, and switch."""
    flipped, late = 1 - mean, (torch.arange(T) > 0.4 * T)[:, None, None]
    return {
        "bernoulli": occ.BernoulliLosses(mean),
        "two phases": occ.TableLosses(torch.where(late, flipped, mean)),
        "greedy": occ.GreedyAdversary(),
        "switching": occ.SwitchingLosses(torch.stack([mean, flipped]), 25),
    }


def comparators(mdp, run):
    """The best policy for Lhat_T, and random ones."""
    total = run.all("cumulative_loss")[-1]
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, total).policy)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        policy = torch.rand(total.shape, dtype=F64, generator=generator) ** 4 * mdp.actions
        drawn = occ.occupancy(mdp, policy / policy.sum(-1, keepdim=True))
        yield drawn
        yield 0.99 * best + 0.01 * drawn


SETTINGS = {
    "default": {},
    "without hints": {"hints": False},
    "closing": {"cap": 20.0, "budget": 0.05},
    "smooth": {"cap": 20.0, "budget": 0.02, "ledger": "smooth"},
    "frozen": {"cap": 5.0, "budget": 0.05, "ledger": "frozen"},
    "frozen without hints": {"cap": 10.0, "budget": 0.05, "ledger": "frozen", "hints": False},
    "no budget": {"budget": 0.0, "ledger": "smooth", "hints": False},
}


@pytest.mark.parametrize("shape", [(3, 3, 3), (1, 1, 2), (5, 3, 2)])
@pytest.mark.parametrize("name", SETTINGS)
def test_no_run_violates_lemma_1_or_2(name, shape):
    T, closed = 120, 0.0
    mdp, mean = random_problem(3, shape)
    for losses in worlds(mdp, mean, T).values():
        learner, run = occ.ShiftedFTRL(mdp, **SETTINGS[name]), shifted.ShiftCertificate()
        options = {"checkpoints": range(1, T + 1), "callbacks": [run], "backend": "engine"}
        occ.simulate(mdp, learner, losses, T, range(3), **options)
        closed += float(run.learner.state["refused"].sum())
        for u in comparators(mdp, run):
            first, terms = shifted.lemma_1(run, u)
            assert bool(first.holds.all())
            assert bool((terms["stability"] >= 0).all())
            assert bool(shifted.lemma_2(run, u).holds.all())
        mapping = occ.optimal_policy(mdp, mean).policy
        q = run.all("q")[1:]
        assert all(bool(x.holds.all()) for x in shifted.lemma_3(mdp, q, mapping))
        B = ((q / torch.arange(1, T + 1)[:, None, None, None]).sqrt()
             * (1 - occ.policy_of(mdp, q))).sum((0, -2, -1))  # fmt: skip
        torch.testing.assert_close(run.all("stability")[-1].sum(-1), B)
    assert closed > 0 or name in ("default", "without hints") or shape == (1, 1, 2)


@pytest.mark.parametrize("t", [10, 1000, 100_000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_lemma_4_over_all_trajectories(scale, t):
    """From nearly uniform to nearly deterministic q, with the expectation computed exactly."""
    mdp, mean = random_problem(5, (3, 2, 2))
    gamma = 0.85
    q = occ.FTRLStep(mdp, occ.Tsallis() / occ.InverseSqrt(gamma))(scale * t**0.5 * mean, t=t)
    q, eta = q.detach(), gamma / t**0.5
    states, actions, chance = trajectories(mdp, q)
    visits = q.new_zeros(len(chance), *q.shape)
    visits[torch.arange(len(chance))[:, None], states, actions] = 1.0
    for loss, hint in itertools.product((mean, torch.ones_like(mean)), (None, 1 - mean)):
        used = torch.zeros_like(q) if hint is None else hint * (q >= 16 * eta**2)
        estimate = used + visits * (loss - used) / q
        both = shifted.lemma_4(mdp, q, estimate, chance, t, gamma, hint)
        allowed = (hint is None or eta <= 1 / 4, hint is None or eta * 3 <= 1 / 16)
        assert all(bool(x.holds) for x, a in zip(both, allowed, strict=True) if a)
        assert float(both[0].left) > 0


def test_lemma_5_for_pairs_of_mappings():
    mdp, _ = random_problem(2, (4, 3, 3))
    generator, shape = torch.Generator().manual_seed(1), (60, mdp.num_states)
    policy = torch.rand(*shape, 3, dtype=F64, generator=generator) ** 6
    q = occ.occupancy(mdp, policy / policy.sum(-1, keepdim=True))
    maps = [torch.eye(3, dtype=F64)[torch.randint(3, shape, generator=generator)] for _ in "ab"]
    near = occ.occupancy(mdp, 0.999 * maps[1] + 0.001 / 3)
    for point in (q, near):
        for u in maps:
            assert bool(shifted.lemma_5(mdp, point, occ.occupancy(mdp, u), maps[1]).holds.all())


@pytest.mark.parametrize("ledger", ["hard", "frozen"])
def test_the_terms_of_theorem_a_along_a_run(ledger):
    """In their order: regret, terms, bound. With every episode, nothing is interpolated."""
    mdp, mean = random_problem(1, (3, 3, 3))
    learner, T = occ.ShiftedFTRL(mdp, ledger=ledger), 400
    found = []
    for checkpoints in (range(1, T + 1), [1, 2, 5, 10, 20, 50, 100, 200, 300, T]):
        run = shifted.ShiftCertificate()
        losses, options = occ.BernoulliLosses(mean), {"checkpoints": checkpoints}
        occ.simulate(mdp, learner, losses, T, range(8), callbacks=[run], **options)
        found.append({name: float(x[..., -1].double().mean()) for name, x in run.curves.items()})
    exact, few = found
    assert exact["regret"] < exact["bound_terms"] < exact["bound"]
    assert exact["moved"] + exact["ledger"] <= exact["limit"]
    for name in ("stability", "penalty"):
        assert few[name] == pytest.approx(exact[name], rel=0.02)
    settings = shifted.ShiftSettings.of(learner)
    assert settings == shifted.ShiftSettings(0.85, 2.0, 4.0, 1 if ledger == "frozen" else 3, True)
    price = 4.0 + (2.0 if ledger == "frozen" else 6.0)
    slope = 8 * 0.85 + 1 / 0.85 + 2 * price
    bound = slope * math.sqrt(3 * 21 * T) + 4.0 + (price - 4.0) * 3
    assert exact["bound"] == pytest.approx(bound)


def test_the_theorems_with_their_constants():
    """Theorem B for two arms, by hand; and what hints change in both."""
    arms, regret = occ.LayeredMDP.random(1, 1, 2, seed=0), torch.zeros(2, dtype=F64)
    gaps, T, C = torch.tensor([[0.0, 0.5]], dtype=F64), 100, 7.0
    found = shifted.theorem_b(arms, shifted.ShiftSettings(1.0), regret, T, gaps, C)
    log = 1 + math.log(T)
    U, V = log * (9**2 / 2 / 0.5 + 1 / 0.5), 8 * math.sqrt(2) * log
    assert float(found.right) == pytest.approx(2 * U + V + 2 * math.sqrt((1.5 * C + U + V) * U))
    tie = torch.zeros(1, 2, dtype=F64)
    assert math.isinf(shifted.theorem_b(arms, shifted.ShiftSettings(1.0), regret, T, tie).right)
    hinted = shifted.ShiftSettings(1.0, hints=True)
    found = shifted.theorem_a(arms, hinted, regret, T)
    assert float(found.right) == pytest.approx(9 * math.sqrt(2 * T))
    found, U = shifted.theorem_b(arms, hinted, regret, T, gaps), log * (33**2 + 2)
    V = (128 * 2**0.5 + 80 * 2**1.5) * log + 128 * 2**0.5
    assert float(found.right) == pytest.approx(2 * U + V + 2 * math.sqrt((U + V) * U))


def test_a_learner_without_a_theorem_says_why():
    mdp, _ = random_problem(0, (2, 2, 2))
    barrier = occ.Tsallis() / occ.InverseSqrt(1.0) + occ.LogBarrier(2.0)
    for learner, expected in (
        (occ.ShiftedFTRL(mdp), "Theorems A and B"),
        (occ.ShiftedFTRL(mdp, hints=False), "Theorems A and B"),
        (occ.ShiftedFTRL(mdp, barrier), "none: Lemma 4 needs the 1/2-Tsallis entropy"),
        (occ.ShiftedFTRL(mdp, occ.jin_luo(mdp)), "none: Lemma 4 needs the 1/2-Tsallis entropy"),
        (occ.ShiftedFTRL(mdp, occ.Tsallis(0.6) / occ.InverseSqrt()), "none: Lemma 4 needs"),
    ):
        assert learner.guarantee.startswith(expected)
        proved = not expected.startswith("none")
        assert math.isfinite(shifted.ShiftSettings.of(learner).gamma) == proved
    run = shifted.ShiftCertificate()
    with pytest.raises(ValueError, match="about ShiftedFTRL, not FTRL"):
        occ.simulate(mdp, occ.FTRL.tsallis(mdp), occ.GreedyAdversary(), 2, callbacks=[run])
