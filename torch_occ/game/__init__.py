"""Learners, loss processes, and simulations in which they play.

losses           loss processes: stochastic and adversarial
corruption       corrupted losses
estimators       estimates of the loss function from the feedback of an episode
beliefs          transitions that are learned: counts, confidence, occupancy bounds
learners         FTRL, and learners to compare it with
arguments        checks of what simulate is given
contracts        checks of what learners, loss processes and estimators return
driver           simulate: learner x losses x seeds -> History
simulation       a run in progress
players          who plays the episodes: torch, or compiled kernels
comparing        several learners on the same seeds, with paired differences
intervals        means over seeds and their confidence intervals
history          the result of a simulation
regret           comparators, and the self-bounding condition
callbacks        hooks into a simulation: TensorBoard, progress bar
figures          regret curves and heat maps
"""
