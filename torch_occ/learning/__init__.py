"""Losses for networks that predict losses.

losses         targets: occupancy measures that a plan should equal, checked before they are used
unconstrained  parameters that plain optimizers cannot drive out of their domains
"""
