"""Compiled code: NumPy arrays in and out, no torch.

Adapters from torch are beside their torch twins, in step, game, forecasting and tuning.

constants     numbers that kernels share with their twins in torch; needs no Numba
layout        what kernels read and write, and how they are compiled
newton        the FTRL step for one problem
shaping       the loss as gaps
certificate   the certificate of a step
entropic      the FTRL step of an entropy, in logarithms
sweeps        its linear algebra for dense transitions
conjugate     its linear algebra for sparse transitions
transitions   dense or sparse, decided when a kernel is compiled
batches       many steps, and their derivatives
episodes      the episode loop of FTRL
baselines     the episode loop of the other learners
leaps         many episodes at once
tangents      the episode loop with tangents
"""
