"""The FTRL step, its derivatives and its linear algebra.

ftrl                  FTRLStep, the module that users call
checks                what may be given to a step, and the words for what is wrong
solution              what a solve returns: the minimizer, its certificate, its status
newton                damped Newton iterations, and a certificate for each element
shaping               losses replaced by gaps, without rounding errors
entropic              the step of entropies, in logarithms
implicit              derivatives of the solution, to any order
kkt                   the linear system of a Newton step
states                one state of that system, its actions eliminated
iterative             that system by conjugate gradients, for wide and sparse MDPs
linearization         first and second derivatives of the step
compiled              the step in compiled kernels
compiled_derivatives  derivatives of the compiled step
compiled_sweeps       the sweeps of `iterative` in compiled kernels
kernel_inputs         from torch objects to the arrays that kernels read, and back
formulas              weights of the terms as a function of t and the parameters
"""
