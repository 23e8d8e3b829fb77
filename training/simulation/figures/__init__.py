"""Reproduces the published figures: expected values, points and studies to run, checks, plots.

May import everything of `training.simulation`; matplotlib is imported by `plots` alone.
"""
