"""The regret of FTRL without playing.

mean_path        the regret on the mean path, with gradients
leaping          the regret by leaps of many episodes; `predict` chooses between the two
torch_leaps      leaps in torch
compiled_leaps   leaps in compiled kernels
smooth_leaps     leaps with reparametrized draws, differentiable
course           what a leaping particle plays against
phases           loss processes as a forecast sees them
quadrature       sums over very many episodes from a few of them
"""
