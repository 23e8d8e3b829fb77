"""What the backup of a shard does: receive forwarded deltas and states, and confirm to the owner what it holds.

May import `training.exchange.store`, `training.exchange.owner`, the context and the RPC.
"""
