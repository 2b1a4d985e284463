"""Episode loops in compiled code.

episodes   the episode loop of FTRL
baselines  the episode loops of the other learners
leaps      regret forecasts that play many episodes at once
tangents   the episode loop of FTRL with forward-mode derivatives
"""
