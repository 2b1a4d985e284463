"""The Kullback-Leibler projection in compiled code; its twin is torch_occ.step.projection.

arrays      the arrays of a projection
rows        one row of transitions: the closest distribution between its bounds
passes      the pass backward and the pass forward through the layers
directions  the Newton direction, layer by layer
solving     the projection for one problem, and for a batch
"""
