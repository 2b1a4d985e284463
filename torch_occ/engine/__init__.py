"""Compiled code: NumPy arrays in and out, no torch.

batch          a batch of FTRL steps in one call, and their derivatives; `FTRLStep` calls these
draws          gamma and Beta variates from numbers that are a function of a key, compiled
entropic       backward and forward passes in logarithms, for the step of an entropy
lanes          vectors and masks: one number or bool per lane, with the operators of plain ones
layout         the arrays that kernels read and write, and the decorators that compile kernels
learners       the learners of torch_occ.game, compiled for the episode loop
linear         the linear system of a Newton step, with dense or sparse transitions
newton         newton's method for one FTRL step, compiled, for regularizers made of elementary
play           the episode loop: the adversary answers, the learner proposes, walks and observes
psi            the derivatives of psi at q; psi is a weighted sum of elementary functions of its
shaping        potential-based shaping, compiled: replace the loss by the gaps of its optimal policy
"""
