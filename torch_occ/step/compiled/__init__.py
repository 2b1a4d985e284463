"""The step in compiled kernels: adapters between tensors and arrays.

solving      the step
derivatives  its derivatives
worlds       the MDPs of a batch: one for all elements, or one for each
groups       calls of the kernels for a batch, in plain arrays or in lanes
explicit     terms whose weights and exponents are parameters, for derivatives in torch
budgets      the step with limits on expected costs
sweeps       the sweeps of torch_occ.step.iterative
inputs       conversion of torch objects to the arrays of the kernels, and back
formulas     weights of the terms as a function of t and the parameters
"""
