"""Data and arithmetic of a simulation: plan, step times, random streams, samplers, outcomes, metrics.

May import the barriers and settings of `training`. Pure.
"""
