"""Tuning a regularizer's parameters.

objectives         what a tuner minimizes, over several environments
recipe             gradients first, then trials: tune_and_refine
space              unconstrained coordinates of the parameters, and their bounds
tuner              tuning by gradients of the forecast
refinement         a local search from there, judged by leaping or playing
trials             one setting tried in all environments
surfaces           quadratics through noisy values
guard              environments that cannot be forecast: not worse than a reference, by playing
metagradients      gradients through the run itself, and their standard errors
tangents           the run with its tangents, in torch
board              what TensorBoard shows of a tuning
compiled_tangents  the run with its tangents, in compiled kernels
"""
