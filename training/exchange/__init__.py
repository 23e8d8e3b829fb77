"""Sharded exchange: one owner per shard, a backup beside it, and everybody pushing to and pulling from the owners.

`store` decides (pure: roles, terms, identities), `repair` keeps what ends a split (pure). `serving` takes deltas,
`answering` shows what is held, `receiving` takes states and offices; `pushing` and `pulling` are the client's side.
`keeping` moves shards (backups, hand-over), `taking` takes over what has no owner, `mending` ends splits, `service`
composes them. The protocol is `docs/protocol.md`; why each rule is as it is
stands in `docs/architecture.md`, and what the tests found in `docs/faults.md`.
"""
