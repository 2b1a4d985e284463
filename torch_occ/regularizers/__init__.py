"""Regularizers, learning rates and their derivatives.

base          the three base classes; sums, scaling, division by a schedule
catalog       the built-in regularizers, and jin_luo
terms         weighted elementary functions, the data of built-in regularizers
arguments     q(s,a), q(s) - q(s,a), q(s) and 1 - q(s,a), without cancellation
schedules     learning rates eta_t
parametrized  modules whose parameters declare their domains
places        parameters with one value per layer, state or pair
derivatives   gradients and Hessians of psi by autograd
frozen        modules whose structure is fixed
hessians      Hessians: three vectors, one block per state, or one full matrix
"""
