"""The state of one shard and the arithmetic that changes it: applied identities, outer rule, robust aggregation.

May import `training.kernels` and `training.encoding`. Pure.
"""
