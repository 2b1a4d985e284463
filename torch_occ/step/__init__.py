"""The FTRL step, its derivatives and its linear algebra.

ftrl             FTRLStep, the module that users call
newton           damped Newton iterations, and a certificate for each element
status           how a solve ended
shaping          the loss as gaps
entropic         the step of an entropy, in logarithms
implicit         derivatives of the solution, to any order
kkt              the linear system of a Newton step
states           one state of that system, its actions eliminated
iterative        that system by conjugate gradients, for wide and sparse MDPs
linearization    first and second derivatives of the step
compiled         the step in compiled kernels
compiled_sweeps  the sweeps of `iterative` in compiled kernels
kernel_inputs    from torch objects to the arrays that kernels read
formulas         weights of the terms as a function of t and the parameters
rows             between tensors, arrays and numbers
"""
