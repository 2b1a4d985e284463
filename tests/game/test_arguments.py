"""A wrong argument of `simulate` is named before the first episode, with what to pass instead.

More messages are in the record, to the word.
"""

import pytest
import torch

import torch_occ as occ
from torch_occ._support.streams import check_memory

MDP = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=0)
MEAN = torch.full((3, 2), 0.5, dtype=torch.float64)
LOSSES = occ.BernoulliLosses(MEAN)
LEARNER = occ.FollowTheLeader(MDP)


def test_numbers_of_numpy_and_torch_are_welcome():
    seeds = torch.arange(2).numpy()
    episodes = torch.tensor(5)
    history = occ.simulate(MDP, LEARNER, LOSSES, episodes, seeds, backend="torch")
    assert history.seeds == (0, 1)
    assert int(history.episodes[-1]) == 5


def test_more_seeds_than_memory_are_refused_with_a_way_out():
    with pytest.raises(MemoryError, match=r"need .* GB of random numbers.*play fewer seeds"):
        check_memory(10**10, 9)
