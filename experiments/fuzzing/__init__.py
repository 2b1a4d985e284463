"""Random FTRL steps, and a judge of their answers; the script is experiments/fuzz.py."""
