"""Learners: an occupancy measure for every episode, learned from earlier episodes.

base       what a learner is
counting   what learners share that do not know the transitions: counts and epochs
ftrl       follow the regularized leader
baselines  a fixed policy, and learners that plan with averages
sampling   Gamma and Beta variates for learners that sample
"""
