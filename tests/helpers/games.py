"""Runs to save, interrupt and continue."""

from dataclasses import fields
from typing import ClassVar

import torch
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from torch_occ.game.checks import DIAGNOSTICS

MDP = PROBLEMS["masked"]().mdp
NEARLY = {"rtol": 0.0, "atol": 1e-10}
TABLES = ("cumulative_occupancy", "total_mean", "last_q")


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


def check_same_game(mdp, build, losses, episodes, tolerance=0.0):
    """Both backends play the same game: trajectories are the same, and states.

    Plans are discrete, so rounding is not amplified. Importance weights do that along the run;
    then numbers other than the losses are compared with a tolerance.
    """
    learner, kept = build(mdp), (Kept(), Kept())
    expected, found = (
        occ.simulate(mdp, learner, losses, episodes, [0, 7], backend=backend, callbacks=[keep])
        for keep, backend in zip(kept, ("torch", "engine"), strict=True)
    )
    assert (expected.backend, found.backend) == ("torch", "engine")
    bounds = {"rtol": 10 * tolerance, "atol": max(tolerance, 1e-10)}
    for name in ("realised_regret", "newton_steps"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **NEARLY)
    for name in ("regret", "comparator", "corruption", "uncertified", *TABLES):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **bounds)
    states = [keep.learner.state for keep in kept]
    assert states[0].keys() == states[1].keys()
    assert bool(states[0]) != isinstance(learner, occ.FixedPolicy)
    for name in states[0].keys() - set(DIAGNOSTICS):
        bounds["atol"] = max(tolerance, 1e-12)
        torch.testing.assert_close(states[1][name], states[0][name], **bounds)
