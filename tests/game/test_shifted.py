"""FTRL with a shift: its formulas, and bad input."""

from __future__ import annotations

import pytest
import torch

import torch_occ as occ

F64 = torch.float64


def shifted_bandit(visits, losses, total, **options):
    """A learner with two arms and one seed, before episode 11, with B = 3 and X = 30."""
    bandit = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=F64)])
    learner = occ.ShiftedFTRL(bandit, cap=0.5, hints=False, **options)
    learner.start(1)
    for name, x in (("visits", visits), ("losses", losses), ("cumulative_loss", total)):
        learner.state[name] = torch.tensor([[x]], dtype=F64)
    learner.state |= {"stability": torch.full((1, 1), 3.0, dtype=F64)}
    learner.state |= {"ledger": torch.full((1,), 30.0, dtype=F64)}
    return learner


def test_the_shift_is_that_of_the_formula():
    """m = 1.5 / 4 and 3.5 / 4; 11 m - Lhat = 1.125 and -50.375; the cap is 0.5 (1 + 3) = 2."""
    seen = ([3.0, 3.0], [1.5, 3.5], [3.0, 60.0])
    q = None
    for ledger, budget, share in (
        ("hard", 10.0, 1.0),
        ("hard", 7.0, 0.0),
        ("smooth", 10.0, 1 - 30 / 40),
        ("smooth", 5.0, 0.0),
        ("frozen", 10.0, 1.0),
    ):
        learner = shifted_bandit(*seen, ledger=ledger, budget=budget)
        q = learner.propose(11)
        shift = share * torch.tensor([[[1.125, -2.0]]], dtype=F64)
        torch.testing.assert_close(learner.state["shift"], shift)
        step = occ.FTRLStep(learner.mdp, occ.Tsallis() / occ.InverseSqrt(0.85))
        total = torch.tensor([[[3.0, 60.0]]], dtype=F64)
        torch.testing.assert_close(q, step(total + shift, t=11.0).detach())
        spent = 30.0 - float((q * shift).sum())
        assert float(learner.state["ledger"]) == pytest.approx(spent)
        assert float(learner.state["refused"]) == float(share == 0)


def test_hints_where_q_is_not_small():
    """They begin when eta_t <= 1/4, and serve in estimates where q >= 16 eta_t^2."""
    bandit = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=F64)])
    learner = occ.ShiftedFTRL(bandit, occ.Tsallis() / occ.InverseSqrt(1.0))
    learner.start(1)
    for name, x in (("visits", [3.0, 3.0]), ("losses", [1.0, 2.0])):
        learner.state[name] = torch.tensor([[x]], dtype=F64)
    q, mean = torch.tensor([[[0.95, 0.05]]], dtype=F64), torch.tensor([[[0.25, 0.5]]], dtype=F64)
    assert torch.equal(learner.hint(15), 0 * mean)
    assert torch.equal(learner.hint(16), mean)
    seen = torch.tensor([[0]]), torch.tensor([[1]]), torch.ones(1, 1, dtype=F64)
    for t, hint in ((15, [0.0, 0.0]), (17, [0.25, 0.0]), (321, [0.25, 0.5])):
        learner.state |= {"cumulative_loss": 0 * mean, "visits": 0 * mean + 3.0}
        learner.state["losses"] = torch.tensor([[[1.0, 2.0]]], dtype=F64)
        learner.observe(t, q, occ.Feedback(*seen, None))
        expected = torch.tensor([[[hint[0], hint[1] + (1 - hint[1]) / 0.05]]], dtype=F64)
        torch.testing.assert_close(learner.state["cumulative_loss"], expected)
