"""Transitions that are not known: what trajectories tell about them, and how surely.

counts             visit counts, the empirical transitions, and doubling epochs
widths             confidence widths of the sources, and bonuses
monitoring         numbers about a belief, for TensorBoard
occupancy_bounds   upper occupancy bounds over a confidence set (Comp-UOB)
"""
