"""The least regret that any consistent learner can have: the Graves-Lai constant of an MDP.

families    how much information a loss carries about its mean
excursions  the ways of leaving the states that optimal policies visit
separation  the alternative that the fewest observations rule out, by branch and bound
graves_lai  the constant, by cutting planes, with bounds from both sides
"""
