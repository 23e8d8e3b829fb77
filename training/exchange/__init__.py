"""Sharded exchange: one owner per shard, a backup beside it, and everybody pushing to and pulling from the owners.

`store` decides (pure: roles, terms, identities), `serving` answers requests, `pushing` and `pulling` are the client's
side, `keeping` moves shards (backups, hand-over, take-over), `service` composes them. The protocol is
`docs/protocol.md`; why each rule is as it is stands in `docs/architecture.md`.
"""
