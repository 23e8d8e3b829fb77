"""The worker's side of the exchange: push deltas to the owners, retry from the outbox, pull values.

May import `training.exchange.owner` (for shards that this node owns itself), the directory, and what these import.
"""
