"""The layered MDP and its occupancy measures.

layered       LayeredMDP: layers, transitions, and the actions of each state
layout        sizes, numbering of states, and masks of actions
constructors  constructors of layered MDPs: random, tables, arrays, Gymnasium, graphs
drawing       random transitions
layers        one layer of transitions as a linear map, dense or sparse
validation    the conditions that a valid layered MDP satisfies
in_order      sums in an order that does not depend on the batch
occupancy     flow constraints, policy to q and back, optimal policies, gaps
unrolling     from an ordinary finite MDP to layers
rewards       rewards as losses, and back
graphs        MDPs from directed acyclic graphs, costs and flows of edges
importers     MDPs from Gymnasium and from arrays of other packages
audit         a test of a published table against its environment
limits        the least regret of any consistent learner (Graves and Lai)
"""
