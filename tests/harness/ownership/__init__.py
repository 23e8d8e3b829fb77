"""A model of the ownership of one shard, which a search plays in every order of events.

It imports nothing of the packages: it is compared with their tests by reading (`docs/faults.md`).
"""
