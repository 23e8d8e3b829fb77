"""Trainers, tasks and training scripts that run in the process of a test, with and without a model.

`tasks` has those that a test gives to a trainer in a process of its own.
"""
