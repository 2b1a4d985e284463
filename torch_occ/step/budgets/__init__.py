"""Budgets on occupancy measures: the step with constraints ⟨G_i, q⟩ <= h_i.

limits    Budgets, the module that users make, and checks of its tensors
search    the multipliers of the budgets, by Newton's method on the dual
solving   from the arguments of the step to a solution
equation  the optimality conditions, for implicit derivatives
"""
