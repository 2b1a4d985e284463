"""The regret without playing, and the search for parameters of a regularizer.

compiled_leaps  leaps of many episodes in compiled kernels, for built-in regularizers and estimators
forecast        sums over very many episodes from few evaluations
leaps           the course of a leaping particle: phases of constant means, and episodes where
objective       the objective of a meta-tuner: forecast regret in several environments, relative to
recommended     the recipe of tuning: gradients of the forecast, then a local search with values by
refine          response surfaces: quadratics with mixed terms, fitted to a noisy function around a
space           the space in which parameters are tuned: one unconstrained coordinate per number
tune            a tuning in TensorBoard
"""
