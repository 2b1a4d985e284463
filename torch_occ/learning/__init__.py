"""Losses for learning: a network predicts the losses, the step plans, these functions compare.

fenchel_young  the Fenchel-Young loss of a target occupancy measure, for any regularizer
envelope       the regularized optimal value, differentiated by the envelope theorem
objectives     the expected cost of the plan, and the likelihood of demonstrated trajectories
targets        checks of target occupancy measures
unconstrained  parameters that plain optimizers cannot drive out of their domains
demonstrations  checks of trajectories, and their probabilities
"""
