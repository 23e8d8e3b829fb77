"""Reproduces the published figures: expected values, the runs behind them, comparisons, and plots.

May import everything in `training.simulation` except `advice`; only `plots` imports matplotlib.
"""
