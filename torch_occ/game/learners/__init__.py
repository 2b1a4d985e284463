"""Learners: an occupancy measure for every episode, learned from earlier episodes.

base       what a learner is
counting   what learners share that do not know the transitions: counts and epochs
ftrl       follow the regularized leader
adaptive   FTRL with hints, with rates that adapt along the run, and on corrected means
unknown    FTRL for unknown transitions
uob_reps   UOB-REPS: mirror descent over a confidence set of transitions
baselines  a fixed policy, and learners that plan with averages
kl_ucb     KL-UCB for known transitions
thompson   Thompson sampling for known transitions
planning   bonuses, and backward induction with lower and upper values
optimism   what learners share that plan with estimated transitions
planners   UCBVI, EULER and posterior sampling
multilayer  multi-layer UCBVI, simplified: an unknown corruption of the losses
sampling   Gamma and Beta variates for learners that sample
"""
