"""The compiled engine: the step and the episode loop in Numba, for every regularizer that is a table of elementary terms."""
