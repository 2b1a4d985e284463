"""A function over a grid of configurations, on local processes or on a Dask cluster.

driver   the sweep: every cell is run once and stored at once
cells    what a cell is, and what a worker does with one
locks    one driver per directory
workers  where cells run
"""
