"""Simulates Probabilistic Synchronous Parallel on a virtual clock: the daemon's barriers, with thousands of nodes.

`plan` describes a swarm, and `run.simulate` runs it. The reference engine is plain Python, supports every feature
and calls `training.barriers.predicates` for each decision. The compiled engine (numba) has the features that large
swarms need, and produces the same history, event by event: tests compare both. Nothing here reads a clock, draws
unseeded random numbers or imports torch.
"""
