"""FTRL that adapts along a run: to predictions of losses, and by its learning rates.

learner    FTRL with hints and rates
hints      predictions of the loss of the next episode
rates      learning rates that follow from what was observed
corrected  FTRL on empirical means, corrected by importance weights
"""
