"""Regularizers, learning rates, and their derivatives.

base         regularizers: convex functions of q and of the episode t, written at one of three
catalog      the built-in regularizers, as data
derivatives  gradient and Hessian of psi_t by autograd, at the level at which psi is written
parameters   parameters with one value per layer, per state or per pair
schedules    learning rates: eta_t as a function of the episode t = 1, 2,
terms        the arguments of separable regularizers, computed from q without cancellation
"""
