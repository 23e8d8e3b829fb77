"""Named values: their keys and encoding, the reducers that combine updates, and the table of one shard."""
