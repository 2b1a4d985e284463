"""The Kullback-Leibler projection onto occupancy measures q(s,a,s') under transition bounds.

module    KLProjection, the module that users call, and its result
checks    checks of the arguments, and their error messages
rows      one row of transitions: the closest distribution between its bounds
dual      the dual problem with one multiplier per state, by Newton's method
compiled  the adapter to the compiled projection
"""
