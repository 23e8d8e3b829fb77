"""Data and arithmetic of a simulation: plan, step times, random streams, samplers, outcomes, metrics, bounds.

May import the barriers and settings of `training`. Pure.
"""
