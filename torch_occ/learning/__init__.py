"""Losses for networks that predict losses.

losses         losses for networks: Fenchel-Young, expected cost, likelihood of demonstrations
unconstrained  parameters that plain optimizers cannot drive out of their domains
"""
