"""FTRL for unknown transitions and UOB-REPS: printed constants, closed forms, bad input."""

import math
import time

import pytest
import torch
from zoo import random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import occupancy, uniform_policy

R = occ.rivals
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
LOSSES = occ.BernoulliLosses(random_loss(MDP, seed=3))


def psi():
    return occ.Tsallis() / occ.InverseSqrt(1.0) + occ.LogBarrier(1.0)


# -- FTRL ------------------------------------------------------------------------------------------


def test_with_the_true_transitions_the_plug_in_is_ftrl():
    """A belief that is the truth and never changes, in a whole run."""

    class Told(R.UnknownFTRL):
        compiled = R.UnknownFTRL.compiled

        def start(self, num_seeds):
            super().start(num_seeds)
            true = torch.cat([P.flatten() for P in MDP.transitions])
            self.state["belief"] = true.expand(num_seeds, -1).clone()
            self.state["epoch_visits"] = self.state["epoch_visits"] + torch.inf
            q = occupancy(MDP, uniform_policy(MDP), in_order=True)
            self.state["q"] = q.expand_as(self.state["q"]).clone()

    found = occ.simulate(MDP, Told(MDP, psi()), LOSSES, 60, range(3))
    expected = occ.simulate(MDP, occ.FTRL(MDP, psi()), LOSSES, 60, range(3))
    torch.testing.assert_close(found.realised_regret, expected.realised_regret, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-9, atol=1e-9)


def test_printed_constants():
    T = 2000
    bandit = R.UnknownFTRL.jin_huang_luo(MDP, T)
    assert bandit.restart
    assert bandit.bonus
    assert bandit.widths[:5] == (2.0, 14 / 3, 0, 1.0, False)
    assert bandit.widths.iota == pytest.approx(math.log(T**4 * 21), rel=1e-13)
    q = occ.interior_point(MDP)
    expected = -math.sqrt(9.0) * q.sqrt().sum() - 128 * 3**4 * q.log().sum()
    torch.testing.assert_close(bandit.step.regularizer(q, 9.0), expected)
    full = R.UnknownFTRL.jin_huang_luo(MDP, T, full_information=True)
    assert full.full_information
    assert full.widths.iota == pytest.approx(math.log(T**3 * 21), rel=1e-13)


@pytest.mark.slow
def test_the_time_of_an_episode():
    """At most 1.5 times that of FTRL with known transitions: the least of five runs in turns."""
    learners = {"known": occ.FTRL(MDP, psi()), "plug-in": R.UnknownFTRL(MDP, psi())}
    times = {name: [] for name in learners}
    for _ in range(5):
        for name, learner in learners.items():
            begun = time.process_time()
            occ.simulate(MDP, learner, LOSSES, 20_000, range(8))
            times[name].append(time.process_time() - begun)
    assert min(times["plug-in"]) < 1.5 * min(times["known"]), times


# -- UOB-REPS --------------------------------------------------------------------------------------


def test_the_constants_are_those_of_the_paper():
    learner = R.UOBREPS(MDP, 1000, delta=0.05)
    expected = math.sqrt(3 * math.log(3 * 21 / 0.05) / (1000 * 21))
    assert learner.learning_rate == learner.bias == pytest.approx(expected, rel=1e-14)
    assert learner.widths.iota == pytest.approx(math.log(1000 * 21 / 0.05))
    assert learner.widths[:3] == (2, 14 / 3, 1)


def test_one_layer_is_exponential_weights_with_implicit_exploration():
    """No transitions: u is the policy itself, and the game is that of Exp3-IX."""
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1).double()])
    losses = occ.UniformLosses(random_loss(mdp))
    learner = R.UOBREPS(mdp, 100, learning_rate=0.3, bias=0.05)
    exp3 = occ.FTRL(mdp, occ.Shannon() / occ.Constant(0.3), occ.ImplicitExploration(0.05))
    found, expected = (occ.simulate(mdp, x, losses, 100, range(3)) for x in (learner, exp3))
    torch.testing.assert_close(found.last_q, expected.last_q, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-9, atol=1e-9)


def test_it_learns():
    episodes = 20_000
    mean = 0.3 + 0.4 * (torch.arange(3) != 1).double().expand(7, 3)
    found = occ.simulate(
        MDP, R.UOBREPS(MDP, episodes), occ.BernoulliLosses(mean), episodes, range(3)
    )
    uniform = episodes * 3 * 0.4 * 2 / 3
    assert float(found.regret[:, -1].max()) < 0.15 * uniform
    assert float(found.uncertified.max()) == 0
    assert float(found.flow_residual.max()) < 1e-12
