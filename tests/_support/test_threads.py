"""Threads: all work is done, exceptions are raised, and a forked process has its own threads."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from zoo import random_loss

import torch_occ as occ
from torch_occ._support.processes import for_each

MDP = occ.LayeredMDP.random(2, 2, 2, seed=0)
MEAN = random_loss(MDP, seed=1)


def work(count: int = 16) -> list[int]:
    done = [0] * count
    for_each(lambda i: done.__setitem__(i, i + 1), count)
    return done


def play() -> torch.Tensor:
    learner = occ.FTRL(MDP, occ.jin_luo(MDP, beta=1.0))
    return occ.simulate(MDP, learner, occ.BernoulliLosses(MEAN), 20, range(16)).regret


def in_child(function) -> object:
    """The result of the function in a forked process; an error if it takes too long."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(function()), daemon=True)
    child.start()
    try:
        assert mine.poll(20), "the child hangs"
        return mine.recv()
    finally:
        child.kill()
        child.join()


def test_an_exception_in_a_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        for_each(lambda i: 1 // (i - 3), 5)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork"
)
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("function", [work, lambda: play().tolist()])
def test_a_forked_process_has_threads_of_its_own(function):
    """A forked child has only the forking thread, so the parent's pool has no threads there."""
    here = function()
    assert in_child(function) == here
    assert function() == here  # and the parent's pool is as it was
