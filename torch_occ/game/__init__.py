"""Learners, loss processes, and the simulation that lets them play.

losses           loss processes: stochastic and adversarial
corruption       corrupted losses
estimators       from what is seen to an estimate of the loss
learners         FTRL and the learners that it is compared with
contracts        what learners, loss processes and estimators may return; uncertified steps
driver           simulate: learner x losses x seeds -> History
simulation       a run in progress
torch_player     one episode of every seed, in torch
compiled_player  the same game in compiled kernels
comparing        several learners on the same seeds, with paired differences
intervals        means over seeds and their confidence intervals
history          what a simulation leaves behind
regret           comparators and regrets
callbacks        what watches a simulation: TensorBoard, progress bar
figures          regret curves and heat maps
"""
