"""Probabilistic Synchronous Parallel on a virtual clock: the daemon's own barrier code, for up to a million nodes.

`plan` says what is simulated, `run.simulate` simulates it. `engine` is plain Python, calls
`training.barriers.predicates` for every decision and knows every feature; `kernel` is compiled by numba, knows what
large swarms need, and makes the same history, event by event; `grouped` makes the same distribution, faster
(tests/unit/training/simulation/engines/test_engines.py). Nothing here reads a clock, draws unseeded randomness or
imports torch; matplotlib is imported by `drawing` alone.
"""
