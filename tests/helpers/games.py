"""Runs to save, interrupt and continue."""

from dataclasses import fields
from typing import ClassVar

import torch
from zoo import PROBLEMS

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


class Patient(occ.FollowTheLeader):
    """Calls something at one episode; a class attribute, so that the configuration stays the same."""

    calls: ClassVar = {}

    def propose(self, t):
        Patient.calls.get(t, int)()
        return super().propose(t)


def walk():
    return occ.Corrupted(occ.RandomWalkLosses(0.1, "bernoulli"), 30.0)
