"""Learners from the literature, to compare with.

beliefs     visit counts of transitions, the empirical transitions, and doubling epochs
choice      which learners have a compiled player
kl_ucb      KL-UCB for known transitions: optimism by relative entropy
multilayer  multi-layer UCBVI (simplified): losses of which an unknown part was changed
planning    optimistic planning: bonuses, and backward induction with lower and upper values
players     the compiled players of learners at the limit of regret: KL-UCB, Thompson sampling
psrl        PSRL: posterior sampling for unknown transitions and losses
sampling    gamma and Beta variates of learners that sample, for arrays of items
thompson    thompson sampling for known transitions
ucbvi       UCBVI: value iteration with upper confidence bounds, for unknown transitions
unknown     FTRL over the occupancy measures of transitions that are learned
uob_reps    UOB-REPS (Jin, Jin, Luo, Sra and Yu, 2020): mirror descent over a confidence set of
"""
