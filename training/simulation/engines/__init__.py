"""Engines that run a plan: `reference` in plain Python, `compiled` on a numba kernel.

May import `training.simulation.model` and `training.barriers`. Both give the same history (their tests compare them).
"""
