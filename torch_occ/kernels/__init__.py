"""Compiled kernels: NumPy arrays in and out, no torch.

Each kernel has a twin in torch that computes the same. The adapters that convert between tensors
and arrays stand beside these twins, in the packages step, game, forecasting and tuning.

constants     constants that kernels share with their torch twins; needs no Numba
layout        the arrays that kernels read and write, and how kernels are compiled
psi           elementary functions, psi and its derivatives
newton        the FTRL step for one problem
shaping       replace the loss by the gaps of its optimal policy
certificate   dual and flow residual, and a check of convexity
entropic      the FTRL step of an entropy, in logarithms
log_passes    backward and forward passes of that step
sweeps        the linear system of a Newton step, for dense transitions
conjugate     the linear system of a Newton step, for sparse transitions
transitions   functions that choose between dense and sparse at compile time
batches       a batch of steps, and their derivatives
episodes      the episode loop of FTRL
baselines     the episode loops of the other learners
leaps         regret forecasts that play many episodes at once
tangents      the episode loop of FTRL with forward-mode derivatives
"""
