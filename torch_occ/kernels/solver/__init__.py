"""The FTRL step in compiled code, and its derivatives.

psi           elementary functions, psi and its derivatives
newton        the FTRL step for one problem
shaping       replace the loss by the gaps of its optimal policy
certificate   dual and flow residual, and a check of convexity
entropic      the FTRL step of an entropy, in logarithms
log_passes    backward and forward passes of that step
factors       the factors of the linear system of a Newton step, for dense transitions
sweeps        the linear system of a Newton step, for dense transitions
conjugate     the linear system of a Newton step, for sparse transitions
transitions   functions that choose between dense and sparse at compile time
batches       a batch of steps, and their derivatives
budgets       the FTRL step with limits on expected costs
multipliers   the quadratic model of its dual
"""
