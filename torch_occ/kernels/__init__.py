"""Compiled kernels: NumPy arrays in and out, no torch.

Each kernel has a twin in torch that computes the same. The adapters that convert between tensors
and arrays stand beside these twins, in the packages step, game, forecasting and tuning.

constants   constants that kernels share with their torch twins; needs no Numba
lanes       vectors that hold one number of each of eight problems
layout      the arrays that kernels read and write, and how kernels are compiled
solver      the FTRL step and its derivatives
projection  the Kullback-Leibler projection under transition bounds
play        episode loops
"""
