"""What FTRL adapts along a run: predictions of the next loss, and learning rates.

hints   predictions of the loss of the next episode
rates   learning rates that follow from what was observed
"""
