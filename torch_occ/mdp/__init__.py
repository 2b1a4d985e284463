"""The layered MDP and its in_order      sums in an order that does not depend on the batch
occupancy measures.

layered       LayeredMDP: layers, transitions, and which actions each state has
layout        sizes, numbering of states, and masks of actions
constructors  where layered MDPs come from: at random, tables, arrays, Gymnasium
drawing       random transitions
layers        one layer of transitions as a linear map, dense or sparse
validation    what a valid layered MDP is
in_order      sums in an order that does not depend on the batch
occupancy     flow constraints, policy to q and back, optimal policies, gaps
unrolling     from an ordinary finite MDP to layers
rewards       rewards as losses, and back
importers     MDPs from Gymnasium and from arrays of other packages
audit         does a published table agree with its environment?
"""
