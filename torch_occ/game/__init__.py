"""Losses, estimators, learners, `simulate`, histories, callbacks, figures.

callbacks        callbacks: they watch a simulation. Derive from `Callback` and override the hooks
checks           checks of what learners, loss processes and estimators return; warnings of
comparing        several learners in the same game, on the same seeds, with paired differences
estimators       estimators: from the feedback of an episode to an estimate of its loss function
figures          figures of a run: regret curves with bands over seeds, heat maps of q, and the
history          what a run leaves: its history, means with intervals over seeds, and the comparator
learners         what a learner is
losses           loss processes: the losses that the environment charges in each episode
players          the engine as a player of `simulate`: the same game as in torch, from the same
shifted          FTRL on a shifted loss, with a budget for what the shift may cost
simulate         `simulate`: play a learner against losses for all seeds, with callbacks and saved
"""

from torch_occ.game.checks import UncertifiedWarning as UncertifiedWarning
from torch_occ.game.comparing import LearnerComparison as LearnerComparison
from torch_occ.game.estimators import CentredEstimator as CentredEstimator
from torch_occ.game.history import Mean as Mean
from torch_occ.game.history import comparator as comparator
