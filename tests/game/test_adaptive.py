"""FTRL with hints, adaptive rates and corrected means: their formulas, and bad input."""

from __future__ import annotations

import math

import pytest
import torch
from zoo import Kept, random_loss

import torch_occ as occ

F64 = torch.float64
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
S, A = MDP.num_states, MDP.num_actions
MEAN = random_loss(MDP, seed=2)
LOSSES = occ.BernoulliLosses(MEAN)


def test_hints_that_are_right_have_no_errors():
    """With m = loss there is nothing to estimate, and the rates never change."""

    class Truth(occ.game.Hints):
        def predict(self, state):
            return MEAN.expand(2, S, A)

    learner = occ.AdaptiveFTRL(
        MDP, occ.LogBarrier(), hints=Truth(), rates=occ.game.AdaptiveRates(100, first=3.0)
    )
    losses, kept = occ.TableLosses(MEAN.expand(40, S, A)), Kept()
    occ.simulate(MDP, learner, losses, 40, range(2), backend="torch", callbacks=[kept])
    state = kept.learner.state
    torch.testing.assert_close(state["cumulative_loss"], 40 * MEAN.expand(2, S, A))
    assert bool((state["inverse_rate"] == 3.0).all())


def test_the_rates_are_those_of_the_formula():
    """On a bandit, Q - V is x - pi x on the visited action."""
    bandit = occ.LayeredMDP([torch.ones(1, 3, 1, dtype=F64)])
    rates = occ.game.AdaptiveRates(1000, first=2.0)
    q = torch.tensor([[[0.2, 0.3, 0.5]]], dtype=F64)
    x = torch.tensor([[[0.0, 0.6 / 0.3, 0.0]]], dtype=F64)
    b = rates.update(bandit, torch.full((1, 1, 3), 2.0, dtype=F64), q, x)
    zeta = (0.6 * (1 - 0.3)) ** 2
    expected = [2.0, 2.0 + zeta / (2 * math.log(1000)), 2.0]
    torch.testing.assert_close(b.flatten(), torch.tensor(expected, dtype=F64))
    matching = occ.game.StabilityPenaltyMatching(4.0)
    assert matching.start(bandit, occ.Tsallis()) == 4.0
    b = matching.update(bandit, torch.tensor([4.0], dtype=F64), q, x)
    z = 2 * sum(p**0.5 * (1 - p) for p in (0.2, 0.3, 0.5))
    h = sum(p**0.5 for p in (0.2, 0.3, 0.5)) - 1
    assert float(b) == pytest.approx(4 + z / (4 * h), rel=1e-12)


def test_the_corrected_loss_is_that_of_the_formula():
    """One pair whose importance weights say as much as its mean, one where they contradict it."""
    bandit = occ.LayeredMDP([torch.ones(1, 3, 1, dtype=F64)])
    learner = occ.CorrectedFTRL(bandit, width=2.0, prior=0.5, count=1.0)
    learner.start(1)
    learner.state |= {
        "visits": torch.tensor([[[3.0, 3.0, 0.0]]], dtype=F64),
        "losses": torch.tensor([[[1.5, 3.5, 0.0]]], dtype=F64),
        "cumulative_loss": torch.tensor([[[6.0, 60.0, 0.0]]], dtype=F64),
        "squares": torch.tensor([[[4.0, 25.0, 0.0]]], dtype=F64),
    }
    # t = 11 and m = 1/2, 1, 1/2. D = 6 - 5 = 1 is less than 2 sqrt(4), and D = 60 - 10 = 50 is
    # more than 2 sqrt(25). The third pair was never seen, and nothing is put down to noise.
    expected = [11 * 0.5, 11 + 50 * (1 - 4 * 25 / 50**2), 11 * 0.5 - 5]
    torch.testing.assert_close(learner.loss(11).flatten(), torch.tensor(expected, dtype=F64))


def test_bad_input():
    with pytest.raises(ValueError, match=r"hints: they need a log-barrier.*-m / q"):
        occ.AdaptiveFTRL(MDP, occ.Tsallis() / occ.InverseSqrt(1.0), hints=occ.game.MeanHints())
    with pytest.raises(TypeError, match=r"hints: expected an occ\.Hints"):
        occ.AdaptiveFTRL(MDP, occ.LogBarrier(), hints=0.5)
    with pytest.raises(TypeError, match=r"rates: expected an occ\.Rates"):
        occ.AdaptiveFTRL(MDP, occ.LogBarrier(), rates=occ.InverseSqrt(1.0))
    with pytest.raises(ValueError, match="StabilityPenaltyMatching knows"):
        occ.AdaptiveFTRL(MDP, occ.LogBarrier(), rates=occ.game.StabilityPenaltyMatching())
    with pytest.raises(ValueError, match="episodes, first"):
        occ.game.AdaptiveRates(0)
    with pytest.raises(ValueError, match="prior, count"):
        occ.game.MeanHints(prior=2.0)
    with pytest.raises(ValueError, match="step, prior"):
        occ.game.GradientHints(step=0.0)
    with pytest.raises(ValueError, match="made for 10 episodes"):
        occ.simulate(MDP, occ.AdaptiveFTRL.optimistic(MDP, 10), LOSSES, 20)
    with pytest.raises(ValueError, match="width: expected a finite number of at least 0, got -1"):
        occ.CorrectedFTRL(MDP, width=-1.0)
    with pytest.raises(ValueError, match=r"prior, count: expected .* got 2.0 and 1.0"):
        occ.CorrectedFTRL(MDP, prior=2.0)
    with pytest.raises(ValueError, match=r"prior, count: expected .* got 0.0 and 0.0"):
        occ.CorrectedFTRL(MDP, count=0.0)
