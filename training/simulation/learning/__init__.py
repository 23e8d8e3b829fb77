"""Learning on simulated time: small problems, update rules, and a parameter server.

May import `training.simulation.model` and `training.simulation.engines`.
"""
