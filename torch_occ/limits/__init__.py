"""The least regret of any learner.

graves_lai  the Graves-Lai constant of an MDP with known transitions, by cutting planes
separation  families of loss distributions: how much information an observation carries about its
"""
