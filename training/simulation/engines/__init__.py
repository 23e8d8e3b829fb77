"""Engines that run a plan: `reference` in plain Python, `compiled` on numba kernels.

May import `training.simulation.model` and `training.barriers`. All make the same decisions (their tests compare them).
"""
