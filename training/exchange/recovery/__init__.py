"""What keeps every shard owned: new backups, hand-over, failover after a death, reconciliation after a split.

May import everything of `training.exchange` but the facade `exchange`. `copy_rank` is pure.
"""
