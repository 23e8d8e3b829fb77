"""Sharded exchange: each shard has one owner and one backup; all nodes push to and pull from the owners.

`store` holds the state of the shards and decides by roles, terms and identities (pure). `owner` serves pushes and
pulls, `backup` receives forwarded deltas and states, `client` pushes and pulls. `recovery` moves shards, takes over
those without an owner, and reconciles the two sides of a split. `exchange` composes the services.

Imports run one way: terms and messages, store, rpc and jobs, context, directory and owner, backup and client, recovery,
exchange. The protocol is described in `docs/protocol.md`, its reasons in `docs/architecture.md`.
"""
