"""Compiled code: NumPy arrays in and out, no torch.

Adapters stand beside their torch twins in step, game, forecasting and tuning.

constants     numbers that kernels share with their twins in torch; needs no Numba
layout        what kernels read and write, and how they are compiled
psi           elementary functions, psi and its derivatives
newton        the FTRL step for one problem
shaping       losses replaced by gaps, without rounding errors
certificate   how far q is from the solution
entropic      the step of entropies, in logarithms
log_passes    passes through the layers in logarithms
sweeps        the linear algebra of a step for dense transitions
conjugate     the linear algebra of a step for sparse transitions
transitions   dense or sparse, decided when a kernel is compiled
batches       many steps, and their derivatives
episodes      the episode loop of FTRL
baselines     the episode loop of the other learners
leaps         many episodes at once
tangents      the episode loop with tangents
"""
