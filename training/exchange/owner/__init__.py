"""What the owner of a shard does: validate and add deltas, replicate them to the backup, answer pulls.

May import the directory and what it imports, and `training.exchange.delta`; not the client, not the recovery.
"""
