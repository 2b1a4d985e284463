"""Runs to save, interrupt and continue."""

from dataclasses import fields
from typing import ClassVar

import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ

MDP = PROBLEMS["masked"]().mdp


def same(one, other):
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name == "wall_time":
            assert mine.shape == theirs.shape
        elif isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name
            assert type(mine) is type(theirs), field.name


class Interruptible(occ.FollowTheLeader):
    """A learner that calls a function in one episode; it is not part of the fingerprint."""

    fingerprint_ignores = ("calls",)
    calls: ClassVar = {}

    def propose(self, t):
        Interruptible.calls.get(t, int)()
        return super().propose(t)


def walk():
    return occ.Corrupted(occ.RandomWalkLosses(0.1, "bernoulli"), 30.0)


def endless(path, backend, episodes, *callbacks):
    """A long run, which is saved only when it is interrupted."""
    mdp = occ.LayeredMDP.random(3, 3, 3, seed=0)
    losses = occ.BernoulliLosses(random_loss(mdp))
    learner = occ.FTRL(mdp, occ.jin_luo(mdp))
    options = {"backend": backend, "save_to": path, "save_every": 1e9, "callbacks": callbacks}
    return occ.simulate(mdp, learner, losses, episodes, range(3), checkpoints=[100], **options)
