"""Keeps every shard owned: new backups, hand-over, failover after a failure, reconciliation after a split.

May import everything of `training.exchange` but the facade `exchange`.
"""
