"""Transitions that are not known: what trajectories tell about them, and how surely.

counts   visit counts, the empirical transitions, and doubling epochs
"""
