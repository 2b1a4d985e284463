"""Episode loops in compiled code.

episodes   the episode loop of FTRL
adaptive   the episode loop of FTRL with hints and adaptive rates
corrected  the episode loop of FTRL on corrected empirical means
beliefs    transitions that are learned: counts, epochs, occupancy bounds
unknown    the episode loop of FTRL for unknown transitions
baselines  the episode loops of the other learners
planning   the episode loop of optimistic learners with estimated transitions
uob_reps   the episode loop of UOB-REPS
posterior  the episode loop of posterior sampling
multilayer  the episode loop of multi-layer UCBVI
indices    the episode loop of KL-UCB and Thompson sampling
sampling   Gamma and Beta variates for learners that sample
draws      uniform, normal and binomial numbers from a stream
leaps      regret forecasts that play many episodes at once
"""
