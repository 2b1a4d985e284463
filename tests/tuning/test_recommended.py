"""Recommended learners: one per kind of world, with the constants that were measured."""

import torch
from zoo import random_problem

import torch_occ as occ


def test_there_is_a_learner_for_every_kind_of_world():
    def numbers(learner):
        own = learner.step.named_parameters()
        return {name.rpartition(".")[2]: p.item() for name, p in own}

    mdp, mean = random_problem(0, (2, 2, 2))
    learner = occ.recommended(mdp)
    assert isinstance(learner, occ.ShiftedFTRL)
    assert (numbers(learner)["gamma"], learner.cap, learner.budget) == (0.85, 2.0, 4.0)
    assert learner.guarantee == "Theorems A and B"
    assert "Theorems A and B" in occ.recommended.__doc__
    assert isinstance(occ.recommended(mdp, "stochastic"), occ.rivals.Thompson)
    q, t = torch.full((1, 3, 2), 1e-4, dtype=torch.float64), torch.tensor([10.0])
    for world, expected in (("varying", (1.0, 0.5)), ("adversarial", (0.2663, 1.0))):
        learner = occ.recommended(mdp, world)
        assert type(learner) is occ.FTRL
        assert (numbers(learner)["gamma"], numbers(learner)["beta"]) == expected
        assert bool((learner.estimator.baseline(q, t) == 0.5).all())
    for world in ("any", "stochastic", "varying", "adversarial"):
        learner, losses = occ.recommended(mdp, world), occ.BernoulliLosses(mean)
        assert occ.simulate(mdp, learner, losses, 50).regret.isfinite().all()
