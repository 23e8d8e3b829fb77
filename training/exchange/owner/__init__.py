"""What the owner of a shard does: validate and add deltas, replicate them to the backup, answer pulls.

May import `training.exchange.store`, the context and the RPC; not the client, not the recovery.
"""
