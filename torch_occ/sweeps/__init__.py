"""Sweeps: a function over a grid of configurations, on local processes or on a Dask cluster.

driver   `sweep`: run every cell once, and store it when it is finished
cells    cells, failures, and the code that a worker runs
locks    one driver per directory
workers  local processes and Dask clusters
"""
