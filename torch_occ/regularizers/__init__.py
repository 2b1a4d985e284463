"""Regularizers, learning rates and their derivatives.

base          what a regularizer is; sums, scaling, division by a schedule
catalog       the built-in regularizers, and jin_luo
terms         elementary functions as data
arguments     q(s,a), q(s) - q(s,a), q(s) and 1 - q(s,a), without cancellation
schedules     learning rates eta_t
parametrized  modules whose parameters declare their domain
derivatives   gradients and Hessians of psi by autograd
frozen        modules whose structure is fixed
hessians      Hessians at the cheapest level that holds them
"""
