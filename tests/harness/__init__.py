"""Runs the code of the packages in one process, on virtual time: what tests of every kind share.

Imports run one way: environment, network, trainers, swarms, histories. `ownership` imports no other.
"""
