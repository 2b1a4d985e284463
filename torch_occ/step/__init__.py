"""`FTRLStep`: Newton's method, its linear algebra, implicit derivatives.

arrays               conversion of torch objects to the arrays of the compiled kernels, and what
budgets              the step with budgets: its multipliers and its derivatives
checking             check a regularizer: is it finite, convex and steep, and are its
compiled             the step in compiled kernels: solves, first derivatives, sweeps
entropic             the FTRL step for entropies, in logarithms: q may underflow, but log q does not
ftrl                 the FTRL step as a torch module
graph                what surrounds a step in a network: other number types, autocast, inference
implicit             derivatives of a solution by the implicit function theorem, not through the
newton               potential-based shaping: the loss is replaced by its gaps
solution             what goes into a step and what comes out: budgets, options, solution, errors
system               the blocks of the Newton system: one state, with its actions eliminated
utilities            the step with a smooth convex function of a few features of q
ways                 which way to solve: the engine or torch, in logarithms or not, and the linear
"""
