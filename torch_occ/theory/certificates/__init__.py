"""The terms of a regret analysis, evaluated during a run.

curves         the terms of the bound of Jin and Luo (2020) at checkpoints
known          the callback that evaluates them
"""
