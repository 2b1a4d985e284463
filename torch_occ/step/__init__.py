"""The FTRL step, its derivatives and its linear algebra.

ftrl           FTRLStep, the module that users call
checks         checks of the arguments, and their error messages
problem        the checked arguments of a step, as the torch path needs them
solution       the result of a solve: the minimizer, its certificate, its status
newton         damped Newton iterations, and a certificate per batch element
shaping        losses replaced by gaps, without rounding errors
entropic       the step for entropies, in logarithms
implicit       derivatives of the solution, of any order
kkt            the linear system of a Newton step
states         the blocks of that system: one state, with its actions eliminated
iterative      conjugate gradients for that system, for wide and sparse MDPs
linearization  first and second derivatives of the step with respect to the loss
projection     the Kullback-Leibler projection onto q(s,a,s') under transition bounds
budgets        the step with limits on expected costs
network        the step inside a network: torch.compile, other number types, autocast
compiled       the step in compiled kernels
"""
