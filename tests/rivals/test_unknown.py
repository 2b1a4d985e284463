"""FTRL for unknown transitions and UOB-REPS: printed constants, closed forms, bad input."""

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


# -- UOB-REPS --------------------------------------------------------------------------------------


def test_one_layer_is_exponential_weights_with_implicit_exploration():
    """No transitions: u is the policy itself, and the game is that of Exp3-IX."""
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1).double()])
    losses = occ.UniformLosses(random_loss(mdp))
    learner = R.UOBREPS(mdp, 100, learning_rate=0.3, bias=0.05)
    exp3 = occ.FTRL(mdp, occ.Shannon() / occ.Constant(0.3), occ.ImplicitExploration(0.05))
    found, expected = (occ.simulate(mdp, x, losses, 100, range(3)) for x in (learner, exp3))
    torch.testing.assert_close(found.last_q, expected.last_q, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-9, atol=1e-9)
