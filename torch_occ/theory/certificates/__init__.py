"""The terms of a regret analysis, evaluated during a run.

curves         the terms of the bound of Jin and Luo (2020) at checkpoints
known          the callback that evaluates them
unknown_parts  the regret with unknown transitions in parts (Jin, Huang and Luo, 2021)
unknown        the callback that evaluates them
"""
