"""Tuning a regularizer's parameters.

objectives         the objective that a tuner minimizes, over several environments
recommended        what to take without tuning, for each kind of world
recipe             tune_and_refine: first gradients, then trials
space              unconstrained coordinates of the parameters, and their bounds
tuner              tuning by gradients of the forecast
refinement         a local search around the tuned point, with values from leaping or playing
trials             the objective by leaping or playing, at one setting
surfaces           quadratics fitted to noisy values
guard              a comparison with a reference by playing, where nothing can be forecast
board              a tuning in TensorBoard
"""
