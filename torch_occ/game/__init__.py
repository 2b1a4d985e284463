"""Losses, estimators, learners, `simulate`, histories, callbacks, figures.

callbacks   callbacks: they watch a simulation. Derive from `Callback` and override the hooks
checks      checks of what learners, loss processes and estimators return; warnings
estimators  estimators: from the feedback of an episode to an estimate of its loss function
figures     figures of a run: regret curves with bands over seeds, heat maps of q
history     what runs leave: histories, means with intervals over seeds, comparisons of learners
learners    what a learner is, and the learners of the paper
losses      loss processes: the losses that the environment charges in each episode
players     the engine as a player of `simulate`: the same game as in torch
shifted     FTRL on a shifted loss, with a budget for what the shift may cost
simulate    `simulate`: play a learner for all seeds; `compare_learners` does so for several
"""

from torch_occ.game.checks import UncertifiedWarning as UncertifiedWarning
from torch_occ.game.estimators import CentredEstimator as CentredEstimator
from torch_occ.game.history import LearnerComparison as LearnerComparison
from torch_occ.game.history import Mean as Mean
from torch_occ.game.history import comparator as comparator
