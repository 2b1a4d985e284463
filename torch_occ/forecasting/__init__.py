"""Forecasts of the regret of FTRL, without playing every episode.

mean_path        the regret on the mean path, with gradients
probes           the noise of the mean path without matrices, for large MDPs
leaping          the regret by leaps of many episodes; `predict` chooses between the two
torch_leaps      leaps in torch
compiled_leaps   leaps in compiled kernels
course           the losses, checkpoints and comparators of a leaping particle
phases           loss processes as phases of constant means
quadrature       sums over very many episodes from few evaluations
"""
