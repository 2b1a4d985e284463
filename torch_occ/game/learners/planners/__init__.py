"""Learners that plan with estimated transitions.

ucbvi  UCBVI with its two printed bonuses and a sharper one
euler  EULER and StrongEuler
psrl   posterior sampling
"""
