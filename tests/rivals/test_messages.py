"""Bad input: a message names the argument, the value and what to do. More are in the record."""

import pytest
import torch
from zoo import random_loss

import torch_occ as occ

R = occ.rivals
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


def play(learner, episodes):
    return occ.simulate(MDP, learner, occ.BernoulliLosses(random_loss(MDP)), episodes)


def test_rivals_play_in_the_engine_only():
    losses = occ.BernoulliLosses(random_loss(MDP))
    message = r"backend: PSRL plays in the engine only, and not in torch; use backend='auto'"
    with pytest.raises(ValueError, match=message):
        occ.simulate(MDP, R.PSRL(MDP), losses, 3, backend="torch")
    single = MDP.to(dtype=torch.float32)
    message = "learner: EULER plays in the engine only, but the engine works in float64"
    with pytest.raises(ValueError, match=message):
        occ.simulate(single, R.EULER(single), occ.BernoulliLosses(random_loss(MDP).float()), 3)

    class Slow(occ.Schedule):
        def forward(self, t):
            return 1 / (1 + t.log())

    with pytest.raises(ValueError, match="not powers of t"):
        play(R.UnknownFTRL(MDP, occ.Tsallis() / Slow()), 3)
